# SPDX-License-Identifier: Apache-2.0
"""What follows from what was seen of a run: judge it, journal it, act on it, show it."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
import time
from collections.abc import Callable
from typing import Any

import structlog

from isoexec.contracts.halting import LeaseState, StateDirectory
from isoexec.contracts.verdict import Verdict, evaluate, guard_state, overall
from isoexec.contracts.window import Window
from isoexec.daemon.config import Config
from isoexec.daemon.halt import LeaseKeeper, escalate
from isoexec.daemon.journal import Journal
from isoexec.daemon.judge import claim_outcomes, lease_state, marker_of, run_outcome
from isoexec.daemon.metrics import Metrics
from isoexec.daemon.runs import Run
from isoexec.daemon.store import write_samples
from isoexec.daemon.verify import Findings
from isoexec.daemon.window import StepState

__all__ = ["Enforcer"]

_log = structlog.get_logger("isoexec.daemon")


class Enforcer:
    """Turns windows into verdicts and verdicts into leases, markers, journal rows and metrics; on the daemon's event loop.

    ``spawn`` runs a coroutine beside the loop's other work.
    """

    def __init__(
        self,
        config: Config,
        state: StateDirectory,
        journal: Journal,
        keeper: LeaseKeeper,
        metrics: Metrics,
        spawn: Callable[[Any], None],
    ) -> None:
        self._config = config
        self._state = state
        self._journal = journal
        self._keeper = keeper
        self._metrics = metrics
        self._spawn = spawn

    def judge_facts(self, run: Run) -> None:
        """Halt the moment a fact breaks: the next rollout must not begin on it. Weaker verdicts wait for the step's window."""
        if run.halted or run.session < 0:
            return
        window = run.facts()
        verdicts = evaluate(run.judge.rules, window, run.judge.history)
        if not any(verdict.outcome == "violation" and verdict.action == "halt" for verdict in verdicts):
            return
        self._journal_window(run, window, verdicts)
        self._act(run, window, verdicts)
        self._show(run, None, window, verdicts, {})

    def judge(self, run: Run, state: StepState | None, now: float) -> None:
        start = time.thread_time()
        window, findings = run.window(state, now)
        verdicts = run.judge.judge(window)
        key = self._journal_window(run, window, verdicts)
        self._act(run, window, verdicts)
        self._show(run, state, window, verdicts, run.dropped_of_window)
        self.show_regions(run, findings)
        self._metrics.add("evaluate_seconds", time.thread_time() - start)
        if state is not None:
            self._spawn(
                asyncio.to_thread(
                    write_samples,
                    self._state.run(run.name).path / "samples",
                    window.step,
                    key,
                    state.samples.arrays(),
                    keep=self._config.sample_windows,
                )
            )

    def _journal_window(self, run: Run, window: Window, verdicts: list[Verdict]) -> int:
        try:
            return self._journal.add_window(run.session, window, verdicts)
        except (sqlite3.Error, ValueError, TypeError) as error:
            # a full disk must not keep a broken run going: act first, shout here
            _log.critical("journal failed", run=run.name, error=str(error))
            return 0

    def _act(self, run: Run, window: Window, verdicts: list[Verdict]) -> None:
        worst = overall(verdicts)
        said = worst.message if worst is not None and worst.action != "none" else ""
        if run.halted:
            return
        if any(verdict.action == "halt" for verdict in verdicts):
            self._halt(run, window, verdicts)
            return
        state = lease_state(verdicts)
        rule = worst.rule if worst is not None and said else ""
        self._keeper.set(run.name, state, run.policy, step=window.step, rule=rule, cause=said)
        level = _log.info if state is LeaseState.OK else _log.warning
        level("window", run=run.name, step=window.step, state=state.name.lower(), rule=rule, message=said)

    def _halt(self, run: Run, window: Window, verdicts: list[Verdict]) -> None:
        marker = marker_of(window, verdicts)
        try:
            self._keeper.halt(marker, run.policy)  # marker, then lease
        except OSError as error:
            # a disk that is full must not keep a broken run going; what is lost is that the halt outlives a restart
            _log.critical("marker cannot be written", run=run.name, error=str(error))
            self._keeper.set(
                run.name, LeaseState.HALT, run.policy, step=marker.step, rule=marker.rule, cause=marker.cause
            )
        run.halted = True
        self._metrics.add("halts", 1.0, run=run.name)
        self._metrics.set("halted", 1.0, run=run.name)
        self._metrics.state("guard_state", "halt", run=run.name)
        self.record(run.name, window.step, "halt", dataclasses.asdict(marker))
        _log.critical("halt", run=run.name, step=window.step, rule=marker.rule, cause=marker.cause)
        if self._config.escalation.enabled:
            self._spawn(self._escalate(run, window.step))

    async def _escalate(self, run: Run, step: int) -> None:
        def record(stage: str, pids: list[int]) -> None:
            _log.warning("escalation", run=run.name, stage=stage, pids=pids)
            self.record(run.name, step, stage, {"pids": pids})

        await escalate(
            lambda: [p.handle for p in run.processes.values() if p.handle is not None],
            self._config.escalation,
            record,
        )

    def record(self, run: str, step: int, action: str, data: dict[str, Any]) -> None:
        try:
            self._journal.add_action(run, step, action, data)
        except (sqlite3.Error, ValueError, TypeError) as error:
            _log.critical("journal failed", run=run, error=str(error))

    def _show(
        self,
        run: Run,
        state: StepState | None,
        window: Window,
        verdicts: list[Verdict],
        dropped: dict[str, int],
    ) -> None:
        name, metrics = run.name, self._metrics
        for stats, total in state.stats() if state else ():
            metrics.pair(name, stats, total)
        for role, tokens in (state.unpaired if state else {}).items():
            metrics.add("tokens_unpaired", tokens, run=name, role=role)
        for role, messages in dropped.items():
            metrics.add("messages_dropped", messages, run=name, role=role)
        metrics.state("verdict", run_outcome((v.outcome, v.action) for v in verdicts), run=name)
        for verdict in verdicts:
            metrics.state("rule_outcome", verdict.outcome, run=name, rule=verdict.rule)
            if verdict.action != "none":
                metrics.add("decisions", 1.0, run=name, rule=verdict.rule, action=verdict.action)
        for claim, outcome in claim_outcomes(window).items():
            if window.between_steps and outcome != "violation":
                continue  # made to state what broke: it proves nothing of the rest
            metrics.state("claim", outcome, run=name, claim=claim)
        metrics.state("guard_state", "halt" if run.halted else guard_state(verdicts), run=name)
        metrics.set("last_verdict_timestamp_seconds", time.time(), run=name)

    def show_regions(self, run: Run, findings: Findings) -> None:
        if run.contract is None:
            return
        broken: dict[tuple[str, str], set[str]] = {}
        for one in findings.regions:
            broken.setdefault((one.role, one.region), set()).add(one.source)
        for role in ("engine", "trainer"):
            for region in run.contract.regions:
                count = len(broken.get((role, region), ()))
                self._metrics.set("region_breaks", count, run=run.name, role=role, region=region)
