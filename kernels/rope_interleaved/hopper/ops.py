# SPDX-License-Identifier: Apache-2.0
"""Rotation of neighbouring columns on sm90, as GLM's latent attention has it; forward and gradient by the op of `rope`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isoexec.kernels.rope.hopper.ops import rotate, table_digest, tables

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rope", "table_digest", "tables"]


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x [tokens, heads, head_dim]` (views welcome), columns 2i and 2i + 1 rotated at `positions [tokens]`; differentiable.

    Columns stay interleaved; those behind the table's are copied; a position outside the table gives NaN.
    """
    return rotate(x, positions, cos, sin, interleaved=True)
