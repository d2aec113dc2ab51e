# SPDX-License-Identifier: Apache-2.0
"""Dispatch on sm90 as opaque torch ops: the plan is made on the device, and every size is known before it is.

A plan has tokens * places rows whatever this rank owns; rows after the last offset are of no slot, and nobody writes or reads
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from isoexec.kernels.combine.hopper.kernel import launch_sum
from isoexec.kernels.dispatch.hopper.kernel import launch_plan, launch_rows
from isoexec.kernels.dispatch.naive import DispatchPlan
from isoexec.kernels.domain import require
from isoexec.kernels.groups import name_of, resolve
from isoexec.kernels.hopper.library import define, require_model_dtype

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["DevicePlan", "by_slot", "dispatch", "plan"]

MOST_SLOTS = 2**20
MOST_EXPERTS = 512


@dataclass(frozen=True, kw_only=True)
class DevicePlan(DispatchPlan):
    """A `DispatchPlan` on the device: `slots` int64 [T * k], -1 after the last row; `offsets` int32 [count + 1].

    `rows` int32 [T * k] is the other way round: the row of each slot, -1 for another rank's.
    """

    rows: Tensor


def _plan(experts: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    require(
        experts.dim() == 2
        and experts.dtype == torch.int64
        and experts.numel() <= MOST_SLOTS
        and first >= 0
        and 1 <= count <= MOST_EXPERTS,
        "sm90_moe_dispatch",
        f"experts {list(experts.shape)} {experts.dtype}, {count} of them from {first}",
        f"int64 [tokens, places] of at most {MOST_SLOTS} slots and 1 to {MOST_EXPERTS} experts",
    )
    slots, rows, offsets = launch_plan(experts.contiguous(), first, count)
    return slots, rows, offsets


def _plan_fake(experts: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    total = experts.numel()
    return (
        experts.new_empty(total),
        experts.new_empty(total, dtype=torch.int32),
        experts.new_empty(count + 1, dtype=torch.int32),
    )


_plan_op = define(
    "sm90_moe_plan(Tensor experts, int first, int count) -> (Tensor, Tensor, Tensor)", _plan, _plan_fake
)


def plan(experts: Tensor, first: int, count: int) -> DevicePlan:
    """Plan the rows of experts `[first, first + count)` among `experts` int64 `[T, k]`, different ones a token; no gradient.

    Nothing is read back by the host. Raises `DomainError` for another dtype or shape.
    """
    slots, rows, offsets = _plan_op(experts, first, count)
    tokens, places = experts.shape
    return DevicePlan(
        slots=slots, rows=rows, offsets=offsets, first=first, count=count, tokens=tokens, places=places
    )


def _exchanged(rows: Tensor, group: str) -> Tensor:
    """Rows by slot, each from the rank that has it; the others hold zeros, so adding their bits as integers moves them."""
    if group and rows.numel():
        flat = rows.view(torch.int32) if rows.shape[1] * rows.element_size() % 4 == 0 else None
        require(
            flat is not None,
            "sm90_moe exchange",
            f"rows {list(rows.shape)} {rows.dtype}",
            "whole words a row",
        )
        dist.all_reduce(flat, group=resolve(group))
    return rows


def _check_rows(op: str, x: Tensor, rows: int) -> None:
    require_model_dtype(op, x)
    require(x.dim() == 2 and x.shape[0] == rows, op, f"{list(x.shape)}", f"[{rows}, width], as was planned")


def _dispatch(x: Tensor, slots: Tensor, rows: Tensor, places: int, group: str) -> Tensor:
    out = torch.empty(slots.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    launch_rows(x, slots, out, places)
    return out


def _dispatch_fake(x: Tensor, slots: Tensor, rows: Tensor, places: int, group: str) -> Tensor:
    return x.new_empty((slots.shape[0], x.shape[1]))


def _slots_of(y: Tensor, rows: Tensor, group: str) -> Tensor:
    out = torch.empty(rows.shape[0], y.shape[1], dtype=y.dtype, device=y.device)
    launch_rows(y, rows, out, 1, back=True)
    return _exchanged(out, group)


def _dispatch_grad(g: Tensor, rows: Tensor, places: int, group: str) -> Tensor:
    out = torch.empty(rows.shape[0] // places, g.shape[1], dtype=g.dtype, device=g.device)
    g = g.contiguous()
    if group:
        launch_sum(_slots_of(g, rows, group), None, None, None, out, places)
    else:
        launch_sum(g, rows, None, None, out, places)
    return out


def _dispatch_grad_fake(g: Tensor, rows: Tensor, places: int, group: str) -> Tensor:
    return g.new_empty((rows.shape[0] // places, g.shape[1]))


_dispatch_grad_op = define(
    "sm90_moe_dispatch_grad(Tensor g, Tensor rows, int places, str group) -> Tensor",
    _dispatch_grad,
    _dispatch_grad_fake,
)


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, rows, ctx.places, ctx.group = inputs
    ctx.save_for_backward(rows)


def _dispatch_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    return _dispatch_grad_op(g, *ctx.saved_tensors, ctx.places, ctx.group), None, None, None, None


_dispatch_op = define(
    "sm90_moe_dispatch(Tensor x, Tensor slots, Tensor rows, int places, str group) -> Tensor",
    _dispatch,
    _dispatch_fake,
    backward=_dispatch_backward,
    setup_context=_dispatch_setup,
)


def dispatch(x: Tensor, plan: DevicePlan, group: ProcessGroup | None = None) -> Tensor:
    """`x [T, H]` -> `[T * k, H]`: a row a slot of the plan, in its order, then rows that are not written; differentiable.

    The gradient adds a token's slots in routing order, in fp32. Where ranks of `group` hold the same tokens and share the
    experts out, its rows are exchanged first; without a group, slots of other experts count as zero.
    """
    _check_rows("sm90_moe_dispatch", x, plan.tokens)
    out: Tensor = _dispatch_op(x, plan.slots, plan.rows, plan.places, name_of(group))
    return out


def _by_slot(y: Tensor, slots: Tensor, rows: Tensor, group: str) -> Tensor:
    return _slots_of(y, rows, group)


def _by_slot_fake(y: Tensor, slots: Tensor, rows: Tensor, group: str) -> Tensor:
    return y.new_empty((rows.shape[0], y.shape[1]))


def _by_slot_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _by_slot_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    slots, rows = ctx.saved_tensors
    return _dispatch_op(g, slots, rows, 1, ""), None, None, None


_by_slot_op = define(
    "sm90_moe_by_slot(Tensor y, Tensor slots, Tensor rows, str group) -> Tensor",
    _by_slot,
    _by_slot_fake,
    backward=_by_slot_backward,
    setup_context=_by_slot_setup,
)


def by_slot(y: Tensor, plan: DevicePlan, group: ProcessGroup | None = None) -> Tensor:
    """`y [T * k, H]` in the plan's order -> the same by slot, as `combine` reads it; differentiable.

    Where ranks of `group` hold the same tokens and share the experts out, each slot's row comes from the rank that has it;
    without a group, slots of other experts are zero.
    """
    _check_rows("sm90_moe_by_slot", y, plan.slots.shape[0])
    out: Tensor = _by_slot_op(y, plan.slots, plan.rows, name_of(group))
    return out
