# SPDX-License-Identifier: Apache-2.0
"""Names content by its SHA-256, always written `sha256:<64 hex digits>`."""

from __future__ import annotations

import hashlib
import re

from isoexec.contracts.canonical import encode

__all__ = ["ZERO", "digest_bytes", "digest_of", "is_digest"]

ZERO = "sha256:" + "0" * 64  # a digest nothing has: "not pinned yet"
_FORM = re.compile(r"sha256:[0-9a-f]{64}")


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """Return the digest of raw bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def digest_of(obj: object) -> str:
    """Return the digest of the canonical encoding of `obj`; raises ContractError if it has none."""
    return digest_bytes(encode(obj))


def is_digest(text: object) -> bool:
    """Say whether `text` has the form of a digest."""
    return isinstance(text, str) and _FORM.fullmatch(text) is not None
