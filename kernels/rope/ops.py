# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding as torch ops over one cached table."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.domain import DomainError, require_float
from isoexec.kernels.library import define
from isoexec.kernels.rope import naive

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rope", "rope_grad"]

_table = lru_cache(maxsize=16)(naive.table)


def _rotate(x: Tensor, positions: Tensor, base: float, backward: bool) -> Tensor:
    require_float("rope", x)
    if not (x.dim() == 3 and x.shape[-1] % 2 == 0 and positions.shape == x.shape[:1]):
        raise DomainError(
            "rope",
            f"x {list(x.shape)} with positions {list(positions.shape)}",
            "x [tokens, heads, even head_dim] and positions [tokens]",
        )
    tables = _table(x.shape[-1], base)
    try:
        cos, sin = (t.index_select(0, positions).unsqueeze(1) for t in tables)
    except (IndexError, RuntimeError) as error:
        if positions.numel() and (int(positions.min()) < 0 or int(positions.max()) >= naive.LENGTH):
            raise DomainError(
                "rope", f"position {int(positions.max())}", f"positions 0 to {naive.LENGTH - 1}"
            ) from error
        raise
    a, b = x.to(torch.float32).chunk(2, -1)
    out = torch.empty(x.shape, dtype=torch.float32)
    low, high = out.chunk(2, -1)
    if backward:
        torch.add(a * cos, b * sin, out=low)
        torch.sub(b * cos, a * sin, out=high)
    else:
        torch.sub(a * cos, b * sin, out=low)
        torch.add(b * cos, a * sin, out=high)
    return out.to(x.dtype)


def _rotate_fake(x: Tensor, positions: Tensor, base: float, backward: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, positions, ctx.base, ctx.reverse = inputs
    ctx.save_for_backward(positions)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    (positions,) = ctx.saved_tensors
    return _rotate_op(g, positions, ctx.base, not ctx.reverse), None, None, None


_rotate_op = define(
    "rope(Tensor x, Tensor positions, float base, bool backward) -> Tensor",
    _rotate,
    _rotate_fake,
    backward=_backward,
    setup_context=_setup,
)


def rope(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """`x [tokens, heads, head_dim]` rotated at `positions [tokens]` (0 to 8191), NeoX halves, in x.dtype; differentiable."""
    out: Tensor = _rotate_op(x, positions, float(base), False)
    return out


rope_grad = rope
