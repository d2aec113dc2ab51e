# SPDX-License-Identifier: Apache-2.0
"""Where in its sequence a token lies: sums of d by position, distance to the end, half, sequence and attribute.

Buckets are all combinations of position, distance to the end and half: position first, half last. Tokens of one sequence
come in one batch: sums over sequences rest on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["COLUMNS", "FROM_END", "LABEL_LIMIT", "OTHER", "POSITIONS", "Groups"]

POSITIONS = (0, 1, 16, 128, 1024, 4096, 16384)
"""First position of each bucket, counted from the first token reported of a sequence."""
FROM_END = (0, 1, 16, 128)
"""Smallest distance to the last token of each bucket."""
LABEL_LIMIT = 64
"""Labels kept of one attribute; what comes later is counted under `OTHER`."""
OTHER = "other"

COLUMNS = ("tokens", "finite", "unequal", "sum_abs", "sum_d", "sum_square", "sum_excess")
"""Sums kept of each bucket; `sum_excess` is that of exp(d) - 1."""

Doubles = npt.NDArray[np.float64]


class Groups:
    """Sums by bucket of place, and by label of each attribute that sequences came with."""

    def __init__(self) -> None:
        self.places = np.zeros((len(POSITIONS) * len(FROM_END) * 2, len(COLUMNS)))
        """Sums of each bucket."""
        self.labels: dict[str, dict[str, Doubles]] = {}

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
        self.places += other.places
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
        return self.places.T.reshape(len(COLUMNS), len(POSITIONS), len(FROM_END), 2)
