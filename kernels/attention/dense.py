# SPDX-License-Identifier: Apache-2.0
"""Trainer attention: whole sequences, causal, with a gradient that stays inside its KV group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from isoexec.kernels.attention.naive import QUERY_TILE
from isoexec.kernels.attention.tile import attend, check_heads, weights
from isoexec.kernels.domain import DomainError
from isoexec.kernels.library import define
from isoexec.kernels.sums import halving_tree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["attention_varlen"]

SCORES = 2**18  # scores held at a time; changes no bit


def _check(q: Tensor, k: Tensor, v: Tensor, kv_segment: int) -> int:
    if not (q.dim() == 4 and k.shape == v.shape and k.shape[:2] == q.shape[:2] and k.shape[3] == q.shape[3]):
        raise DomainError(
            "attention",
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
            "q [b, s, H, D] with k and v [b, s, KV, D]",
        )
    return check_heads(q, q.shape[2], k.shape[2], q.shape[3], kv_segment)


def _tile(x: Tensor, kv_heads: int, per: int) -> Tensor:
    """[b, s, H, D] -> fp32 [b * KV, tiles * QUERY_TILE, D], rows token-major in a tile of `per` tokens, zero padded."""
    b, s, H, D = x.shape
    group, T = H // kv_heads, -(-s // per)
    x = x.to(torch.float32).reshape(b, s, kv_heads, group, D)
    if T * per != s:
        x = F.pad(x, (0, 0, 0, 0, 0, 0, 0, T * per - s))
    x = x.view(b, T, per, kv_heads, group, D).permute(0, 3, 1, 2, 4, 5)
    x = x.reshape(b * kv_heads, T, per * group, D)
    if per * group != QUERY_TILE:
        x = F.pad(x, (0, 0, 0, QUERY_TILE - per * group))
    return x.reshape(b * kv_heads, T * QUERY_TILE, D)


def _untile(x: Tensor, like: Tensor, kv_heads: int, per: int) -> Tensor:
    """The inverse of `_tile`, in the shape and dtype of `like` [b, s, H, D]."""
    b, s, H, D = like.shape
    group = H // kv_heads
    x = x.view(b, kv_heads, x.shape[1] // QUERY_TILE, QUERY_TILE, D)[:, :, :, : per * group].to(like.dtype)
    x = x.unflatten(3, (per, group)).permute(0, 2, 3, 1, 4, 5)
    return x.reshape(b, x.shape[1] * per, H, D)[:, :s].contiguous()


def _keys(x: Tensor, kv_segment: int) -> Tensor:
    """[b, s, KV, D] -> fp32 [b * KV, whole segments, D], zero padded."""
    b, s, KV, D = x.shape
    x = x.to(torch.float32).transpose(1, 2)
    x = F.pad(x, (0, 0, 0, -s % kv_segment))
    return x.reshape(b * KV, x.shape[2], D)


def _unkeys(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_keys`, in the shape and dtype of `like` [b, s, KV, D]."""
    b, s, KV, D = like.shape
    return x.view(b, KV, x.shape[1], D)[:, :, :s].to(like.dtype).transpose(1, 2).contiguous()


def _runs(s: int, per: int, group: int, kv_segment: int) -> Iterator[tuple[slice, int, Tensor, int]]:
    """Neighbouring tiles that see the same segments: (rows, keys, limit [1, rows], keys that all rows see)."""
    tiles = -(-s // per)
    token = torch.arange(QUERY_TILE) // group
    first = 0
    while first < tiles:
        need = -(-min((first + 1) * per, s) // kv_segment)
        past = first + 1
        while past < tiles and -(-min((past + 1) * per, s) // kv_segment) == need:
            past += 1
        limit = torch.arange(first, past).unsqueeze(1) * per + token + 1
        yield (
            slice(first * QUERY_TILE, past * QUERY_TILE),
            need * kv_segment,
            limit.view(1, -1),
            first * per + 1,
        )
        first = past


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, kv_segment: int) -> tuple[Tensor, Tensor, Tensor]:
    group = _check(q, k, v, kv_segment)
    KV = k.shape[2]
    per = QUERY_TILE // group
    qt, kt, vt = _tile(q, KV, per) * scale, _keys(k, kv_segment), _keys(v, kv_segment)
    B, R, D = qt.shape
    out = torch.empty(B, R, D, dtype=torch.float32)
    top, total = (torch.empty(B, R, dtype=torch.float32) for _ in range(2))
    columns = qt.transpose(1, 2).contiguous()
    for rows, keys, limit, visible in _runs(q.shape[1], per, group, kv_segment):
        M = rows.stop - rows.start
        step = max(1, SCORES // (M * keys))
        for c in range(0, B, step):
            at = (slice(c, c + step), rows)
            out[at], top[at], total[at] = attend(
                columns[at[0], :, rows], kt[at[0], :keys], vt[at[0], :keys], limit, visible, M, kv_segment
            )
    return _untile(out, q, KV, per), top, total


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, scale: float, kv_segment: int
) -> tuple[Tensor, Tensor, Tensor]:
    per = QUERY_TILE // (q.shape[2] // k.shape[2])
    shape = (q.shape[0] * k.shape[2], -(-q.shape[1] // per) * QUERY_TILE)
    row = q.new_empty(shape, dtype=torch.float32)
    return q.new_empty(q.shape), row, torch.empty_like(row)


def _grad(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    top: Tensor,
    total: Tensor,
    scale: float,
    kv_segment: int,
) -> tuple[Tensor, Tensor, Tensor]:
    KV = k.shape[2]
    group = q.shape[2] // KV
    per = QUERY_TILE // group
    qt, gt, ot = (_tile(t, KV, per) for t in (q, g, out))
    delta = halving_tree(ot * gt)
    qt = qt * scale  # never in place: a tile can be a view of the input
    kt, vt = _keys(k, kv_segment), _keys(v, kv_segment)
    dq, dk, dv = (torch.zeros_like(t) for t in (qt, kt, vt))
    B = qt.shape[0]
    for rows, keys, limit, visible in _runs(q.shape[1], per, group, kv_segment):
        M = rows.stop - rows.start
        step = max(1, SCORES // (M * keys))
        for c in range(0, B, step):
            here, at = slice(c, c + step), (slice(c, c + step), rows)
            p, _ = weights(qt[at].transpose(1, 2), kt[here, :keys], limit, visible, M)  # [n, keys, M]
            p.div_(total[at].unsqueeze(1))
            ds = torch.bmm(vt[here, :keys], gt[at].transpose(1, 2)).sub_(delta[at].unsqueeze(1)).mul_(p)
            # a key's gradient adds the query tiles in order, a query's adds the segments in order
            for a in range(0, M, QUERY_TILE):
                tile, row = slice(a, a + QUERY_TILE), slice(rows.start + a, rows.start + a + QUERY_TILE)
                dv[here, :keys].baddbmm_(p[:, :, tile], gt[here, row])
                dk[here, :keys].baddbmm_(ds[:, :, tile], qt[here, row])
            for a in range(0, keys, kv_segment):
                segment = slice(a, a + kv_segment)
                dq[at].baddbmm_(ds[:, segment].transpose(1, 2), kt[here, segment])
    return _untile(dq.mul_(scale), q, KV, per), _unkeys(dk, k), _unkeys(dv, v)


def _grad_fake(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    top: Tensor,
    total: Tensor,
    scale: float,
    kv_segment: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, ctx.kv_segment = inputs
    out, top, total = output
    ctx.mark_non_differentiable(top, total)
    ctx.save_for_backward(q, k, v, out, top, total)


def _backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dv = _grad_op(g, *ctx.saved_tensors, ctx.scale, ctx.kv_segment)
    return dq, dk, dv, None, None


_grad_op = define(
    "attention_grad(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor top, Tensor total, float scale, "
    "int kv_segment) -> (Tensor, Tensor, Tensor)",
    _grad,
    _grad_fake,
)
_op = define(
    "attention(Tensor q, Tensor k, Tensor v, float scale, int kv_segment) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    backward=_backward,
    setup_context=_setup,
)


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, kv_segment: int, query_tile: int = QUERY_TILE
) -> Tensor:
    """Causal attention of `q [b, s, H, D]` over `k, v [b, s, KV, D]` at positions 0 to s - 1, in q.dtype; differentiable.

    Sequences of other lengths are right padded: padding changes no bit of a real token, forward or backward.
    """
    if query_tile != QUERY_TILE:
        raise DomainError("attention", f"query_tile {query_tile}", f"query_tile {QUERY_TILE}")
    out: Tensor = _op(q, k, v, float(scale), kv_segment)[0]
    return out
