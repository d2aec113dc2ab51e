# SPDX-License-Identifier: Apache-2.0
"""The daemon itself: runs by name, messages in, windows judged, leases kept, everything journaled."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import time
from contextlib import suppress
from typing import Any

import structlog

from isoexec.contracts.errors import IsoExecError, WireError
from isoexec.contracts.halting import HaltMarker, LeaseError, LeaseState, StateDirectory
from isoexec.contracts.measures import LABEL_VALUES, PHASES, TRAIN_VALUES
from isoexec.contracts.modes import Mode, read_mode
from isoexec.contracts.window import REGIMES, Window
from isoexec.contracts.wire import (
    Attestation,
    Bye,
    Hello,
    Logprobs,
    Message,
    Probe,
    Step,
    Weights,
    Welcome,
)
from isoexec.daemon.accounts import Frame
from isoexec.daemon.clock import FairClock
from isoexec.daemon.config import Config, ConfigError
from isoexec.daemon.enforce import Enforcer
from isoexec.daemon.halt import LeaseKeeper, ProcessHandle
from isoexec.daemon.handshake import agree, contract_of, refusal
from isoexec.daemon.ingest import Connection, Ingest
from isoexec.daemon.journal import Journal
from isoexec.daemon.judge import Judge, rules_for
from isoexec.daemon.metrics import Metrics
from isoexec.daemon.peers import SparseLog
from isoexec.daemon.place import Place
from isoexec.daemon.runs import Process, Run
from isoexec.daemon.statistics import prepare
from isoexec.daemon.stream import Stream
from isoexec.daemon.verify import Findings
from isoexec.daemon.version import package_version
from isoexec.daemon.views import halted_runs
from isoexec.daemon.window import StepBuilder

__all__ = ["Service"]

_log = structlog.get_logger("isoexec.daemon")

_TICK_SECONDS = 0.05
_MARKER_SECONDS = 1.0


class Service:
    """One per state directory. Everything here runs on one event loop."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.state = StateDirectory(config.state_dir).make()
        self.place = Place(self.state)
        # a rules file that cannot be read stops the start, not the first run
        rules_for(REGIMES[0], config.rules)
        try:
            self.journal = Journal.create(self.state.journal)
        except BaseException:
            self.place.leave()
            raise
        self.metrics = Metrics(version=package_version())
        self.keeper = LeaseKeeper(self.state)
        self.enforcer = Enforcer(config, self.state, self.journal, self.keeper, self.metrics, self._spawn)
        self.runs: dict[str, Run] = {}
        self.ingest = Ingest(
            config,
            process=self.process,
            lost=self.lost,
            malformed=self.malformed,
            failed=self.failed,
            spent=lambda seconds: self.metrics.add("ingest_seconds", seconds),
            prepare=prepare,
        )
        self._holders: dict[tuple[str, str], Connection] = {}
        """The stream that each process speaks on, by run and source."""
        self.stream = Stream(config, config.broker, self) if config.broker is not None else None
        self._name = f"daemon:{os.getpid()}" + (f":shard{config.shard}" if self.stream else "")
        self._said = SparseLog()
        self.ready = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._markers_at = 0.0
        self.halted: dict[str, str] = {}
        """Runs that a marker of this directory keeps from starting, for the other shards to tell."""
        self._clock = FairClock(time.monotonic())
        self.metrics.before_scrape(self._measure)

    async def start(self, tcp: socket.socket | None = None) -> None:
        """Begin to listen, on a bound TCP socket too. Raises TokenError and ConfigError for files of it that are unfit."""
        await self.ingest.start(self.place.listen(), tcp)
        self.keeper.beat()
        if resumed := self.keeper.resume():
            _log.warning("leases taken up", runs=resumed)
        self.keeper.start()
        self._spawn(self._ticks())
        if self.stream is not None:
            await asyncio.to_thread(prepare)
            await self.stream.start()
        self.ready = True

    async def _look_at_socket(self) -> None:
        try:
            await self.place.tend(self.ingest.listen_again)
        except OSError as error:
            self.ready = False
            if (unsaid := self._said.due()) is not None:
                _log.critical("no socket", path=str(self.state.socket), error=str(error), unsaid=unsaid)
            return
        self.ready = True

    async def stream_failed(self) -> None:
        """Return once the stream has had to stop for good; never where there is none."""
        await (self.stream.failed.wait() if self.stream is not None else asyncio.Event().wait())

    async def close(self) -> None:
        """Take what was sent, judge what is complete, leave the leases to run out."""
        self.ready = False
        with suppress(TimeoutError):
            await self.ingest.close()
        self._judge_due(time.monotonic())
        if self.stream is not None:
            await self.stream.close()
        for task in list(self._tasks):
            task.cancel()
        self.keeper.close()
        self.journal.close()
        self.place.leave()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("task failed", error=repr(task.exception()))

    async def _ticks(self) -> None:
        while True:
            now = time.monotonic()
            self.keeper.beat()
            self._clock.tick(now, waiting=self.ingest.depth, done=self.ingest.done)
            for run in self.runs.values():
                run.late = self._clock.late
            try:
                self._judge_due(now)
                if now - self._markers_at >= _MARKER_SECONDS:
                    self._markers_at = now
                    await self._look_at_socket()
                    self._look_at_markers()
                    self.enforcer.tend(self.runs.values(), now)
                    self._forget(now)
            except Exception:  # noqa: BLE001 - the watch over the other runs goes on
                _log.exception("tick failed")
            await asyncio.sleep(_TICK_SECONDS)

    # messages

    def malformed(self, connection: Connection, error: WireError) -> None:
        self.metrics.add("decode_errors", 1.0)
        unsaid = self._said.due()
        if unsaid is not None:
            _log.warning(
                "connection closed",
                peer=connection.peer,
                source=connection.source,
                error=str(error),
                unsaid=unsaid,
            )

    def failed(self, connection: Connection, message: Message) -> None:
        """Count a message that came and could not be taken: it is lost to the verdict like one that never came."""
        process = self._process_of(connection)
        if process is not None and not isinstance(message, Hello):
            process.spoiled += 1

    def _process_of(self, connection: Connection) -> Process | None:
        run = self.runs.get(connection.run or "")
        return run.processes.get(connection.source) if run else None

    def lost(self, connection: Connection) -> None:
        """Note that a stream ended."""
        place = (connection.run or "", connection.source)
        if self._holders.get(place) is not connection:
            return  # said no hello, or its process speaks on another stream by now
        del self._holders[place]
        process = self._process_of(connection)
        if process is not None:
            process.connected = False

    def found(self, connection: Connection) -> None:
        """Note that a process of which nothing was heard for long speaks again."""
        process = self._process_of(connection)
        if process is not None and not process.ended:
            self._holders[connection.run or "", connection.source] = connection
            process.connected = True

    def holder(self, run: str, source: str) -> Connection | None:
        """Give the stream that a process speaks on."""
        return self._holders.get((run, source))

    def process(self, connection: Connection, message: Message, frame: Frame | None = None) -> None:
        """Take one message. Raises WireError where it has no place on its connection."""
        if isinstance(message, Hello):
            self._greet(connection, message)
        elif isinstance(message, Welcome):
            raise WireError("welcome is the daemon's to send")
        elif message.run != connection.run or message.source != connection.source:
            raise WireError(
                f"wanted run {connection.run} and source {connection.source}, as in hello, found {message.run} "
                f"and {message.source}"
            )
        elif run := self.runs.get(message.run):
            self._take(run, connection, message, frame)
        else:
            raise WireError(f"run {message.run} is no longer watched; say hello again")

    def _greet(self, connection: Connection, hello: Hello) -> None:
        try:
            welcome = self._answer(connection, hello)
        except IsoExecError as error:
            welcome = refusal(hello, str(error))
        if not welcome.accepted:
            _log.warning("hello refused", run=hello.run, source=hello.source, reason=welcome.message)
        connection.answer(welcome)

    def _answer(self, connection: Connection, hello: Hello) -> Welcome:
        directory = self.state.run(hello.run)
        if hello.role not in LABEL_VALUES["role"]:
            return refusal(hello, f"role {hello.role} does not say hello")
        if hello.regime not in REGIMES:
            return refusal(
                hello, f"unknown regime {hello.regime!r}: set ISOEXEC_REGIME to one of {', '.join(REGIMES)}"
            )
        marker = HaltMarker.read(directory.path)
        if marker is not None and read_mode(self.state, hello.run).mode is not Mode.OFF:
            where = (
                f" It is halted by shard {self.config.shard} of {self.config.shards}." if self.stream else ""
            )
            return refusal(hello, str(marker) + where)
        if problem := self._unfit(connection, hello):
            return refusal(hello, problem)
        now = time.monotonic()
        run = self.runs.get(hello.run)
        if run is not None and run.processes:
            gone = hello.source not in run.processes and not run.connected
            # whoever was there is gone, or was halted and is cleared: this is the job's next start
            if gone or run.halted or run.session < 0:
                self._finish(run)
                run = None
        if run is None:
            alone = agree(None, hello)
            if not alone.accepted:
                return refusal(hello, alone.message, alone.differences)
            run = self._begin(hello)
        if run.reference.role == "driver" and hello.role != "driver":
            alone = agree(None, hello)
            if not alone.accepted:
                return refusal(hello, alone.message, alone.differences)
            run.adopt(hello, contract_of(hello), Judge(rules_for(hello.regime, self.config.rules)))
            self._declare(run)
        agreement = run.greet(hello, now)
        if not agreement.accepted:
            self.enforcer.judge_facts(run)
            return refusal(hello, agreement.message, agreement.differences)
        process = run.processes[hello.source]
        # a process id of another host means nothing here: such a process is told to stop, never signalled
        process.handle = ProcessHandle.open(connection.pid) if connection.pid else None
        connection.run, connection.source = hello.run, hello.source
        self._holders[hello.run, hello.source] = connection
        place = run.place(hello.source)
        self.journal.add_process(
            run.session,
            hello.source,
            {"role": hello.role, "versions": dict(hello.versions), "place": place},
        )
        self._count(run, connection, hello)
        _log.info("hello", run=hello.run, role=hello.role, source=hello.source, regime=hello.regime)
        return Welcome(
            run=hello.run,
            role="daemon",
            source=self._name,
            time=time.time(),
            accepted=True,
            message=agreement.message,
        )

    def _unfit(self, connection: Connection, hello: Hello) -> str:
        """Say why a process cannot be taken whatever its contract, or nothing."""
        for name in ("source", "replica"):
            value = getattr(hello, name)
            if not value.isprintable() or (name == "source" and not value):
                return f"{name}: wanted printable characters, found {value[:80]!r}"
        holder = self._holders.get((hello.run, hello.source))
        if holder is not None and not holder.closing and holder.peer != connection.peer:
            return f"source {hello.source} is spoken for by {holder.peer}, this is {connection.peer}"
        run = self.runs.get(hello.run)
        if run is None or hello.source in run.processes:
            return ""
        if len(run.processes) >= self.config.max_processes:
            return f"run {hello.run} has {self.config.max_processes} processes, no more are taken; raise max_processes"
        return ""

    def _begin(self, hello: Hello) -> Run:
        if len(self.runs) >= self.config.max_runs and not self._make_room():
            self.metrics.add("runs_refused", 1.0)
            raise ConfigError(f"the daemon watches {self.config.max_runs} runs at most; raise max_runs")
        contract = contract_of(hello)
        judge = Judge(rules_for(hello.regime, self.config.rules))
        builder = StepBuilder(self.config, pending_tokens=self.config.pending_tokens)
        session = self._resume(hello, judge, builder)
        if session is None:
            session = self.journal.start_run(
                hello.run,
                regime=hello.regime,
                monitor_only=contract is None,
                policy=hello.policy,
                data={
                    "contract": hello.contract,
                    "identities": hello.identities,
                    "rules": [rule.to_dict() for rule in judge.rules],
                },
            )
        run = Run(
            name=hello.run,
            config=self.config,
            reference=hello,
            contract=contract,
            judge=judge,
            session=session,
            builder=builder,
            touched=time.monotonic(),
        )
        self.runs[hello.run] = run
        self._share()
        try:
            self._declare(run)
        except LeaseError:
            # a run that no lease can stop is not taken
            self.metrics.end_run(run.name)
            self.journal.end_run(run.session)
            del self.runs[run.name]
            raise
        return run

    def _share(self) -> None:
        """Give every run that goes on the same part of the tokens that may wait."""
        going = [run for run in self.runs.values() if run.session >= 0]
        for run in going:
            run.builder.pairing.limit_tokens = max(self.config.pending_tokens // len(going), 1)

    def _declare(self, run: Run) -> None:
        """Show what a run is, and begin its lease."""
        hello = run.reference
        self.metrics.start_run(
            run.name, regime=run.regime, monitor_only=run.monitor_only, policy=hello.policy
        )
        rules = [rule.name for rule in run.judge.rules if rule.applies_to(run.regime)]
        self.metrics.start_rules(run.name, rules)
        self.enforcer.show_regions(run, Findings())
        self.keeper.set(run.name, LeaseState.OK, run.policy, cause="no window judged yet")

    def _resume(self, hello: Hello, judge: Judge, builder: StepBuilder) -> int | None:
        """Go on with the session that a daemon before this one left open, its history replayed."""
        found = self.journal.open_session(hello.run)
        if found is None or hello.run in self.runs or found[1] < time.time() - self.config.run_ttl_seconds:
            return None
        session = found[0]
        if hello.source not in self.journal.processes(session):
            # another start of the job under the same name
            self.journal.end_run(session)
            return None
        rows = self.journal.windows(hello.run, session=session, limit=64)
        for row in rows:
            window = Window.from_dict(row["window"])
            judge.judge(window)
            if not window.between_steps:
                builder.closed = max(builder.closed, window.step)
        _log.info("session resumed", run=hello.run, windows=len(rows))
        return session

    def _count(self, run: Run, connection: Connection, message: Message) -> None:
        role = message.role if message.role in LABEL_VALUES["role"] else "driver"
        self.metrics.add("messages_received", 1.0, run=run.name, role=role, type=message.TYPE)
        self.metrics.add("received_bytes", connection.bytes_read, run=run.name, role=role)
        connection.bytes_read = 0
        self.metrics.set("last_message_timestamp_seconds", time.time(), run=run.name, role=role)

    def _take(self, run: Run, connection: Connection, message: Message, frame: Frame | None) -> None:
        now = time.monotonic()
        process = run.processes.get(message.source)
        before = process.probe if process else None
        if process is None:
            raise WireError(f"{message.source} has not said hello to run {run.name}")
        if message.role != process.role:
            raise WireError(f"wanted role {process.role}, as in hello, found {message.role}")
        self._count(run, connection, message)
        if isinstance(message, Bye):
            process.count(message)
            run.bye(message.source, now)
            if run.over:
                _log.info("run over", run=run.name)
            return
        if isinstance(message, Step | Logprobs):
            self._check_step(run, message.step)
        run.take(message, now, frame)
        if isinstance(message, Step):
            self._step(run, message)
        elif isinstance(message, Attestation):
            if process.kept.admits():
                self.journal.add_attestation(run.name, message.source, message.header())
            else:
                self.journal.leave_out()
            if changed := process.attested[message.rank].changed:
                fields = [f"{one.path}: {one.engine!r} / {one.trainer!r}" for one in changed]
                _log.warning("contract changed", run=run.name, source=message.source, fields=fields)
            self._regions(run)
        elif isinstance(message, Probe):
            self._probe(run, before, message)
        if isinstance(message, Attestation | Weights):
            self.enforcer.judge_facts(run)
        version_of = getattr(message, "weight_version", -1)
        if version_of >= 0 and not isinstance(message, Step | Weights):
            self.metrics.set("weight_version", version_of, run=run.name, role=message.role)

    def _check_step(self, run: Run, step: int) -> None:
        """Refuse a step that would be one too many, or leaves the others behind: all that they say would be late."""
        last, most = max([run.builder.closed, *run.builder.open]), self.config.max_open_steps
        if len(run.builder.open) >= most and step > run.builder.closed and step not in run.builder.open:
            raise WireError(
                f"{len(run.builder.open)} steps of run {run.name} are open, step {step} would be one more"
            )
        if last >= 0 and step - last > most:
            raise WireError(
                f"step {step} is {step - last - 1} ahead of the next of run {run.name}, max_open_steps is {most}"
            )

    def _step(self, run: Run, message: Step) -> None:
        name = run.name
        if message.step > run.last_step:
            run.last_step = message.step
            run.step_seconds.clear()
            run.phases_done.clear()
            self.metrics.set("step", message.step, run=name)
            self.metrics.add("steps", 1.0, run=name)
        fresh = {
            phase: seconds
            for phase, seconds in message.seconds.items()
            if phase in PHASES
            and message.step == run.last_step
            and (message.step, phase) not in run.phases_done
        }
        for phase, seconds in fresh.items():
            # every rank may report a phase: the first one counts
            run.phases_done.add((message.step, phase))
            run.step_seconds[phase] = seconds
            self.metrics.set("step_last_seconds", seconds, run=name, phase=phase)
            self.metrics.add("step_seconds", max(seconds, 0.0), run=name, phase=phase)
        if fresh and run.step_seconds.get("step", 0.0) > 0 and "probe" in run.step_seconds:
            ratio = run.step_seconds["probe"] / run.step_seconds["step"]
            self.metrics.set("overhead_ratio", ratio, run=name)
        for key, value in message.values.items():
            if key in TRAIN_VALUES:
                self.metrics.set("train_value", value, run=name, value=key)
        if fresh or message.values:
            values = {
                key: value if abs(value) < float("inf") else str(value)
                for key, value in message.values.items()
            }
            if run.processes[message.source].kept.admits():
                self.journal.add_step(
                    name, message.step, {"seconds": dict(fresh), "values": values, "source": message.source}
                )
            else:
                self.journal.leave_out()

    def _probe(self, run: Run, before: Probe | None, message: Probe) -> None:
        sent, seconds = message.sent, message.probe_seconds
        if before is not None:
            sent, seconds = sent - before.sent, seconds - before.probe_seconds
        self.metrics.add("messages_sent", max(sent, 0), run=run.name, role=message.role)
        self.metrics.add("probe_seconds", max(seconds, 0.0), run=run.name, role=message.role)

    def _regions(self, run: Run) -> None:
        if run.contract is not None:
            self.enforcer.show_regions(run, run.findings())

    # judging

    def _judge_due(self, now: float) -> None:
        for run in list(self.runs.values()):
            try:
                self._judge_run(run, now)
            except Exception:  # noqa: BLE001 - a window that cannot be judged is unknown, never passed over
                _log.exception("judging failed", run=run.name)
                self.keeper.set(
                    run.name,
                    LeaseState.HALT if run.halted else LeaseState.UNKNOWN,
                    run.policy,
                    cause="the daemon failed to judge a window; see its log",
                )

    def _judge_run(self, run: Run, now: float) -> None:
        while (state := run.due(now)) is not None:
            self.enforcer.judge(run, run.close(state, now), now)
        if run.silent_too_long(now):
            self.enforcer.judge(run, None, now)
        if run.over and not run.builder.open and run.session >= 0:
            self._finish(run)

    def _measure(self) -> None:
        self.metrics.set("queue_depth", self.ingest.depth)
        self.metrics.set("connections", len(self.ingest.connections))
        if self.stream is not None:
            self.metrics.set("stream_frames_held", self.stream.held)
            self.metrics.set("shards_heard", self.stream.heard)
            self.metrics.set("shards", self.config.shards)
        for run in self.runs.values():
            for role in ("engine", "trainer"):
                self.metrics.set("tokens_pending", run.builder.pairing.pending(role), run=run.name, role=role)

    # the life of runs

    def _look_at_markers(self) -> None:
        """See markers that others wrote (a guard that failed closed) or cleared."""
        if self.stream is not None:
            self.halted = halted_runs(self.state)
        for run in self.runs.values():
            there = HaltMarker.read(self.state.run(run.name).path)
            if there is not None and not run.halted:
                run.halted = True
                self.keeper.halt(there, run.policy)
                self.metrics.add("halts", 1.0, run=run.name)
                self.metrics.set("halted", 1.0, run=run.name)
                self.metrics.state("guard_state", "halt", run=run.name)
                self.enforcer.record(run.name, there.step, "halt_seen", dataclasses.asdict(there))
                self.enforcer.escalate(run, there.step)
            elif there is None and run.halted:
                # the processes that were told to stop stay told; the next start is a session of its own
                self.metrics.set("halted", 0.0, run=run.name)

    def _finish(self, run: Run) -> None:
        """End a session: nothing more is judged; its series stay until they are too old."""
        for role, dropped in run.take_dropped().items():
            # what was lost after the last window
            self.metrics.add("messages_dropped", dropped, run=run.name, role=role)
        if run.accounts is not None:
            run.accounts.finish()
            self.journal.add_lanes(run.accounts.rows())
        if run.session >= 0:
            self.journal.end_run(run.session)
            run.session = -1
            self._share()
        self.keeper.release(run.name)
        self.metrics.finish_run(run.name)
        for process in run.processes.values():
            if process.handle is not None:
                process.handle.close()
                process.handle = None

    def _make_room(self) -> bool:
        idle = [run for run in self.runs.values() if not run.connected]
        if not idle:
            return False
        oldest = min(idle, key=lambda run: run.touched)
        self._drop(oldest)
        return True

    def _forget(self, now: float) -> None:
        for run in list(self.runs.values()):
            if not run.connected and now - run.touched > self.config.run_ttl_seconds:
                self._drop(run)

    def _drop(self, run: Run) -> None:
        self._finish(run)
        self.metrics.end_run(run.name)
        del self.runs[run.name]
        _log.info("run expired", run=run.name)
