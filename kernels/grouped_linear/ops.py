# SPDX-License-Identifier: Apache-2.0
"""The grouped chain as torch ops: an expert's rows by the linear's chain, accumulators of all experts handed on together."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from isoexec.kernels import linear
from isoexec.kernels.domain import DomainError, require, require_float
from isoexec.kernels.groups import name_of, resolve, size_of
from isoexec.kernels.library import define
from isoexec.kernels.linear.ops import MIN_BLOCK, n_block_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["chain", "grouped_linear", "hand_off", "pack_weights", "row_grouped_linear"]

_wgrad = torch.ops.isoexec.linear_wgrad.default


def pack_weights(w: Tensor, *, k_block: int) -> Tensor:
    """Lay the weights out for `chain`: `[E, N, K]` of float32 or bfloat16 -> fp32 `[E, K / k_block, k_block, N]`.

    Raises `DomainError` as `linear.pack_weight` does for each.
    """
    require(w.dim() == 3 and len(w) > 0, "grouped_linear", f"weights {list(w.shape)}", "[experts, N, K]")
    return torch.stack([linear.pack_weight(one, k_block=k_block) for one in w])


def _cuts(offsets: Tensor, rows: int, experts: int) -> Iterator[tuple[int, int, int]]:
    """Experts that have rows, with their first and last."""
    ends = offsets.tolist()
    if len(ends) != experts + 1 or ends[0] != 0 or ends[-1] != rows or ends != sorted(ends):
        raise DomainError(
            "grouped_linear",
            f"offsets {ends} for {rows} rows of {experts} experts",
            "ascending offsets from 0 to the number of rows, one more than experts",
        )
    return ((e, a, b) for e, (a, b) in enumerate(pairwise(ends)) if a < b)


def _chain(x: Tensor, packed: Tensor, offsets: Tensor, acc: Tensor | None) -> Tensor:
    require(x.dim() == 2 and packed.dim() == 4, "grouped_linear", f"rows {list(x.shape)}", "[rows, K]")
    y = torch.empty(len(x), packed.shape[3], dtype=torch.float32)
    for e, a, b in _cuts(offsets, len(x), len(packed)):
        y[a:b] = linear.chain(x[a:b], packed[e], None if acc is None else acc[a:b])
    return y


def _chain_fake(x: Tensor, packed: Tensor, offsets: Tensor, acc: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], packed.shape[3]), dtype=torch.float32)


_chain_op = define(
    "grouped_chain(Tensor x, Tensor packed, Tensor offsets, Tensor? acc) -> Tensor", _chain, _chain_fake
)


def chain(x: Tensor, packed: Tensor, offsets: Tensor, acc: Tensor | None = None) -> Tensor:
    """fp32 `[R, N]`: `x [R, K]`, each row by its expert's packed weight, continued from `acc [R, N]` where one is given."""
    out: Tensor = _chain_op(x, packed, offsets, acc)
    return out


def _hand_off(x: Tensor, packed: Tensor, offsets: Tensor, group_name: str) -> Tensor:
    if not group_name or not len(x):
        return _chain(x, packed, offsets, None)
    group = resolve(group_name)
    rank, last = group.rank(), group.size() - 1
    acc = None
    if rank:
        acc = torch.empty(len(x), packed.shape[3], dtype=torch.float32)
        dist.recv(acc, group=group, group_src=rank - 1)
    y = _chain(x, packed, offsets, acc)
    if rank != last:
        dist.send(y, group=group, group_dst=rank + 1)
    dist.broadcast(y, group=group, group_src=last)
    return y


def _hand_off_fake(x: Tensor, packed: Tensor, offsets: Tensor, group_name: str) -> Tensor:
    return x.new_empty((x.shape[0], packed.shape[3]), dtype=torch.float32)


_hand_off_op = define(
    "grouped_hand_off(Tensor x, Tensor packed, Tensor offsets, str group) -> Tensor",
    _hand_off,
    _hand_off_fake,
)


def hand_off(x: Tensor, packed: Tensor, offsets: Tensor, group: ProcessGroup | None) -> Tensor:
    """fp32 `[R, N]`: the chain over a K that is sharded over `group`, each rank going on where the one before ended.

    Every rank holds the same rows and offsets. Bits are those of one rank holding all of K.
    """
    out: Tensor = _hand_off_op(x, packed, offsets, name_of(group))
    return out


def _blocks_of_n(w: Tensor, n_block: int, interleave: int) -> Tensor:
    """[E, N, K] -> fp32 [E, N / n_block, n_block, K], the interleaved parts' blocks in turns."""
    E, N, K = w.shape
    parts = w.detach().to(torch.float32).reshape(E, interleave, N // (interleave * n_block), n_block, K)
    return parts.transpose(1, 2).reshape(E, N // n_block, n_block, K).contiguous()


def _take_turns(g: Tensor, n_block: int, interleave: int) -> Tensor:
    R, N = g.shape
    return g.reshape(R, interleave, N // (interleave * n_block), n_block).transpose(1, 2).reshape(R, N)


def _wgrads(g: Tensor, x: Tensor, offsets: Tensor, experts: int) -> Tensor:
    dw = torch.zeros(experts, g.shape[1], x.shape[1], dtype=torch.float32)
    for e, a, b in _cuts(offsets, len(g), experts):
        dw[e] = _wgrad(g[a:b], x[a:b])
    return dw


def _wgrads_fake(g: Tensor, x: Tensor, offsets: Tensor, experts: int) -> Tensor:
    return g.new_empty((experts, g.shape[1], x.shape[1]), dtype=torch.float32)


_wgrads_op = define(
    "grouped_wgrad(Tensor g, Tensor x, Tensor offsets, int experts) -> Tensor", _wgrads, _wgrads_fake
)


def _block_of(n_local: int, ranks: int, k_block: int, interleave: int) -> int:
    n_block = n_block_of(n_local * ranks, k_block, interleave)
    require(
        n_block >= MIN_BLOCK and n_local % (interleave * n_block) == 0,
        "grouped_linear input gradient",
        f"N {n_local * ranks} in shards of {n_local}, interleave {interleave}, block {n_block}",
        f"shards that are whole blocks of at least {MIN_BLOCK}",
    )
    return n_block


def _column(x: Tensor, w: Tensor, offsets: Tensor, k_block: int, group: str, interleave: int) -> Tensor:
    require_float("grouped_linear", x, w)
    return _chain(x, pack_weights(w, k_block=k_block), offsets, None).to(x.dtype)


def _column_fake(x: Tensor, w: Tensor, offsets: Tensor, k_block: int, group: str, interleave: int) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[1]))


def _column_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, offsets, ctx.k_block, ctx.group, ctx.interleave = inputs
    ctx.save_for_backward(x, w, offsets)


def _column_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, w, offsets = ctx.saved_tensors
    dx = dw = None
    if ctx.needs_input_grad[0]:
        n_block = _block_of(w.shape[1], size_of(ctx.group), ctx.k_block, ctx.interleave)
        turns = _take_turns(g, n_block, ctx.interleave)
        packed = _blocks_of_n(w, n_block, ctx.interleave)
        dx = _hand_off_op(turns, packed, offsets, ctx.group).to(x.dtype)
    if ctx.needs_input_grad[1]:
        dw = _wgrads_op(g, x, offsets, len(w)).to(w.dtype)
    return dx, dw, None, None, None, None


_column_op = define(
    "column_grouped_linear(Tensor x, Tensor w, Tensor offsets, int k_block, str group, int interleave) -> Tensor",
    _column,
    _column_fake,
    backward=_column_backward,
    setup_context=_column_setup,
)


def grouped_linear(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    *,
    k_block: int,
    group: ProcessGroup | None = None,
    interleave: int = 1,
) -> Tensor:
    """`x [R, K]` by `w [E, N_local, K]`, N sharded over `group` (ETP) -> `[R, N_local]` in x's dtype; differentiable.

    Rows `offsets[e]` to `offsets[e + 1]` are expert e's. The input gradient is handed from rank to rank of the group.
    `interleave=2` is for shards laid out `[gate_r; up_r]`, at every degree the same.
    """
    out: Tensor = _column_op(x, w, offsets, k_block, name_of(group), interleave)
    return out


def _row(x: Tensor, w: Tensor, offsets: Tensor, k_block: int, group: str) -> Tensor:
    require_float("grouped_linear.row", x, w)
    return _hand_off(x, pack_weights(w, k_block=k_block), offsets, group).to(x.dtype)


def _row_fake(x: Tensor, w: Tensor, offsets: Tensor, k_block: int, group: str) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[1]))


def _row_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, offsets, ctx.k_block, _ = inputs
    ctx.save_for_backward(x, w, offsets)


def _row_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, w, offsets = ctx.saved_tensors
    dx = dw = None
    if ctx.needs_input_grad[0]:
        n_block = _block_of(w.shape[1], 1, ctx.k_block, 1)
        dx = _chain_op(g, _blocks_of_n(w, n_block, 1), offsets, None).to(x.dtype)
    if ctx.needs_input_grad[1]:
        dw = _wgrads_op(x, g, offsets, len(w)).transpose(1, 2).to(w.dtype)
    return dx, dw, None, None, None


_row_op = define(
    "row_grouped_linear(Tensor x, Tensor w, Tensor offsets, int k_block, str group) -> Tensor",
    _row,
    _row_fake,
    backward=_row_backward,
    setup_context=_row_setup,
)


def row_grouped_linear(
    x: Tensor, w: Tensor, offsets: Tensor, *, k_block: int, group: ProcessGroup | None = None
) -> Tensor:
    """`x [R, K_local]` by `w [E, N, K_local]`, K sharded over `group` (ETP) -> `[R, N]` in x's dtype; differentiable.

    The accumulator is handed from rank to rank; every rank gets the whole result.
    """
    out: Tensor = _row_op(x, w, offsets, k_block, name_of(group))
    return out
