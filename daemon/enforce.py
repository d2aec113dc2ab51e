# SPDX-License-Identifier: Apache-2.0
"""What follows from what was seen of a run: judge it, journal it, act on it, show it."""

from __future__ import annotations

import dataclasses
import sqlite3
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import structlog

from isoexec.contracts.halting import HaltMarker, LeaseState, StateDirectory
from isoexec.contracts.modes import Mode, ModeSetting, read_mode
from isoexec.contracts.verdict import Verdict, evaluate, guard_state, overall
from isoexec.contracts.window import Window
from isoexec.daemon.config import Config
from isoexec.daemon.evidence import EvidenceKeeper
from isoexec.daemon.halt import LeaseKeeper, StageReport, escalate
from isoexec.daemon.journal import Journal
from isoexec.daemon.judge import claim_outcomes, lease_state, marker_of, run_outcome
from isoexec.daemon.metrics import Metrics
from isoexec.daemon.runs import Run
from isoexec.daemon.verify import Findings
from isoexec.daemon.window import StepState

__all__ = ["Enforcer"]

_log = structlog.get_logger("isoexec.daemon")

_RETIRE_SECONDS = 60.0
_RETIRED_AT_ONCE = 500
_STAGES = ("cooperative", "terminate", "runtime", "kill")


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
        self._evidence = EvidenceKeeper(config, state, metrics)
        self._unmarked: dict[str, HaltMarker] = {}
        """Halts whose marker the disk refused; tried again until it takes them."""
        self._modes: dict[str, ModeSetting] = {}
        self._retire_at = 0.0
        self._degraded = False

    def mode(self, run: Run) -> Mode:
        """Give what verdicts may do to a run now; a change is journaled with who made it and why."""
        found = read_mode(self._state, run.name)
        known = self._modes.get(run.name)
        if known is None or known.mode is not found.mode:
            self._modes[run.name] = found
            self._metrics.state("halting", found.mode.value, run=run.name)
            if known is not None or found.mode is not Mode.ENFORCE:
                _log.critical("mode", run=run.name, mode=found.mode.value, by=found.by, reason=found.reason)
                data = {"mode": found.mode.value, "by": found.by, "reason": found.reason}
                self.record(run.name, run.last_step, "mode", data)
        return found.mode

    def tend(self, runs: Iterable[Run], now: float) -> None:
        """What is looked after every second: modes, markers and rows that the disk refused, old rows."""
        for run in runs:
            if run.session >= 0:
                self.mode(run)
        for name, marker in list(self._unmarked.items()):
            with suppress(OSError):
                marker.write(self._state.run(name).path)
                del self._unmarked[name]
                _log.warning("marker written after all", run=name)
        self._journal.drain()
        if now >= self._retire_at:
            config, before = self._config, time.time() - self._config.journal_days * 86400
            # down to what is allowed with some room, or each window would move another
            over = self._journal.size() > config.journal_bytes * (1.0 if self._retire_at >= 0 else 0.9)
            moved = self._journal.retire(
                before=time.time() if over else before,
                archive_bytes=config.journal_bytes,
                keep_archives=config.journal_archives,
                most=_RETIRED_AT_ONCE,
            )
            if not moved:
                self._journal.forget_lanes(before=before)
            self._retire_at = -1.0 if moved else now + _RETIRE_SECONDS
        self._note_journal()

    def _note_journal(self) -> None:
        journal, metrics = self._journal, self._metrics
        metrics.set("journal_degraded", float(journal.degraded))
        metrics.set("journal_rows_waiting", journal.waiting)
        for name, count in (("journal_errors", journal.errors), ("journal_rows_lost", journal.lost)):
            metrics.add(name, count - (metrics.get(name) or 0.0))
        if journal.degraded and not self._degraded:
            _log.critical("journal degraded: what is judged is held in memory", error=journal.last_error)
        elif self._degraded and not journal.degraded:
            _log.warning("journal written again", lost=journal.lost)
        self._degraded = journal.degraded

    def judge_facts(self, run: Run) -> None:
        """Halt the moment a fact breaks: the next rollout must not begin on it. Weaker verdicts wait for the step's window."""
        if run.halted or run.session < 0:
            return
        window = run.facts()
        verdicts = evaluate(run.judge.rules, window, run.judge.history)
        if not any(verdict.outcome == "violation" and verdict.action == "halt" for verdict in verdicts):
            return
        key = self._journal_window(run, window, verdicts)
        self._act(run, window, verdicts)
        self._keep_evidence(run, None, window, verdicts, key)
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
        self._keep_evidence(run, state, window, verdicts, key)

    def _keep_evidence(
        self, run: Run, state: StepState | None, window: Window, verdicts: list[Verdict], key: int
    ) -> None:
        arrays = state.samples.arrays() if state is not None else {}
        bundled = self._evidence.wanted(run.name, run.session, verdicts)
        if not arrays and not bundled:
            return
        versions = {source: dict(one.hello.versions) for source, one in run.processes.items()}
        self._spawn(
            self._evidence.keep(window, verdicts, key, arrays, versions, bundled=bundled, time=time.time())
        )

    def _journal_window(self, run: Run, window: Window, verdicts: list[Verdict]) -> int:
        lanes = run.accounts.settle(run.builder.closed) if run.accounts is not None else []
        try:
            key = self._journal.add_window(run.session, window, verdicts, lanes)
            self._note_journal()
            if run.accounts is not None and not self._journal.degraded:
                run.accounts.kept()
            return key
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
            mode = self.mode(run)
            if mode is Mode.ENFORCE:
                self._halt(run, window, verdicts)
                return
            verdicts = [_withheld(verdict, mode) for verdict in verdicts]
            self.record(run.name, window.step, "halt_withheld", {"mode": mode.value, "message": said})
            _log.critical("halt withheld", run=run.name, step=window.step, mode=mode.value, message=said)
        state = lease_state(verdicts)
        rule = worst.rule if worst is not None and said else ""
        if self._journal.degraded and state is LeaseState.OK:
            state, rule = LeaseState.WARN, "journal"
            said = f"the journal cannot be written: {self._journal.last_error}"
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
            self._unmarked[run.name] = marker
            self._keeper.set(
                run.name, LeaseState.HALT, run.policy, step=marker.step, rule=marker.rule, cause=marker.cause
            )
        run.halted = True
        self._metrics.add("halts", 1.0, run=run.name)
        self._metrics.set("halted", 1.0, run=run.name)
        self._metrics.state("guard_state", "halt", run=run.name)
        self.record(run.name, window.step, "halt", dataclasses.asdict(marker))
        _log.critical("halt", run=run.name, step=window.step, rule=marker.rule, cause=marker.cause)
        self.escalate(run, window.step)

    def escalate(self, run: Run, step: int) -> None:
        """See a halt through, beside everything else: time how the run stops, and go on to stronger means where allowed."""
        self._spawn(self._escalate(run, step))

    async def _escalate(self, run: Run, step: int) -> None:
        name, metrics = run.name, self._metrics
        metrics.add("halt_stages", 1.0, run=name, stage="cooperative")

        def record(report: StageReport) -> None:
            _log.warning("escalation", run=name, **dataclasses.asdict(report))
            self.record(name, step, report.stage, dataclasses.asdict(report))
            if name not in self._modes:
                return  # no longer exported
            metrics.add("halt_stage_seconds", report.before_seconds, run=name, stage=report.before)
            if report.stage in _STAGES:
                metrics.add("halt_stages", 1.0, run=name, stage=report.stage)

        directory = self._state.run(name)

        def stands() -> bool:
            there = name in self._unmarked or directory.marker.exists()
            return there and read_mode(self._state, name).mode is not Mode.OFF

        # handles of its own: those of the run are closed as its session ends
        handles = [one.handle.again() for one in run.processes.values() if one.handle is not None]
        runtimes = [one for one in self._config.escalation.runtimes if one.serves(name)]
        try:
            await escalate(handles, self._config.escalation, record, runtimes=runtimes, stands=stands)
        finally:
            for handle in handles:
                handle.close()

    def record(self, run: str, step: int, action: str, data: dict[str, Any]) -> None:
        try:
            self._journal.add_action(run, step, action, data)
            self._note_journal()
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
        if state is not None:
            for stats in window.pairs:
                metrics.pair(name, stats, state.sum_abs(stats.pair), run.place)
            for (role, reason), tokens in state.unpaired.items():
                metrics.add("tokens_unpaired", tokens, run=name, role=role, reason=reason)
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


def _withheld(verdict: Verdict, mode: Mode) -> Verdict:
    if verdict.action != "halt":
        return verdict
    return dataclasses.replace(verdict, action="warn" if mode is Mode.WARN else "dryrun")
