# SPDX-License-Identifier: Apache-2.0
"""Name a token sequence by its content, so that both sides find the same name without carrying ids through a framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

__all__ = ["DIGEST_BYTES", "checked_ids", "sampled", "sequence_digest"]

DIGEST_BYTES = 16


def checked_ids(
    token_ids: Sequence[int] | np.ndarray[Any, np.dtype[Any]],
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Token ids as little-endian int32, as they are where they are that already.

    Raises ValueError for an id outside [0, 2**31): a wrapped id would pair with another sequence.
    """
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(
            f"token ids must be a flat sequence of integers, found shape {ids.shape} of {ids.dtype}"
        )
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > 0x7FFFFFFF):
        raise ValueError(f"token ids must be in [0, 2**31), found {int(ids.min())}..{int(ids.max())}")
    return np.ascontiguousarray(ids, "<i4")


def sequence_digest(token_ids: Sequence[int] | np.ndarray[Any, np.dtype[Any]]) -> bytes:
    """xxh3-128 (big-endian, 16 bytes) of the token ids as little-endian int32, prompt and response in order.

    Raises ValueError as `checked_ids`.
    """
    return xxhash.xxh3_128_digest(checked_ids(token_ids).data)


def sampled(digest: bytes, one_in: int) -> bool:
    """Whether a sequence is among the ``1 / one_in`` that both sides report; decided by the digest alone."""
    if one_in < 1:
        raise ValueError(f"one_in must be at least 1, found {one_in}")
    return int.from_bytes(digest[:8], "big") % one_in == 0
