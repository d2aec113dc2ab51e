# SPDX-License-Identifier: Apache-2.0
"""Time the phases of a step and what the probes themselves cost."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from isoexec.contracts import wire
from isoexec.contracts.errors import IsoExecError
from isoexec.probes.client import Client

__all__ = ["StepTimer", "VerifyPeriod"]

_SECONDS = 60.0


class VerifyPeriod:
    """When a process looks again at what it runs, between weight syncs: every ``ISOEXEC_VERIFY_SECONDS`` (60), 0 at each step.

    Raises IsoExecError for a period that is no number of seconds: a run that is not looked at must not pass for one that is.
    """

    def __init__(self, seconds: float | None = None) -> None:
        if seconds is None:
            text = os.environ.get("ISOEXEC_VERIFY_SECONDS", "") or str(_SECONDS)
            try:
                seconds = float(text)
            except ValueError:
                seconds = math.nan
        if not 0.0 <= seconds < math.inf:
            raise IsoExecError(
                f"ISOEXEC_VERIFY_SECONDS: wanted seconds, 0 or more, found {os.environ.get('ISOEXEC_VERIFY_SECONDS')!r}; "
                f"unset it for {_SECONDS:g}"
            )
        self.seconds = seconds
        self._last = time.monotonic()

    @property
    def due(self) -> bool:
        return time.monotonic() - self._last >= self.seconds

    def done(self) -> None:
        """A verification was made, for whatever reason."""
        self._last = time.monotonic()


class StepTimer:
    """Seconds per phase (generation, score, train, sync, probe) of one step, and of the whole step."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def seconds(self) -> dict[str, float]:
        return {**self._seconds, "step": time.perf_counter() - self._start}

    def send(
        self, client: Client, *, step: int, weight_version: int, values: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Queue the step's times and values (loss, reward, ...) and return the times."""
        seconds = self.seconds
        client.send(
            wire.Step, step=step, weight_version=weight_version, seconds=seconds, values=dict(values or {})
        )
        return seconds
