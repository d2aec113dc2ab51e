# SPDX-License-Identifier: Apache-2.0
"""logprobs.blocks/2 on sm90: exponentials as whole powers of two, blocks of 128 columns, one tree by index.

x = fp32(logit), divided by the temperature where one is given (one IEEE division, as the engine's sampler makes it).
The vocabulary is cut into `vocab_leaves` equal leaves, a leaf into blocks of BLOCK columns; a short block is filled up with
-inf. With t = x L, L = fp32(log2 e), n = rint(t) and f = t - n rounded once, e^x is taken as 2^n q(f), q a polynomial.

Block b has its maximum m_b, N_b = rint(m_b L), terms e_i = q(f_i) 2^(n_i - N_b) and s_b, their sum: the four stripes of 32
columns are added, then neighbouring columns. Blocks are nodes (N, s) of a tree, neighbours joined until a leaf is left, then
until one is left: N = max(N_1, N_2), s = s_1 2^(N_1 - N) + s_2 2^(N_2 - N). Scaling by a power of two rounds nothing, so a
joint costs one addition, and any kernel that keeps to the tree (a block, a tile, a chunk of blocks, a rank with whole
leaves) makes the same sums. Then

    lse = (N ln2 + ln s) / (L ln2)     log p = x_target - lse, at most 0     in float64, rounded once to fp32.

2^(x L) is e^(c x) with c = L ln2 = 1 - 1.3e-8; dividing the logarithm by c leaves an error of 1.3e-8 times the entropy. q is
within 2.3e-7 of 2^f, without bias. Terms below 2^-119 of their block's greatest count as 2^-119, and nodes below 2^-100 of
their neighbour as 2^-100 of themselves: neither can show in a sum but through four exact ties in a row, and both are part
of the function. A row whose maximum is not within +-LIMIT, that holds NaN or no finite logit, gives NaN.

Entropy, in nats: w_b = sum of e_i d_i in the same order with d_i = x_i L - N_b rounded once; a joint adds
(w_j + (N_j - N) s_j) 2^(N_j - N) with a fused multiply-add; H = ln s / c - (w / s) / L in float64, at least 0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from isoexec.kernels.hopper.spec import LN2, LOG, LOG2E, ROOT2, ROUNDER, fma, pair_sum

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128
STRIPE = 32
LIMIT = 2.0**20  # a greater logit has no fraction worth an exponential
DEPTH = 83.0  # nats below a block's maximum: 2^-119.7
FARTHEST = -100.0  # exponent by which a node is scaled at most
EXP2 = (
    tuple(  # least greatest error of q on [-1/2, 1/2] with q(0) = 1 and rounding counted, then without bias
        float.fromhex(c)
        for c in (
            "0x1.5c30e6p-10",
            "0x1.3d1252p-7",
            "0x1.c6b7ccp-5",
            "0x1.ebf97cp-3",
            "0x1.62e428p-1",
            "0x1p+0",
        )
    )
)
INVERSE = 1.0 / (LOG2E * math.log(2.0))  # 1 / c
BASE = 1.0 / LOG2E
BASE32 = torch.tensor(BASE, dtype=torch.float32).item()


def whole(x: Tensor) -> Tensor:
    """The nearest integer to x L in fp32; x below -LIMIT, and NaN, count as -LIMIT."""
    return fma(torch.fmax(x, torch.full_like(x, -LIMIT)), LOG2E, ROUNDER) - ROUNDER


def terms(x: Tensor, n: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """q(f) 2^(rint(x L) - n) and x L - n of fp32 x; x below `low` counts as `low`. n is a whole number."""
    x = torch.fmax(x, low)
    about = -n + ROUNDER
    t = fma(x, LOG2E, about)
    f = fma(x, LOG2E, about - t)
    y = torch.full_like(f, EXP2[0])
    for c in EXP2[1:]:
        y = fma(y, f, c)
    return (y.view(torch.int32) + (t.view(torch.int32) << 23)).view(torch.float32), fma(x, LOG2E, -n)


def scaled(logits: Tensor, temperature: Tensor | None = None) -> Tensor:
    """fp32 logits [rows, V], divided by the temperature [rows]."""
    x = logits.float()
    return x if temperature is None else x / temperature.unsqueeze(-1)


def _fold(e: Tensor) -> Tensor:
    """Sum a block's columns [..., BLOCK] by its rule."""
    stripes = e.unflatten(-1, (2, 2, STRIPE))
    return pair_sum((stripes[..., 0, :] + stripes[..., 1, :]).sum(-2))


def partials(x: Tensor, *, leaves: int) -> tuple[Tensor, Tensor, Tensor]:
    """(m, s, w), fp32 [rows, leaves, blocks a leaf], of the leaves that fp32 `x [rows, V]` holds."""
    width = x.shape[-1] // leaves
    x = F.pad(x.unflatten(-1, (leaves, width)), (0, -width % BLOCK), value=-torch.inf).unflatten(
        -1, (-1, BLOCK)
    )
    m = x.amax(-1)
    reach = torch.fmax(m, torch.full_like(m, -LIMIT))
    e, d = terms(x, whole(m).unsqueeze(-1), (reach - DEPTH).unsqueeze(-1))
    return m, _fold(e), _fold(e * d)


def tree(m: Tensor, s: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Join the nodes of the last dimension: neighbours until one is left; a missing one is nothing."""
    lacking = (1 << (m.shape[-1] - 1).bit_length()) - m.shape[-1]
    n, s, w = whole(F.pad(m, (0, lacking), value=-torch.inf)), F.pad(s, (0, lacking)), F.pad(w, (0, lacking))
    while n.shape[-1] > 1:
        n2, s2, w2 = (t.unflatten(-1, (-1, 2)) for t in (n, s, w))
        n = n2.amax(-1)
        k = (n2 - n.unsqueeze(-1)).clamp(min=FARTHEST)
        power = torch.exp2(k.double()).float()
        s, w = (s2 * power).sum(-1), (fma(k, s2, w2) * power).sum(-1)
    return m.amax(-1), s[..., 0], w[..., 0]


def log64(x: Tensor) -> Tensor:
    """float64 natural logarithm of normal positive fp32 numbers, by `spec.log`'s series."""
    bits = x.double().view(torch.int64)
    m = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)
    e = ((bits >> 52) - 1023).double()
    high = m > ROOT2
    m, e = torch.where(high, m * 0.5, m), torch.where(high, e + 1.0, e)
    z = (m - 1.0) / (m + 1.0)
    u = z * z
    y = torch.full_like(z, LOG[0])
    for c in LOG[1:]:
        y = y * u + c
    return e * LN2 + (z + z) * y


def finish(picked: Tensor, m: Tensor, s: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """(log p, entropy, N, s, lse), fp32 [rows], from x at the target and every leaf's node [rows, leaves]."""
    m, s, w = tree(m, s, w)
    good = (m > -LIMIT) & (m < LIMIT)
    n = whole(m)
    lse = (n.double() * LN2 + log64(s)) * INVERSE
    log_p = (picked.double() - lse).float()
    log_p = torch.where(log_p > 0.0, 0.0, log_p)
    entropy = (log64(s) * INVERSE - (w.double() / s.double()) * BASE).float()
    entropy = torch.where(entropy < 0.0, 0.0, entropy)
    return tuple(torch.where(good, t, torch.nan) for t in (log_p, entropy, n, s, lse.float()))


def everything(
    logits: Tensor, target: Tensor, temperature: Tensor | None = None, *, vocab_leaves: int
) -> tuple[Tensor, ...]:
    """(log p, entropy, N, s, lse), fp32 [rows]: all that a forward pass makes."""
    x = scaled(logits, temperature)
    picked = x.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return finish(picked, *tree(*partials(x, leaves=vocab_leaves)))


def token_logprobs(
    logits: Tensor, target: Tensor, temperature: Tensor | None = None, *, vocab_leaves: int
) -> Tensor:
    """fp32 [rows]: log p(target) of `logits [rows, V]`."""
    return everything(logits, target, temperature, vocab_leaves=vocab_leaves)[0]


def gradient(
    grad: Tensor,
    grad_entropy: Tensor | None,
    logits: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    stats: tuple[Tensor, ...],
) -> Tensor:
    """The gradient of (log p, entropy) in the logits' dtype, from `stats` = (entropy, N, s, lse) of the forward pass.

    p = e (1 / s), nothing below 2^-119; g (1[target] - p) - h p ((x - lse) + H), divided by the temperature; each operation
    is rounded to fp32 in the order written.
    """
    entropy, n, s, lse = (t.unsqueeze(-1) for t in stats)
    x = scaled(logits, temperature)
    low = n * BASE32 - DEPTH
    e, _ = terms(x, n, low)
    p = torch.where(x <= low, 0.0, e * (1.0 / s))
    one_hot = torch.zeros_like(p).scatter_(-1, target.unsqueeze(-1), 1.0)
    d = grad.unsqueeze(-1) * (one_hot - p)
    if grad_entropy is not None:
        q = torch.where(x <= low, 0.0, p * ((x - lse) + entropy))
        d = d - grad_entropy.unsqueeze(-1) * q
    if temperature is not None:
        d = d / temperature.unsqueeze(-1)
    return d.to(logits.dtype)
