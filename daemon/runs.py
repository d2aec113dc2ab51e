# SPDX-License-Identifier: Apache-2.0
"""One run: its processes, what they attest, its open steps; makes the window of a step from all of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from isoexec.contracts.errors import WireError
from isoexec.contracts.halting import Policy
from isoexec.contracts.measures import PROCESSES
from isoexec.contracts.schema import Contract
from isoexec.contracts.window import FieldDifference, Silence, Window
from isoexec.contracts.wire import Attestation, Hello, Logprobs, Message, Probe, Step, Weights
from isoexec.daemon.accounts import Accounts, Frame
from isoexec.daemon.config import Config
from isoexec.daemon.diagnosis.pairs import Point
from isoexec.daemon.diagnosis.window import diagnose_step
from isoexec.daemon.halt import ProcessHandle
from isoexec.daemon.handshake import Agreement, agree, agree_still
from isoexec.daemon.judge import Judge
from isoexec.daemon.peers import Pace
from isoexec.daemon.verify import Findings, verify
from isoexec.daemon.weights import WeightLedger
from isoexec.daemon.window import StepBuilder, StepState

__all__ = ["Process", "Run"]

_SIDES = ("engine", "trainer")
_PAST = 32  # windows a diagnosis looks back
_KEPT_A_SECOND = 20.0
"""Attestations and steps of one process that go into the journal, with twice that at once."""
_RANKS = 4096
"""Ranks that one process attests for, at most."""
_REFUSED = 256
"""Places of which the refusal is remembered; one is enough to halt."""


@dataclass(frozen=True, slots=True)
class Attested:
    """What one rank said last; `changed` is what it says of the contract that hello did not."""

    message: Attestation
    at: float
    changed: tuple[FieldDifference, ...]


@dataclass(slots=True, eq=False)
class Process:
    """One source. Times are monotonic seconds; `handle` is the process by the socket's own word, on this host."""

    hello: Hello
    since: float
    agreement: Agreement
    handle: ProcessHandle | None = None
    connected: bool = True
    ended: bool = False
    seen: float = 0.0
    attested: dict[int, Attested] = field(
        default_factory=dict
    )  # by rank: an engine's driver speaks for its workers
    first_seq: int = 0
    last_seq: int = 0
    received: int = 0
    spoiled: int = 0  # messages that came and could not be taken
    probe: Probe | None = None
    kept: Pace = field(default_factory=lambda: Pace(_KEPT_A_SECOND))

    @property
    def source(self) -> str:
        return self.hello.source

    @property
    def role(self) -> str:
        return self.hello.role

    @property
    def lost(self) -> int:
        """Messages that never came: gaps in the numbering, or what the probe says it dropped, if more."""
        gaps = self.last_seq - self.first_seq + 1 - self.received
        return max(gaps, self.probe.dropped if self.probe else 0, 0) + self.spoiled

    def attest(self, message: Attestation, now: float) -> None:
        """Keep what a rank attests. Raises WireError for a rank that its world does not have."""
        if not message.rank < message.world <= _RANKS:
            raise WireError(
                f"attestation: wanted a rank below its world and a world of {_RANKS} at most, found rank "
                f"{message.rank} of {message.world}"
            )
        # once an attestation, for it digests a contract; a driver computes no logprob and is not held to one
        changed = () if self.role == "driver" else agree_still(self.hello, message)
        self.attested = {rank: one for rank, one in self.attested.items() if rank < message.world}
        self.attested[message.rank] = Attested(message, now, changed)

    def count(self, message: Message) -> None:
        if self.received == 0:
            self.first_seq = self.last_seq = message.seq
        # a probe that reconnects greets with a number ahead of what it has queued
        self.first_seq = min(self.first_seq, message.seq)
        self.last_seq = max(self.last_seq, message.seq)
        self.received += 1


@dataclass(slots=True, eq=False)
class Run:
    """A session of a run: from the first hello to the last bye."""

    name: str
    config: Config
    reference: Hello
    contract: Contract | None
    judge: Judge
    session: int
    builder: StepBuilder
    started: float = field(default_factory=time.time)
    touched: float = 0.0
    processes: dict[str, Process] = field(default_factory=dict)
    refused: dict[tuple[str, str, int], tuple[FieldDifference, ...]] = field(default_factory=dict)
    weights: WeightLedger = field(default_factory=WeightLedger)
    said: dict[tuple[str, str], float] = field(default_factory=dict)  # (role, type) -> monotonic
    halted: bool = False
    last_step: int = -1
    dropped_reported: dict[str, int] = field(default_factory=dict)  # by role
    lost_before: dict[str, int] = field(default_factory=dict)  # by role, of processes that were replaced
    dropped_of_window: dict[str, int] = field(default_factory=dict)  # by role
    silent_at: float = 0.0
    step_seconds: dict[str, float] = field(default_factory=dict)
    phases_done: set[tuple[int, str]] = field(default_factory=set)
    probe_totals: dict[str, float] = field(default_factory=dict)
    sent_totals: dict[str, int] = field(default_factory=dict)
    rules_named: set[str] = field(default_factory=set)
    accounts: Accounts | None = None
    """Of the frames that came through a stream."""
    places: dict[str, int] = field(default_factory=dict)
    """Number of each process among those of its role, by source: the label of its series."""
    late: float = 0.0
    """Seconds that the daemon was late by, which no step settles in; see `FairClock`."""
    past: tuple[Point, ...] = ()
    """Mean abs d of the last windows, for what only shows over steps; begins anew with the daemon."""

    @property
    def regime(self) -> str:
        return self.reference.regime

    @property
    def monitor_only(self) -> bool:
        return self.contract is None

    @property
    def policy(self) -> Policy:
        return Policy.FAIL_CLOSED if self.reference.policy == "fail_closed" else Policy.FAIL_OPEN

    @property
    def over(self) -> bool:
        """Whether every process that came has said goodbye."""
        return bool(self.processes) and all(process.ended for process in self.processes.values())

    @property
    def connected(self) -> int:
        return sum(process.connected for process in self.processes.values())

    def greet(self, hello: Hello, now: float) -> Agreement:
        """Compare a process with the run and let it in if it agrees; keep the difference if not."""
        agreement = agree(self.reference, hello)
        place = (hello.role, hello.replica, hello.rank)
        if not agreement.accepted:
            self.refused[place] = agreement.fields
            if len(self.refused) > _REFUSED:
                del self.refused[next(iter(self.refused))]
            return agreement
        self.refused.pop(place, None)
        old = self.processes.get(hello.source)
        process = Process(hello=hello, since=now, agreement=agreement, seen=now)
        if old is not None and hello.seq > old.last_seq:
            # the same process again: its numbering and its attestation go on
            process.attested, process.probe = old.attested, old.probe
            process.first_seq, process.last_seq, process.received = (
                old.first_seq,
                old.last_seq,
                old.received,
            )
            process.spoiled = old.spoiled
        elif old is not None:
            self.lost_before[old.role] = self.lost_before.get(old.role, 0) + old.lost
        if old is not None and old.handle is not None:
            old.handle.close()
        self._give_place(hello)
        self.processes[hello.source] = process
        process.count(hello)
        self.hear(hello, now)
        return agreement

    def _give_place(self, hello: Hello) -> None:
        """Give a process its rank for a place, that of the process whose place it takes, or the lowest that is free."""
        if hello.source in self.places:
            return
        others = [one for one in self.processes.values() if one.role == hello.role]
        taken = {self.places[one.source] for one in others if one.source in self.places}
        same = (hello.replica, hello.rank)
        gone = [one for one in others if (one.hello.replica, one.hello.rank) == same and not one.connected]
        place = next((self.places[one.source] for one in reversed(gone) if one.source in self.places), None)
        if place is None:
            free = (number for number in (hello.rank, *range(PROCESSES)) if number not in taken)
            place = next(free, PROCESSES)
        if place < PROCESSES:
            self.places[hello.source] = place

    def place(self, source: str) -> str:
        """Give the label that the series of a process have: one of `LABEL_VALUES["process"]`, whatever its name."""
        number = self.places.get(source)
        return "other" if number is None else str(number)

    def take_dropped(self) -> dict[str, int]:
        """Give the messages lost since this was last asked, by role, where there are any."""
        lost = dict(self.lost_before)
        for process in self.processes.values():
            lost[process.role] = lost.get(process.role, 0) + process.lost
        fresh = {role: count - self.dropped_reported.get(role, 0) for role, count in lost.items()}
        fresh = {role: count for role, count in fresh.items() if count > 0}
        for role, count in fresh.items():
            self.dropped_reported[role] = self.dropped_reported.get(role, 0) + count
        return fresh

    def adopt(self, hello: Hello, contract: Contract | None, judge: Judge) -> None:
        """Let the first process that computes anything declare what the run is, where a driver came before it."""
        self.reference, self.contract, self.judge = hello, contract, judge

    def hear(self, message: Message, now: float) -> None:
        self.said[message.role, message.TYPE] = now
        self.said[message.role, "any"] = now
        self.touched = now

    def take(self, message: Message, now: float, frame: Frame | None = None) -> None:
        """Take any message but hello and bye."""
        self.hear(message, now)
        process = self.processes.get(message.source)
        if process is not None:
            process.count(message)
            process.seen = now
        if isinstance(message, Logprobs):
            self.builder.logprobs(message, now - self.late, frame)
        elif isinstance(message, Step):
            self.builder.step(message, now - self.late, frame)
        elif isinstance(message, Weights):
            self.weights.add(message, process.hello.replica if process else "")
        elif process is not None and isinstance(message, Attestation):
            process.attest(message, now)
        elif process is not None and isinstance(message, Probe):
            process.probe = message

    def bye(self, source: str, now: float) -> None:
        process = self.processes.get(source)
        if process is not None:
            process.ended, process.connected = True, False
        trainers = [one for one in self.processes.values() if one.role == "trainer"]
        if trainers and all(one.ended for one in trainers):
            self.builder.finish_all(now - self.late)

    def due(self, now: float) -> StepState | None:
        """Give the next step to judge, or None."""
        waiting = False
        if self.builder.open:
            version = self.builder.open[min(self.builder.open)].weight_version
            waiting = any(
                self.weights.latest(role) is not None and not self.weights.has(role, version)
                for role in _SIDES
                if version >= 0
            )
        return self.builder.due(now - self.late, weights_awaited=waiting, final=self.over)

    def close(self, state: StepState, now: float) -> StepState:
        """Take a step that is due out of the open ones."""
        return self.builder.close(state, now - self.late)

    def findings(self) -> Findings:
        """Compare the latest attestations of the processes that are still there with the contract."""
        if self.contract is None:
            return Findings()
        attestations = [
            (process.hello.replica, one.message)
            for process in self.processes.values()
            for one in process.attested.values()
            if not process.ended
        ]
        return verify(self.contract, attestations)

    def window(self, state: StepState | None, now: float) -> tuple[Window, Findings]:
        """Make the window of a closed step; None makes one of silence, on the step that should have come."""
        findings = self.findings()
        self.dropped_of_window = self.take_dropped()
        dropped = sum(self.dropped_of_window.values())
        version = state.weight_version if state else -1
        if version < 0:
            version = max((self.weights.latest(role) or -1 for role in _SIDES), default=-1)
        pairs = state.stats() if state else ()
        diagnosis, point = diagnose_step(state, pairs, self.regime, self.past)
        self.past = (*self.past, point)[-_PAST:] if point is not None else self.past
        window = Window(
            run=self.name,
            regime=self.regime,
            monitor_only=self.monitor_only,
            step=state.step if state else self.builder.closed + 1,
            weight_version=version,
            pairs=pairs,
            diagnosis=diagnosis,
            handshake=self._handshake(),
            topology_breaks=findings.topology,
            region_breaks=findings.regions,
            weights=self.weights.breaks(version),
            silence=tuple(self._silence(state, findings, version, now)),
            dropped=dropped,
            sampling=state.sampling_breaks() if state else (),
            environment_breaks=findings.environment,
            unpaired=state.never_paired() if state else (),
        )
        return window, findings

    def facts(self) -> Window:
        """Make the window of what is broken right now, between steps; it claims nothing about what is yet to come.

        What is missing may still be on its way from another rank, so only what a process did say counts.
        """
        findings = self.findings()
        latest = [version for role in _SIDES if (version := self.weights.latest(role)) is not None]
        version = min(latest) if len(latest) == len(_SIDES) else -1
        return Window(
            run=self.name,
            regime=self.regime,
            monitor_only=self.monitor_only,
            step=self.builder.closed + 1,
            weight_version=version,
            handshake=self._handshake(),
            topology_breaks=findings.topology,
            region_breaks=tuple(one for one in findings.regions if one.kind != "missing"),
            weights=tuple(one for one in self.weights.breaks(version) if one.kind != "missing"),
            environment_breaks=findings.environment,
            between_steps=True,
        )

    def _handshake(self) -> tuple[FieldDifference, ...]:
        rows = [row for fields in self.refused.values() for row in fields]
        for process in self.processes.values():
            rows.extend(row for one in process.attested.values() for row in one.changed)
        return tuple(rows)

    def _age(self, role: str, what: str, now: float) -> float | None:
        at = self.said.get((role, what))
        return None if at is None else now - at

    def _silence(
        self, state: StepState | None, findings: Findings, version: int, now: float
    ) -> list[Silence]:
        rows: list[Silence] = []

        def silent(role: str, what: Any, age: float | None) -> None:
            rows.append(Silence(role=role, what=what, age_seconds=age))

        for role in _SIDES:
            members = [process for process in self.processes.values() if process.role == role]
            if not members:
                silent(role, "hello", None)
            if not self.monitor_only and members:
                self._silent_attestations(role, members, findings, now, silent)
            if state is None or role not in state.roles:
                silent(role, "logprobs", self._age(role, "logprobs", now))
            if not self.weights.has(role, version):
                silent(role, "weights", self._age(role, "weights", now))
        if state is None or not state.reported:
            role = "driver" if any(p.role == "driver" for p in self.processes.values()) else "trainer"
            silent(role, "step", self._age(role, "step", now))
        for role, limit in self.config.silence_seconds.items():
            age = max((now - at for at in self._heard(role)), default=0.0)
            if age > limit:
                silent(role, "probe", age)
        return rows

    def _heard(self, role: str) -> list[float]:
        """Give when each rank of a role was last heard, of those that have not said goodbye.

        One that hangs, or died, is silent though the others speak; a process whose place another took is not.
        """
        places: dict[tuple[str, int], Process] = {}
        for process in self.processes.values():
            place = process.hello.replica, process.hello.rank
            if process.role == role and (place not in places or places[place].since <= process.since):
                places[place] = process
        return [process.seen for process in places.values() if not process.ended]

    def _silent_attestations(
        self, role: str, members: list[Process], findings: Findings, now: float, silent: Any
    ) -> None:
        living = [process for process in members if not process.ended] or members
        # ranks that have said goodbye were there: what they attested last counts
        if not all(process.attested for process in living) or _ranks_missing(members):
            silent(role, "attestation", None)
            return
        oldest = max(now - one.at for process in living for one in process.attested.values())
        if oldest > self.config.attestation_seconds or role in findings.unreadable:
            silent(role, "attestation", oldest)

    def silent_too_long(self, now: float) -> bool:
        """Whether a rank that lives has said nothing for longer than it may; once per silence."""
        if self.over or not self.processes:
            return False
        for role in _SIDES:
            limit = self.config.silence_seconds[role]
            if any(now - at > limit and at >= self.silent_at for at in self._heard(role)):
                self.silent_at = now
                return True
        return False


def _ranks_missing(processes: Sequence[Process]) -> bool:
    """Whether some copy of the model has a rank that attests nothing, though others say that it is there."""
    worlds: dict[str, int] = {}
    ranks: dict[str, set[int]] = {}
    for process in processes:
        replica = process.hello.replica
        for rank, one in process.attested.items():
            worlds[replica] = max(worlds.get(replica, 0), one.message.world)
            ranks.setdefault(replica, set()).add(rank)
    return any(len(ranks[replica]) < world for replica, world in worlds.items())
