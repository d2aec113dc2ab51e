# SPDX-License-Identifier: Apache-2.0
"""The shared secret of probes and a daemon on different hosts: its file, and the proof of holding it.

The daemon sends ``IXC1`` and 32 random bytes; the probe answers ``IXA1`` and HMAC-SHA256(token, ``isoexec probe 1`` + those
bytes), as RFC 2104 defines HMAC. So the token itself never travels, and what was overheard proves nothing to another
challenge. Nothing else of a peer is looked at before its proof, which is compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import stat
from pathlib import Path

from isoexec.contracts.errors import IsoExecError, WireError

__all__ = [
    "CHALLENGE_BYTES",
    "PROOF_BYTES",
    "TokenError",
    "challenge",
    "prove",
    "proven",
    "read_token",
    "same",
]

_ASK, _ANSWER = b"IXC1", b"IXA1"
_NONCE_BYTES = 32
_PURPOSE = b"isoexec probe 1"
CHALLENGE_BYTES = len(_ASK) + _NONCE_BYTES
PROOF_BYTES = len(_ANSWER) + hashlib.sha256().digest_size
_SHORTEST, _LONGEST = 16, 4096


class TokenError(IsoExecError):
    """A token file that cannot be used."""


def read_token(path: Path) -> bytes:
    """Give a file's token without the white space around it; TokenError for one that is short or that others can read."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        with path.open("rb") as file:
            token = file.read(_LONGEST + 1).strip()
    except OSError as error:
        raise TokenError(f"{path}: the token cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise TokenError(f"{path}: others may read the token (mode {mode:03o}); chmod 600 {path}")
    if not _SHORTEST <= len(token) <= _LONGEST:
        raise TokenError(
            f"{path}: wanted a token of {_SHORTEST} to {_LONGEST} bytes, found {len(token)}; "
            f"make one: openssl rand -hex 32"
        )
    return token


def same(found: bytes, wanted: bytes) -> bool:
    """Whether two secrets are equal, in a time that tells neither where they differ nor how long the wanted one is."""
    return hmac.compare_digest(hashlib.sha256(found).digest(), hashlib.sha256(wanted).digest())


def challenge() -> bytes:
    """Make the daemon's first bytes on a stream, never the same twice."""
    return _ASK + secrets.token_bytes(_NONCE_BYTES)


def prove(token: bytes, asked: bytes) -> bytes:
    """Answer a challenge. Raises WireError where the other end does not speak as a daemon."""
    if len(asked) != CHALLENGE_BYTES or not asked.startswith(_ASK):
        raise WireError(
            f"wanted a challenge {_ASK!r} of {CHALLENGE_BYTES} bytes, found {asked[:8]!r}; is this a daemon's TCP "
            f"address, and do both sides use TLS or neither?"
        )
    return _ANSWER + hmac.digest(token, _PURPOSE + asked[len(_ASK) :], "sha256")


def proven(token: bytes, asked: bytes, answer: bytes) -> bool:
    """Whether an answer to ``asked`` was made with the token, in constant time."""
    return hmac.compare_digest(answer, prove(token, asked))
