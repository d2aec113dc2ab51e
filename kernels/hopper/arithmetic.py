# SPDX-License-Identifier: Apache-2.0
"""The shared arithmetic of `spec` as Triton functions; launch kernels that use it with `enable_fp_fusion=False`.

Each sum adds two numbers at a time in an order given by the index, so a layout, a warp count or a batch cannot change it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isoexec.kernels.hopper import spec

__all__ = ["by_row", "exp", "fold", "fold_rows", "log", "log64", "power_of_two", "sigmoid", "top"]

_LOG2E = tl.constexpr(spec.LOG2E)
_LN2_HIGH = tl.constexpr(-spec.LN2_HIGH)
_LN2_LOW = tl.constexpr(-spec.LN2_LOW)
_ROUNDER = tl.constexpr(spec.ROUNDER)
_E0, _E1, _E2, _E3, _E4 = (tl.constexpr(c) for c in spec.EXP)
_EXP_LOW = tl.constexpr(spec.EXP_LOW)
_EXP_HIGH = tl.constexpr(spec.EXP_HIGH)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (tl.constexpr(c) for c in spec.LOG)
_LN2 = tl.constexpr(spec.LN2)
_ROOT2 = tl.constexpr(spec.ROOT2)
_MANTISSA = tl.constexpr((1 << 52) - 1)
_ONE = tl.constexpr(1023 << 52)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@triton.jit
def fold(v: tl.tensor, ROWS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """[ROWS, WIDTH] -> [ROWS]: `spec.pair_sum`; WIDTH is a power of two."""
    if WIDTH == 1:
        return tl.sum(v, axis=1)
    else:  # noqa: RET505 - Triton compiles both branches unless the condition decides
        return fold(tl.sum(tl.reshape(v, (ROWS, WIDTH // 2, 2)), axis=2), ROWS, WIDTH // 2)


@triton.jit
def fold_rows(v: tl.tensor, ROWS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """[ROWS, WIDTH] -> [WIDTH]: `spec.pair_sum` over the first dimension; ROWS is a power of two."""
    if ROWS == 1:
        return tl.sum(v, axis=0)
    else:  # noqa: RET505 - Triton compiles both branches unless the condition decides
        return fold_rows(tl.sum(tl.reshape(v, (ROWS // 2, 2, WIDTH)), axis=1), ROWS // 2, WIDTH)


@triton.jit
def by_row(v: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """[ROWS] -> [ROWS, 1]: a number of each row, for a product with the row's elements; no bit changes.

    A folded sum lies in every thread, and what is multiplied by it would follow: all elements in every thread. A gather, whose
    result lies where its index does, ends that.
    """
    return tl.gather(v, tl.arange(0, ROWS), 0)[:, None]


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def top(v: tl.tensor) -> tl.tensor:
    """[ROWS, WIDTH] -> [ROWS]: the maximum, NaN where a row holds one; exact in any order."""
    return tl.reduce(v, 1, _larger)


@triton.jit
def exp(x: tl.tensor) -> tl.tensor:
    """`spec.exp`."""
    x = tl.maximum(x, _EXP_LOW)
    t = tl.fma(x, tl.full(x.shape, _LOG2E, tl.float32), tl.full(x.shape, _ROUNDER, tl.float32))
    n = t - _ROUNDER
    r = tl.fma(n, tl.full(x.shape, _LN2_HIGH, tl.float32), x)
    r = tl.fma(n, tl.full(x.shape, _LN2_LOW, tl.float32), r)
    y = tl.fma(tl.full(x.shape, _E0, tl.float32), r, tl.full(x.shape, _E1, tl.float32))
    y = tl.fma(y, r, tl.full(x.shape, _E2, tl.float32))
    y = tl.fma(y, r, tl.full(x.shape, _E3, tl.float32))
    y = tl.fma(y, r, tl.full(x.shape, _E4, tl.float32))
    y = tl.fma(y, r, tl.full(x.shape, 1.0, tl.float32))
    y = tl.fma(y, r, tl.full(x.shape, 1.0, tl.float32))
    return (y.to(tl.int32, bitcast=True) + (t.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """`spec.sigmoid`."""
    e = tl.where(-x > _EXP_HIGH, float("inf"), exp(-x))
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.where(x == x, e, x))


@triton.jit
def log64(x: tl.tensor) -> tl.tensor:
    """Natural logarithm of normal positive fp32 numbers in fp64, as `spec.log` has it before it rounds."""
    bits = x.to(tl.float64).to(tl.int64, bitcast=True)
    m = ((bits & _MANTISSA) | _ONE).to(tl.float64, bitcast=True)
    e = ((bits >> 52) - 1023).to(tl.float64)
    high = m > tl.full(x.shape, _ROOT2, tl.float64)
    e = tl.where(high, e + 1.0, e)
    m = tl.where(high, m * 0.5, m)
    z = (m - 1.0) / (m + 1.0)
    w = z * z
    y = tl.full(x.shape, _L0, tl.float64)
    y = y * w + tl.full(x.shape, _L1, tl.float64)
    y = y * w + tl.full(x.shape, _L2, tl.float64)
    y = y * w + tl.full(x.shape, _L3, tl.float64)
    y = y * w + tl.full(x.shape, _L4, tl.float64)
    y = y * w + tl.full(x.shape, _L5, tl.float64)
    y = y * w + tl.full(x.shape, _L6, tl.float64)
    y = y * w + tl.full(x.shape, _L7, tl.float64)
    y = y * w + tl.full(x.shape, _L8, tl.float64)
    return e * tl.full(x.shape, _LN2, tl.float64) + (z + z) * y


@triton.jit
def log(x: tl.tensor) -> tl.tensor:
    """`spec.log`."""
    return tl.where((x > 0.0) & (x < float("inf")), log64(x).to(tl.float32), float("nan"))
