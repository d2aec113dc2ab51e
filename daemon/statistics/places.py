# SPDX-License-Identifier: Apache-2.0
"""Where in its sequence a token lies: sums of d by position, distance to the end, half, sequence and attribute.

A batch is cut at every edge of these buckets, once for all of them; what is summed between two cuts is then sorted
into the buckets. Tokens of one sequence come in one batch: sums over sequences rest on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["COLUMNS", "FROM_END", "LABEL_LIMIT", "OTHER", "POSITIONS", "Cuts", "Groups"]

POSITIONS = (0, 1, 16, 128, 1024, 4096, 16384)
"""First position of each bucket, counted from the first token reported of a sequence."""
FROM_END = (0, 1, 16, 128)
"""Smallest distance to the last token of each bucket."""
LABEL_LIMIT = 64
"""Labels kept of one attribute; what comes later is counted under `OTHER`."""
OTHER = "other"

_FAR = 1 << 40

COLUMNS = ("tokens", "finite", "unequal", "sum_abs", "sum_d", "sum_square", "sum_excess")
"""Sums kept of each bucket; `sum_excess` is that of exp(d) - 1."""

Longs = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cuts:
    """The segments of a batch: segment i holds the tokens at[i] .. at[i + 1]."""

    at: Longs
    sequence: Longs
    bucket: Longs
    starts: Longs
    lengths: Longs
    first: Longs
    """The first segment of each sequence."""
    sizes: Doubles
    """Tokens of each segment."""

    @classmethod
    def of(cls, lengths: Longs, every: int) -> Cuts:
        """Cut sequences of `lengths` > 0, one after the other, and the multiples of `every`."""
        ends = np.cumsum(lengths)
        starts = ends - lengths
        total = int(ends[-1])
        after = np.concatenate([np.asarray(POSITIONS)[:, None] + starts, [starts + (lengths + 1) // 2]])
        before = ends - np.asarray(FROM_END[1:])[:, None]
        inside = np.concatenate([after[after < ends], before[before > starts], np.arange(0, total, every)])
        inside.sort()
        at = inside[np.concatenate([[True], inside[1:] != inside[:-1]])]
        sequence = np.searchsorted(starts, at, side="right") - 1
        place = at - starts[sequence]
        to_end = ends[sequence] - 1 - at
        position = np.searchsorted(POSITIONS, place, side="right") - 1
        distance = np.searchsorted(FROM_END, to_end, side="right") - 1
        late = 2 * place >= lengths[sequence]
        bucket = (position * len(FROM_END) + distance) * 2 + late
        first = np.searchsorted(at, starts)
        sizes = np.empty(at.size)
        np.subtract(at[1:], at[:-1], out=sizes[:-1])
        sizes[-1] = total - at[-1]
        return cls(at, sequence, bucket, starts, lengths, first, sizes)


def tokens_by_bucket(lengths: Longs) -> Doubles:
    """Give the tokens [buckets] of sequences of `lengths`, which follow from these alone."""
    low, high = (np.asarray(edges)[:, None, None] for edges in (POSITIONS, (*POSITIONS[1:], _FAR)))
    near, far = (np.asarray(edges)[:, None] for edges in (FROM_END, (*FROM_END[1:], _FAR)))
    half = (lengths + 1) // 2
    start, end = np.maximum(low, lengths - far), np.minimum(high, lengths - near)
    early = np.maximum(np.minimum(end, half) - start, 0).sum(axis=2)
    late = np.maximum(end - np.maximum(start, half), 0).sum(axis=2)
    return np.stack([early, late], axis=2).reshape(-1).astype(np.float64)


class Groups:
    """Sums by bucket of place, and by label of each attribute that sequences came with."""

    def __init__(self) -> None:
        self._places = np.zeros((len(COLUMNS), len(POSITIONS) * len(FROM_END) * 2))
        self.labels: dict[str, dict[str, Doubles]] = {}

    def add_places(self, cuts: Cuts, sums: Doubles) -> None:
        """Add sums [COLUMNS, segments]."""
        width = self._places.shape[1]
        for index, values in enumerate(sums):
            self._places[index] += np.bincount(cuts.bucket, weights=values, minlength=width)

    def add_equal(self, lengths: Longs) -> None:
        """Add sequences of `lengths` of which every pair is finite and equal in every bit."""
        self._places[:2] += tokens_by_bucket(lengths)

    def add_labels(self, attributes: Mapping[str, Sequence[object]], sums: Doubles) -> None:
        """Add sums [COLUMNS, sequences] under the label that each sequence has for each attribute.

        Raises ValueError where an attribute has not one label a sequence.
        """
        for name, values in attributes.items():
            if len(values) != sums.shape[1]:
                raise ValueError(
                    f"attribute {name!r}: wanted one label a sequence, {sums.shape[1]}, found {len(values)}"
                )
            known = self.labels.setdefault(name, {})
            if values.count(values[0]) == len(values):
                columns: dict[str, list[int]] = {str(values[0]): list(range(len(values)))}
            else:
                columns = {}
                for index, value in enumerate(values):
                    columns.setdefault(str(value), []).append(index)
            for label, those in columns.items():
                kept = label if label in known or len(known) < LABEL_LIMIT else OTHER
                known.setdefault(kept, np.zeros(len(COLUMNS)))
                whole = len(those) == sums.shape[1]
                known[kept] += (sums if whole else sums[:, those]).sum(axis=1)

    def merge(self, other: Groups) -> None:
        self._places += other._places
        for name, labels in other.labels.items():
            known = self.labels.setdefault(name, {})
            for label, sums in labels.items():
                kept = label if label in known or len(known) < LABEL_LIMIT else OTHER
                known.setdefault(kept, np.zeros(len(COLUMNS)))
                known[kept] += sums

    def by_position(self) -> Doubles:
        """[COLUMNS, POSITIONS]."""
        found: Doubles = self._cube().sum(axis=(2, 3))
        return found

    def by_distance(self) -> Doubles:
        """[COLUMNS, FROM_END]."""
        found: Doubles = self._cube().sum(axis=(1, 3))
        return found

    def by_half(self) -> Doubles:
        """[COLUMNS, 2]: the earlier half of each sequence, and the later one."""
        found: Doubles = self._cube().sum(axis=(1, 2))
        return found

    def _cube(self) -> Doubles:
        return self._places.reshape(len(COLUMNS), len(POSITIONS), len(FROM_END), 2)
