# SPDX-License-Identifier: Apache-2.0
"""attention.latent_segments/1 on sm90: absorbed multi-head latent attention, in every case, over absolute segments.

A key is one latent row c [512] with its rotated part r [64], shared by all heads; a value is the same latent row. A query head
brings its rotated part [64] and its absorbed part q_nope @ W_UK [512], rounded to bf16 where the absorbed linear ends. The
scores are one chain of tensor-core steps, rotated part first:

    s   = chain(q_absorbed, c) from chain(q_rope, r) from zero

and all else is attention.mma_segments/1 (`kernels/attention/hopper/naive.py`) with blocks of 64 keys: blocks from a row's last
to its first, weights summed in four lanes, values c, log-sum-exps, segments merged in ascending order. The result [512] goes
through W_UV after the attention.

Why absorbed everywhere. Prefill usually expands c to keys and values of 128 a head: a query and a key then meet in 192 + 128
numbers a head, in the absorbed form in 576 + 512. But the two round in different places (one k = c W_UK^T to bf16, the other
q W_UK), and no order of additions gives both the same bits; and decode in the expanded form would make 256 x 512 products a head
of every cached key for every token. So the function that prefill, decode and trainer share is absorbed, at 3.4 times the
attention flops of an expanded prefill.

With bf16 inputs, `HEAD` is 576 = 64 + 512: `joined` puts the rotated part first, and the functions of attention.mma_segments/1
take the joined rows as keys and the latent rows as values.

Gradients, with L_i the row's merged log-sum-exp, D_i the pair sum of dout_i * out_i, and exp written out:

    P_ij  = exp(fma(s_ij, scale, -L_i)), 0 for a key that is not visible;  dP = chain(dout, c)
    dS_ij = bf16((P_ij * (dP_ij - D_i)) * scale)
    dq_i  = bf16(chain of dS_ij (r_j, c_j) over keys in ascending order, 16 a step)
    dr_j  = chain of dS_ij q_rope_i
    dc_j  = chain in which each ROWS query rows bring dS_ij q_absorbed_i, then bf16(P_ij) dout_i

over the heads in order and, within a head, over query rows in ascending order, 16 a step, from zero or from what the heads
of the ranks before hand on; rounded to bf16 after the last head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.attention.hopper.naive import _chain, merge_with_lse, segment
from isoexec.kernels.hopper.spec import exp, fma, pair_sum

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["BLOCK", "HEAD", "LATENT", "ROPE", "ROWS", "attention", "gradients", "joined"]

ROPE, LATENT = 64, 512
HEAD = ROPE + LATENT
BLOCK = 64  # keys a block
ROWS = 32  # query rows whose two parts of a latent row's gradient stand together


def joined(rope: Tensor, latent: Tensor) -> Tensor:
    """The rotated part before the latent one: [..., 576]."""
    return torch.cat([rope, latent], dim=-1)


def attention(
    q_rope: Tensor, q_latent: Tensor, k_rope: Tensor, latent: Tensor, scale: float, *, kv_segment: int
) -> tuple[Tensor, Tensor]:
    """Q_rope [s, H, 64], q_latent [s, H, 512], k_rope [s, 64], latent [s, 512] bf16 of one sequence from position 0.

    Returns bf16 [s, H, 512] and the merged log-sum-exp fp32 [H, s].
    """
    s, H, _ = q_latent.shape
    keys = joined(k_rope, latent)
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    lse = torch.empty(H, s, device=q_latent.device)
    for start in range(0, s, kv_segment):
        end = min(s, start + kv_segment)
        position = torch.arange(start, end, device=q_latent.device)
        for h in range(H):
            parts = [
                segment(
                    joined(q_rope[start:end, h], q_latent[start:end, h]),
                    keys[first : min(end, first + kv_segment)],
                    latent[first : min(end, first + kv_segment)],
                    (position + 1 - first).clamp(max=kv_segment),
                    scale,
                    BLOCK,
                )
                for first in range(0, end, kv_segment)
            ]
            outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
            out[start:end, h], lse[h, start:end] = merge_with_lse(outs, lses)
    return out, lse


def _padded(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def gradients(
    q_rope: Tensor,
    q_latent: Tensor,
    k_rope: Tensor,
    latent: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    scale: float,
    start: Tensor | None = None,
    *,
    chain: Callable[[Tensor, Tensor, Tensor], Tensor] = _chain,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one sequence: dq_rope [s, H, 64], dq_latent [s, H, 512] bf16 and the fp32 chains of its keys [s, 576].

    `lse` [H, s] fp32 is the merged log-sum-exp. The chains, of dk_rope before dlatent, over this call's heads begin at `start`,
    those of the heads before; after the last head they are rounded to bf16. `chain(x [R, K], w [N, K], acc [R, N])` is a chip's,
    where its bits are wanted.
    """
    s, H, _ = q_latent.shape
    scale = torch.tensor(scale, dtype=torch.float32).item()  # as a kernel is given it
    rows = -(-s // ROWS) * ROWS
    zeros = torch.zeros(rows, HEAD, device=out.device)
    begun = zeros if start is None else _padded(start, rows)
    dr, dc = begun[:, :ROPE].clone(), begun[:, ROPE:].clone()
    keys = _padded(joined(k_rope, latent), rows)
    dq = torch.empty(s, H, HEAD, dtype=out.dtype, device=out.device)
    place = torch.arange(rows, device=out.device)
    seen = (place <= place[:, None]) & (place < s)[:, None]
    for h in range(H):
        q = _padded(joined(q_rope[:, h], q_latent[:, h]), rows)
        do = _padded(dout[:, h], rows)
        delta = pair_sum(do.float() * _padded(out[:, h], rows).float())
        score = chain(q, keys, torch.zeros(rows, rows, device=out.device))
        far = _padded(lse[h], rows)[:, None].expand_as(score)
        p = torch.where(seen, exp(fma(score, scale, -far)), 0.0)
        dp = chain(do, keys[:, ROPE:], torch.zeros_like(score))
        ds = ((p * (dp - delta[:, None])) * scale).bfloat16()
        dq[:, h] = (chain(ds, keys.t(), zeros) + 0.0)[:s].bfloat16()
        for first in range(0, rows, ROWS):
            at = slice(first, first + ROWS)
            dr = chain(ds[at].t(), q[at, :ROPE].t(), dr)
            dc = chain(ds[at].t(), q[at, ROPE:].t(), dc)
            dc = chain(p[at].bfloat16().t(), do[at].t(), dc)
    return dq[..., :ROPE], dq[..., ROPE:], joined(dr, dc)[:s] + 0.0
