# SPDX-License-Identifier: Apache-2.0
"""Column- and row-parallel linears over a process group, with the bits of one rank, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from isoexec.kernels.domain import require
from isoexec.kernels.groups import name_of, resolve, size_of
from isoexec.kernels.hopper.library import define
from isoexec.kernels.linear.hopper import products, transport
from isoexec.kernels.linear.hopper.parts import parts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from isoexec.kernels.linear.hopper.transport import Form

__all__ = ["column_linear", "row_linear"]

BF16 = torch.bfloat16


def _flat(x: Tensor) -> Tensor:
    """`[..., width]` as rows of unit stride."""
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _gather(x: Tensor, group: str) -> Tensor:
    """Every rank's block of dim 0, in rank order."""
    own = x.contiguous()
    whole = own.new_empty((own.shape[0] * size_of(group), *own.shape[1:]))
    if own.numel():
        dist.all_gather_into_tensor(whole, own, group=resolve(group))
    return whole


def _form(sp: bool) -> Form:
    return "rows" if sp else "all"


def _shared_rows(x: Tensor, group: str, sp: bool, op: str) -> int:
    """Length of dim 0 of a result whose rows the ranks share."""
    size = size_of(group) if sp else 1
    require(
        x.shape[0] % size == 0,
        op,
        f"{list(x.shape)} scattered over {size} ranks",
        "a first dimension the group's size divides",
    )
    return x.shape[0] // size


def _column(
    x: Tensor, w: Tensor, group: str, sp: bool, parts: Sequence[int], out_dtype: torch.dtype
) -> Tensor:
    whole = _gather(x, group) if sp and group else x
    y = products.product("forward", _flat(whole), w, None, out_dtype)
    return y.view(*whole.shape[:-1], len(w))


def _column_fake(
    x: Tensor, w: Tensor, group: str, sp: bool, parts: Sequence[int], out_dtype: torch.dtype
) -> Tensor:
    rows = x.shape[0] * size_of(group) if sp else x.shape[0]
    return x.new_empty((rows, *x.shape[1:-1], w.shape[0]), dtype=out_dtype)


def _column_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, ctx.group, ctx.sp, ctx.parts, _ = inputs
    ctx.save_for_backward(x, w)


def _column_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    dy = dy.to(BF16)
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = _column_gradient_op(dy, w, ctx.group, ctx.sp, ctx.parts)
    if ctx.needs_input_grad[1]:
        dw = _weight_gradient_op(dy, x, ctx.group if ctx.sp else "", "")
    return dx, dw, None, None, None, None


_column_op = define(
    "sm90_column_linear(Tensor x, Tensor w, str group, bool sequence_parallel, int[] parts, ScalarType out_dtype) -> Tensor",
    _column,
    _column_fake,
    backward=_column_backward,
    setup_context=_column_setup,
)


def _column_gradient(dy: Tensor, w: Tensor, group: str, sp: bool, parts: Sequence[int]) -> Tensor:
    flat = _flat(dy)
    rows = _shared_rows(dy, group, sp, "sm90_column_linear input gradient")
    if not group:
        dx = products.product("input", flat, w, None, BF16)
    else:
        live = resolve(group)
        chosen = transport.prepare(live, dy.device)
        dx = chosen.module.column_gradient(flat, w, live, parts, _form(sp), BF16)
    return dx.view(rows, *dy.shape[1:-1], w.shape[1])


def _column_gradient_fake(dy: Tensor, w: Tensor, group: str, sp: bool, parts: Sequence[int]) -> Tensor:
    rows = dy.shape[0] // size_of(group) if sp else dy.shape[0]
    return dy.new_empty((rows, *dy.shape[1:-1], w.shape[1]), dtype=BF16)


_column_gradient_op = define(
    "sm90_column_input_gradient(Tensor dy, Tensor w, str group, bool sequence_parallel, int[] parts) -> Tensor",
    _column_gradient,
    _column_gradient_fake,
)


def _weight_gradient(dy: Tensor, x: Tensor, x_group: str, dy_group: str) -> Tensor:
    """The groups name over which rows of x, or of dy, are still shared."""
    rows = _gather(x, x_group) if x_group else x
    grads = _gather(dy, dy_group) if dy_group else dy
    return products.product("weight", _flat(grads), _flat(rows), None, BF16)


def _weight_gradient_fake(dy: Tensor, x: Tensor, x_group: str, dy_group: str) -> Tensor:
    return dy.new_empty((dy.shape[-1], x.shape[-1]), dtype=BF16)


_weight_gradient_op = define(
    "sm90_parallel_weight_gradient(Tensor dy, Tensor x, str x_group, str dy_group) -> Tensor",
    _weight_gradient,
    _weight_gradient_fake,
)


def column_linear(
    x: Tensor,
    w: Tensor,
    *,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    laps: int | Sequence[int] = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`x [s, ..., K] @ w [N_local, K]^T`, N sharded over `group`; bf16, to bf16 or fp32; differentiable in bf16.

    With `sequence_parallel`, x holds this rank's block of dim 0 and rows are gathered first; so is its gradient. `laps` is for
    a shard that is merged of parts one after the other (`naive.py`): how many equal ones, 2 for `[gate_r; up_r]`, or the rows of
    each on this rank, as in `[q_r; k_r; v_r; z_r]`; a layout that interleaves its parts by groups, as Megatron's qkv, needs none.
    """
    parts = parts_of(laps, w.shape[0])
    out: Tensor = _column_op(x, w, name_of(group), sequence_parallel, parts, out_dtype or x.dtype)
    return out


def _row(x: Tensor, w: Tensor, by_outputs: Tensor | None, group: str, sp: bool) -> Tensor:
    flat = _flat(x)
    rows = _shared_rows(x, group, sp, "sm90_row_linear")
    if not group:
        y = products.product("forward", flat, w, None, BF16)
    else:
        live = resolve(group)
        chosen = transport.prepare(live, x.device)
        gathers = (
            by_outputs is not None
            and len(flat) <= transport.schedule_for(chosen.name, live.size(), len(flat)).gather_rows
        )
        if gathers and by_outputs is not None:
            y = chosen.module.gathered_product(flat, by_outputs, live, _form(sp), BF16)
        else:
            y = chosen.module.row_product(flat, w, live, _form(sp), BF16)
    return y.view(rows, *x.shape[1:-1], len(w))


def _row_fake(x: Tensor, w: Tensor, by_outputs: Tensor | None, group: str, sp: bool) -> Tensor:
    rows = x.shape[0] // size_of(group) if sp else x.shape[0]
    return x.new_empty((rows, *x.shape[1:-1], w.shape[0]), dtype=BF16)


def _row_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, ctx.group, ctx.sp = inputs
    ctx.save_for_backward(x, w)


def _row_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    dy = dy.to(BF16)
    shared = ctx.group if ctx.sp else ""
    dx = _row_gradient_op(dy, w, shared) if ctx.needs_input_grad[0] else None
    dw = _weight_gradient_op(dy, x, "", shared) if ctx.needs_input_grad[1] else None
    return dx, dw, None, None, None


_row_op = define(
    "sm90_row_linear(Tensor x, Tensor w, Tensor? by_outputs, str group, bool sequence_parallel) -> Tensor",
    _row,
    _row_fake,
    backward=_row_backward,
    setup_context=_row_setup,
)


def _row_gradient(dy: Tensor, w: Tensor, dy_group: str) -> Tensor:
    grads = _gather(dy, dy_group) if dy_group else dy
    return products.product("input", _flat(grads), w, None, BF16).view(*grads.shape[:-1], w.shape[1])


def _row_gradient_fake(dy: Tensor, w: Tensor, dy_group: str) -> Tensor:
    return dy.new_empty((dy.shape[0] * size_of(dy_group), *dy.shape[1:-1], w.shape[1]), dtype=BF16)


_row_gradient_op = define(
    "sm90_row_input_gradient(Tensor dy, Tensor w, str dy_group) -> Tensor", _row_gradient, _row_gradient_fake
)


def row_linear(
    x: Tensor,
    w: Tensor,
    *,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    by_outputs: Tensor | None = None,
) -> Tensor:
    """`x [s, ..., K_local] @ w [N, K_local]^T` by the chain over all of `group`'s K, in bf16; differentiable.

    Every rank gets the whole result; with `sequence_parallel` its block of dim 0. `by_outputs` is `outputs_shard(w, group)`, held
    beside w: it lets few rows be made by gather-K, where the checked-in schedule says that this is faster. Raises `DomainError`
    and `transport.TransportError`; a peer that is lost raises `transport.LostPeerError`.
    """
    out: Tensor = _row_op(x, w, by_outputs, name_of(group), sequence_parallel)
    return out
