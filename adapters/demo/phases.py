# SPDX-License-Identifier: Apache-2.0
"""The demo's phases: watch a native job, put the contract under it, then break one of its promises."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isoexec.adapters.demo.faults import Fault, edited_contract
from isoexec.adapters.demo.job import Halted, Job, Layout
from isoexec.adapters.demo.processes import RemoteError
from isoexec.adapters.demo.report import PhaseResult
from isoexec.adapters.demo.services import Daemon, Prometheus, ServiceError, get_json
from isoexec.contracts.errors import HaltedError, HandshakeError, IsoExecError
from isoexec.contracts.halting import HaltMarker
from isoexec.probes.client import Client, ProbeSettings
from isoexec.probes.guard import Guard

__all__ = ["Stage", "clear_run", "fault_phase", "plain_phase"]

_FAULTY_TEMPERATURE = 0.7
_MARKER_SECONDS = 30.0


@dataclass(kw_only=True)
class Stage:
    """What all phases share.  ``tick(name, done, of)`` is called after each step."""

    daemon: Daemon
    prometheus: Prometheus | None
    model: Path
    work: Path
    contract: Path
    tick: Callable[[str, int, int], None]
    lr: float = 1.5e-3

    def windows(self, run: str) -> list[dict[str, Any]]:
        """The windows the daemon judged of a run, oldest first."""
        rows = get_json(f"{self.daemon.url}/api/v1/runs/{run}/windows")["windows"]
        return [row["window"] for row in rows]

    def wait_windows(self, run: str, count: int, seconds: float = 15.0) -> list[dict[str, Any]]:
        """Wait until the daemon has judged ``count`` windows; gives what there is when the time is up."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and len(self.windows(run)) < count:
            time.sleep(0.1)
        return self.windows(run)

    def marker(self, run: str) -> HaltMarker | None:
        return HaltMarker.read(self.daemon.state.run(run).path)

    def job(self, run: str, layout: Layout, **more: Any) -> Job:
        return Job(
            run=run,
            layout=layout,
            model=self.model,
            work=self.work,
            state_dir=self.daemon.state.path,
            lr=self.lr,
            **more,
        )


def plain_phase(
    stage: Stage, name: str, layout: Layout, *, steps: int, contract: Path | None, regime: str
) -> PhaseResult:
    """Run a job for ``steps`` watched steps; a native job makes as many unwatched ones in between, to price the watching."""
    result = PhaseResult(name=name, layout=str(layout))
    run = f"demo-{name}"
    native = contract is None
    total = 2 * steps if native else steps
    with stage.job(run, layout, contract=contract, regime=regime) as job:
        try:
            for step in range(total):
                result.steps.append(job.step(step, watched=not native or step % 2 == 0))
                stage.tick(name, step + 1, total)
        except Halted as halted:
            result.lines.append(f"halted at step {halted.step}: {halted.text}")
        result.windows = stage.wait_windows(run, steps)
    marker = stage.marker(run)
    result.verdict, result.cause = outcome_of(stage, run, marker)
    return result


def outcome_of(stage: Stage, run: str, marker: HaltMarker | None) -> tuple[str, str]:
    """The run's verdict and cause: the marker's where there is one, else the daemon's last."""
    if marker is not None:
        return marker.verdict, _cause(marker)
    said = stage.daemon.run(run)
    first = next((v for v in said["failing"] if v["outcome"] == said["outcome"]), None)
    return str(said["outcome"]), str(first["message"]) if first else ""


def _cause(marker: HaltMarker) -> str:
    return marker.cause if marker.cause.startswith(marker.rule) else f"{marker.rule}: {marker.cause}"


def fault_phase(stage: Stage, fault: Fault, layout: Layout, *, steps: int, regime: str) -> PhaseResult:
    """Run a healthy job under the contract, plant the fault after half of the steps, and show how it ends.

    The updates of weights after the verdict are counted, and a restart is tried while the marker lies there.
    Raises IsoExecError when the fault ends in another verdict than its own: the demo does not pass over that.
    """
    result = PhaseResult(name=f"fault {fault.name}", layout=str(layout))
    run = f"demo-fault-{fault.name}"
    folder = stage.work / run
    folder.mkdir(parents=True, exist_ok=True)
    contract = stage.contract
    if fault.name == "topology":
        contract = edited_contract(
            contract, folder / "contract.yaml", {"claims.topology.trainer.TP": {"pinned": layout.trainer_tp}}
        )
    if fault.name == "kept-cache" and not layout.gpu:
        # on a GPU the engine has a prefix cache of itself
        layout = replace(layout, engine={**layout.engine, "enable_prefix_caching": True, "block_size": 32})
    engine_contract = None
    if fault.name == "digest":
        engine_contract = edited_contract(
            contract,
            folder / "engine-contract.yaml",
            {"claims.state.state=prefix_cache.invalidated_by": ["engine_restart"]},
        )
    policy = "fail_closed" if fault.name == "daemon-killed" else "fail_open"
    settings = ProbeSettings(run=run, state_dir=stage.daemon.state.path, regime=regime, policy=policy)
    job = stage.job(
        run, layout, contract=contract, engine_contract=engine_contract, regime=regime, policy=policy
    )
    try:
        with job:
            _run_until_halted(stage, job, fault, result, steps)
            _alert_line(stage, fault, result)
    except RemoteError as error:
        if error.kind != HandshakeError.__name__:
            raise
        result.lines.append(f"refused before a token was sampled: {error.text}")
        _alert_line(stage, fault, result)
    marker = _await_marker(stage, run)
    result.verdict, result.cause = marker.verdict, _cause(marker)
    for fact in marker.evidence.get("first", [])[:1]:
        result.lines.append("evidence: " + ", ".join(f"{k} {v}" for k, v in fact.items() if v is not None))
    after = sum(start > marker.time for start in job.update_starts)
    result.lines.append(f"updates after the verdict: {after}")
    result.lines.append(f"checkpoint before the halt: {len(job.checkpoints())} files")
    if fault.name == "daemon-killed":
        stage.daemon.restart()
    result.windows = stage.windows(run)
    result.settings = settings
    result.lines.append(f"restart before `isoexec clear`: {_restart(settings)}")
    if marker.rule not in fault.rules or marker.verdict != fault.outcome or after:
        raise IsoExecError(
            f"fault {fault.name}: wanted {fault.outcome} by {' or '.join(fault.rules)} and no update after it, found "
            f"{marker.verdict} by {marker.rule} ({marker.cause}) and {after} updates"
        )
    return result


def _alert_line(stage: Stage, fault: Fault, result: PhaseResult) -> None:
    if stage.prometheus is not None:
        # the alert on a dead daemon waits for a minute, so as not to page for a restart: the demo does not
        patience = 4.0 if fault.name == "daemon-killed" else 20.0
        result.lines.append(
            f"Prometheus: {fault.alert} is {stage.prometheus.wait_alert(fault.alert, patience)}"
        )


def _run_until_halted(stage: Stage, job: Job, fault: Fault, result: PhaseResult, steps: int) -> None:
    at = steps // 2
    # a silent probe is found by its age, a dead daemon by its lease: these go on until the guard ends them
    patience = steps + 40
    try:
        for step in range(patience):
            planted = step == at
            temperature = 1.0
            load = True
            before_sync: Callable[[], object] | None = None
            if planted:
                result.lines.append(f"step {step}: {fault.what}")
            if step >= at and fault.name == "temperature":
                temperature = _FAULTY_TEMPERATURE
            elif planted and fault.name == "topology":
                before_sync = lambda: [t.call("rebuild_groups") for t in job.trainers]  # noqa: E731
            elif planted and fault.name in ("kernel", "one-rank"):
                rank = job.layout.engine_tp - 1 if fault.name == "one-rank" else None
                before_sync = lambda rank=rank: job.engine.call("replace_norm", rank)  # noqa: E731
            elif planted and fault.name == "kept-cache":
                job.engine.call("keep_cache")
            elif planted and fault.name == "stale-weights":
                load = False
            elif planted and fault.name == "silence":
                job.engine.call("silence")
            elif planted and fault.name == "daemon-killed":
                stage.daemon.kill()
            result.steps.append(
                job.step(
                    step,
                    temperature=temperature,
                    before_sync=before_sync,
                    load=load,
                    rescore=0 if temperature != 1.0 else 8,
                )
            )
            stage.tick(result.name, min(step + 1, steps), steps)
    except Halted as halted:
        if halted.step < at:
            raise IsoExecError(
                f"fault {fault.name}: halted at step {halted.step}, before anything was planted: {halted.text}"
            ) from halted
        result.lines.append(f"halted at the boundary of step {halted.step}, on every rank: {halted.text}")
        return
    raise IsoExecError(f"fault {fault.name}: the job ran {patience} steps and nobody halted it")


def _await_marker(stage: Stage, run: str) -> HaltMarker:
    deadline = time.monotonic() + _MARKER_SECONDS
    while time.monotonic() < deadline:
        marker = stage.marker(run)
        if marker is not None:
            return marker
        time.sleep(0.1)
    raise ServiceError(f"run {run} has no halt marker after {_MARKER_SECONDS:.0f} s")


def _restart(settings: ProbeSettings) -> str:
    """What a restart of the run meets."""
    client = Client(settings, "driver")
    try:
        client.connect()
        Guard(settings)
    except (HaltedError, HandshakeError) as error:
        return f"refused ({error})"
    finally:
        client.close()
    return "starts"


def clear_run(result: PhaseResult, settings: ProbeSettings) -> None:
    """Clear the run of a fault with ``isoexec clear``, start it again, and put both into the result's lines."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "isoexec.contracts.main", "clear", settings.run],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ISOEXEC_STATE_DIR": str(settings.state_dir)},
    )
    result.lines.append(f"`isoexec clear`: {(done.stdout or done.stderr).strip().partition(',')[0]}")
    result.lines.append(f"restart after `isoexec clear`: {_restart(settings)}")
