# SPDX-License-Identifier: Apache-2.0
"""Plain torch for the shared arithmetic of the sm90 functions; any device gives the same bits.

exp and log are written out in additions and multiplications that IEEE 754 rounds, because the hardware's `ex2.approx` and
`lg2.approx` are defined by an error bound only: their bits belong to a chip and a driver, so no specification could state
them. Written out, one bitwise comparison covers CPU, interpreter and GPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["exp", "fma", "log", "pair_sum", "sigmoid"]

# exp(r) = 1 + r + r^2 q(r) on |r| <= ln2 / 2, q of degree 4 with the least relative error (0.05 units in the last place)
LOG2E = float.fromhex("0x1.715476p+0")
LN2_HIGH = float.fromhex("0x1.62e4p-1")  # 15 bits: a multiple of it is exact
LN2_LOW = float.fromhex("0x1.7f7d1cp-20")
ROUNDER = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
EXP = tuple(
    float.fromhex(c)
    for c in ("0x1.6a23cep-10", "0x1.123a2p-7", "0x1.5558f2p-5", "0x1.555492p-3", "0x1.fffffcp-2")
)
EXP_LOW, EXP_HIGH = -87.0, 88.71875
# log(m) = 2 z (1 + z^2/3 + z^4/5 + ...), z = (m - 1) / (m + 1), m in [sqrt(1/2), sqrt(2)), in float64
LOG = tuple(1.0 / k for k in (17, 15, 13, 11, 9, 7, 5, 3, 1))
LN2 = math.log(2.0)
ROOT2 = math.sqrt(2.0)


def fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """fp32 a * b + c with one rounding: exact product in fp64, sum rounded to odd, then rounded to fp32."""
    p = a.double() * b
    d = c.double() if isinstance(c, Tensor) else torch.full_like(p, c)
    s = p + d
    t = s - p
    error = (p - (s - t)) + (d - t)
    bits = s.view(torch.int64)
    inexact = (error != 0) & (bits % 2 == 0) & torch.isfinite(s)
    toward = torch.where((error > 0) == (s > 0), 1, -1)
    return torch.where(inexact, bits + toward, bits).view(torch.float64).float()


def exp(x: Tensor) -> Tensor:
    """fp32 exponential of x <= EXP_HIGH within one unit in the last place; x below EXP_LOW, and NaN, count as EXP_LOW.

    So no result is subnormal, and where a term stands beside 1 the floor of 1.6e-38 changes no bit. Callers carry NaN and
    larger arguments themselves.
    """
    x = torch.fmax(x, torch.full_like(x, EXP_LOW))
    t = fma(x, LOG2E, ROUNDER)
    n = t - ROUNDER
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x))
    y = torch.full_like(r, EXP[0])
    for c in (*EXP[1:], 1.0, 1.0):
        y = fma(y, r, c)
    return (y.view(torch.int32) + (t.view(torch.int32) << 23)).view(torch.float32)


def sigmoid(x: Tensor) -> Tensor:
    """fp32 1 / (1 + exp(-x)); NaN stays NaN, and below -EXP_HIGH it is zero."""
    e = torch.where(-x > EXP_HIGH, torch.inf, exp(-x))
    e = torch.where(x.isnan(), x, e)
    return torch.ones_like(e) / (1.0 + e)


def log(x: Tensor) -> Tensor:
    """fp32 natural logarithm of normal positive numbers, rounded from fp64; anything else gives NaN."""
    bits = x.double().view(torch.int64)
    m = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)
    e = ((bits >> 52) - 1023).double()
    high = m > ROOT2
    m, e = torch.where(high, m * 0.5, m), torch.where(high, e + 1.0, e)
    z = (m - 1.0) / (m + 1.0)
    w = z * z
    y = torch.full_like(z, LOG[0])
    for c in LOG[1:]:
        y = y * w + c
    y = (e * LN2 + (z + z) * y).float()
    return torch.where((x > 0) & (x < torch.inf), y, torch.nan)


def pair_sum(x: Tensor) -> Tensor:
    """Sum of the last dimension: zeros up to a power of two, then neighbours added until one is left."""
    width = x.shape[-1]
    x = F.pad(x, (0, (1 << (width - 1).bit_length()) - width))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]
