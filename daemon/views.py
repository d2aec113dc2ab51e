# SPDX-License-Identifier: Apache-2.0
"""What is told of a run, read from the journal and the markers, so that it is the same with the daemon dead."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from isoexec.contracts.detail import BREAKDOWNS
from isoexec.contracts.halting import HaltMarker, StateDirectory
from isoexec.contracts.modes import Mode, ModeSetting, read_mode
from isoexec.contracts.rules import Rule
from isoexec.contracts.shards import HALTED_LIMIT
from isoexec.contracts.window import PairStats, Window
from isoexec.daemon.journal import Journal
from isoexec.daemon.judge import run_outcome

__all__ = ["halted_runs", "run_summary", "run_view", "runs_view"]

_SHOWN = 500
"""Characters of why a run is halted that other shards are told."""


def halted_runs(state: StateDirectory) -> dict[str, str]:
    """Give the runs that a marker keeps from starting, the newest `HALTED_LIMIT`, with why in words."""
    written: dict[str, float] = {}
    for name in state.runs():
        with suppress(OSError):
            written[name] = state.run(name).marker.stat().st_mtime
    newest = sorted(written, key=lambda name: -written[name])[:HALTED_LIMIT]
    found = {name: HaltMarker.read(state.run(name).path) for name in newest}
    return {
        name: f"at step {one.step} by {one.rule}: {one.cause}"[:_SHOWN]
        for name, one in found.items()
        if one is not None
    }


def run_summary(state: StateDirectory, journal: Journal, row: dict[str, Any]) -> dict[str, Any]:
    """One run in a few lines: what it is, its last window, whether it is halted."""
    run = row["run"]
    last = journal.windows(run, limit=1)
    window = last[0]["window"] if last else None
    verdicts = journal.last_verdicts(run)
    marker = HaltMarker.read(state.run(run).path)
    pairs = [pair for pair in Window.from_dict(window).pairs if pair.tokens] if window else []
    mode = read_mode(state, run)
    rules = [rule for rule in journal.rules(row["session"]) if rule.applies_to(row["regime"])]
    return {
        "run": run,
        "regime": row["regime"],
        "monitor_only": row["monitor_only"],
        "policy": row["policy"],
        "started": row["started"],
        "ended": row["ended"],
        "mode": {"mode": mode.mode.value, "by": mode.by, "reason": mode.reason, "time": mode.time},
        "rules": _rule_modes(rules, mode, monitor_only=row["monitor_only"]),
        "halted": marker is not None,
        "marker": dataclasses.asdict(marker) if marker else None,
        "outcome": run_outcome((verdict["outcome"], verdict["action"]) for verdict in verdicts),
        "step": window["step"] if window else None,
        "weight_version": window["weight_version"] if window else None,
        "last_window": last[0]["time"] if last else None,
        "pairs": [
            {
                "pair": pair.label,
                "tokens": pair.tokens,
                "bitwise_equal": pair.bitwise_equal,
                "mean_abs_d": _json(pair.mean_abs_d),
                "max_abs_d": _json(pair.max_abs_d),
                "worst": _worst(pair),
            }
            for pair in pairs
        ],
        "unpaired": window.get("unpaired", []) if window else [],
        "failing": [
            {key: verdict[key] for key in ("rule", "outcome", "action", "cause", "message", "runbook")}
            for verdict in sorted(verdicts, key=lambda verdict: bool(verdict["outcome"] != "violation"))
            if verdict["outcome"] != "pass"
            and (verdict["outcome"], verdict["action"]) != ("unknown", "dryrun")
        ],
    }


def _json(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def _worst(pair: PairStats) -> list[dict[str, Any]]:
    """The worst bucket of each breakdown of a pair that differs, with mean abs d there and elsewhere, in nats."""
    detail = pair.detail
    if detail is None:
        return []
    found = [
        bucket for by in BREAKDOWNS if (bucket := detail.worst(by)) is not None and bucket.mean_abs_d > 0
    ]
    return [
        {
            "by": bucket.by,
            "label": bucket.label,
            "tokens": bucket.tokens,
            "unequal": bucket.unequal,
            "mean_abs_d": _json(bucket.mean_abs_d),
            "elsewhere": _json(detail.elsewhere(bucket)),
        }
        for bucket in found
    ]


def _rule_modes(rules: Iterable[Rule], mode: ModeSetting, *, monitor_only: bool) -> list[dict[str, Any]]:
    """What each rule may do now, `mode`, beside the action it declares, and what lowered it: monitor only, or the run's mode."""
    found = []
    for rule in rules:
        action = "warn" if monitor_only and rule.action == "halt" else rule.action
        # a mode bounds halts; in `off` no guard looks at what any rule says
        most = {Mode.WARN: "warn", Mode.DRYRUN: "dryrun"}.get(mode.mode, action)
        now = "off" if mode.mode is Mode.OFF else most if action == "halt" else action
        lowered = f"mode {mode.mode}" if now != action else "monitor only" if action != rule.action else ""
        found.append({"rule": rule.name, "action": rule.action, "mode": now, "lowered_by": lowered})
    return found


def runs_view(state: StateDirectory, journal: Journal) -> list[dict[str, Any]]:
    """Every run ever watched, newest first, with those that have but a marker."""
    rows = [run_summary(state, journal, row) for row in journal.runs()]
    known = {row["run"] for row in rows}
    for run in state.runs():
        marker = HaltMarker.read(state.run(run).path) if run not in known else None
        if marker is not None:
            rows.append(
                {"run": run, "halted": True, "marker": dataclasses.asdict(marker), "outcome": "unknown"}
            )
    return rows


def run_view(state: StateDirectory, journal: Journal, run: str) -> dict[str, Any] | None:
    """Everything of one run but its windows; None for a run that was never watched."""
    row = next((row for row in journal.runs() if row["run"] == run), None)
    if row is None:
        return None
    return {
        **run_summary(state, journal, row),
        "contract": row.get("contract"),
        "identities": row.get("identities"),
        "processes": journal.processes(row["session"]),
        "verdicts": journal.last_verdicts(run),
        "actions": journal.actions(run),
        "attestations": journal.attestations(run, limit=16),
        "steps": journal.steps(run, limit=100),
    }
