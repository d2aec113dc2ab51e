# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of `naive` as Triton functions, for every kernel that makes or joins nodes of the tree."""

from __future__ import annotations

import triton
import triton.language as tl

from isoexec.kernels.hopper import spec
from isoexec.kernels.hopper.arithmetic import _larger, fold, log64
from isoexec.kernels.logprobs.hopper import naive

__all__ = ["blocks", "finish", "reach", "sums", "terms", "tree", "whole"]

L = tl.constexpr(spec.LOG2E)
ROUNDER = tl.constexpr(spec.ROUNDER)
LIMIT = tl.constexpr(naive.LIMIT)
DEPTH = tl.constexpr(naive.DEPTH)
FARTHEST = tl.constexpr(naive.FARTHEST)
BASE32 = tl.constexpr(naive.BASE32)
_C0, _C1, _C2, _C3, _C4, _C5 = (tl.constexpr(c) for c in naive.EXP2)
_INVERSE = tl.constexpr(naive.INVERSE)
_BASE = tl.constexpr(naive.BASE)
_LN2 = tl.constexpr(spec.LN2)


@triton.jit
def reach(m: tl.tensor) -> tl.tensor:
    """A maximum as the exponentials see it: at least -LIMIT, NaN too."""
    return tl.maximum(m, -LIMIT)


@triton.jit
def whole(m: tl.tensor) -> tl.tensor:
    """`naive.whole`."""
    return tl.fma(reach(m), tl.full(m.shape, L, tl.float32), tl.full(m.shape, ROUNDER, tl.float32)) - ROUNDER


@triton.jit
def terms(x: tl.tensor, n: tl.tensor, low: tl.tensor, OFFSET: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """`naive.terms` of x with n and low that broadcast to it; the second is x itself unless OFFSET."""
    x = tl.maximum(x, low)
    about = tl.broadcast_to(-n + ROUNDER, x.shape)
    t = tl.fma(x, tl.full(x.shape, L, tl.float32), about)
    f = tl.fma(x, tl.full(x.shape, L, tl.float32), about - t)
    y = tl.fma(tl.full(x.shape, _C0, tl.float32), f, tl.full(x.shape, _C1, tl.float32))
    y = tl.fma(y, f, tl.full(x.shape, _C2, tl.float32))
    y = tl.fma(y, f, tl.full(x.shape, _C3, tl.float32))
    y = tl.fma(y, f, tl.full(x.shape, _C4, tl.float32))
    y = tl.fma(y, f, tl.full(x.shape, _C5, tl.float32))
    e = (y.to(tl.int32, bitcast=True) + (t.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)
    d = tl.fma(x, tl.full(x.shape, L, tl.float32), tl.broadcast_to(-n, x.shape)) if OFFSET else x
    return e, d


@triton.jit
def sums(v: tl.tensor, ROWS: tl.constexpr, GROUP: tl.constexpr) -> tl.tensor:
    """[ROWS * GROUP blocks of 128 columns, in any shape] -> [ROWS, GROUP]: each block's sum, stripes first."""
    v = tl.sum(tl.reshape(v, (ROWS * GROUP, 2, 2, 32)), axis=2)
    return tl.reshape(fold(tl.sum(v, axis=1), ROWS * GROUP, 32), (ROWS, GROUP))


@triton.jit
def tree(
    n: tl.tensor, s: tl.tensor, w: tl.tensor, ROWS: tl.constexpr, WIDTH: tl.constexpr, BOTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(s, w) [ROWS] of `naive.tree` over nodes [ROWS, WIDTH], WIDTH a power of two; w is joined where BOTH."""
    if WIDTH == 1:
        return tl.sum(s, axis=1), tl.sum(w, axis=1)
    else:  # noqa: RET505 - Triton compiles both branches unless the condition decides
        n2 = tl.reshape(n, (ROWS, WIDTH // 2, 2))
        top = tl.max(n2, axis=2)
        k = tl.maximum(n2 - top[:, :, None], FARTHEST)
        power = ((k.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
        s2 = tl.reshape(s, (ROWS, WIDTH // 2, 2))
        s_up = tl.sum(s2 * power, axis=2)
        if BOTH:
            w2 = tl.reshape(w, (ROWS, WIDTH // 2, 2))
            w_up = tl.sum(tl.fma(k, s2, w2) * power, axis=2)
        else:
            w_up = s_up
        return tree(top, s_up, w_up, ROWS, WIDTH // 2, BOTH)


@triton.jit
def finish(
    x: tl.tensor, m: tl.tensor, s: tl.tensor, w: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(log p, entropy, N, s, lse) of `naive.finish` from x at the target and the tree's root."""
    good = (m > -LIMIT) & (m < LIMIT)
    n = whole(m)
    inverse = tl.full(x.shape, _INVERSE, tl.float64)
    logarithm = log64(s)
    lse = (n.to(tl.float64) * tl.full(x.shape, _LN2, tl.float64) + logarithm) * inverse
    log_p = (x.to(tl.float64) - lse).to(tl.float32)
    log_p = tl.where(log_p > 0.0, 0.0, log_p)
    mean = (w.to(tl.float64) / s.to(tl.float64)) * tl.full(x.shape, _BASE, tl.float64)
    entropy = (logarithm * inverse - mean).to(tl.float32)
    entropy = tl.where(entropy < 0.0, 0.0, entropy)
    nan = tl.full(x.shape, float("nan"), tl.float32)
    return (
        tl.where(good, log_p, nan),
        tl.where(good, entropy, nan),
        tl.where(good, n, nan),
        tl.where(good, s, nan),
        tl.where(good, lse.to(tl.float32), nan),
    )


@triton.jit
def blocks(
    x: tl.tensor, ROWS: tl.constexpr, GROUP: tl.constexpr, BOTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(m, s, w) [ROWS, GROUP] of fp32 x [ROWS, 128 * GROUP], as a product leaves it; w where BOTH."""
    x = tl.reshape(x, (ROWS, GROUP, 128))
    m = tl.reduce(x, 2, _larger)
    e, d = terms(x, whole(m)[:, :, None], (reach(m) - DEPTH)[:, :, None], BOTH)
    s = sums(e, ROWS, GROUP)
    w = sums(e * d, ROWS, GROUP) if BOTH else s
    return m, s, w
