# SPDX-License-Identifier: Apache-2.0
"""What a run of the demo leaves behind: a table, a plot, the numbers as JSON, the journal and the last scrape."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from isoexec.probes.client import ProbeSettings

__all__ = ["Mismatch", "PhaseResult", "StepRecord", "mismatch_of", "plot", "table", "write"]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of the job; seconds by phase, the probes' own among them (0 where they were off).

    ``tokens`` were sampled, ``scored`` sequences scored before the update; ``skip`` is why a skip that was allowed scored all.
    """

    step: int
    watched: bool
    reward: float
    loss: float
    grad_norm: float
    seconds: Mapping[str, float]
    tokens: int = 0
    scored: int = 0
    skip: str | None = None


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Rollout against trainer over a phase, added up from the daemon's windows; d in nats."""

    tokens: int = 0
    bitwise_equal: int = 0
    mean_abs_d: float = math.nan
    max_abs_d: float = math.nan
    k1: float = math.nan
    k3: float = math.nan

    @property
    def share(self) -> float:
        return self.bitwise_equal / self.tokens if self.tokens else math.nan


@dataclass(kw_only=True)
class PhaseResult:
    """What a phase did and what the daemon said of it."""

    name: str
    layout: str
    steps: list[StepRecord] = field(default_factory=list)
    windows: list[dict[str, Any]] = field(default_factory=list)
    verdict: str = "unknown"
    cause: str = ""
    lines: list[str] = field(default_factory=list)
    settings: ProbeSettings | None = None  # of a run that ended halted

    @property
    def mismatch(self) -> Mismatch:
        return mismatch_of(self.windows)

    def seconds(self, *, watched: bool | None = None) -> float:
        """Median seconds of a step, the first one left out: it pays for warming up."""
        chosen = [s for s in self.steps[1:] if watched is None or s.watched == watched]
        return median(s.seconds["step"] for s in chosen) if chosen else math.nan


def mismatch_of(windows: Sequence[Mapping[str, Any]]) -> Mismatch:
    """Add up the pair (engine_decode, trainer_score) over windows, means weighted by tokens."""
    pairs = [
        p
        for w in windows
        for p in w["pairs"]
        if list(p["pair"]) == ["engine_decode", "trainer_score"] and p["tokens"]
    ]
    tokens = sum(p["tokens"] for p in pairs)
    if not tokens:
        return Mismatch()

    def weighted(name: str) -> float:
        return sum(float(p[name]) * p["tokens"] for p in pairs) / tokens

    return Mismatch(
        tokens=tokens,
        bitwise_equal=sum(p["bitwise_equal"] for p in pairs),
        mean_abs_d=weighted("mean_abs_d"),
        max_abs_d=max(float(p["max_abs_d"]) for p in pairs),
        k1=weighted("k1"),
        k3=weighted("k3"),
    )


def _number(value: float, form: str) -> str:
    if math.isnan(value):
        return "-"
    return "0" if value == 0 else format(value, form)


def table(phases: Sequence[PhaseResult], native_seconds: float) -> Table:
    """One row a phase; ``native_seconds`` is the unwatched native step that the last time column is measured against."""
    out = Table(
        title="IsoExec demo",
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("phase", "engine x trainer"):
        out.add_column(heading, no_wrap=True)
    for heading in ("tokens", "bitwise", "mean |d|", "max |d|", "KL k3", "reward", "step s", "x native"):
        out.add_column(heading, justify="right", no_wrap=True)
    out.add_column("verdict", no_wrap=True)
    for phase in phases:
        m = phase.mismatch
        rewards = [s.reward for s in phase.steps]
        seconds = phase.seconds()
        out.add_row(
            phase.name,
            phase.layout,
            f"{m.tokens:,}",
            "1" if m.share == 1 else _number(m.share, ".4f"),
            _number(m.mean_abs_d, ".2e"),
            _number(m.max_abs_d, ".2e"),
            _number(m.k3, ".2e"),
            f"{rewards[0]:.2f}>{rewards[-1]:.2f}" if rewards else "-",
            _number(seconds, ".2f"),
            _number(seconds / native_seconds if native_seconds else math.nan, ".2f"),
            phase.verdict,
        )
    return out


def plot(phases: Sequence[PhaseResult], path: Path) -> None:
    """Bitwise share, mean |d| and reward by step, one after the other over the phases."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(9, 7.5), sharex=True, layout="constrained")
    at = 0
    for phase in phases:
        seen = [(int(w["step"]), mismatch_of([w])) for w in phase.windows]
        x = [at + step for step, m in seen if m.tokens]
        rows = [m for _, m in seen if m.tokens]
        axes[0].plot(x, [m.share for m in rows], "o-", ms=3, label=phase.name)
        # a logarithmic axis has no zero: exact equality is drawn at the bottom, and says so
        axes[1].plot(x, [max(m.mean_abs_d, 1e-10) for m in rows], "o-", ms=3)
        axes[2].plot([at + s.step for s in phase.steps], [s.reward for s in phase.steps], "o-", ms=3)
        at += max([s.step for s in phase.steps] + [step for step, _ in seen], default=0) + 2
    axes[0].set_ylabel("bitwise equal share")
    axes[0].set_ylim(-0.05, 1.05)
    axes[0].legend(loc="center right", fontsize=8)
    axes[1].set_ylabel("mean |d|, nats (0 drawn at 1e-10)")
    axes[1].set_yscale("log")
    axes[1].set_ylim(3e-11, 1.0)
    axes[2].set_ylabel("reward")
    axes[2].set_xlabel("step, phase after phase")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write(folder: Path, phases: Sequence[PhaseResult], *, journal: Path | None, metrics: str) -> None:
    """Write report.json, plot.png, journal.sqlite and metrics.txt into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    report = []
    for phase in phases:
        shown = {f.name: getattr(phase, f.name) for f in fields(phase) if f.name != "settings"}
        shown["steps"] = [asdict(s) for s in phase.steps]
        report.append({**shown, "mismatch": {**asdict(phase.mismatch), "share": phase.mismatch.share}})
    (folder / "report.json").write_text(json.dumps(report, indent=1, default=str) + "\n")
    (folder / "metrics.txt").write_text(metrics)
    plot(phases, folder / "plot.png")
    if journal is not None and journal.exists():
        target = folder / "journal.sqlite"
        target.unlink(missing_ok=True)
        # what is committed may still lie in the write-ahead log: a copy of the file alone would lack it
        with closing(sqlite3.connect(journal)) as source, closing(sqlite3.connect(target)) as copy:
            source.backup(copy)
