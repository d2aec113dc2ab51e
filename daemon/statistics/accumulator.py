# SPDX-License-Identifier: Apache-2.0
"""Statistics of d over paired tokens, from the raw bits of both sides, added up batch by batch.

Counts come before averages: bitwise equality is counted on the integers, non-finite pairs are counted and leave
everything else. Every sum is one that can be added to another window's: `merge` gives what one window over both
would have, but for the order of rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from isoexec.contracts.window import PairStats
from isoexec.daemon.statistics.histogram import BitHistogram
from isoexec.daemon.statistics.places import COLUMNS, Groups
from isoexec.daemon.statistics.result import Detail, detail_of, stats_of
from isoexec.daemon.statistics.sequences import SequenceSums
from isoexec.daemon.statistics.sums import State

__all__ = ["PairAccumulator", "prepare"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
_Scalar = TypeVar("_Scalar", bound=np.generic)

_NO_IDS = np.empty(0, np.int32)


@cache
def _kernel() -> Callable[..., int]:
    # Numba costs 0.4 s and 60 MB to load: the commands that add nothing up do without
    from isoexec.daemon.statistics.kernel import add_batch

    return add_batch


def prepare() -> None:
    """Compile what adds up, or load it from the cache of an earlier process: seconds, that no step should wait for."""
    one = np.full(1, -1, np.float32)
    PairAccumulator(("engine_decode", "trainer_score")).add(one, one, np.ones(1, np.int64))


class PairAccumulator:
    """Adds up what is known of one pair of cases in one window. One thread at a time."""

    def __init__(self, pair: tuple[str, str]) -> None:
        self.pair = pair
        self.unpaired: dict[str, int] = {}
        self.groups = Groups()
        self.sequences = SequenceSums()
        self._state = State()

    @property
    def tokens(self) -> int:
        """Paired tokens, non-finite ones included."""
        return int(self._state.sums.tokens)

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
        attributes = attributes or {}
        for name, labels in attributes.items():
            if len(labels) != lengths.size:
                raise ValueError(f"attribute {name!r}: wanted {lengths.size} labels, found {len(labels)}")
        if not lengths.all():
            attributes = {
                name: [label for label, length in zip(labels, lengths, strict=True) if length > 0]
                for name, labels in attributes.items()
            }
            lengths = lengths[lengths > 0]
        if first_ids is None or second_ids is None:
            first_ids = second_ids = _NO_IDS
        first, second = _plain(first, np.float32), _plain(second, np.float32)
        rows = np.zeros((lengths.size, len(COLUMNS) + 1))
        zeros = _kernel()(
            self._state.total, rows, self.groups.places, *self._state.histogram.counts(),
            first, second, first.view(np.int32), second.view(np.int32), _plain(lengths, np.int64),
            _plain(first_ids, np.int32), _plain(second_ids, np.int32),
        )  # fmt: skip
        self._state.histogram.add_zeros(zeros)
        self.sequences.add(rows)
        if attributes:
            self.groups.add_labels(attributes, rows[:, :-1].T)

    def merge(self, other: PairAccumulator) -> None:
        """Add what another accumulator of the same pair has seen. Raises ValueError for another pair."""
        if other.pair != self.pair:
            raise ValueError(f"pair: wanted {self.pair}, found {other.pair}")
        self._state.merge(other._state)
        self.groups.merge(other.groups)
        self.sequences.merge(other.sequences)
        for role, tokens in other.unpaired.items():
            self.count_unpaired(role, tokens)

    def result(self) -> PairStats:
        """Give the statistics so far; means of nothing are NaN."""
        return stats_of(self.pair, self._state, self.groups, self.unpaired)

    def detail(self) -> Detail:
        """Give what rules do not read: more statistics, sequences and breakdowns."""
        return detail_of(self._state, self.groups, self.sequences.settle())


def _plain(values: npt.NDArray[_Scalar], dtype: type[_Scalar]) -> npt.NDArray[_Scalar]:
    """Give the one kind of array that the kernel is compiled for: contiguous, aligned, not to be written."""
    found = np.require(values, dtype, ("C", "A"))[:]
    found.flags.writeable = False
    return found
