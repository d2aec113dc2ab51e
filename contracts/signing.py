# SPDX-License-Identifier: Apache-2.0
"""Signs records with Ed25519 keys; a signature lies beside its record, in `<hex>.sig`, and is over the record's digest."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from isoexec.contracts.errors import EvidenceError
from isoexec.contracts.evidence import Store, put_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = ["load_key", "make_key", "public_hex", "sign", "signers"]

_PREFIX = b"isoexec evidence v1\n"
MAX_BYTES = 100_000


def make_key(path: Path) -> str:
    """Write a new private key (PEM, mode 0600) and return its public key as 64 hex digits; refuses an existing file."""
    from cryptography.hazmat.primitives import serialization

    key = _ed25519().Ed25519PrivateKey.generate()
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        path.touch(mode=0o600, exist_ok=False)
    except FileExistsError as error:
        raise EvidenceError(
            field="key", wanted="a new file", found=f"{path}, which exists", fix="choose another name"
        ) from error
    path.write_bytes(pem)
    return public_hex(key)


def load_key(path: Path) -> Ed25519PrivateKey:
    """Return the private key of a PEM file; raises EvidenceError for anything else."""
    from cryptography.hazmat.primitives import serialization

    kind: type[Ed25519PrivateKey] = _ed25519().Ed25519PrivateKey
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise EvidenceError(
            field="key",
            wanted="an Ed25519 private key in PEM",
            found=f"{path}: {error}",
            fix="make one: isoexec gate key FILE",
        ) from error
    if not isinstance(key, kind):
        raise EvidenceError(
            field="key",
            wanted="an Ed25519 private key",
            found=f"another kind in {path}",
            fix="isoexec gate key FILE",
        )
    return key


def public_hex(key: Ed25519PrivateKey) -> str:
    """Return the public key of a private one, as contracts write it."""
    return key.public_key().public_bytes_raw().hex()


def sign(store: Store, digest: str, key: Ed25519PrivateKey) -> str:
    """Add a signature beside a record of the store, once a key; return the public key. The record is read first."""
    store.read(digest)
    public = public_hex(key)
    path = store.path(digest)
    if path is None:
        raise EvidenceError(field="evidence", wanted=digest, found="none", fix="write the record first")
    held = _held(path.with_suffix(".sig"))
    held[public] = key.sign(_PREFIX + digest.encode()).hex()
    text = json.dumps({"signatures": dict(sorted(held.items()))}, indent=2) + "\n"
    put_file(path.parent, path.with_suffix(".sig").name, text.encode())
    return public


def signers(store: Store, digest: str) -> frozenset[str]:
    """Return the keys whose signature on a record is good; a bad signature, or one that cannot be read, raises EvidenceError."""
    path = store.path(digest)
    held = _held(path.with_suffix(".sig")) if path is not None else {}
    if not held:
        return frozenset()
    from cryptography.exceptions import InvalidSignature

    kind = _ed25519().Ed25519PublicKey
    for public, signature in held.items():
        try:
            kind.from_public_bytes(bytes.fromhex(public)).verify(
                bytes.fromhex(signature), _PREFIX + digest.encode()
            )
        except (InvalidSignature, ValueError) as error:
            raise EvidenceError(
                field="signature", wanted=f"a signature of {public[:16]}... over {digest}", found="one that does not verify",
                fix="sign the record again, or remove the signature",
            ) from error  # fmt: skip
    return frozenset(held)


def _held(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as handle:
            value = json.loads(handle.read(MAX_BYTES))["signatures"]
        return {str(key): str(signature) for key, signature in value.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EvidenceError(
            field="signature",
            wanted="signatures by key",
            found=f"{path}, unreadable: {error}",
            fix="sign the record again",
        ) from error


def _ed25519() -> ModuleType:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ModuleNotFoundError as error:
        raise EvidenceError(
            field="signature",
            wanted="the package cryptography, which checks signatures",
            found="none installed",
            fix="pip install cryptography",
        ) from error
    return ed25519
