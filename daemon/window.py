# SPDX-License-Identifier: Apache-2.0
"""Gathers what is seen of each step and says when a step is complete, or has been silent for too long."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from isoexec.contracts.window import PairStats, SamplingBreak, Unpaired
from isoexec.contracts.wire import Logprobs, Step
from isoexec.daemon.accounts import Frame
from isoexec.daemon.attributes import Attributes, labels_of
from isoexec.daemon.config import Config
from isoexec.daemon.detail import pair_detail
from isoexec.daemon.pairing import Batch, Gone, Pairing, role_of
from isoexec.daemon.statistics import PairAccumulator
from isoexec.daemon.store import SampleBuffer

__all__ = ["StepBuilder", "StepState"]

# where no pair of cases was ever seen, unpaired tokens are shown on the commonest one
_DEFAULT_PAIR = ("engine_decode", "trainer_score")


@dataclass(slots=True)
class StepState:
    """One step that is still open. Times are monotonic seconds."""

    step: int
    touched: float
    samples: SampleBuffer
    finished: float | None = None
    weight_version: int = -1
    accumulators: dict[tuple[str, str], PairAccumulator] = field(default_factory=dict)
    cases: set[str] = field(default_factory=set)
    sampling: set[tuple[str, str, str]] = field(default_factory=set)
    versions: set[tuple[int, int]] = field(default_factory=set)
    reported: bool = False  # a step message came
    late: bool = False  # holds nothing but what came for steps already judged
    since: float = 0.0  # when the first of it came
    frames: list[Frame] = field(default_factory=list)  # counted in it while it was late, and may yet move
    unpaired: Counter[tuple[str, str]] = field(
        default_factory=Counter
    )  # tokens that met nothing at all, by (role, reason)

    def count(self, frame: Frame | None) -> None:
        """Have a frame be held until this step is judged, whichever number it has by then."""
        if frame is not None:
            frame.counted_in(self.step)
            if self.late:
                self.frames.append(frame)

    def move(self, step: int) -> None:
        self.step = step
        for frame in self.frames:
            frame.counted_in(step)

    @property
    def roles(self) -> set[str]:
        found = {role_of(case) for case in self.cases}
        for pair, sums in self.accumulators.items():
            if sums.tokens:
                found |= {role_of(case) for case in pair}
        return found

    def pair(self, pair: tuple[str, str]) -> PairAccumulator:
        found = self.accumulators.get(pair)
        if found is None:  # one is dear to make
            found = self.accumulators[pair] = PairAccumulator(pair)
        return found

    def stats(self) -> tuple[PairStats, ...]:
        """Give the statistics of each pair, whole: for the window of a closed step, not for every frame."""
        return tuple(
            replace(sums.result(), detail=pair_detail(sums.detail()))
            for _, sums in sorted(self.accumulators.items())
        )

    def never_paired(self) -> tuple[Unpaired, ...]:
        """Give the tokens that met nothing at all, by side and reason."""
        rows = sorted(self.unpaired.items())
        return tuple(Unpaired(role=role, reason=reason, tokens=tokens) for (role, reason), tokens in rows)

    def sum_abs(self, pair: tuple[str, str]) -> float:
        """Sum of abs d of a pair, in nats."""
        return self.accumulators[pair].sum_abs

    def sampling_breaks(self) -> tuple[SamplingBreak, ...]:
        rows = [SamplingBreak(field=name, engine=a, trainer=b) for name, a, b in sorted(self.sampling)]
        rows += [SamplingBreak(field="weight_version", engine=a, trainer=b) for a, b in sorted(self.versions)]
        return tuple(rows)


class StepBuilder:
    """The open steps of one run, and the sequences that wait for a partner."""

    def __init__(self, config: Config, *, pending_tokens: int) -> None:
        self._config = config
        self.pairing = Pairing(limit_tokens=pending_tokens)
        self._attributes = Attributes()
        self.open: dict[int, StepState] = {}
        self.closed = -1
        """Last step of which a window was made."""
        self._trainer_cases: set[str] = set()

    def _state(self, step: int, now: float) -> StepState:
        """Give the open state that takes what came for a step.

        What comes for a step already judged is judged with the next one: no window is made twice. It opens no step
        of its own, which would number the next window past what the job has done: it waits for one.
        """
        late = step <= self.closed
        state = self.open[min(self.open)] if late and self.open else self.open.get(step)
        if state is None:
            state = next((one for one in self.open.values() if one.late), None)
            if state is None:
                state = StepState(
                    step=step,
                    touched=now,
                    samples=SampleBuffer(self._config.sample_tokens),
                    late=late,
                    since=now,
                )
            else:
                del self.open[state.step]
            state.move(max(step, self.closed + 1))
            self.open[state.step] = state
        state.late = state.late and late
        state.touched = now
        return state

    def logprobs(self, message: Logprobs, now: float, frame: Frame | None = None) -> None:
        """Pair a message, add what pairs to its step."""
        role = role_of(message.case)
        if role == "trainer":
            self._trainer_cases.add(message.case)
        if message.step >= 0:
            state = self._state(message.step, now)
            state.cases.add(message.case)
            state.count(frame)
            state.weight_version = max(state.weight_version, message.weight_version)
            if role == "trainer":
                self._finish_before(message.step, now)
        self._attributes.note(message)
        for batch in self.pairing.add(message, now, self._unpaired_at(now), frame):
            self._batch(batch, now)

    def _batch(self, batch: Batch, now: float) -> None:
        step = batch.step if batch.step >= 0 else max([self.closed + 1, *self.open])
        state = self._state(step, now)
        batch.attributes = self._attributes.of(batch.pair, batch.digests)
        state.pair(batch.pair).add(
            batch.first,
            batch.second,
            batch.lengths,
            batch.first_ids,
            batch.second_ids,
            batch.sources | labels_of(batch.attributes),
        )
        state.sampling |= batch.sampling
        state.samples.add(batch)
        for frame in batch.frames:
            state.count(frame)

    def step(self, message: Step, now: float, frame: Frame | None = None) -> None:
        """Take the end of a step as the job reports it: this step and those before are complete."""
        if message.step <= self.closed and not any(one.late for one in self.open.values()):
            return  # another rank says it of what is judged already
        state = self._state(message.step, now)
        state.count(frame)
        state.reported = True
        state.weight_version = max(state.weight_version, message.weight_version)
        self._finish_before(message.step + 1, now)

    def _finish_before(self, step: int, now: float) -> None:
        for state in self.open.values():
            if state.step < step and state.finished is None and not state.late:
                state.finished = now

    def finish_all(self, now: float) -> None:
        """Say that nothing more will come."""
        for state in self.open.values():
            state.late = False
        self._finish_before(1 << 62, now)

    def due(self, now: float, *, weights_awaited: bool = False, final: bool = False) -> StepState | None:
        """Give the first step that can be judged now, or None.

        A finished step is due once both sides are there, no token waits and all is quiet, or `settle_seconds`
        later. With a side missing it is due `window_seconds` later, or sooner where the run is over (`final`). A
        step that nobody finishes is due when nothing came for so long, and so is what came late and meets no next step.
        """
        while self.open:
            state = self.open[min(self.open)]
            # every sequence of it was trained under another step's number: that window has judged them
            if state.finished is None or state.reported or "trainer" in state.roles or not state.cases:
                break
            # at the end of a run, what was generated and never trained claims nothing
            if not final and (state.unpaired or self.pairing.waiting(state.step)):
                break
            del self.open[state.step]
        if not self.open:
            return None
        if state.finished is None and final:
            state.finished = now
        if state.finished is None:
            since = state.since if state.late else state.touched
            return state if now - since >= self._config.window_seconds else None
        age = now - state.finished
        if final and age >= self._config.settle_seconds:
            return state
        if {"engine", "trainer"} <= state.roles:
            settled = (
                now - state.touched >= self._config.quiet_seconds
                and not weights_awaited
                and self._trainer_cases <= state.cases
                and not self.pairing.waiting(state.step)
            )
            return state if settled or age >= self._config.settle_seconds else None
        return state if age >= self._config.window_seconds else None

    def close(self, state: StepState, now: float) -> StepState:
        """Take a step out of the open ones, with the tokens that stay unpaired counted in it."""
        self.pairing.retire(
            state.step,
            lag_steps=self._config.lag_steps,
            older_than=now - self._config.pending_seconds,
            unpaired=lambda gone: self._count_unpaired(state, gone),
        )
        self._attributes.forget(state.step - self._config.lag_steps)
        del self.open[state.step]
        self.closed = max(self.closed, state.step)
        return state

    def _unpaired_at(self, now: float) -> _Evicted:
        return _Evicted(self, now)

    def evicted(self, gone: Gone, now: float) -> None:
        self._count_unpaired(self._state(gone.step, now), gone)

    def _count_unpaired(self, state: StepState, gone: Gone) -> None:
        """Count records against each pair of cases in which they were awaited and met nobody."""
        role = role_of(gone.case)
        state.count(gone.frame)
        if not gone.met_other_side:
            state.unpaired.update({(role, reason): tokens for reason, tokens in gone.reasons.items()})
            state.versions |= gone.other_versions
        if role == "engine":
            seen = {case for case in state.cases if role_of(case) == "trainer"}
            wanted = [(gone.case, case) for case in sorted(seen or self._trainer_cases)]
        else:
            # prefill rescores are a sample of their own: nobody waits for one
            wanted = [("engine_decode", gone.case)]
        for pair in wanted or [_DEFAULT_PAIR]:
            partner = pair[1] if role == "engine" else pair[0]
            if partner not in gone.met and not (role == "trainer" and gone.met_other_side):
                state.pair(pair).count_unpaired(role, gone.tokens)


@dataclass(frozen=True, slots=True)
class _Evicted:
    builder: StepBuilder
    now: float

    def __call__(self, gone: Gone) -> None:
        self.builder.evicted(gone, self.now)
