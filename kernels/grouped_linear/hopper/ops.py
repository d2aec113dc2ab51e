# SPDX-License-Identifier: Apache-2.0
"""The experts' linears on sm90 as opaque torch ops, whole or sharded over a group (ETP), with their gradients.

Over ETP a chain is handed on by the linear's transport: accumulators of all experts travel together, in row blocks, each by the
offsets of its rows. In symmetric memory a product reads and writes them where they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.grouped_linear.hopper import products, table
from isoexec.kernels.grouped_linear.hopper.naive import STEP
from isoexec.kernels.groups import name_of, resolve
from isoexec.kernels.hopper.library import define
from isoexec.kernels.linear.hopper import transport

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["chain", "grouped_linear", "input_gradient", "row_grouped_linear", "weight_gradient"]

BF16, FP32 = torch.bfloat16, torch.float32


def _chain(
    a: Tensor, w: Tensor, offsets: Tensor, acc: Tensor | None, down: bool, out_dtype: torch.dtype
) -> Tensor:
    return products.rows_product(a, w, offsets, acc, out_dtype, down=down)


def _chain_fake(
    a: Tensor, w: Tensor, offsets: Tensor, acc: Tensor | None, down: bool, out_dtype: torch.dtype
) -> Tensor:
    return a.new_empty((a.shape[0], w.shape[2 if down else 1]), dtype=out_dtype)


_chain_op = define(
    "sm90_grouped_chain(Tensor a, Tensor w, Tensor offsets, Tensor? acc, bool down, ScalarType out_dtype) -> Tensor",
    _chain,
    _chain_fake,
)


def chain(
    x: Tensor, w: Tensor, offsets: Tensor, acc: Tensor | None = None, *, out_dtype: torch.dtype = FP32
) -> Tensor:
    """`x [R, K]` by `w [E, N, K]`, each row by its expert, going on from `acc [R, N]` (fp32); no gradient."""
    out: Tensor = _chain_op(x, w, offsets, acc, False, out_dtype)
    return out


def input_gradient(
    dy: Tensor, w: Tensor, offsets: Tensor, acc: Tensor | None = None, *, out_dtype: torch.dtype = BF16
) -> Tensor:
    """`dy [R, N]` by `w [E, N, K]` down N, each row by its expert, going on from `acc [R, K]` (fp32)."""
    out: Tensor = _chain_op(dy, w, offsets, acc, True, out_dtype)
    return out


def _weight(dy: Tensor, x: Tensor, offsets: Tensor, out_dtype: torch.dtype) -> Tensor:
    return products.weight_product(dy, x, offsets, offsets.shape[0] - 1, out_dtype)


def _weight_fake(dy: Tensor, x: Tensor, offsets: Tensor, out_dtype: torch.dtype) -> Tensor:
    return dy.new_empty((offsets.shape[0] - 1, dy.shape[1], x.shape[1]), dtype=out_dtype)


_weight_op = define(
    "sm90_grouped_weight_gradient(Tensor dy, Tensor x, Tensor offsets, ScalarType out_dtype) -> Tensor",
    _weight,
    _weight_fake,
)


def weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor, *, out_dtype: torch.dtype = BF16) -> Tensor:
    """`dy [R, N]^T x [R, K]` of each expert's rows, one chain over them in their order -> `[E, N, K]`; any number of rows."""
    out: Tensor = _weight_op(dy, x, offsets, out_dtype)
    return out


def _between(offsets: Tensor, rows: slice) -> Tensor:
    """The offsets within a block of rows, on the device."""
    return (offsets - rows.start).clamp(0, rows.stop - rows.start)


def _handed(a: Tensor, w: Tensor, offsets: Tensor, group: str, laps: int, down: bool) -> Tensor:
    """A chain over all ranks' shares: once around, or as many laps as a column shard has parts."""
    ranks = resolve(group)
    size, per = ranks.size(), w.shape[1] // laps

    def make(stage: int, rows: slice, acc: Tensor | None, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        part = slice(stage // size * per, (stage // size + 1) * per)
        left, right = (a[rows, part], w[:, part]) if down else (a[rows], w)
        return products.rows_product(left, right, _between(offsets, rows), acc, dtype, out, down=down)

    return transport.prepare(ranks, a.device).module.hand_off(
        make,
        rows=len(a),
        width=w.shape[2 if down else 1],
        device=a.device,
        group=ranks,
        stages=laps * size,
        out_dtype=BF16,
        name="experts' input gradient" if down else "experts' row product",
    )


def _column(x: Tensor, w: Tensor, offsets: Tensor, group: str, laps: int) -> Tensor:
    table.require_listed(w.shape[1], w.shape[2])
    return products.rows_product(x, w, offsets, None, BF16)


def _column_fake(x: Tensor, w: Tensor, offsets: Tensor, group: str, laps: int) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[1]))


def _column_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, offsets, ctx.group, ctx.laps = inputs
    ctx.save_for_backward(x, w, offsets)


def _column_gradient(dy: Tensor, w: Tensor, offsets: Tensor, group: str, laps: int) -> Tensor:
    require(
        laps >= 1 and w.shape[1] % (laps * STEP) == 0,
        "sm90_grouped_linear input gradient",
        f"a shard of {w.shape[1]} rows in {laps} parts",
        f"parts of whole {STEP}s",
    )
    if not group:
        return products.rows_product(dy, w, offsets, None, BF16, down=True)
    return _handed(dy, w, offsets, group, laps, True)


def _column_gradient_fake(dy: Tensor, w: Tensor, offsets: Tensor, group: str, laps: int) -> Tensor:
    return dy.new_empty((dy.shape[0], w.shape[2]))


_column_gradient_op = define(
    "sm90_grouped_column_gradient(Tensor dy, Tensor w, Tensor offsets, str group, int laps) -> Tensor",
    _column_gradient,
    _column_gradient_fake,
)


def _column_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w, offsets = ctx.saved_tensors
    dy = dy.contiguous()
    dx = _column_gradient_op(dy, w, offsets, ctx.group, ctx.laps) if ctx.needs_input_grad[0] else None
    dw = _weight_op(dy, x, offsets, BF16) if ctx.needs_input_grad[1] else None
    return dx, dw, None, None, None


_column_op = define(
    "sm90_grouped_linear(Tensor x, Tensor w, Tensor offsets, str group, int laps) -> Tensor",
    _column,
    _column_fake,
    backward=_column_backward,
    setup_context=_column_setup,
)


def grouped_linear(
    x: Tensor, w: Tensor, offsets: Tensor, *, group: ProcessGroup | None = None, laps: int = 1
) -> Tensor:
    """`x [R, K]` by `w [E, N_local, K]`, N sharded over `group` (ETP) -> `[R, N_local]`, all bf16; differentiable.

    Rows `offsets[e]` to `offsets[e + 1]` (int32) are expert e's; rows after the last offset are of none and are not written.
    The input gradient is handed from rank to rank; `laps=2` is for shards laid out `[gate_r; up_r]`. Raises `DomainError` for
    a weight that the table does not list.
    """
    out: Tensor = _column_op(x, w, offsets, name_of(group), laps)
    return out


def _row(x: Tensor, w: Tensor, offsets: Tensor, group: str) -> Tensor:
    table.require_listed(w.shape[1], w.shape[2])
    if not group:
        return products.rows_product(x, w, offsets, None, BF16)
    return _handed(x, w, offsets, group, 1, False)


def _row_fake(x: Tensor, w: Tensor, offsets: Tensor, group: str) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[1]))


def _row_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _row_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w, offsets = ctx.saved_tensors
    dy = dy.contiguous()
    dx = _chain_op(dy, w, offsets, None, True, BF16) if ctx.needs_input_grad[0] else None
    dw = _weight_op(dy, x, offsets, BF16) if ctx.needs_input_grad[1] else None
    return dx, dw, None, None


_row_op = define(
    "sm90_row_grouped_linear(Tensor x, Tensor w, Tensor offsets, str group) -> Tensor",
    _row,
    _row_fake,
    backward=_row_backward,
    setup_context=_row_setup,
)


def row_grouped_linear(x: Tensor, w: Tensor, offsets: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """`x [R, K_local]` by `w [E, N, K_local]`, K sharded over `group` (ETP) -> `[R, N]`, all bf16; differentiable.

    The accumulator is handed from rank to rank; every rank gets the whole result. Refuses as `grouped_linear`, and raises
    `transport.TransportError`; a peer that is lost raises the transport's error.
    """
    out: Tensor = _row_op(x, w, offsets, name_of(group))
    return out
