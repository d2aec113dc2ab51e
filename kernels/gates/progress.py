# SPDX-License-Identifier: Apache-2.0
"""The progress bar of a run of gates: a bar on a terminal, a line a check elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from isoexec.contracts.evidence import Check
    from isoexec.kernels.gates.running import Job

__all__ = ["Progress"]


class Progress:
    """Counts checks; `said` is what `run_gates` tells."""

    def __init__(self, total: int) -> None:
        self.console = Console(soft_wrap=True, highlight=False)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(file=sys.stderr),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("", total=total)

    def said(self, job: Job, check: Check | None, kept: bool) -> None:
        """A check begins (`check` None), or has ended."""
        del kept
        if check is None:
            self._bar.update(self._task, description=job.label)
        else:
            self._bar.advance(self._task)

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, markup=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
