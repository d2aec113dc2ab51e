# SPDX-License-Identifier: Apache-2.0
"""Dispatch as torch ops: out to the experts' order, back to slots, with rows exchanged where ranks own experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.dispatch import naive
from isoexec.kernels.dispatch.naive import DispatchPlan
from isoexec.kernels.domain import require, require_float
from isoexec.kernels.groups import all_reduce, name_of
from isoexec.kernels.library import define

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["by_slot", "dispatch", "plan"]


def plan(experts: Tensor, first: int, count: int) -> DispatchPlan:
    """Plan the rows of experts `[first, first + count)` among `experts` int64 `[T, k]`; no gradient.

    Raises `DomainError` for another dtype or shape, or a token that chose an expert twice.
    """
    require(
        experts.dim() == 2 and experts.dtype == torch.int64 and first >= 0 and count >= 1,
        "moe.dispatch",
        f"experts {list(experts.shape)} {experts.dtype}, {count} of them from {first}",
        "int64 [tokens, places] and at least one expert",
    )
    ordered = experts.sort(dim=1).values
    require(
        not bool((ordered[:, 1:] == ordered[:, :-1]).any()),
        "moe.dispatch",
        "a token with one expert at two places",
        "different experts a token",
    )
    return naive.plan(experts, first, count)


def _check_rows(op: str, x: Tensor, rows: int) -> None:
    require_float(op, x)
    require(x.dim() == 2 and x.shape[0] == rows, op, f"{list(x.shape)}", f"[{rows}, width], as was planned")


def _exchanged(rows: Tensor, group: str) -> Tensor:
    """Rows by slot, each from the rank that has it; the others hold zeros, so adding their bits as integers moves them."""
    if not group:
        return rows
    if rows.dtype == torch.float32:
        return all_reduce(rows.view(torch.int32), group).view(torch.float32)
    bits = all_reduce(rows.view(torch.int16).to(torch.int32), group)
    return bits.to(torch.int16).view(rows.dtype)


def _dispatch(x: Tensor, slots: Tensor, places: int, group: str) -> Tensor:
    return naive.dispatch(x, slots, places)


def _dispatch_fake(x: Tensor, slots: Tensor, places: int, group: str) -> Tensor:
    return x.new_empty((slots.shape[0], x.shape[1]))


def _dispatch_grad(g: Tensor, slots: Tensor, tokens: int, places: int, group: str) -> Tensor:
    rows = _exchanged(naive.by_slot(g, slots, tokens * places), group)
    return naive.dispatch_backward(rows, places)


def _dispatch_grad_fake(g: Tensor, slots: Tensor, tokens: int, places: int, group: str) -> Tensor:
    return g.new_empty((tokens, g.shape[1]))


_dispatch_grad_op = define(
    "moe_dispatch_grad(Tensor g, Tensor slots, int tokens, int places, str group) -> Tensor",
    _dispatch_grad,
    _dispatch_grad_fake,
)


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, slots, ctx.places, ctx.group = inputs
    ctx.tokens = x.shape[0]
    ctx.save_for_backward(slots)


def _dispatch_backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
    return _dispatch_grad_op(g, *ctx.saved_tensors, ctx.tokens, ctx.places, ctx.group), None, None, None


_dispatch_op = define(
    "moe_dispatch(Tensor x, Tensor slots, int places, str group) -> Tensor",
    _dispatch,
    _dispatch_fake,
    backward=_dispatch_backward,
    setup_context=_dispatch_setup,
)


def dispatch(x: Tensor, plan: DispatchPlan, group: ProcessGroup | None = None) -> Tensor:
    """`x [T, H]` -> `[R, H]`: a row a slot of the plan, in its order; differentiable.

    The gradient adds a token's slots in routing order, in fp32. Where ranks of `group` hold the same tokens and share the
    experts out, its rows are exchanged first; without a group, slots of other experts count as zero.
    """
    _check_rows("moe.dispatch", x, plan.tokens)
    out: Tensor = _dispatch_op(x, plan.slots, plan.places, name_of(group))
    return out


def _by_slot(y: Tensor, slots: Tensor, total: int, group: str) -> Tensor:
    return _exchanged(naive.by_slot(y, slots, total), group)


def _by_slot_fake(y: Tensor, slots: Tensor, total: int, group: str) -> Tensor:
    return y.new_empty((total, y.shape[1]))


def _take(g: Tensor, slots: Tensor) -> Tensor:
    return g[slots]


def _take_fake(g: Tensor, slots: Tensor) -> Tensor:
    return g.new_empty((slots.shape[0], g.shape[1]))


_take_op = define("moe_take(Tensor g, Tensor slots) -> Tensor", _take, _take_fake)


def _by_slot_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _by_slot_backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
    return _take_op(g, *ctx.saved_tensors), None, None, None


_by_slot_op = define(
    "moe_by_slot(Tensor y, Tensor slots, int total, str group) -> Tensor",
    _by_slot,
    _by_slot_fake,
    backward=_by_slot_backward,
    setup_context=_by_slot_setup,
)


def by_slot(y: Tensor, plan: DispatchPlan, group: ProcessGroup | None = None) -> Tensor:
    """`y [R, H]` in the plan's order -> `[T * k, H]` by slot, as `combine` reads it; differentiable.

    Where ranks of `group` hold the same tokens and share the experts out, each slot's row comes from the rank that has it;
    without a group, slots of other experts are zero.
    """
    _check_rows("moe.by_slot", y, plan.slots.shape[0])
    out: Tensor = _by_slot_op(y, plan.slots, plan.tokens * plan.places, name_of(group))
    return out
