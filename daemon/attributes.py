# SPDX-License-Identifier: Apache-2.0
"""What senders say of sequences beside their logprobs: found again by content when a sequence pairs, told as labels.

The numbers of `wire.ATTRIBUTES` are kept by case and digest until the window of their step is made. A sequence that was
reported twice with other numbers is not known to be either.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from isoexec.contracts.wire import ATTRIBUTES, Logprobs

__all__ = ["UNKNOWN", "Attributes", "labels_of"]

Ints = npt.NDArray[np.int32]

UNKNOWN = "unknown"
_LIMIT = 1 << 18
"""Sequences of one case of which numbers are kept; those of later ones are not known."""
_NOTHING = (-1,) * len(ATTRIBUTES)
# attribute -> first number of each label: a small set, whatever is sent
_LABELS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "prefix_hit": ((0, 1), ("miss", "hit")),
    "pack_index": ((0, 1, 2, 4, 8), ("0", "1", "2-3", "4-7", "8+")),
    "padding": ((0, 1), ("none", "padded")),
}


class Attributes:
    """The numbers of the sequences of one run that wait or were just paired."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[bytes, tuple[int, tuple[int, ...]]]] = {}

    def note(self, message: Logprobs) -> None:
        """Keep what a message says; one that says nothing costs nothing."""
        columns = [getattr(message, name) for name in ATTRIBUTES]
        if all(column is None for column in columns):
            return
        rows = self._rows.setdefault(message.case, {})
        blank = [-1] * len(message.lengths)
        numbers = zip(*(blank if column is None else column.tolist() for column in columns), strict=True)
        digests, step = message.digests.tobytes(), message.step
        for index, row in enumerate(numbers):
            digest = digests[16 * index : 16 * index + 16]
            known = rows.get(digest)
            if known is None:
                if len(rows) < _LIMIT:
                    rows[digest] = step, row
            elif known[1] != row:
                rows[digest] = step, tuple(a if a == b else -1 for a, b in zip(known[1], row, strict=True))

    def of(self, pair: tuple[str, str], digests: Sequence[bytes]) -> dict[str, Ints]:
        """Give, for each attribute of which something is known, int32 [digests]; -1 where it is not.

        Where both cases of a pair say something, the first one's word is taken.
        """
        sides = [self._rows[case] for case in pair if self._rows.get(case)]
        found: Ints | None = None
        nothing = -1, _NOTHING
        for rows in sides:
            mine = np.asarray([rows.get(digest, nothing)[1] for digest in digests], np.int32)
            found = mine if found is None else np.where(found >= 0, found, mine)
        if found is None or not found.size:
            return {}
        columns = zip(ATTRIBUTES, found.T, strict=True)
        return {name: column for name, column in columns if int(column.max()) >= 0}

    def forget(self, step: int) -> None:
        """Let go of what was said of `step` and the steps before it."""
        for case, rows in self._rows.items():
            self._rows[case] = {key: row for key, row in rows.items() if not 0 <= row[0] <= step}


def labels_of(attributes: Mapping[str, Ints]) -> dict[str, list[str]]:
    """Give the label of each sequence for each attribute: of a small set, `UNKNOWN` where the number is -1."""
    found: dict[str, list[str]] = {}
    for name, column in attributes.items():
        firsts, labels = _LABELS[name]
        by_place = (UNKNOWN, *labels)
        found[name] = [by_place[bisect_right(firsts, number)] for number in column.tolist()]
    return found
