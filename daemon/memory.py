# SPDX-License-Identifier: Apache-2.0
"""Has the C library keep freed memory: what a step's frames took goes to the next step's.

By default each frame of a batch is mapped anew and given back: touching fresh pages costs more than all that is done with them.
"""

from __future__ import annotations

import ctypes

__all__ = ["KEPT_BYTES", "keep_freed"]

KEPT_BYTES = 256 << 20
"""Freed memory at the end of the heap that is kept, at most."""

# of glibc's malloc.h; a mapping threshold above 32 MiB is refused
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAPPED_FROM = 32 << 20


def keep_freed() -> bool:
    """Set it for this process; False where the C library has no such setting."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
