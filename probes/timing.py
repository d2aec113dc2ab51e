# SPDX-License-Identifier: Apache-2.0
"""Time the phases of a step and what the probes themselves cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from isoexec.contracts import wire
from isoexec.probes.client import Client

__all__ = ["StepTimer"]


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
