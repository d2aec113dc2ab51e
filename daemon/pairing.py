# SPDX-License-Identifier: Apache-2.0
"""Joins both sides' logprobs by what the sequence is: digest of its tokens and range of positions.

Duplicates pair as a multiset: k reports of one sequence on either side make k pairs, in order of arrival.
Only records of one weight version pair (a version below 0 is not stated and pairs with any); a record that met
its digest under other versions only knows them. Memory is bounded by tokens: what is evicted counts as unpaired.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from isoexec.contracts.window import PAIRS
from isoexec.contracts.wire import Logprobs

__all__ = ["Batch", "Pairing", "Record", "role_of"]

Unpaired = Callable[["Record"], None]

_PARTNERS: dict[str, tuple[tuple[str, tuple[str, str]], ...]] = {
    case: tuple((pair[1] if pair[0] == case else pair[0], pair) for pair in PAIRS if case in pair)
    for case in {name for pair in PAIRS for name in pair}
}


_ROLES = {case: "engine" if case.startswith("engine_") else "trainer" for case in _PARTNERS}


def role_of(case: str) -> str:
    """Give the role whose logprobs a case holds."""
    return _ROLES[case]


@dataclass(slots=True, eq=False)
class Record:
    """One sequence under one case: positions start .. start + n, its bits, and the cases that it has met.

    `other_versions` are (engine version, trainer version) under which both sides reported it without pairing.
    """

    case: str
    digest: bytes
    start: int
    logprobs: npt.NDArray[np.float32]
    tokens: npt.NDArray[np.int32]
    step: int
    weight_version: int
    temperature: float
    logprobs_mode: str
    source: str
    arrived: float
    size: int
    met: set[str] = field(default_factory=set)
    met_other_side: bool = False
    other_versions: set[tuple[int, int]] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Batch:
    """What one message made possible for one pair of cases; `first` and `second` as in the pair."""

    pair: tuple[str, str]
    step: int
    first: list[npt.NDArray[np.float32]] = field(default_factory=list)
    second: list[npt.NDArray[np.float32]] = field(default_factory=list)
    first_ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    second_ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    first_sources: list[str] = field(default_factory=list)
    second_sources: list[str] = field(default_factory=list)
    sampling: set[tuple[str, str, str]] = field(default_factory=set)

    @property
    def sources(self) -> dict[str, list[str]]:
        """The process that reported each sequence, by its role: of the engine's own two, the first."""
        found = {role_of(self.pair[1]): self.second_sources}
        return found | {role_of(self.pair[0]): self.first_sources}

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.asarray(self.sizes, np.int64)


class Pairing:
    """The sequences of one run that wait for a partner, oldest first."""

    def __init__(self, *, limit_tokens: int) -> None:
        self._limit = limit_tokens
        self._records: OrderedDict[int, Record] = OrderedDict()
        self._by_digest: dict[bytes, list[int]] = {}
        self._next = 0
        self.held_tokens = 0
        self.evicted_tokens = 0
        self._unmet: Counter[int] = Counter()  # records by step that met nothing of the other side
        self._unmet_tokens: Counter[str] = Counter()  # by role

    def pending(self, role: str) -> int:
        """Tokens of a role that have met nothing of the other side."""
        return self._unmet_tokens[role]

    def add(self, message: Logprobs, now: float, unpaired: Unpaired) -> list[Batch]:
        """Take a message, give what it pairs with; `unpaired` is told of each record evicted for room."""
        batches: dict[tuple[tuple[str, str], int], Batch] = {}
        ends = np.cumsum(message.lengths, dtype=np.int64)
        starts = ends - message.lengths
        digests = message.digests.tobytes()
        places = zip(starts.tolist(), ends.tolist(), message.starts.tolist(), strict=True)
        for index, (first, end, start) in enumerate(places):
            record = Record(
                case=message.case,
                digest=digests[16 * index : 16 * index + 16],
                start=start,
                size=end - first,
                logprobs=message.logprobs[first:end],
                tokens=message.tokens[first:end],
                step=message.step,
                weight_version=message.weight_version,
                temperature=message.temperature,
                logprobs_mode=message.logprobs_mode,
                source=message.source,
                arrived=now,
            )
            if record.size:
                self._match(record, batches)
                self._hold(record)
        while self.held_tokens > self._limit and self._records:
            oldest = next(iter(self._records))
            self.evicted_tokens += self._records[oldest].size
            unpaired(self._drop(oldest))
        return list(batches.values())

    def _match(self, record: Record, batches: dict[tuple[tuple[str, str], int], Batch]) -> None:
        keys = self._by_digest.get(record.digest)
        if not keys:
            return
        others = [self._records[key] for key in keys]
        for partner_case, pair in _PARTNERS[record.case]:
            candidates = [
                other for other in others if other.case == partner_case and record.case not in other.met
            ]
            found = next((other for other in candidates if _comparable(record, other)), None)
            if found is None:
                _note_versions(record, candidates)
                continue
            if role_of(record.case) != role_of(found.case):
                if not found.met_other_side:
                    self._count_unmet(found, -1)
                record.met_other_side = found.met_other_side = True
            found.met.add(record.case)
            record.met.add(partner_case)
            first, second = (record, found) if pair[0] == record.case else (found, record)
            step = second.step if second.step >= 0 else first.step
            _append(batches.setdefault((pair, step), Batch(pair, step)), first, second)

    def _hold(self, record: Record) -> None:
        key = self._next
        self._next += 1
        self._records[key] = record
        self._by_digest.setdefault(record.digest, []).append(key)
        self.held_tokens += record.size
        if not record.met_other_side:
            self._count_unmet(record, 1)

    def _count_unmet(self, record: Record, sign: int) -> None:
        self._unmet[record.step] += sign
        if not self._unmet[record.step]:
            del self._unmet[record.step]
        self._unmet_tokens[role_of(record.case)] += sign * record.size

    def _drop(self, key: int) -> Record:
        record = self._records.pop(key)
        keys = self._by_digest[record.digest]
        keys.remove(key)
        if not keys:
            del self._by_digest[record.digest]
        self.held_tokens -= record.size
        if not record.met_other_side:
            self._count_unmet(record, -1)
        return record

    def retire(self, step: int, *, lag_steps: int, older_than: float, unpaired: Unpaired) -> None:
        """Let go of what a window over `step` has used up.

        Records of that step or an earlier one go (an engine's that met no trainer `lag_steps` later), and so
        do records of no stated step that came before `older_than`; `unpaired` is told of each.
        """
        gone: list[int] = []
        for key, record in self._records.items():
            if record.step < 0:
                over = record.arrived < older_than or record.met_other_side
            elif role_of(record.case) == "trainer" or record.met_other_side:
                over = record.step <= step
            else:
                over = record.step + lag_steps <= step
            if over:
                gone.append(key)
        for key in gone:
            unpaired(self._drop(key))

    def waiting(self, step: int) -> bool:
        """Whether a record of `step` or before has met nothing of the other side yet."""
        return any(0 <= one <= step for one in self._unmet)


def _note_versions(record: Record, candidates: Iterable[Record]) -> None:
    for other in candidates:
        if role_of(other.case) == role_of(record.case) or _same_version(record, other):
            continue
        engine, trainer = (record, other) if role_of(record.case) == "engine" else (other, record)
        versions = (engine.weight_version, trainer.weight_version)
        engine.other_versions.add(versions)
        trainer.other_versions.add(versions)


def _same_version(a: Record, b: Record) -> bool:
    return a.weight_version == b.weight_version or min(a.weight_version, b.weight_version) < 0


def _comparable(a: Record, b: Record) -> bool:
    overlap = min(a.start + a.size, b.start + b.size) - max(a.start, b.start)
    return overlap > 0 and _same_version(a, b)


def _append(batch: Batch, first: Record, second: Record) -> None:
    start = max(first.start, second.start)
    end = min(first.start + first.size, second.start + second.size)
    a = slice(start - first.start, end - first.start)
    b = slice(start - second.start, end - second.start)
    batch.first.append(first.logprobs[a])
    batch.second.append(second.logprobs[b])
    batch.first_ids.append(first.tokens[a])
    batch.second_ids.append(second.tokens[b])
    batch.positions.append(start)
    batch.sizes.append(end - start)
    batch.digests.append(first.digest)
    batch.first_sources.append(first.source)
    batch.second_sources.append(second.source)
    if role_of(first.case) == role_of(second.case):
        return
    if first.temperature != second.temperature:
        batch.sampling.add(("temperature", repr(first.temperature), repr(second.temperature)))
    # raw and processed logprobs are the same numbers where nothing is processed
    if first.logprobs_mode != second.logprobs_mode and not first.temperature == second.temperature == 1.0:
        batch.sampling.add(("logprobs_mode", first.logprobs_mode, second.logprobs_mode))
