# SPDX-License-Identifier: Apache-2.0
"""Statistics of d over paired tokens, from the raw bits of both sides, added up batch by batch.

Counts come before averages: bitwise equality is counted on the integers, non-finite pairs are counted and leave
everything else. Every sum is one that can be added to another window's: `merge` gives what one window over both
would have, but for the order of rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from isoexec.contracts.window import PairStats
from isoexec.daemon.statistics.histogram import BitHistogram
from isoexec.daemon.statistics.kernel import CHUNK, Room, State, add_chunk, add_equal, add_few
from isoexec.daemon.statistics.places import COLUMNS, Cuts, Groups
from isoexec.daemon.statistics.result import Detail, detail_of, stats_of
from isoexec.daemon.statistics.sequences import SequenceSums

__all__ = ["PairAccumulator"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

SHAPE_WHOLE = 1 << 18
"""Tokens of a window of which all enter the grid test and the differences of probabilities."""
SHAPE_EVERY = 8
"""Beyond that, one piece in so many does."""

# batches of equal bits gathered for one count by place
_WAITING = 64
_ROOM = Room()
# positions are added up in ramps that begin anew so often: what a longer one adds cancels again, its rounding does not
_RAMP = np.arange(4096, dtype=np.float32)


class PairAccumulator:
    """Adds up what is known of one pair of cases in one window. One thread at a time, over all of them."""

    def __init__(self, pair: tuple[str, str]) -> None:
        self.pair = pair
        self.unpaired: dict[str, int] = {}
        self.groups = Groups()
        self.sequences = SequenceSums()
        self._state = State()
        self._pieces = 0
        self._equal: list[Longs] = []  # lengths of sequences without an unequal bit, not yet counted by place

    @property
    def tokens(self) -> int:
        """Paired tokens, non-finite ones included."""
        return self._state.sums.tokens

    @property
    def sum_abs(self) -> float:
        """Sum of abs d, in nats."""
        return self._state.sums.abs1

    @property
    def histogram(self) -> BitHistogram:
        """Counts of abs d."""
        return self._state.histogram

    def count_unpaired(self, role: str, tokens: int) -> None:
        self.unpaired[role] = self.unpaired.get(role, 0) + tokens

    def add(
        self,
        first: Floats,
        second: Floats,
        lengths: Longs,
        first_ids: Ints | None = None,
        second_ids: Ints | None = None,
        attributes: Mapping[str, Sequence[object]] | None = None,
    ) -> None:
        """Take logprobs [n] and [n], in the order of the pair, of sequences of `lengths` one after the other.

        `attributes` holds one label a sequence: engine, rank, pack_index, prefix_hit. Raises ValueError where the
        lengths do not add up to n, or an attribute has not one label a sequence.
        """
        n = int(first.shape[0])
        if int(lengths.sum()) != n or int(second.shape[0]) != n:
            raise ValueError(
                f"lengths: wanted a sum of {n} tokens a side, found {int(lengths.sum())} and {second.shape[0]}"
            )
        if n == 0:
            return
        for name, labels in (attributes or {}).items():
            if len(labels) != lengths.size:
                raise ValueError(f"attribute {name!r}: wanted {lengths.size} labels, found {len(labels)}")
        lengths = lengths.astype(np.int64, copy=False)
        attributes = attributes or {}
        if not lengths.all():
            attributes = {
                name: [label for label, length in zip(labels, lengths, strict=True) if length > 0]
                for name, labels in attributes.items()
            }
            lengths = lengths[lengths > 0]
        differs = _ROOM.differs(n)
        if first_ids is not None and second_ids is not None:
            np.not_equal(first_ids, second_ids, out=differs)
            self._state.sums.id_mismatch += int(np.count_nonzero(differs))
        np.not_equal(first.view(np.int32), second.view(np.int32), out=differs)
        if differs.any() or not self._add_equal(first, lengths, attributes):
            self._add_unequal(first, second, differs, lengths, attributes)

    def _add_equal(self, x: Floats, lengths: Longs, attributes: Mapping[str, Sequence[object]]) -> bool:
        """Add a batch without an unequal bit: every d is 0. False, and nothing added, where that does not say it all."""
        found = add_equal(x)
        if found is None:
            return False
        sums, n = self._state.sums, x.size
        for at in range(0, n, CHUNK):
            piece = min(CHUNK, n - at)
            sums.shape_tokens += piece if self._shape_due() else 0
            sums.tokens += piece
        sums.finite += n
        sums.x += found[0]
        sums.xx += found[1]
        self._state.histogram.add_zeros(n)
        self._equal.append(lengths)
        if len(self._equal) >= _WAITING:
            self._settle()
        if attributes:
            counts = np.zeros((len(COLUMNS), lengths.size))
            counts[:2] = lengths
            self.groups.add_labels(attributes, counts)
        return True

    def _settle(self) -> None:
        """Count what follows from the lengths of equal sequences alone, those of many batches at once."""
        if not self._equal:
            return
        lengths = np.concatenate(self._equal)
        self._equal = []
        self.groups.add_equal(lengths)
        self.sequences.add_equal(lengths)
        self._add_ramps(lengths)

    def _add_ramps(self, lengths: Longs) -> None:
        sums, wide = self._state.sums, lengths.astype(np.float64)
        sums.lag_pairs += int(lengths.sum()) - lengths.size
        sums.place += float((wide * (wide - 1) / 2).sum())
        sums.place_square += float(((wide - 1) * wide * (2 * wide - 1) / 6).sum())

    def _add_unequal(
        self,
        first: Floats,
        second: Floats,
        differs: npt.NDArray[np.bool_],
        lengths: Longs,
        attributes: Mapping[str, Sequence[object]],
    ) -> None:
        n = first.size
        cuts = Cuts.of(lengths, _RAMP.size)
        d, sizes = _ROOM.whole(n)
        rows = np.zeros((len(COLUMNS) + 1, cuts.at.size))
        rows[0] = cuts.sizes
        pieces: list[tuple[int, npt.NDArray[np.intp], bool]] = []
        left, missing = [np.empty(0, np.intp)], [np.empty(0, np.intp)]
        shaped = [np.empty(0, np.bool_)]
        for at in range(0, n, CHUNK):
            end = min(at + CHUNK, n)
            low, high = np.searchsorted(cuts.at, (at, end))
            shape = self._shape_due()
            few, bad, dense = add_chunk(
                self._state,
                first[at:end],
                second[at:end],
                differs[at:end],
                d[at:end],
                sizes[at:end],
                cuts.at[low:high] - at,
                rows[:, low:high],
                _ROOM,
                shape,
            )
            pieces.append((at, few, dense))
            if few.size:
                left.append(few + at)
                shaped.append(np.full(few.size, shape))
            if bad is not None:
                missing.append(np.flatnonzero(bad) + at)
        few = np.concatenate(left)
        shapes = np.concatenate(shaped)
        for at in range(0, few.size, CHUNK // 2):
            piece = slice(at, at + CHUNK // 2)
            add_few(self._state, first, second, few[piece], d, sizes, cuts.at, rows, shapes[piece])
        bad_at = np.concatenate(missing)
        self._state.histogram.add_zeros(-bad_at.size)
        for at, few, dense in pieces:
            self._add_piece(d, sizes, at, None if dense else few + at)
        self._add_order(cuts, d, bad_at, rows)
        self.groups.add_places(cuts, rows[:-1])
        by_sequence = np.add.reduceat(rows, cuts.first, axis=1)
        self.sequences.add(by_sequence)
        if attributes:
            self.groups.add_labels(attributes, by_sequence[:-1])

    def _shape_due(self) -> bool:
        """Whether the next piece is one of those that the costly sums are taken from."""
        self._pieces += 1
        return self._state.sums.tokens < SHAPE_WHOLE or self._pieces % SHAPE_EVERY == 0

    def _add_piece(self, d: Floats, sizes: Floats, at: int, few: npt.NDArray[np.intp] | None) -> None:
        """Add abs d, its product with a ramp, and products of neighbours; `few` are the places where d is not 0."""
        sums, histogram = self._state.sums, self._state.histogram
        end = min(at + CHUNK, d.size)
        if few is None:
            before = max(at - 1, 0)
            histogram.add(sizes[at:end])
            whole = at + (end - at) // _RAMP.size * _RAMP.size
            ramps = sizes[at:whole].reshape(-1, _RAMP.size) @ _RAMP
            sums.place_abs += float(ramps.sum(dtype=np.float64))
            sums.place_abs += float(np.dot(_RAMP[: end - whole], sizes[whole:end]))
            sums.lag_product += float(np.dot(d[before : end - 1], d[before + 1 : end]))
            return
        histogram.add_zeros(end - at - few.size)
        if few.size:
            size, after = sizes[few], few[few > 0]
            histogram.add(size)
            sums.place_abs += float(np.dot(_RAMP[few % _RAMP.size], size))
            sums.lag_product += float(np.dot(d[after - 1], d[after]))

    def _add_order(self, cuts: Cuts, d: Floats, bad: Longs, rows: npt.NDArray[np.float64]) -> None:
        """Add what rests on the order of tokens: of neighbours in a sequence, and of positions in it."""
        sums, starts, lengths = self._state.sums, cuts.starts, cuts.lengths
        last = starts + lengths - 1
        total = float(rows[4].sum())
        across = starts[1:]
        sums.lag_product -= float((d[across - 1].astype(np.float64) * d[across]).sum())
        sums.lag_first += total - float(d[last].sum(dtype=np.float64))
        sums.lag_second += total - float(d[starts].sum(dtype=np.float64))
        self._add_ramps(lengths)
        origin = (cuts.at // _RAMP.size * _RAMP.size).astype(np.float64)
        sums.place_abs += float(np.dot(origin - starts[cuts.sequence], rows[3]))
        if bad.size:
            self._leave_out(cuts, d, bad)

    def _leave_out(self, cuts: Cuts, d: Floats, bad: Longs) -> None:
        """Take out of the sums of order what stands beside, or in the place of, a token that is no number."""
        sums = self._state.sums
        missing = np.zeros(d.size, np.bool_)
        missing[bad] = True
        sequence = np.searchsorted(cuts.starts, bad, side="right") - 1
        place = (bad - cuts.starts[sequence]).astype(np.float64)
        sums.place -= float(place.sum())
        sums.place_square -= float((place * place).sum())
        left = np.union1d(bad[place > 0] - 1, bad[bad + 1 < cuts.starts[sequence] + cuts.lengths[sequence]])
        sums.lag_pairs -= left.size
        sums.lag_first -= float(d[left].sum(dtype=np.float64))
        sums.lag_second -= float(d[left + 1].sum(dtype=np.float64))

    def merge(self, other: PairAccumulator) -> None:
        """Add what another accumulator of the same pair has seen. Raises ValueError for another pair."""
        if other.pair != self.pair:
            raise ValueError(f"pair: wanted {self.pair}, found {other.pair}")
        self._settle()
        other._settle()
        self._state.merge(other._state)
        self.groups.merge(other.groups)
        self.sequences.merge(other.sequences)
        for role, tokens in other.unpaired.items():
            self.count_unpaired(role, tokens)

    def result(self) -> PairStats:
        """Give the statistics so far; means of nothing are NaN."""
        self._settle()
        return stats_of(self.pair, self._state, self.groups, self.unpaired)

    def detail(self) -> Detail:
        """Give what rules do not read: more statistics, sequences and breakdowns."""
        self._settle()
        return detail_of(self._state, self.groups, self.sequences)
