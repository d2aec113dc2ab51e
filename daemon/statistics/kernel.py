# SPDX-License-Identifier: Apache-2.0
"""Adds up everything known of d, token by token, in one pass over the bits of both sides. Compiled by Numba.

Tokens are taken in blocks. One whose logprobs are all plain, numbers of at most `PLAUSIBLE` nats, is added in loops that
the compiler turns into vector code; any other token by token, with every case looked at. d is the difference in float64,
where that of two float32 is exact or nearly so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from isoexec.contracts.window import FILLED_BELOW
from isoexec.daemon.statistics.places import FROM_END, POSITIONS
from isoexec.daemon.statistics.sums import CLIP, RHO_CAP, SUMS

__all__ = ["add_batch"]

BLOCK = 512
"""Tokens of one block at most."""
PLAUSIBLE = 1e4
"""Nats beyond which no logprob lies; sums of products are cut there."""

# largest abs d that enters exp(d): beyond it the square would overflow float64
_LIMIT = 300.0
_FLOAT_MAX = float(np.finfo(np.float32).max)
_PLAUSIBLE_BITS = int(np.float32(PLAUSIBLE).view(np.int32))
_NO_SIGN = 0x7FFFFFFF
_NEGATIVE_ZERO = -(1 << 31)
_CAPPED = math.expm1(RHO_CAP)
_BELOW, _ABOVE = CLIP
_LOG2E, _LN2 = 1 / math.log(2), math.log(2)
_EDGES = np.asarray(POSITIONS, np.int64)
_ENDS = np.asarray(FROM_END, np.int64)
_RAMP = np.arange(BLOCK, dtype=np.float64)

(
    _TOKENS, _UNEQUAL, _NONFINITE, _FILLED, _POSITIVE, _ID_MISMATCH, _NEGATIVE, _CLIPPED, _FAR_BELOW, _MOVED, _ON_GRID,
    _LAG_PAIRS, _FINITE, _X, _XX, _XD, _D1, _D2, _D3, _D4, _ABS1, _EXCESS1, _EXCESS2, _K3, _EXP_ABS, _CAPPED1, _CAPPED2,
    _BEYOND, _LAG_PRODUCT, _LAG_FIRST, _LAG_SECOND, _PLACE, _PLACE_SQUARE, _PLACE_ABS, _PROBABILITY1, _PROBABILITY2,
    _LARGEST, _LARGEST_PROBABILITY,
) = range(len(SUMS))  # fmt: skip

_Function = TypeVar("_Function", bound=Callable[..., Any])
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


def _compiled(*, fast: bool) -> Callable[[_Function], _Function]:
    """Compile a function; `fast` ones may add in any order, and see numbers only."""
    made = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=fast)
    return cast(Callable[[_Function], _Function], made)


@_compiled(fast=True)
def _kind(x: Ints, y: Ints) -> tuple[int, int, int]:
    """Count tokens of unequal bits, tokens that are not plain, and tokens of which a side is not below 0."""
    unequal = odd = marked = 0
    for i in range(x.size):
        a, b = x[i], y[i]
        unequal += a != b
        odd += ((a & _NO_SIGN) > _PLAUSIBLE_BITS) | ((b & _NO_SIGN) > _PLAUSIBLE_BITS)
        marked += (a >= 0) | (b >= 0) | (a == _NEGATIVE_ZERO) | (b == _NEGATIVE_ZERO)
    return unequal, odd, marked


@_compiled(fast=True)
def _differing(a: Ints, b: Ints) -> int:
    """Count places at which two arrays differ."""
    count = 0
    for i in range(a.size):
        count += a[i] != b[i]
    return count


@_compiled(fast=False)
def _add_marks(total: Doubles, x: Floats, y: Floats) -> None:
    # a near-certain token rounds to 0.0 by itself; a filled one is 0.0 where the other side is clearly below
    for i in range(x.size):
        a, b = x[i], y[i]
        total[_FILLED] += ((a == 0) & (b < FILLED_BELOW)) | ((b == 0) & (a < FILLED_BELOW))
        total[_POSITIVE] += (a > 0) | (b > 0)


@_compiled(fast=True)
def _add_logprobs(total: Doubles, x: Floats) -> None:
    one = two = 0.0
    for i in range(x.size):
        a = np.float64(x[i])
        one += a
        two += a * a
    total[_X] += one
    total[_XX] += two


@_compiled(fast=True)
def _cut_exponent(values: Doubles, tails: Doubles, powers: Longs) -> None:
    """Turn each v in +-`_LIMIT` into k ln 2 + r: leave r, write exp(r) - 1 - r to 1e-14, and the bits of 2^k."""
    for i in range(values.size):
        v = values[i]
        k = np.int32(v * _LOG2E + (0.5 if v > 0 else -0.5))
        r = v - k * _LN2
        powers[i] = (np.int64(k) + 1023) << 52
        values[i] = r
        high = 1 / 40320 + r * (1 / 362880 + r * (1 / 3628800 + r * (1 / 39916800)))
        tails[i] = (
            r
            * r
            * (1 / 2 + r * (1 / 6 + r * (1 / 24 + r * (1 / 120 + r * (1 / 720 + r * (1 / 5040 + r * high))))))
        )


@_compiled(fast=True)
def _put_peak(values: Ints, n: int) -> None:
    """Write the largest of the first n to the last place; bits of floats without a sign are in the order of these."""
    most = np.int32(0)
    for i in range(n):
        value = values[i]
        if value > most:
            most = value
    values[BLOCK] = most


@_compiled(fast=True)
def _take_sides(x: Floats, y: Floats, d: Doubles, sizes: Floats, of_d: Doubles, of_top: Doubles) -> None:
    """Write d of each token to d[1:], abs d, and what their exponentials are taken of."""
    for i in range(x.size):
        a = np.float64(x[i])
        v = np.float64(y[i]) - a
        d[i + 1] = v
        sizes[i] = np.float32(abs(v))
        of_d[i] = min(max(v, -_LIMIT), _LIMIT)
        # of the likelier side; a probability above 1 is counted as positive, and taken as 1 here
        of_top[i] = min(max(a + max(v, 0.0), -_LIMIT), 0.0)


@_compiled(fast=True)
def _add_plain(
    total: Doubles,
    row: Doubles,
    x: Floats,
    d: Doubles,
    of_d: tuple[Doubles, Doubles, Doubles],
    of_top: tuple[Doubles, Doubles, Doubles],
    gaps: Floats,
) -> None:
    """Add tokens with plain logprobs x [n], of which some differ by other than 0.

    d[1:] is theirs, d[0] that of the token before. `of_d` and `of_top` are what `_cut_exponent` left of exp(d) and of the larger
    probability, with 2^k as a float64. `gaps` takes differences of probabilities.
    """
    rest, tail, power = of_d
    rest_top, tail_top, power_top = of_top
    s1 = s2 = s3 = s4 = a1 = xd = e1 = e2 = c1 = c2 = beyond = k3 = ea = p1 = p2 = ramp = 0.0
    negative = moved = grid = clipped = below = 0.0
    for i in range(x.size):
        v = d[i + 1]
        size, q = abs(v), v * v
        grown = (rest[i] + tail[i]) * power[i] + (power[i] - 1)
        capped = min(grown, _CAPPED)
        mirrored = grown / ((1 + rest[i] + tail[i]) * power[i])  # 1 - exp(-d)
        share = -grown if v < 0 else mirrored
        gap = share * (1 + rest_top[i] + tail_top[i]) * power_top[i]
        gaps[i] = np.float32(gap)
        scaled = v * 32
        s1 += v
        s2 += q
        s3 += q * v
        s4 += q * q
        a1 += size
        xd += x[i] * v
        e1 += grown
        e2 += grown * grown
        c1 += capped
        c2 += capped * capped
        beyond += grown - capped
        k3 += tail[i] if power[i] == 1 else grown - min(max(v, -_LIMIT), _LIMIT)
        ea += -mirrored if v < 0 else grown
        p1 += gap
        p2 += gap * gap
        ramp += _RAMP[i] * size
        negative += 1.0 if v < 0 else 0.0
        moved += 1.0 if size > 0 else 0.0
        grid += 1.0 if np.float64(np.int32(scaled)) == scaled else 0.0
        clipped += 1.0 if (v < _BELOW) | (v > _ABOVE) else 0.0
        below += 1.0 if v < -RHO_CAP else 0.0
    lag = before = 0.0
    for i in range(x.size):
        lag += d[i] * d[i + 1]
        before += d[i]
    total[_D1] += s1
    total[_D2] += s2
    total[_D3] += s3
    total[_D4] += s4
    total[_ABS1] += a1
    total[_XD] += xd
    total[_EXCESS1] += e1
    total[_EXCESS2] += e2
    total[_CAPPED1] += c1
    total[_CAPPED2] += c2
    total[_BEYOND] += beyond
    total[_K3] += k3
    total[_EXP_ABS] += ea
    total[_PROBABILITY1] += p1
    total[_PROBABILITY2] += p2
    total[_PLACE_ABS] += ramp
    total[_NEGATIVE] += negative
    total[_MOVED] += moved
    total[_ON_GRID] += grid - (x.size - moved)
    total[_CLIPPED] += clipped
    total[_FAR_BELOW] += below
    total[_LAG_PRODUCT] += lag
    total[_LAG_FIRST] += before
    row[0], row[1], row[2], row[3], row[4] = a1, s1, s2, e1, c1


@_compiled(fast=False)
def _add_one(total: Doubles, row: Doubles, x: float, top: float, v: float) -> None:
    """Add what follows from one token's d, whatever it is; `x` is cut to `PLAUSIBLE`, `top` is the larger logprob."""
    size, square = abs(v), v * v
    limited = min(max(v, -_LIMIT), _LIMIT)
    grown = math.expm1(limited)
    capped = min(grown, _CAPPED)
    total[_D1] += v
    total[_D2] += square
    total[_D3] += square * v
    total[_D4] += square * square
    total[_ABS1] += size
    total[_EXCESS1] += grown
    total[_EXCESS2] += grown * grown
    total[_CAPPED1] += capped
    total[_CAPPED2] += capped * capped
    total[_BEYOND] += grown - capped
    total[_K3] += grown - limited
    total[_EXP_ABS] += math.expm1(abs(limited))
    total[_XD] += x * v
    total[_CLIPPED] += (v < _BELOW) | (v > _ABOVE)
    total[_FAR_BELOW] += v < -RHO_CAP
    gap = math.exp(min(top, 0.0)) * -math.expm1(-size)
    total[_PROBABILITY1] += gap
    total[_PROBABILITY2] += gap * gap
    total[_LARGEST_PROBABILITY] = max(total[_LARGEST_PROBABILITY], gap)
    row[0] += size
    row[1] += v
    row[2] += square
    row[3] += grown
    row[4] += capped


@_compiled(fast=False)
def _count_size(size: np.float32, bits: int, fine: Longs, is_cut: Any, coarse: Longs, edges: Floats) -> None:
    place = bits >> 16
    fine[place] += 1
    if is_cut[place]:
        at = 0
        while at < edges.size and edges[at] < size:
            at += 1
        coarse[at] += 1


@_compiled(fast=False)
def _add_odd(
    total: Doubles,
    row: Doubles,
    x: Floats,
    y: Floats,
    place: int,
    before: float,
    is_pair: bool,
    sizes: Floats,
) -> tuple[float, bool, int, int]:
    """Add tokens of any bits one by one, from position `place` of their sequence on.

    `before` is d of the token before and `is_pair` whether there is one that is a number. Give the same for the token
    after, how many tokens are numbers, and how many of these have d = 0. `sizes` takes abs d, NaN for what is no number.
    """
    finite = zeros = 0
    for i in range(x.size):
        a, b = np.float64(x[i]), np.float64(y[i])
        if not (math.isfinite(a) and math.isfinite(b)):
            total[_NONFINITE] += 1
            sizes[i] = np.nan
            is_pair = False
            continue
        finite += 1
        v = b - a
        cut = min(max(a, -PLAUSIBLE), PLAUSIBLE)
        total[_X] += cut
        total[_XX] += cut * cut
        size = min(abs(v), _FLOAT_MAX)
        sizes[i] = np.float32(size)
        at = np.float64(place + i)
        total[_PLACE] += at
        total[_PLACE_SQUARE] += at * at
        total[_PLACE_ABS] += at * size
        if v == 0:
            zeros += 1
        else:
            total[_NEGATIVE] += v < 0
            scaled = v * 32
            total[_ON_GRID] += scaled == np.rint(scaled)
            total[_LARGEST] = max(total[_LARGEST], abs(v))
            _add_one(total, row, cut, max(a, b), v)
        d = min(max(v, -PLAUSIBLE), PLAUSIBLE)
        if is_pair:
            total[_LAG_PAIRS] += 1
            total[_LAG_PRODUCT] += before * d
            total[_LAG_FIRST] += before
            total[_LAG_SECOND] += d
        before, is_pair = d, True
    total[_MOVED] += finite - zeros
    return before, is_pair, finite, zeros


@_compiled(fast=False)
def add_batch(
    total: Doubles,
    rows: Doubles,
    places: Doubles,
    fine: Longs,
    is_cut: Any,
    coarse: Longs,
    edges: Floats,
    first: Floats,
    second: Floats,
    first_bits: Ints,
    second_bits: Ints,
    lengths: Longs,
    first_ids: Ints,
    second_ids: Ints,
) -> int:
    """Add sequences of `lengths` [m], one after the other in `first` and `second` [n]; give how many d are 0.

    `total` [SUMS] takes sums; `rows` [m, COLUMNS + 1] those of each sequence, the last that of min(exp(d), exp(RHO_CAP)) - 1;
    `places` [buckets, COLUMNS] those of each bucket of place. `fine`, with `is_cut`, `coarse` and `edges`, is a `BitHistogram`
    of abs d, whose zeros are not counted there. Ids may be empty.
    """
    row, d = np.zeros(5), np.zeros(BLOCK + 1)
    rest, rest_top, tail, tail_top = np.zeros(BLOCK), np.zeros(BLOCK), np.zeros(BLOCK), np.zeros(BLOCK)
    power_bits, power_top_bits = np.zeros(BLOCK, np.int64), np.zeros(BLOCK, np.int64)
    power, power_top = power_bits.view(np.float64), power_top_bits.view(np.float64)
    size_bits, gap_bits = np.zeros(BLOCK + 1, np.int32), np.zeros(BLOCK + 1, np.int32)
    sizes, gaps = size_bits.view(np.float32), gap_bits.view(np.float32)
    zeros = 0
    if first_ids.size:
        total[_ID_MISMATCH] += _differing(first_ids, second_ids)
    low = 0
    for sequence in range(lengths.size):
        length = lengths[sequence]
        half = (length + 1) // 2
        position, distance = 0, _ENDS.size - 1
        place, before, is_pair = 0, 0.0, False
        while place < length:
            while position + 1 < _EDGES.size and place >= _EDGES[position + 1]:
                position += 1
            while length - 1 - place < _ENDS[distance]:
                distance -= 1
            end = min(length, place + BLOCK, length - _ENDS[distance])
            if position + 1 < _EDGES.size:
                end = min(end, _EDGES[position + 1])
            late = place >= half
            if not late:
                end = min(end, half)
            n = end - place
            x, y = first[low : low + n], second[low : low + n]
            unequal, odd, marked = _kind(first_bits[low : low + n], second_bits[low : low + n])
            finite = n
            row[:] = 0
            if marked:
                _add_marks(total, x, y)
            if odd:
                before, is_pair, finite, none = _add_odd(total, row, x, y, place, before, is_pair, sizes)
                zeros += none
                if unequal:
                    for i in range(n):
                        if sizes[i] > 0:
                            _count_size(sizes[i], size_bits[i], fine, is_cut, coarse, edges)
            else:
                _add_logprobs(total, x)
                wide = np.float64(n)
                total[_PLACE] += wide * place + wide * (wide - 1) / 2
                total[_PLACE_SQUARE] += (
                    wide * place * place + place * wide * (wide - 1) + (wide - 1) * wide * (2 * wide - 1) / 6
                )
                total[_LAG_PAIRS] += n if is_pair else n - 1
                if unequal:
                    d[0] = before if is_pair else 0.0
                    moved = total[_MOVED]
                    _take_sides(x, y, d, sizes, rest[:n], rest_top[:n])
                    _cut_exponent(rest[:n], tail, power_bits)
                    _cut_exponent(rest_top[:n], tail_top, power_top_bits)
                    _add_plain(total, row, x, d, (rest, tail, power), (rest_top, tail_top, power_top), gaps)
                    _put_peak(size_bits, n)
                    _put_peak(gap_bits, n)
                    total[_LARGEST] = max(total[_LARGEST], np.float64(sizes[BLOCK]))
                    total[_LARGEST_PROBABILITY] = max(total[_LARGEST_PROBABILITY], np.float64(gaps[BLOCK]))
                    total[_PLACE_ABS] += place * row[0]
                    total[_LAG_SECOND] += row[1] if is_pair else row[1] - d[1]
                    none = n - np.int64(total[_MOVED] - moved)
                    zeros += none
                    fine[0] -= none
                    for i in range(n):
                        _count_size(sizes[i], size_bits[i], fine, is_cut, coarse, edges)
                    before = d[n]
                else:
                    zeros += n
                    total[_LAG_FIRST] += before if is_pair else 0.0
                    before = 0.0
                is_pair = True
            total[_TOKENS] += n
            total[_UNEQUAL] += unequal
            total[_FINITE] += finite
            bucket = (position * _ENDS.size + distance) * 2 + late
            for sums in (rows[sequence], places[bucket]):
                sums[0] += n
                sums[1] += finite
                sums[2] += unequal
                for i in range(4):
                    sums[3 + i] += row[i]
            rows[sequence, 7] += row[4]
            low += n
            place = end
    return zeros
