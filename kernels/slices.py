# SPDX-License-Identifier: Apache-2.0
"""Cuts rows so that the temporaries of element-wise work stay in cache; where a cut falls changes no bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["row_slices", "rows_of"]

ELEMENTS = 2**17


def rows_of(x: Tensor) -> Tensor:
    """`[..., width]` as `[rows, width]`."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def row_slices(rows: int, width: int) -> Iterator[slice]:
    """Slices of at most about 131,072 elements that cover all rows."""
    step = max(1, ELEMENTS // max(1, width))
    for first in range(0, rows, step):
        yield slice(first, first + step)
