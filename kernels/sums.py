# SPDX-License-Identifier: Apache-2.0
"""The two sums that are not matrix products: a halving tree over one axis, a pair tree over a list."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["halving_tree", "pair_tree"]


def halving_tree(x: Tensor, dim: int = -1) -> Tensor:
    """Sum `dim` away by adding its upper half to its lower half until one element is left.

    An odd width is padded by one zero. Only element-wise additions are used, so the bits of a sum depend on its terms alone.
    """
    dim %= x.dim()
    width = x.shape[dim]
    while width > 1:
        if width % 2:
            x = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, 1))
            width += 1
        width //= 2
        x = x.narrow(dim, 0, width) + x.narrow(dim, width, width)
    return x.select(dim, 0)


def pair_tree(parts: Sequence[Tensor]) -> Tensor:
    """Sum a power-of-two number of tensors as a balanced tree over neighbours."""
    level = list(parts)
    assert len(level).bit_count() == 1, "a pair tree needs a power-of-two number of leaves"
    while len(level) > 1:
        level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
    return level[0]
