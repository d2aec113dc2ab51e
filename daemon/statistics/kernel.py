# SPDX-License-Identifier: Apache-2.0
"""Adds up everything known of d, token by token, in pieces that stay in the processor's cache.

d is taken in float32: two logprobs within a factor of 2 of each other subtract exactly (Sterbenz), others round to
6e-8 of d. Tokens with abs d up to `SMALL` enter power sums, and exp(d) is summed from those by its series, to 4e-9 of
k3; the few above it are taken one by one in float64. Sums of a piece are float32, sums of pieces float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from isoexec.contracts.window import FILLED_BELOW, HISTOGRAM_EDGES
from isoexec.daemon.statistics.histogram import BitHistogram

__all__ = [
    "CHUNK",
    "CLIP",
    "RARE",
    "RHO_CAP",
    "SMALL",
    "Room",
    "State",
    "Sums",
    "add_chunk",
    "add_equal",
    "add_few",
]

CHUNK = 32768
"""Tokens of one piece."""
SMALL = 0.1
"""abs d in nats up to which the series of exp(d) is used."""
CLIP = (float(np.log(0.8)), float(np.log(1.2)))
"""d outside of which a ratio clipped to [0.8, 1.2] is clipped."""
RARE = 32
"""Where at most one token in so many differs, these are taken one by one and nothing else is computed."""
RHO_CAP = 2.0
"""d in nats at which exp(d) is cut off for the test of E[exp(d)] = 1."""

# largest abs d that enters exp(d): beyond it the square would overflow float64
_LIMIT = 300.0
# nats beyond which no logprob lies; sums of products cut there
_PLAUSIBLE = np.float32(1e4)
_FLOAT_MAX = np.finfo(np.float32).max
_NONE = np.empty(0, np.intp)
_EDGES = np.asarray(HISTOGRAM_EDGES, dtype=np.float32)
_ONES = np.ones(CHUNK, np.float32)

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Sums:
    """Counts and sums over finite tokens; adding two of them gives those of both."""

    tokens: int = 0
    unequal: int = 0
    nonfinite: int = 0
    filled: int = 0
    positive: int = 0
    id_mismatch: int = 0
    negative: int = 0
    clipped: int = 0
    far_below: int = 0  # d < -RHO_CAP
    lag_pairs: int = 0
    finite: float = 0.0
    x: float = 0.0  # logprob of the first side
    xx: float = 0.0
    xd: float = 0.0
    d1: float = 0.0
    d2: float = 0.0
    d3: float = 0.0
    d4: float = 0.0
    abs1: float = 0.0
    excess1: float = 0.0  # exp(d) - 1
    excess2: float = 0.0  # its square
    k3: float = 0.0  # exp(d) - 1 - d
    exp_abs: float = 0.0  # exp(abs d) - 1
    capped1: float = 0.0  # min(exp(d), exp(RHO_CAP)) - 1
    capped2: float = 0.0
    beyond: float = 0.0  # what the cap takes away
    lag_product: float = 0.0
    lag_first: float = 0.0
    lag_second: float = 0.0
    place: float = 0.0
    place_square: float = 0.0
    place_abs: float = 0.0
    shape_tokens: int = 0  # finite tokens of the pieces that the following are from
    shape_moved: int = 0
    on_grid: int = 0
    probability1: float = 0.0  # abs(exp(y) - exp(x))
    probability2: float = 0.0

    def merge(self, other: Sums) -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


@dataclass(slots=True)
class State:
    """What one accumulator holds beside the sums."""

    sums: Sums = field(default_factory=Sums)
    histogram: BitHistogram = field(default_factory=lambda: BitHistogram(_EDGES))
    largest: float = 0.0
    largest_probability: float = 0.0

    def merge(self, other: State) -> None:
        self.sums.merge(other.sums)
        self.histogram.merge(other.histogram)
        self.largest = max(self.largest, other.largest)
        self.largest_probability = max(self.largest_probability, other.largest_probability)


class Room:
    """Arrays of one piece, used again for each."""

    def __init__(self) -> None:
        self.size, self.square, self.cube, self.work = (np.empty(CHUNK, np.float32) for _ in range(4))
        self.flags = np.empty(CHUNK, np.bool_)
        self._whole = np.empty((2, CHUNK), np.float32)
        self._differs = np.empty(CHUNK, np.bool_)

    def differs(self, n: int) -> Bools:
        """Give room for what of a whole batch differs."""
        if self._differs.size < n:
            self._differs = np.empty(n, np.bool_)
        return self._differs[:n]

    def whole(self, n: int) -> tuple[Floats, Floats]:
        """Give room for d and abs d of a whole batch: fresh memory costs more than what is done in it."""
        if self._whole.shape[1] < n:
            self._whole = np.empty((2, n), np.float32)
        return self._whole[0, :n], self._whole[1, :n]


def add_equal(x: Floats) -> tuple[float, float] | None:
    """Give the sums of x and of its square over a batch of which both sides are x, piece by piece.

    None where a value is no number, no logprob, or 0: these are counted, and looked at one by one.
    """
    total = squares = 0.0
    for at in range(0, x.size, CHUNK):
        part = x[at : at + CHUNK]
        with np.errstate(over="ignore", invalid="ignore"):
            square = float(np.dot(part, part))
        if not 2 * square < _PLAUSIBLE * _PLAUSIBLE:
            return None
        squares += square
        total += float(np.dot(part, _ONES[: part.size]))
    return (total, squares) if float(x.max()) < 0 else None


def add_chunk(
    state: State,
    first: Floats,
    second: Floats,
    differs: Bools,
    out: Floats,
    sizes: Floats,
    at: Longs,
    rows: Doubles,
    room: Room,
    shape: bool,
) -> tuple[npt.NDArray[np.intp], Bools | None, bool]:
    """Add a piece of at most CHUNK tokens, write its d to `out`, cut to 1e4 nats, and abs d to `sizes`, whole.

    Both are 0 where a side is no number. `differs` says where bits do. `shape` asks for the sums that large windows
    take from some pieces only.

    Write sums to `rows` [COLUMNS + 1, segments] of the segments that start `at`, the last row that of
    min(exp(d), exp(RHO_CAP)) - 1; the first holds their tokens, the others 0. Give the places of tokens left to
    `add_few`; where a side is no number, None for nowhere; and whether d is other than 0 elsewhere. What rests on
    neighbours or on positions is left to the caller too.
    """
    sums, n = state.sums, first.size
    sums.tokens += n
    unequal = int(np.count_nonzero(differs))
    top = max(float(first.max()), float(second.max()))
    if not top < 0:  # or NaN
        _count_marks(sums, first, second)
    with np.errstate(over="ignore", invalid="ignore"):
        xx = float(np.dot(first, first))
        yy = float(np.dot(second, second)) if unequal else xx
    bad: Bools | None = None
    if not xx + yy < _PLAUSIBLE * _PLAUSIBLE:
        bad = ~(np.isfinite(first) & np.isfinite(second))
        if bad.any():
            first, second = np.where(bad, np.float32(0), first), np.where(bad, np.float32(0), second)
            top = max(float(first.max()), float(second.max()))
            rows[1] = np.add.reduceat(bad, at, dtype=np.int64)
        else:
            bad = None
    rows[1] = rows[0] - rows[1]
    missing = 0 if bad is None else int(np.count_nonzero(bad))
    sums.nonfinite += missing
    sums.finite += n - missing
    x = first
    if not xx < _PLAUSIBLE * _PLAUSIBLE:
        x = np.clip(first, -_PLAUSIBLE, _PLAUSIBLE)
        xx = float(np.dot(x, x))
    sums.x += float(np.dot(x, _ONES[:n]))
    sums.xx += xx
    if unequal == 0:
        out[:] = 0
        sizes[:] = 0
        if shape:
            sums.shape_tokens += n - missing
        return _NONE, bad, False
    sums.unequal += unequal
    rare = unequal * RARE <= n
    few = np.flatnonzero(differs) if rare else _NONE
    if rare:
        rows[2] = np.bincount(_segments(at, few), minlength=at.size)
    elif (n - unequal) * RARE <= n:
        rows[2] = rows[0] - np.bincount(_segments(at, np.flatnonzero(~differs)), minlength=at.size)
    else:
        rows[2] = np.add.reduceat(differs.astype(np.float32), at)
    if shape:
        sums.shape_tokens += n - missing
    if rare:
        few = few[first[few] != second[few]]
        out[:] = 0
        sizes[:] = 0
    else:
        few = _add_many(state, first, second, x, out, sizes, at, room, rows, top, shape)
    if bad is not None:
        few = few[~bad[few]]
    return few, bad, not rare


def _segments(at: Longs, places: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    return np.searchsorted(at, places, side="right") - 1


def _count_marks(sums: Sums, first: Floats, second: Floats) -> None:
    # a near-certain token rounds to 0.0 by itself; a filled one is 0.0 where the other side is clearly below
    filled = ((first == 0) & (second < FILLED_BELOW)) | ((second == 0) & (first < FILLED_BELOW))
    sums.filled += int(np.count_nonzero(filled))
    sums.positive += int(np.count_nonzero((first > 0) | (second > 0)))


def _add_many(
    state: State,
    first: Floats,
    second: Floats,
    x: Floats,
    d: Floats,
    size: Floats,
    at: Longs,
    room: Room,
    rows: Doubles,
    top: float,
    shape: bool,
) -> npt.NDArray[np.intp]:
    """Add the tokens with abs d up to SMALL; give the places of the others, whose d and size are left at 0."""
    sums, n = state.sums, first.size
    with np.errstate(over="ignore"):
        np.subtract(second, first, out=d)
    np.abs(d, out=size)
    most = float(size.max())
    big = np.flatnonzero(size > SMALL) if most > SMALL else _NONE
    if big.size:
        d[big] = 0
        size[big] = 0
    else:
        state.largest = max(state.largest, most)
    square = np.multiply(d, d, out=room.square[:n])
    cube = np.multiply(square, d, out=room.cube[:n])
    sums.negative += int(np.count_nonzero(np.less(d, 0, out=room.flags[:n])))
    rows[3] = np.add.reduceat(size, at)
    rows[4] = np.add.reduceat(d, at)
    rows[5] = np.add.reduceat(square, at)
    rows[6] = rows[4] + rows[5] / 2 + np.add.reduceat(cube, at) / 6
    rows[7] = rows[6]
    a1, s1, s2 = (float(rows[i].sum()) for i in (3, 4, 5))
    s3, s4, s5, s6, a3 = (
        float(np.dot(left, right))
        for left, right in ((square, d), (square, square), (square, cube), (cube, cube), (square, size))
    )
    tail = s3 / 6 + s4 / 24 + s5 / 120 + s6 / 720
    excess2 = s2 + s3 + s4 * 14 / 24 + s5 / 4 + s6 * 62 / 720
    sums.d1 += s1
    sums.d2 += s2
    sums.d3 += s3
    sums.d4 += s4
    sums.abs1 += a1
    sums.excess1 += s1 + s2 / 2 + tail
    sums.excess2 += excess2
    sums.capped1 += s1 + s2 / 2 + tail
    sums.capped2 += excess2
    sums.k3 += s2 / 2 + tail
    sums.exp_abs += a1 + s2 / 2 + a3 / 6 + s4 / 24 + s6 / 720
    sums.xd += float(np.dot(x, d))
    if shape:
        _add_shape(state, first, d, size, room, top)
    return big


def _add_shape(state: State, first: Floats, d: Floats, size: Floats, room: Room, top: float) -> None:
    """Add what needs the most work a token: differences of probabilities, and d on a grid."""
    sums, n = state.sums, first.size
    work = np.multiply(d, np.float32(32), out=room.work[:n])
    whole = int(np.count_nonzero(np.equal(work, np.rint(work, out=room.cube[:n]), out=room.flags[:n])))
    zeros = n - int(np.count_nonzero(d))
    sums.on_grid += whole - zeros
    sums.shape_moved += n - zeros
    # abs(exp(y) - exp(x)) = exp(x) abs(exp(d) - 1), the latter by its series
    np.multiply(d, np.float32(1 / 6), out=work)
    work += np.float32(0.5)
    work *= d
    work += np.float32(1)
    work *= size
    work *= np.exp(first if top <= 0 else np.minimum(first, 0), out=room.square[:n])
    sums.probability1 += float(np.dot(work, _ONES[:n]))
    sums.probability2 += float(np.dot(work, work))
    state.largest_probability = max(state.largest_probability, float(work.max()))


def add_few(
    state: State,
    first: Floats,
    second: Floats,
    few: npt.NDArray[np.intp],
    out: Floats,
    sizes: Floats,
    at: Longs,
    rows: Doubles,
    shape: Bools,
) -> None:
    """Add the tokens of a batch that `add_chunk` left, whatever their d; `shape` says which are of such a piece."""
    sums = state.sums
    x = first[few]
    v = second[few].astype(np.float64) - x
    size, square = np.abs(v), v * v
    out[few] = np.clip(v, -_PLAUSIBLE, _PLAUSIBLE)
    sizes[few] = np.minimum(size, _FLOAT_MAX)
    state.largest = max(state.largest, float(size.max()))
    limited = np.clip(v, -_LIMIT, _LIMIT)
    grown = np.expm1(limited)
    capped = np.minimum(grown, np.expm1(RHO_CAP))
    sums.d1 += float(v.sum())
    sums.d2 += float(square.sum())
    sums.d3 += float(np.dot(square, v))
    sums.d4 += float(np.dot(square, square))
    sums.abs1 += float(size.sum())
    sums.excess1 += float(grown.sum())
    sums.excess2 += float(np.dot(grown, grown))
    sums.k3 += float((grown - limited).sum())
    below = v < 0
    sums.exp_abs += float(grown[~below].sum() + np.expm1(-limited[below]).sum())
    sums.capped1 += float(capped.sum())
    sums.capped2 += float(np.dot(capped, capped))
    sums.beyond += float((grown - capped).sum())
    sums.xd += float(np.dot(np.clip(x, -_PLAUSIBLE, _PLAUSIBLE).astype(np.float64), v))
    sums.negative += int(np.count_nonzero(below))
    sums.clipped += int(np.count_nonzero((v < CLIP[0]) | (v > CLIP[1])))
    sums.far_below += int(np.count_nonzero(v < -RHO_CAP))
    low, high = _segments(at, few[[0, -1]])
    segment = _segments(at[low : high + 1], few)
    for row, values in zip(rows[3:], (size, v, square, grown, capped), strict=True):
        row[low : high + 1] += np.bincount(segment, weights=values, minlength=high + 1 - low)
    # a probability above 1 is counted as positive, and taken as 1 here
    chance = np.exp(np.minimum(x, 0))
    gap = np.minimum(chance * np.abs(grown), 1.0)
    state.largest_probability = max(state.largest_probability, float(gap.max()))
    if shape.any():
        scaled, gap = v[shape] * 32, gap[shape]
        sums.on_grid += int(np.count_nonzero(scaled == np.rint(scaled)))
        sums.shape_moved += scaled.size
        sums.probability1 += float(gap.sum())
        sums.probability2 += float(np.dot(gap, gap))
