# SPDX-License-Identifier: Apache-2.0
"""Trainer attention: whole sequences, causal, with a gradient that stays inside its KV group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from isoexec.kernels.attention.naive import QUERY_TILE
from isoexec.kernels.attention.tile import attend, check_heads, scores
from isoexec.kernels.domain import require
from isoexec.kernels.library import define
from isoexec.kernels.sums import halving_tree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["attention_varlen"]

BATCH = 4096  # segment products in one batch; changes no bit


def _check(q: Tensor, k: Tensor, v: Tensor, kv_segment: int) -> int:
    require(
        q.dim() == 4 and k.shape == v.shape and k.shape[:2] == q.shape[:2] and k.shape[3] == q.shape[3],
        "attention",
        f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
        "q [b, s, H, D] with k and v [b, s, KV, D]",
    )
    return check_heads(q, q.shape[2], k.shape[2], q.shape[3], kv_segment)


def _tile(x: Tensor, kv_heads: int, per: int) -> Tensor:
    """[b, s, H, D] -> fp32 [tiles, b * KV, QUERY_TILE, D], rows token-major, zero padded."""
    b, s, H, D = x.shape
    group, T = H // kv_heads, -(-s // per)
    x = x.to(torch.float32).reshape(b, s, kv_heads, group, D)
    if T * per != s:
        x = F.pad(x, (0, 0, 0, 0, 0, 0, 0, T * per - s))
    x = x.view(b, T, per, kv_heads, group, D).permute(1, 0, 3, 2, 4, 5)
    x = x.reshape(T, b * kv_heads, per * group, D)
    return F.pad(x, (0, 0, 0, QUERY_TILE - per * group)) if per * group != QUERY_TILE else x


def _untile(x: Tensor, b: int, s: int, kv_heads: int, group: int, per: int) -> Tensor:
    """The inverse of `_tile`, back to [b, s, H, D]."""
    T, D = x.shape[0], x.shape[-1]
    x = x[:, :, : per * group].reshape(T, b, kv_heads, per, group, D).permute(1, 0, 3, 2, 4, 5)
    return x.reshape(b, T * per, kv_heads * group, D)[:, :s]


def _segments(x: Tensor, kv_segment: int) -> Tensor:
    """[b, s, KV, D] -> fp32 [segments, b * KV, kv_segment, D], zero padded."""
    b, s, KV, D = x.shape
    ns = -(-s // kv_segment)
    x = x.to(torch.float32)
    if ns * kv_segment != s:
        x = F.pad(x, (0, 0, 0, 0, 0, ns * kv_segment - s))
    x = x.view(b, ns, kv_segment, KV, D).permute(1, 0, 3, 2, 4)
    return x.reshape(ns, b * KV, kv_segment, D).contiguous()


def _runs(tiles: int, per: int, s: int, kv_segment: int) -> Iterator[tuple[int, int, int]]:
    """(first tile, past the last, segments): neighbouring tiles that see the same number of segments."""
    first = 0
    while first < tiles:
        need = -(-min((first + 1) * per, s) // kv_segment)
        past = first + 1
        while past < tiles and -(-min((past + 1) * per, s) // kv_segment) == need:
            past += 1
        yield first, past, need
        first = past


def _limits(first: int, past: int, per: int, group: int) -> Tensor:
    """[tiles, 1, QUERY_TILE]: keys each row of each tile sees; at least one."""
    token = torch.arange(QUERY_TILE) // group
    return (torch.arange(first, past).unsqueeze(1) * per + token + 1).unsqueeze(1)


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, kv_segment: int) -> tuple[Tensor, Tensor, Tensor]:
    group = _check(q, k, v, kv_segment)
    b, s, _, D = q.shape
    KV = k.shape[2]
    per = QUERY_TILE // group
    qt, ks, vs = _tile(q, KV, per), _segments(k, kv_segment), _segments(v, kv_segment)
    T, B = qt.shape[:2]
    out = torch.empty(T, B, QUERY_TILE, D, dtype=torch.float32)
    top, total = (
        torch.empty(T, B, QUERY_TILE, dtype=torch.float32),
        torch.empty(T, B, QUERY_TILE, dtype=torch.float32),
    )
    for first, past, need in _runs(T, per, s, kv_segment):
        n = past - first
        step = max(1, BATCH // (n * need))
        limit = _limits(first, past, per, group)
        for c in range(0, B, step):
            here = slice(c, c + step)
            kk, vv = (t[:need, here].unsqueeze(0).expand(n, -1, -1, -1, -1) for t in (ks, vs))
            tile = slice(first, past)
            out[tile, here], top[tile, here], total[tile, here] = attend(qt[tile, here], kk, vv, limit, scale)
    return _untile(out, b, s, KV, group, per).to(q.dtype).contiguous(), top, total


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, scale: float, kv_segment: int
) -> tuple[Tensor, Tensor, Tensor]:
    per = QUERY_TILE // (q.shape[2] // k.shape[2])
    shape = (-(-q.shape[1] // per), q.shape[0] * k.shape[2], QUERY_TILE)
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
    b, s, H, D = q.shape
    KV = k.shape[2]
    group = H // KV
    per = QUERY_TILE // group
    qt, gt, ot = (_tile(t, KV, per) for t in (q, g, out))
    ks, vs = _segments(k, kv_segment), _segments(v, kv_segment)
    T, B = qt.shape[:2]
    delta = halving_tree(gt * ot)
    dq = torch.zeros(T, B, QUERY_TILE, D, dtype=torch.float32)
    dk, dv = torch.zeros_like(ks), torch.zeros_like(vs)
    for first, past, need in _runs(T, per, s, kv_segment):
        limit = _limits(first, past, per, group)
        for t in range(first, past):
            shape = (need * B, QUERY_TILE, D)
            kk, vv = ks[:need].view(need * B, kv_segment, D), vs[:need].view(need * B, kv_segment, D)
            p = scores(
                qt[t].unsqueeze(0),
                ks[:need].unsqueeze(0),
                limit[t - first : t - first + 1],
                scale,
                QUERY_TILE,
            )[0]
            p = p.sub_(top[t].unsqueeze(1)).exp_().div_(total[t].unsqueeze(1))  # [need, B, seg, QUERY_TILE]
            flat = p.view(need * B, kv_segment, QUERY_TILE)
            gq = gt[t].expand(need, B, QUERY_TILE, D).reshape(shape)
            dv[:need].view(need * B, kv_segment, D).baddbmm_(flat, gq)
            dp = torch.bmm(vv, gq.transpose(1, 2)).view_as(p)
            ds = dp.sub_(delta[t].unsqueeze(1)).mul_(p).mul_(scale).view_as(flat)
            qq = qt[t].expand(need, B, QUERY_TILE, D).reshape(shape)
            dk[:need].view(need * B, kv_segment, D).baddbmm_(ds, qq)
            part = torch.bmm(ds.transpose(1, 2), kk).view(need, B, QUERY_TILE, D)
            for j in range(need):
                dq[t].add_(part[j])
    back = (
        x.view(-1, b, KV, kv_segment, D).permute(1, 0, 3, 2, 4).reshape(b, -1, KV, D)[:, :s].to(k.dtype)
        for x in (dk, dv)
    )
    gk, gv = (x.contiguous() for x in back)
    return _untile(dq, b, s, KV, group, per).to(q.dtype).contiguous(), gk, gv


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
    require(query_tile == QUERY_TILE, "attention", f"query_tile {query_tile}", f"query_tile {QUERY_TILE}")
    out: Tensor = _op(q, k, v, float(scale), kv_segment)[0]
    return out
