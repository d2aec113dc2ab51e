# SPDX-License-Identifier: Apache-2.0
"""Holds the rows that the journal's disk refused, in order and bounded, until it takes them again.

What decides something goes last: when there is no room left, steps and attestations are given up before windows, their
verdicts and actions, the oldest first. What is given up is counted, never silent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Backlog", "Entry"]

_ENTRY_BYTES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Rows that are written together or not at all: (statement, values), and whether they decide something."""

    rows: tuple[tuple[str, tuple[Any, ...]], ...]
    decides: bool

    @property
    def size(self) -> int:
        """Bytes held, about: characters of texts and a fixed part a row."""
        texts = (value for _, values in self.rows for value in values if isinstance(value, str))
        return sum(map(len, texts)) + _ENTRY_BYTES * len(self.rows)


class Backlog:
    """Entries in the order in which they came; `lost` counts the rows that were given up."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held: deque[Entry] = deque()
        self.bytes = 0
        self.lost = 0

    def __len__(self) -> int:
        return sum(len(entry.rows) for entry in self._held)

    def add(self, entry: Entry) -> None:
        self._held.append(entry)
        self.bytes += entry.size
        if self.bytes > self._limit:
            self._shrink()

    def first(self, most_bytes: int) -> list[Entry]:
        """Give the oldest entries, one at least, up to so many bytes; they stay held until `drop`."""
        found: list[Entry] = []
        size = 0
        for entry in self._held:
            size += entry.size
            if found and size > most_bytes:
                break
            found.append(entry)
        return found

    def drop(self, entries: Iterable[Entry]) -> None:
        """Let go of entries that `first` gave, once they are on disk."""
        for _ in entries:
            self.bytes -= self._held.popleft().size

    def _shrink(self) -> None:
        # to three quarters, so that a full backlog is not gone through at every row
        goal = self._limit * 3 // 4
        for decides in (False, True):
            kept: deque[Entry] = deque()
            for entry in self._held:
                if self.bytes > goal and entry.decides is decides:
                    self.bytes -= entry.size
                    self.lost += len(entry.rows)
                else:
                    kept.append(entry)
            self._held = kept
            if self.bytes <= goal:
                return
