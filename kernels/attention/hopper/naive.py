# SPDX-License-Identifier: Apache-2.0
"""attention.mma_segments/1 on sm90: each query row over each absolute segment of `kv_segment` keys, then one merge.

Segment j holds the keys [j * kv_segment, (j + 1) * kv_segment) of its sequence. A row at position p sees the keys up to p,
so it has the segments 0 .. p // kv_segment. Within a segment, for one row:

    blocks of BLOCK[head dim] keys from the segment's start, walked from the row's last block down to the first:
    s   = chain(q, k)                        fp32, 16 products a step, from zero
    M   = max(m, s of the visible keys)      exact in any order
    r   = exp2((m - M) * c)                  c = scale * log2(e) rounded to fp32; r = 1 in the first block
    p   = exp2(fma(s, c, -(M * c)))          0 for a key that is not visible
    l_t = fma(l_t, r, p of the first key), then + p of the others, one after the other; t = (key // 2) % 4 = 0 .. 3
    o   = chain(bf16(p), v) from o * r       16 keys a step
    then l = (l_0 + l_2) + (l_1 + l_3), out = bf16(o * (1 / l)), lse = fma(M, c * ln2, log2(l) * ln2)

The row's segments are merged in ascending order: W = max lse_j (and the sink), w_j = exp(lse_j - W), written out;
acc = fma(w_j, out_j, acc) and n = n + w_j from zero, then + exp(sink - W); result = bf16(acc / n). A row with one segment and
no sink is that segment's output. The row's log-sum-exp over all its keys and the sink is lse = W + log(n), written out.

attention.mma_window/1 is the same with two more rules: a row sees its last `window` keys, and has the segments in which it
sees one; a block holds WINDOW_BLOCK[head dim] keys.

The gradients, of a row's result `out` and its lse as they were returned, g the result's gradient:

    delta = pair_sum(g * out)                over the head dim, each product rounded in fp32
    p     = exp2(fma(s, c, -(lse * log2(e))))   s as above; 0 for a key that is not visible
    ds    = bf16(p * (chain(g, v) - delta))
    dv    = bf16(chain(bf16(p), g))          a KV group's heads one after the other, each over its rows in ascending order
    dk    = bf16(chain(ds, q) * scale)       likewise
    dq    = bf16(chain(ds, k) * scale)       over the keys in ascending order
    dsink = -(sum of exp(sink - lse) * delta)   a sequence's rows by a tree of pairs, sequences one after the other

The segments are not seen in them: given lse, a softmax has one gradient. Every chain starts at zero and takes 16 rows or keys
a step, from multiples of 16 in the sequence on; what is not visible or beyond the end adds exact zeros, so neither packing,
padding nor company changes a bit, and a rank with whole KV groups has the bits of one that has all.

What plain torch cannot state is the last bit of a tensor-core step, of exp2, of log2 and of 1 / l: on sm90 these are the
steps of its tensor cores and `ex2.approx.ftz`, `lg2.approx.ftz`, `rcp.approx.ftz`. Here a step is the exact sum rounded once,
and the other three are fp64 rounded to fp32. The bits are those of `reference.reference`, which walks the same expressions;
providers are certified against it as integers and against fp64 by error. The gradients' are those of `reference.gradients`,
which is `gradients` here with the chip's steps and exp2. The merge, delta and the sinks' gradient are exact arithmetic with one
specification on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from isoexec.kernels.hopper.spec import LOG2E, exp, fma, log, pair_sum

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BLOCK", "WINDOW_BLOCK", "attention", "gradients", "merge", "merge_with_lse", "segment"]

BLOCK = {64: 128, 128: 128, 256: 80}  # keys a block, by head dim
WINDOW_BLOCK = {64: 128, 128: 128, 256: 64}
STEP, LANES = 16, 4
LN2 = float.fromhex("0x1.62e43p-1")  # float32(ln 2)


def constants(scale: float) -> tuple[float, float]:
    """(c, c * ln2) as fp32 values."""
    c = torch.tensor(float(torch.tensor(scale, dtype=torch.float32)) * math.log2(math.e), dtype=torch.float32)
    return float(c), float(c * torch.tensor(LN2, dtype=torch.float32))


def _chain(x: Tensor, w: Tensor, acc: Tensor) -> Tensor:
    """Fp32 acc [R, N] + bf16 x [R, K] @ w [N, K]^T in steps of 16, each the exact sum rounded once."""
    for k in range(0, x.shape[1], STEP):
        exact = x[:, k : k + STEP].double() @ w[:, k : k + STEP].double().t()
        acc = (acc.double() + exact).float()
    return acc


def _exp2(x: Tensor) -> Tensor:
    return torch.exp2(x.double()).float()


def segment(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    limit: Tensor,
    scale: float,
    block: int = 0,
    low: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One head, one segment: q [R, D], k [n, D] and v [n, V] bf16; (out [R, V] bf16, lse [R] fp32).

    Row i sees the keys low[i] .. limit[i] - 1, at least one; without `low` from the first on. `block` keys a block, by
    default the head dim's.
    """
    R, D = q.shape
    block = block or BLOCK[D]
    c, c_ln2 = constants(scale)
    padded = -(-len(k) // block) * block
    keys = torch.zeros(padded, D, dtype=q.dtype, device=q.device)
    values = torch.zeros(padded, v.shape[1], dtype=v.dtype, device=v.device)
    keys[: len(k)], values[: len(k)] = k, v
    m = torch.full((R,), -torch.inf, device=q.device)
    o, lanes = torch.zeros(R, v.shape[1], device=q.device), torch.zeros(R, LANES, device=q.device)
    for start in range(padded - block, -1, -block):
        s = _chain(q, keys[start : start + block], torch.zeros(R, block, device=q.device))
        place = start + torch.arange(block, device=q.device)
        s = s.masked_fill(place >= limit[:, None], -torch.inf)
        if low is not None:
            s = s.masked_fill(place < low[:, None], -torch.inf)
        top = torch.maximum(m, s.amax(1))
        base = torch.where(top == -torch.inf, 0.0, top)
        r = torch.exp2(((m - base) * c).double()).float()
        # exp2 of fma(s, c, -(M c)); the sentinel keeps the fma finite where a key is not visible
        arg = fma(torch.where(s == -torch.inf, 0.0, s), c, -(base * c)[:, None].expand_as(s))
        p = torch.where(s == -torch.inf, 0.0, torch.exp2(arg.double()).float())
        first, *others = p.view(R, -1, LANES, 2).transpose(2, 3).reshape(R, -1, LANES).unbind(1)
        lanes = fma(lanes, r[:, None].expand_as(lanes), first)
        for other in others:
            lanes = lanes + other
        o = _chain(p.bfloat16(), values[start : start + block].t(), o * r[:, None])
        m = top
    total = (lanes[:, 0] + lanes[:, 2]) + (lanes[:, 1] + lanes[:, 3])
    out = (o * (1.0 / total.double()).float()[:, None]).bfloat16()
    return out, fma(m, c_ln2, torch.log2(total.double()).float() * LN2)


def merge(outs: Tensor, lses: Tensor, sink: Tensor | None = None) -> Tensor:
    """Bf16 outs [n, R, D] and fp32 lses [n, R] of a row's n segments, ascending; sink fp32 [R]; bf16 [R, D]."""
    return merge_with_lse(outs, lses, sink)[0]


def merge_with_lse(outs: Tensor, lses: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`merge`, and the row's log-sum-exp fp32 [R]."""
    if len(outs) == 1 and sink is None:
        return outs[0], lses[0]
    top = lses.amax(0)
    if sink is not None:
        top = torch.maximum(top, sink)
    acc, total = torch.zeros_like(outs[0], dtype=torch.float32), torch.zeros_like(top)
    for out, lse in zip(outs, lses, strict=True):
        w = exp(lse - top)
        acc = fma(w[:, None].expand_as(acc), out.float(), acc)
        total = total + w
    if sink is not None:
        total = total + exp(sink - top)
    return (acc / total[:, None]).bfloat16(), top + log(total)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    kv_segment: int,
    sinks: Tensor | None = None,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """Q [s, H, D], k and v [s, KV, D] bf16 of one sequence from position 0, sinks fp32 [H]; (bf16 [s, H, D], lse [H, s]).

    With a `window`, attention.mma_window/1.
    """
    s, H, D = q.shape
    group = H // k.shape[1]
    block = WINDOW_BLOCK[D] if window else BLOCK[D]
    out = torch.empty(s, H, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(H, s, device=q.device)
    # rows that have the same segments
    segments = [(max(0, p - window + 1) // kv_segment if window else 0, p // kv_segment) for p in range(s)]
    start = 0
    while start < s:
        end = start + 1
        while end < s and segments[end] == segments[start]:
            end += 1
        position = torch.arange(start, end, device=q.device)
        for h in range(H):
            parts = []
            for j in range(segments[start][0], segments[start][1] + 1):
                keys = slice(j * kv_segment, min(end, (j + 1) * kv_segment))
                limit = (position + 1 - keys.start).clamp(max=kv_segment)
                low = (position - window + 1 - keys.start).clamp(min=0) if window else None
                own = (q[start:end, h], k[keys, h // group], v[keys, h // group])
                parts.append(segment(*own, limit, scale, low=low, block=block))
            outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
            sink = None if sinks is None else sinks[h].expand(end - start)
            out[start:end, h], lse[h, start:end] = merge_with_lse(outs, lses, sink)
        start = end
    return out, lse


def gradients(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    chain: Callable[[Tensor, Tensor, Tensor], Tensor] = _chain,
    exp2: Callable[[Tensor], Tensor] = _exp2,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Of one sequence: (dq, dk, dv) in bf16, and the share [H] that it adds to the sinks' gradient, before the sign.

    `chain(x [R, K], w [N, K], acc [R, N])` and `exp2` are a chip's, where its bits are wanted.
    """
    s, H, D = q.shape
    KV = k.shape[1]
    group = H // KV
    c, _ = constants(scale)
    rounded = torch.tensor(scale, dtype=torch.float32)
    padded = -(-s // STEP) * STEP

    def whole(x: Tensor) -> Tensor:
        return torch.cat((x, x.new_zeros(padded - s, *x.shape[1:])))

    qs, gs, ks, vs = (whole(x) for x in (q, g, k, v))
    delta = pair_sum(whole(g).float() * whole(out).float())  # [rows, H]
    place = torch.arange(padded, device=q.device)
    seen = (place[None, :] <= place[:, None]) & (place[:, None] < s)
    if window:
        seen &= place[:, None] - place[None, :] < window
    zero = torch.zeros(padded, padded, device=q.device)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    for kv in range(KV):
        dk_sum, dv_sum = (torch.zeros(padded, D, device=q.device) for _ in range(2))
        for h in range(kv * group, (kv + 1) * group):
            base = whole((lse[h] * LOG2E)[:, None])
            arg = fma(chain(qs[:, h], ks[:, kv], zero), c, -base.expand_as(zero))
            p = torch.where(seen, exp2(arg), 0.0)
            dp = chain(gs[:, h], vs[:, kv], zero)
            ds = torch.where(seen, p * (dp - delta[:, h, None]), 0.0).bfloat16()
            dv_sum = chain(p.bfloat16().t(), gs[:, h].t(), dv_sum)
            dk_sum = chain(ds.t(), qs[:, h].t(), dk_sum)
            dq[:, h] = (chain(ds, ks[:, kv].t(), torch.zeros_like(dk_sum)) * rounded + 0.0).bfloat16()[:s]
        dk[:, kv] = (dk_sum * rounded + 0.0).bfloat16()[:s]
        dv[:, kv] = (dv_sum + 0.0).bfloat16()[:s]
    share = None
    if sinks is not None:
        share = pair_sum(exp(sinks[:, None] - lse) * delta[:s].t())
    return dq, dk, dv, share
