# SPDX-License-Identifier: Apache-2.0
"""rope.interleaved_fp32/1: columns 2i and 2i + 1 are rotated by frequency i, and stay where they are.

The table is that of rope.neox_fp32/1: float64 rounded to fp32. Hugging Face's DeepSeek moves the columns into halves; the
products of queries and keys have the same terms, in another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isoexec.kernels.rope.hopper.rotation import rotate
from isoexec.kernels.rope.naive import table

if TYPE_CHECKING:
    from torch import Tensor


def rope(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """X [tokens, heads, head_dim], positions [tokens]."""
    return rotate(x, positions, table(x.shape[-1], base), interleaved=True)


def rope_backward(g: Tensor, positions: Tensor, base: float) -> Tensor:
    return rotate(g, positions, table(g.shape[-1], base), interleaved=True, reverse=True)
