# SPDX-License-Identifier: Apache-2.0
"""The rotation of the sm90 functions by any table: halves or neighbours, some columns, positions of several axes.

Halves with one axis are `rope/naive.py`. Products and sums are rounded apart, in fp32, and the result once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

Table = tuple["Tensor", "Tensor"]


def section_axes(sections: tuple[int, ...], *, interleaved: bool) -> Tensor:
    """int32 [half]: the axis whose position a frequency reads. `sections` are frequencies an axis: Qwen-VL's mrope_section.

    One section after another as Qwen2-VL; `interleaved` as Qwen3-VL and Qwen3.5: axes take turns while theirs last, and the
    first has what is left.
    """
    half, count = sum(sections), len(sections)
    if not interleaved:
        return torch.repeat_interleave(torch.arange(count), torch.tensor(sections)).int()
    axes = torch.zeros(half, dtype=torch.int32)
    for axis in range(1, count):
        axes[axis : sections[axis] * count : count] = axis
    return axes


def rotate(
    x: Tensor,
    positions: Tensor,
    table: Table,
    *,
    axes: Tensor | None = None,
    interleaved: bool = False,
    reverse: bool = False,
) -> Tensor:
    """X [tokens, heads, width], positions [tokens], or [axes, tokens] with `axes` [half]; columns behind 2 * half are copied."""
    half = table[0].shape[-1]
    where = positions.unsqueeze(-1) if axes is None else positions[axes.long()].t()
    cos, sin = (t[where, torch.arange(half, device=t.device)].unsqueeze(1) for t in table)
    if reverse:
        sin = -sin
    turned = x[..., : 2 * half].float()
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    low, high = a * cos - b * sin, b * cos + a * sin
    out = torch.stack((low, high), -1).flatten(-2) if interleaved else torch.cat((low, high), -1)
    return torch.cat((out.to(x.dtype), x[..., 2 * half :]), -1)
