# SPDX-License-Identifier: Apache-2.0
"""The linear chain as torch ops: batched tiles of one shape, and an accumulator handed from rank to rank."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from isoexec.kernels.domain import DomainError, require_float
from isoexec.kernels.groups import gather_rows, name_of, resolve, size_of
from isoexec.kernels.library import define
from isoexec.kernels.linear.naive import COLUMNS, ROW_TILE

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["chain", "column_linear", "hand_off", "pack_weight", "row_linear"]

TOKEN_BLOCK = 64  # tokens of one term of a weight gradient; part of the function
PIPE_ROWS = 512  # rows handed on at a time; changes no bit
MIN_BLOCK = 16  # narrowest block of a chain


def pack_weight(w: Tensor, *, k_block: int) -> Tensor:
    """Lay a weight out for `chain`: `[N, K]` of float32 or bfloat16 -> fp32 `[K / k_block, k_block, N]`.

    Raises `DomainError` where k_block does not divide K, or N is 1 (a matrix-vector product has other bits).
    """
    require_float("linear", w)
    N, K = w.shape
    if k_block < MIN_BLOCK or K % k_block:
        raise DomainError(
            "linear",
            f"weight [{N}, {K}] with k_block {k_block}",
            f"k_block >= {MIN_BLOCK} dividing this rank's K (tensor parallelism must divide K / k_block)",
        )
    if N < 2:
        raise DomainError("linear", f"weight [{N}, {K}]", "at least 2 output features")
    blocks = w.detach().to(torch.float32).view(N, K // k_block, k_block) if w.is_contiguous() else None
    if blocks is None:
        blocks = w.detach().to(torch.float32).reshape(N, K // k_block, k_block)
    return blocks.permute(1, 2, 0).contiguous()


def _tiles(x: Tensor, width: int) -> tuple[Tensor, int]:
    """fp32 rows padded to whole tiles, and how many of them are real."""
    rows = x.shape[:-1].numel()
    flat = x.reshape(rows, width).to(torch.float32)
    pad = -rows % ROW_TILE
    return (F.pad(flat, (0, 0, 0, pad)) if pad else flat), rows


def _accumulate(acc: Tensor, x: Tensor, packed: Tensor) -> None:
    """Acc [T * ROW_TILE, N] += x @ packed, block by block in order."""
    blocks, k_block, N = packed.shape
    if N < COLUMNS:
        wide = F.pad(acc, (0, COLUMNS - N))
        _accumulate(wide, x, F.pad(packed, (0, COLUMNS - N)))
        acc.copy_(wide[:, :N])
        return
    T = acc.shape[0] // ROW_TILE
    acc3 = acc.view(T, ROW_TILE, N)
    xt = x.view(T, ROW_TILE, blocks, k_block)
    for i in range(blocks):
        acc3.baddbmm_(xt[:, :, i], packed[i].expand(T, k_block, N))


def _chain(x: Tensor, packed: Tensor, acc: Tensor | None) -> Tensor:
    blocks, k_block, N = packed.shape
    if x.shape[-1] != blocks * k_block:
        raise DomainError(
            "linear.chain",
            f"x {list(x.shape)} with packed weight {list(packed.shape)}",
            "x whose last dimension is the packed weight's blocks * k_block",
        )
    flat, rows = _tiles(x, blocks * k_block)
    if acc is None:
        y = torch.zeros(flat.shape[0], N, dtype=torch.float32)
    else:
        y, _ = _tiles(acc, N)
        y = y.clone() if y.data_ptr() == acc.data_ptr() else y
    _accumulate(y, flat, packed)
    return (y if len(y) == rows else y[:rows]).view(*x.shape[:-1], N)


def _chain_fake(x: Tensor, packed: Tensor, acc: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[2]), dtype=torch.float32)


_chain_op = define("linear_chain(Tensor x, Tensor packed, Tensor? acc) -> Tensor", _chain, _chain_fake)


def chain(x: Tensor, packed: Tensor, acc: Tensor | None = None) -> Tensor:
    """fp32 `[..., N]`: `x [..., K]` times a packed weight, continued from `acc [..., N]` where one is handed over."""
    out: Tensor = _chain_op(x, packed, acc)
    return out


def _hand_off(x: Tensor, packed: Tensor, group_name: str, scatter: bool) -> Tensor:
    if not group_name:
        return _chain(x, packed, None)
    group = resolve(group_name)
    size, rank = group.size(), group.rank()
    N = packed.shape[2]
    lead = x.shape[:-1]
    if scatter and lead[0] % size:
        raise DomainError(
            "linear.hand_off",
            f"x {list(x.shape)} scattered over {size} ranks",
            "a first dimension the group's size divides",
        )
    rows = lead.numel()
    flat = x.reshape(rows, x.shape[-1])
    whole = torch.empty(rows, N, dtype=torch.float32)
    per = rows // size if scatter else rows
    own = whole[rank * per : (rank + 1) * per] if scatter else whole
    cuts = [
        (a, min(a + PIPE_ROWS, base + per))
        for base in range(0, rows, max(per, 1))
        for a in range(base, base + per, PIPE_ROWS)
    ]
    last = size - 1
    pending: list[Any] = []
    if scatter and rank != last:
        pending = [dist.irecv(whole[a:b], group=group, group_src=last) for a, b in cuts if a // per == rank]
    for a, b in cuts:
        acc = None
        if rank:
            acc = torch.empty(b - a, N, dtype=torch.float32)
            dist.recv(acc, group=group, group_src=rank - 1)
        part = _chain(flat[a:b], packed, acc).contiguous()
        if rank != last:
            pending.append(dist.isend(part, group=group, group_dst=rank + 1))
        elif scatter and a // per != last:
            pending.append(dist.isend(part, group=group, group_dst=a // per))
        else:
            whole[a:b] = part
    for work in pending:
        work.wait()
    if not scatter:
        dist.broadcast(whole, group=group, group_src=last)
        return whole.view(*lead, N)
    return own.reshape(lead[0] // size, *lead[1:], N)


def _hand_off_fake(x: Tensor, packed: Tensor, group_name: str, scatter: bool) -> Tensor:
    rows = x.shape[0] // size_of(group_name) if scatter else x.shape[0]
    return x.new_empty((rows, *x.shape[1:-1], packed.shape[2]), dtype=torch.float32)


_hand_off_op = define(
    "linear_hand_off(Tensor x, Tensor packed, str group, bool scatter) -> Tensor", _hand_off, _hand_off_fake
)


def hand_off(x: Tensor, packed: Tensor, group: ProcessGroup | None, *, scatter: bool = False) -> Tensor:
    """fp32 `[..., N]`: the chain over a K that is sharded over `group`, each rank going on where the one before ended.

    `scatter=True` returns only this rank's block of dim 0. Bits are those of one rank holding all of K.
    """
    out: Tensor = _hand_off_op(x, packed, name_of(group), scatter)
    return out


def _wgrad(g: Tensor, x: Tensor) -> Tensor:
    M, N, K = g.shape[:-1].numel(), g.shape[-1], x.shape[-1]
    if N % ROW_TILE:
        raise DomainError(
            "linear weight gradient", f"{N} features of the sharded side", f"a multiple of {ROW_TILE}"
        )
    T = N // ROW_TILE
    g2, x2 = g.reshape(M, N).to(torch.float32), x.reshape(M, K).to(torch.float32)
    pad = -M % TOKEN_BLOCK
    if pad:
        g2, x2 = F.pad(g2, (0, 0, 0, pad)), F.pad(x2, (0, 0, 0, pad))
    acc = torch.zeros(T, ROW_TILE, K, dtype=torch.float32)
    for a in range(0, M, TOKEN_BLOCK):
        tiles = g2[a : a + TOKEN_BLOCK].view(TOKEN_BLOCK, T, ROW_TILE).permute(1, 2, 0)
        acc.baddbmm_(tiles, x2[a : a + TOKEN_BLOCK].expand(T, TOKEN_BLOCK, K))
    return acc.view(N, K)


def _wgrad_fake(g: Tensor, x: Tensor) -> Tensor:
    return g.new_empty((g.shape[-1], x.shape[-1]), dtype=torch.float32)


_wgrad_op = define("linear_wgrad(Tensor g, Tensor x) -> Tensor", _wgrad, _wgrad_fake)


def _gather(x: Tensor, group: str) -> Tensor:
    return gather_rows(x, group) if group else x.clone()


def _gather_fake(x: Tensor, group: str) -> Tensor:
    return x.new_empty((x.shape[0] * size_of(group), *x.shape[1:]))


_gather_op = define("gather_rows(Tensor x, str group) -> Tensor", _gather, _gather_fake)


def n_block_of(n_global: int, k_block: int, interleave: int = 1) -> int:
    """Block of an input gradient's chain over N: a constant of the global N and k_block, never of a shard."""
    return gcd(n_global // interleave, k_block)


def _blocks_of_n(w: Tensor, n_block: int, interleave: int) -> Tensor:
    N, K = w.shape
    return (
        w.detach()
        .to(torch.float32)
        .reshape(interleave, N // (interleave * n_block), n_block, K)
        .transpose(0, 1)
        .reshape(N // n_block, n_block, K)
        .contiguous()
    )


def _take_turns(g: Tensor, n_block: int, interleave: int) -> Tensor:
    if interleave == 1:
        return g
    lead, N = g.shape[:-1], g.shape[-1]
    return (
        g.reshape(*lead, interleave, N // (interleave * n_block), n_block).transpose(-3, -2).reshape(*lead, N)
    )


def _column(
    x: Tensor, w: Tensor, k_block: int, group: str, sp: bool, interleave: int, out_dtype: torch.dtype
) -> Tensor:
    require_float("linear.column", x, w)
    if sp:
        x = gather_rows(x, group)
    return _chain(x, pack_weight(w, k_block=k_block), None).to(out_dtype)


def _column_fake(
    x: Tensor, w: Tensor, k_block: int, group: str, sp: bool, interleave: int, out_dtype: torch.dtype
) -> Tensor:
    rows = x.shape[0] * size_of(group) if sp else x.shape[0]
    return x.new_empty((rows, *x.shape[1:-1], w.shape[0]), dtype=out_dtype)


def _column_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, ctx.k_block, ctx.group, ctx.sp, ctx.interleave, _ = inputs
    ctx.save_for_backward(x, w)


def _column_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    dx = dw = None
    if ctx.needs_input_grad[0]:
        n_local = w.shape[0]
        n_global = n_local * size_of(ctx.group)
        n_block = n_block_of(n_global, ctx.k_block, ctx.interleave)
        if not (n_block >= MIN_BLOCK and n_local % (ctx.interleave * n_block) == 0):
            raise DomainError(
                "linear input gradient",
                f"N {n_global} in shards of {n_local}, interleave {ctx.interleave}, block {n_block}",
                f"shards that are whole blocks of at least {MIN_BLOCK}",
            )
        turns = _take_turns(g, n_block, ctx.interleave)
        packed = _blocks_of_n(w, n_block, ctx.interleave)
        dx = _hand_off_op(turns, packed, ctx.group, ctx.sp).to(x.dtype)
    if ctx.needs_input_grad[1]:
        rows = _gather_op(x, ctx.group) if ctx.sp and ctx.group else x
        dw = _wgrad_op(g, rows).to(w.dtype)
    return dx, dw, None, None, None, None, None


_column_op = define(
    "column_linear(Tensor x, Tensor w, int k_block, str group, bool sequence_parallel, int interleave, "
    "ScalarType out_dtype) -> Tensor",
    _column,
    _column_fake,
    backward=_column_backward,
    setup_context=_column_setup,
)


def column_linear(
    x: Tensor,
    w: Tensor,
    *,
    k_block: int,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    interleave: int = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`x [s, b, K] @ w[N_local, K]^T`, N sharded over `group`; differentiable.

    With `sequence_parallel`, x holds this rank's block of dim 0 and rows are gathered first. `interleave=2` is for a
    shard laid out `[gate_r; up_r]`. The result has `out_dtype`, else the dtype of x.
    """
    out: Tensor = _column_op(
        x, w, k_block, name_of(group), sequence_parallel, interleave, out_dtype or x.dtype
    )
    return out


def _row(x: Tensor, w: Tensor, k_block: int, group: str, sp: bool) -> Tensor:
    require_float("linear.row", x, w)
    return _hand_off(x, pack_weight(w, k_block=k_block), group, sp).to(x.dtype)


def _row_fake(x: Tensor, w: Tensor, k_block: int, group: str, sp: bool) -> Tensor:
    rows = x.shape[0] // size_of(group) if sp else x.shape[0]
    return x.new_empty((rows, *x.shape[1:-1], w.shape[0]))


def _row_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, ctx.k_block, ctx.group, ctx.sp = inputs
    ctx.save_for_backward(x, w)


def _row_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    dx = dw = None
    if ctx.sp and ctx.group:
        g = _gather_op(g, ctx.group)
    if ctx.needs_input_grad[0]:
        n_block = n_block_of(w.shape[0], ctx.k_block)
        if n_block < MIN_BLOCK:
            raise DomainError(
                "linear input gradient",
                f"N {w.shape[0]} with k_block {ctx.k_block}",
                f"N with a common divisor of at least {MIN_BLOCK} with k_block",
            )
        dx = _chain_op(g, _blocks_of_n(w, n_block, 1), None).to(x.dtype)
    if ctx.needs_input_grad[1]:
        dw = _wgrad_op(x, g).t().to(w.dtype)
    return dx, dw, None, None, None


_row_op = define(
    "row_linear(Tensor x, Tensor w, int k_block, str group, bool sequence_parallel) -> Tensor",
    _row,
    _row_fake,
    backward=_row_backward,
    setup_context=_row_setup,
)


def row_linear(
    x: Tensor,
    w: Tensor,
    *,
    k_block: int,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """`x [s, b, K_local] @ w[N, K_local]^T` summed over `group` by `hand_off`, in x.dtype; differentiable.

    With `sequence_parallel` the result is this rank's block of dim 0.
    """
    out: Tensor = _row_op(x, w, k_block, name_of(group), sequence_parallel)
    return out
