# SPDX-License-Identifier: Apache-2.0
"""Stops runs: renews their leases from a thread of its own, writes the marker first, escalates if told to.

The thread renews only while the daemon's main loop shows signs of life: a daemon that hangs loses its leases
just as one that died.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from isoexec.contracts.halting import (
    LEASE_TTL_SECONDS,
    RENEW_SECONDS,
    HaltMarker,
    LeaseError,
    LeasePage,
    LeaseState,
    Policy,
    StateDirectory,
)
from isoexec.contracts.shards import Standing
from isoexec.daemon.config import Escalation
from isoexec.daemon.runtimes import Runtime

__all__ = ["LeaseKeeper", "ProcessHandle", "StageReport", "escalate"]

_log = structlog.get_logger("isoexec.daemon")

LOOP_STALL_SECONDS = 10.0
"""How long the main loop may be busy with one thing before its leases are let go."""
RESUME_SECONDS = 10.0
"""How long leases are renewed that the daemon before this one left; probes are back within half of it."""
_AHEAD_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class _Held(Standing):
    until: float = float("inf")


class LeaseKeeper:
    """Holds one page a run. Methods may be called from any thread."""

    def __init__(self, state: StateDirectory, *, ttl_seconds: float = LEASE_TTL_SECONDS) -> None:
        self._state = state
        self._ttl = ttl_seconds
        self._lock = threading.Lock()
        self._pages: dict[str, tuple[LeasePage, _Held]] = {}
        self._alive_at = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_all, name="isoexec-lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def resume(self) -> list[str]:
        """Take up, for a moment, the leases that a daemon left just now; give the names of their runs.

        A daemon that is started anew is there before the probes have noticed: without this a run that fails closed would halt.
        """
        found: list[str] = []
        now = time.monotonic()
        for name in self._state.runs():
            directory = self._state.run(name)
            try:
                with LeasePage.open(directory.lease) as page:
                    lease = page.read()
            except LeaseError:
                continue
            since = now - lease.deadline_ns / 1e9
            # a deadline far ahead is of before a reboot: this clock began anew with it
            if lease.state is LeaseState.UNKNOWN or not -_AHEAD_SECONDS < since < RESUME_SECONDS:
                continue
            marker = HaltMarker.read(directory.path)
            with suppress(LeaseError, OSError):
                self._hold(
                    name,
                    _Held(
                        state=lease.state if marker is None else LeaseState.HALT,
                        policy=lease.policy,
                        step=lease.step if marker is None else marker.step,
                        rule=lease.rule if marker is None else marker.rule,
                        cause=lease.cause if marker is None else marker.cause,
                        until=now + RESUME_SECONDS,
                    ),
                )
                found.append(name)
        return found

    def close(self) -> None:
        """Stop renewing; the pages run out, and the policy of each run decides."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            for page, _ in self._pages.values():
                page.close()
            self._pages.clear()

    def beat(self) -> None:
        """Say that the main loop lives."""
        self._alive_at = time.monotonic()

    def set(
        self, run: str, state: LeaseState, policy: Policy, *, step: int = -1, rule: str = "", cause: str = ""
    ) -> None:
        """Say a state of a run, at once."""
        self._hold(run, _Held(state=state, policy=policy, step=step, rule=rule, cause=cause))

    def _hold(self, run: str, standing: _Held) -> None:
        with self._lock:
            held = self._pages.get(run)
            if held is None:
                directory = self._state.run(run)
                directory.path.mkdir(parents=True, exist_ok=True, mode=0o700)
                page = LeasePage.create(directory.lease)
                try:
                    HaltMarker.reserve(directory.path)
                except OSError as error:
                    _log.critical("no room set aside for a halt marker", run=run, error=str(error))
            else:
                page = held[0]
            self._pages[run] = (page, standing)
            self._write(page, standing)

    def halt(self, marker: HaltMarker, policy: Policy) -> None:
        """Write the marker to disk, and only then let the lease say halt."""
        marker.write(self._state.run(marker.run).path)
        self.set(marker.run, LeaseState.HALT, policy, step=marker.step, rule=marker.rule, cause=marker.cause)

    @property
    def renews(self) -> bool:
        """Whether the main loop has shown life: no lease is renewed while it has not."""
        return time.monotonic() - self._alive_at <= LOOP_STALL_SECONDS

    def standings(self, *, resumed: bool = False) -> dict[str, Standing]:
        """Give what is said of every run; of leases that are only taken up for a moment with `resumed`, or to halt."""
        now = time.monotonic()
        with self._lock:
            return {
                run: Standing(
                    state=one.state, policy=one.policy, step=one.step, rule=one.rule, cause=one.cause
                )
                for run, (_, one) in self._pages.items()
                if one.until == float("inf") or one.state is LeaseState.HALT or (resumed and now < one.until)
            }

    def release(self, run: str) -> None:
        """Stop renewing a run that is over."""
        with self._lock:
            held = self._pages.pop(run, None)
        if held is not None:
            held[0].close()

    def _write(self, page: LeasePage, standing: _Held) -> None:
        page.write(
            standing.state,
            policy=standing.policy,
            ttl_seconds=self._ttl,
            step=standing.step,
            rule=standing.rule,
            cause=standing.cause,
        )

    def _renew_all(self) -> None:
        while not self._stop.wait(RENEW_SECONDS):
            if not self.renews:
                continue
            with self._lock:
                for page, standing in self._pages.values():
                    if time.monotonic() < standing.until:
                        self._write(page, standing)


class ProcessHandle:
    """A process of the job, held by a descriptor, so that a reused process id is never signalled."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    @classmethod
    def open(cls, pid: int) -> ProcessHandle | None:
        """Give a handle, or None where the process is gone or not of this host."""
        if pid <= 1 or pid == os.getpid():
            return None
        try:
            return cls(pid)
        except OSError:
            return None

    def alive(self) -> bool:
        # signal 0 reaches a zombie too; a finished process makes its descriptor readable
        import select

        return not select.select([self._descriptor], [], [], 0)[0]

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def again(self) -> ProcessHandle:
        """Give a second handle of the same process, to be closed by itself."""
        other = object.__new__(ProcessHandle)
        other.pid, other._descriptor = self.pid, os.dup(self._descriptor)
        return other

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """One moment of a halt: the stage that begins, or how it ended.

    stage: terminate, runtime or kill as one begins; at the end stopped, survived (SIGKILL did not end it either),
    not_stopped (no further stage is allowed), called_off (the halt was lifted) or unseen (no process of the run is on this
    host, so whether it stopped is unknown). pids: what still lived. seconds: since the halt. before: the stage that is left;
    before_seconds: how long it took. answers: what runtimes said.
    """

    stage: str
    pids: list[int]
    seconds: float
    before: str
    before_seconds: float
    answers: dict[str, str] = field(default_factory=dict)


async def escalate(
    processes: Sequence[ProcessHandle],
    settings: Escalation,
    record: Callable[[StageReport], None],
    *,
    runtimes: Sequence[Runtime] = (),
    stands: Callable[[], bool] = lambda: True,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Wait for the job to stop by itself, then SIGTERM, then its runtime, then SIGKILL what still lives.

    `stands` is asked before every stage and while waiting: a halt that was lifted is called off. Where `settings` does not
    enable escalation only the wait is timed.
    """
    began = entered = time.monotonic()
    before = "cooperative"

    def say(stage: str, answers: dict[str, str] | None = None, since: float | None = None) -> None:
        nonlocal before, entered
        now = time.monotonic() if since is None else since
        record(
            StageReport(
                stage=stage,
                pids=[process.pid for process in processes if process.alive()],
                seconds=now - began,
                before=before,
                before_seconds=now - entered,
                answers=answers or {},
            )
        )
        before, entered = stage, now

    async def over(patience: float) -> bool:
        deadline = time.monotonic() + patience
        while stands():
            if processes and not any(process.alive() for process in processes):
                say("stopped")
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            await sleep(min(left, 0.1))
        say("called_off")
        return True

    if await over(settings.cooperative_seconds):
        return
    if not settings.enabled:
        say("not_stopped" if processes else "unseen")
        return
    if processes:
        say("terminate")
        _send(processes, signal.SIGTERM)
        _send(processes, signal.SIGCONT)  # one that is stopped cannot heed it
        if await over(settings.terminate_seconds):
            return
    if runtimes:
        asked_at = time.monotonic()
        answers = dict(zip([one.name for one in runtimes], await _ask(runtimes), strict=True))
        say("runtime", answers, since=asked_at)  # the time that they take to answer is this stage's
        refused = all(answer.startswith("refused: ") for answer in answers.values())
        if await over(0.0 if refused else settings.runtime_seconds):
            return
    if not processes:
        say("unseen")
        return
    say("kill")
    _send(processes, signal.SIGKILL)
    if not await over(settings.kill_seconds):
        say("survived")


async def _ask(runtimes: Sequence[Runtime]) -> list[str]:
    return list(await asyncio.gather(*(one.stop() for one in runtimes)))


def _send(processes: Iterable[ProcessHandle], number: signal.Signals) -> None:
    for process in processes:
        if process.alive():
            process.send(number)
