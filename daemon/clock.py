# SPDX-License-Identifier: Apache-2.0
"""The clock by which steps settle: it leaves out what the daemon itself was late by.

A step is judged some seconds after it ended, so that what is on its way can come. Seconds in which the daemon was stopped, or
did not get to what had come already, are none that the job had.
"""

from __future__ import annotations

__all__ = ["FairClock"]

_TICK_SECONDS = 1.0
"""A turn of the loop that took longer was the machine's, or a debugger's."""
_PACE = 0.1
"""How fast it goes while the daemon is behind: it never stands, or a daemon that is always behind would never judge."""


class FairClock:
    """`late` is what to take off monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._at = now
        self._waiting = 0
        self._done = 0
        self.late = 0.0

    def tick(self, now: float, *, waiting: int, done: int) -> None:
        """Say how many messages wait now, and how many were ever taken: what waited at the last tick and still does is late."""
        passed = now - self._at
        self.late += max(passed - _TICK_SECONDS, 0.0)
        if done - self._done < self._waiting:
            self.late += (1.0 - _PACE) * min(passed, _TICK_SECONDS)
        self._at, self._waiting, self._done = now, waiting, done
