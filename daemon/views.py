# SPDX-License-Identifier: Apache-2.0
"""What is told of a run, read from the journal and the markers, so that it is the same with the daemon dead."""

from __future__ import annotations

import dataclasses
from typing import Any

from isoexec.contracts.halting import HaltMarker, StateDirectory
from isoexec.daemon.journal import Journal
from isoexec.daemon.judge import run_outcome

__all__ = ["run_summary", "run_view", "runs_view"]


def run_summary(state: StateDirectory, journal: Journal, row: dict[str, Any]) -> dict[str, Any]:
    """One run in a few lines: what it is, its last window, whether it is halted."""
    run = row["run"]
    last = journal.windows(run, limit=1)
    window = last[0]["window"] if last else None
    verdicts = journal.last_verdicts(run)
    marker = HaltMarker.read(state.run(run).path)
    pairs = [pair for pair in window["pairs"] if pair["tokens"]] if window else []
    return {
        "run": run,
        "regime": row["regime"],
        "monitor_only": row["monitor_only"],
        "policy": row["policy"],
        "started": row["started"],
        "ended": row["ended"],
        "halted": marker is not None,
        "marker": dataclasses.asdict(marker) if marker else None,
        "outcome": run_outcome((verdict["outcome"], verdict["action"]) for verdict in verdicts),
        "step": window["step"] if window else None,
        "weight_version": window["weight_version"] if window else None,
        "last_window": last[0]["time"] if last else None,
        "pairs": [
            {
                "pair": ":".join(pair["pair"]),
                "tokens": pair["tokens"],
                "bitwise_equal": pair["bitwise_equal"],
                "mean_abs_d": pair["mean_abs_d"],
                "max_abs_d": pair["max_abs_d"],
            }
            for pair in pairs
        ],
        "failing": [
            {key: verdict[key] for key in ("rule", "outcome", "action", "cause", "message", "runbook")}
            for verdict in sorted(verdicts, key=lambda verdict: bool(verdict["outcome"] != "violation"))
            if verdict["outcome"] != "pass"
            and (verdict["outcome"], verdict["action"]) != ("unknown", "dryrun")
        ],
    }


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
