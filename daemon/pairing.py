# SPDX-License-Identifier: Apache-2.0
"""Joins both sides' logprobs by what the sequence is: digest of its tokens and range of positions.

Duplicates pair as a multiset: k reports of one sequence on either side make k pairs, in order of arrival.
Only records of one weight version pair (a version below 0 is not stated and pairs with any); a record that met
its digest under other versions only knows them. Memory is bounded by tokens: what is evicted counts as unpaired,
and what is let go without a partner says why (`unpaired.py`).

A record is one sequence of a message. Millions wait in a large job, so that none is an object of its own: it is a
place in its `Block`, and a number that says which block and which place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from isoexec.contracts.window import PAIRS
from isoexec.contracts.wire import SEQUENCES_LIMIT, Logprobs
from isoexec.daemon.accounts import Frame
from isoexec.daemon.unpaired import ALONE, Place, explain

__all__ = ["Batch", "Gone", "Pairing", "role_of"]

Pair = tuple[str, str]
Longs = npt.NDArray[np.int64]
_Scalar = TypeVar("_Scalar", bound=np.generic)

_PARTNERS: dict[str, tuple[tuple[str, Pair], ...]] = {
    case: tuple((pair[1] if pair[0] == case else pair[0], pair) for pair in PAIRS if case in pair)
    for case in {name for pair in PAIRS for name in pair}
}
_ROLES = {case: "engine" if case.startswith("engine_") else "trainer" for case in _PARTNERS}
# cases that a record has met, as bits of one byte
_BIT = {case: 1 << place for place, case in enumerate(sorted(_PARTNERS))}
_OTHER_SIDE = {case: sum(_BIT[one] for one in _PARTNERS if _ROLES[one] != _ROLES[case]) for case in _PARTNERS}
_REMEMBERED = 1 << 14
"""Digests of one side that were let go alone, by which it is known that a partner came too late."""
# a record's number is that of its block, then its place in so many bits
_SHIFT = (SEQUENCES_LIMIT - 1).bit_length()
_PLACE = (1 << _SHIFT) - 1


def role_of(case: str) -> str:
    """Give the role whose logprobs a case holds."""
    return _ROLES[case]


class Block:
    """The sequences of one message, without empty ones: place i has positions starts[i] .. + sizes[i].

    Its bits lie at `offsets[i]` in the message's arrays. `met` has a bit for each case that it has met. `versions` are, by
    place, (engine version, trainer version) under which both sides reported it without pairing. `alone` of its records have
    met nothing of the other side; `reasons` say by place why, as far as that is known.
    """

    __slots__ = (
        "alone", "arrived", "case", "frame", "gone", "keys", "left", "message", "met", "offsets", "reasons", "role", "sizes",
        "starts", "versions",
    )  # fmt: skip

    def __init__(self, message: Logprobs, now: float, frame: Frame | None = None) -> None:
        self.message = message
        self.frame = frame
        self.case = message.case
        self.role = _ROLES[message.case]
        self.arrived = now
        lengths = message.lengths
        offsets: Longs = np.cumsum(lengths, dtype=np.int64) - lengths
        digests = message.digests.tobytes()
        self.keys = [digests[at : at + 16] for at in range(0, len(digests), 16)]
        self.starts: list[int] = message.starts.tolist()
        self.sizes: list[int] = lengths.tolist()
        self.offsets: list[int] = offsets.tolist()
        if 0 in self.sizes:
            kept = np.flatnonzero(lengths).tolist()
            self.keys, self.starts, self.sizes, self.offsets = (
                [values[place] for place in kept]
                for values in (self.keys, self.starts, self.sizes, self.offsets)
            )
        self.left = len(self.keys)
        self.met = bytearray(self.left)
        self.gone = bytearray(self.left)
        self.versions: dict[int, set[tuple[int, int]]] = {}
        self.alone = 0
        self.reasons: dict[int, str] = {}

    def held(self) -> Sequence[int]:
        """Places that were not let go of."""
        if self.left == len(self.keys):
            return range(self.left)
        return [place for place, gone in enumerate(self.gone) if not gone]


@dataclass(frozen=True, slots=True)
class Gone:
    """Records of one message that were let go of and have met the same cases: `tokens` of them.

    `reasons` has, where they met nothing of the other side, their tokens by a word of `UNPAIRED_REASONS`; empty where they did.
    """

    case: str
    step: int
    met: frozenset[str]
    met_other_side: bool
    records: int
    tokens: int
    other_versions: frozenset[tuple[int, int]]
    reasons: Mapping[str, int]
    frame: Frame | None = None


Unpaired = Callable[[Gone], None]


@dataclass(slots=True, eq=False)
class Batch:
    """What one message made possible for one pair of cases; `first` and `second` as in the pair.

    Sequences lie one after the other in the arrays, which may be those of a message: `lengths[i]` tokens each.
    """

    pair: Pair
    step: int
    first: npt.NDArray[np.float32]
    second: npt.NDArray[np.float32]
    first_ids: npt.NDArray[np.int32]
    second_ids: npt.NDArray[np.int32]
    lengths: Longs
    positions: Longs
    digests: list[bytes]
    first_sources: list[str]
    second_sources: list[str]
    sampling: set[tuple[str, str, str]]
    frames: list[Frame]
    attributes: dict[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    """What else is known of each sequence."""

    @property
    def sources(self) -> dict[str, list[str]]:
        """The process that reported each sequence, by its role: of the engine's own two, the first."""
        found = {role_of(self.pair[1]): self.second_sources}
        return found | {role_of(self.pair[0]): self.first_sources}


@dataclass(slots=True)
class _Run:
    """Tokens low .. high of the message that came, and as many from `other_low` of a block that waited."""

    low: int
    high: int
    other: Block
    other_low: int

    def ours(self, values: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
        return values[self.low : self.high]

    def theirs(self, values: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
        return values[self.other_low : self.other_low + self.high - self.low]


@dataclass(slots=True, eq=False)
class _Draft:
    """A batch in the making: the message that came, and for each of its sequences that pairs whose it pairs with."""

    runs: list[_Run] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    others: list[Block] = field(default_factory=list)

    def batch(self, pair: Pair, step: int, block: Block) -> Batch:
        message = block.message
        ours = (
            _joined([run.ours(message.logprobs) for run in self.runs]),
            _joined([run.ours(message.tokens) for run in self.runs]),
            [message.source] * len(self.sizes),
        )
        theirs = (
            _joined([run.theirs(run.other.message.logprobs) for run in self.runs]),
            _joined([run.theirs(run.other.message.tokens) for run in self.runs]),
            [other.message.source for other in self.others],
        )
        swapped = pair[0] != message.case
        first, second = (theirs, ours) if swapped else (ours, theirs)
        sampling: set[tuple[str, str, str]] = set()
        for other in dict.fromkeys(self.others):
            both = (other.message, message) if swapped else (message, other.message)
            sampling.update(_sampling(*both))
        return Batch(
            pair=pair,
            step=step,
            first=first[0],
            second=second[0],
            first_ids=first[1],
            second_ids=second[1],
            lengths=np.asarray(self.sizes, np.int64),
            positions=np.asarray(self.positions, np.int64),
            digests=self.digests,
            first_sources=first[2],
            second_sources=second[2],
            sampling=sampling,
            frames=[one.frame for one in (block, *dict.fromkeys(self.others)) if one.frame is not None],
        )


class Pairing:
    """The sequences of one run that wait for a partner, oldest first."""

    def __init__(self, *, limit_tokens: int) -> None:
        self.limit_tokens = limit_tokens
        self._blocks: dict[int, Block] = {}
        # number of the first record that waits under a digest, by case; of the further ones, in order
        self._first: dict[str, dict[bytes, int]] = {case: {} for case in _PARTNERS}
        self._more: dict[str, dict[bytes, list[int]]] = {case: {} for case in _PARTNERS}
        self._next = 0
        self.held_tokens = 0
        self.evicted_tokens = 0
        self._unmet: Counter[int] = Counter()  # records by step that met nothing of the other side
        self._unmet_tokens: Counter[str] = Counter()  # by role
        # by role, digests that were let go alone and what their partner says if it still comes; oldest first
        self._gone: dict[str, dict[bytes, str]] = {role: {} for role in ALONE}

    def pending(self, role: str) -> int:
        """Tokens of a role that have met nothing of the other side."""
        return self._unmet_tokens[role]

    def add(
        self, message: Logprobs, now: float, unpaired: Unpaired, frame: Frame | None = None
    ) -> list[Batch]:
        """Take a message, give what it pairs with; `unpaired` is told of records evicted for room."""
        block = Block(message, now, frame)
        if not block.keys:
            return []
        drafts: dict[tuple[Pair, int], _Draft] = {}
        for case, pair in _PARTNERS[block.case]:
            if self._first[case]:
                self._match(block, case, pair, drafts)
        self._hold(block)
        while self.held_tokens > self.limit_tokens and self._blocks:
            self._evict(next(iter(self._blocks)), unpaired)
        return [draft.batch(pair, step, block) for (pair, step), draft in drafts.items()]

    def _match(self, block: Block, case: str, pair: Pair, drafts: dict[tuple[Pair, int], _Draft]) -> None:
        """Pair the sequences of a block with those that wait under one case."""
        first, more = self._first[case], self._more[case]
        bit, their_bit, their_side = _BIT[block.case], _BIT[case], _OTHER_SIDE[case]
        number, other, draft, run = -1, block, _Draft(), _Run(0, 0, block, 0)
        same, end, other_end = False, -1, -1
        for place, key in enumerate(block.keys):
            found = first.get(key)
            if found is None:
                continue
            if more and key in more:
                found = self._choose(block, place, [found, *more[key]])
                if found is None:
                    continue
            if found >> _SHIFT != number:
                number, end = found >> _SHIFT, -1
                other = self._blocks[number]
                same = _same_version(block.message, other.message)
                draft = drafts.setdefault((pair, _step_of(pair, block, other)), _Draft())
            theirs = found & _PLACE
            met = other.met[theirs]
            if met & bit:
                continue
            if not same:
                _note_near(block, place, other, theirs)
                continue
            low, size, their_start = block.starts[place], block.sizes[place], other.starts[theirs]
            at, their_at = block.offsets[place], other.offsets[theirs]
            if low != their_start or size != other.sizes[theirs]:
                start, low = low, max(low, their_start)
                size = min(start + size, their_start + other.sizes[theirs]) - low
                if size <= 0:
                    _note_near(block, place, other, theirs)
                    continue
                at, their_at = at + low - start, their_at + low - their_start
            if not met & their_side and bit & their_side:
                other.alone -= 1
                self._count_unmet(other, 1, other.sizes[theirs], -1)
            other.met[theirs] = met | bit
            block.met[place] |= their_bit
            if at != end or their_at != other_end:
                run = _Run(at, at, other, their_at)
                draft.runs.append(run)
            run.high = end = at + size
            other_end = their_at + size
            draft.sizes.append(size)
            draft.positions.append(low)
            draft.digests.append(key)
            draft.others.append(other)
        for name in [name for name, one in drafts.items() if not one.sizes]:
            del drafts[name]

    def _choose(self, block: Block, place: int, numbers: Sequence[int]) -> int | None:
        """Give the first of several records of one case and digest that pairs with a new one, or None."""
        bit = _BIT[block.case]
        free = [
            (number, other, their_place)
            for number in numbers
            if not (other := self._blocks[number >> _SHIFT]).met[(their_place := number & _PLACE)] & bit
        ]
        low, high = block.starts[place], block.starts[place] + block.sizes[place]
        for number, other, theirs in free:
            start = other.starts[theirs]
            if (
                start < high
                and low < start + other.sizes[theirs]
                and _same_version(block.message, other.message)
            ):
                return number
        for _, other, theirs in free:
            _note_near(block, place, other, theirs)
        return None

    def _hold(self, block: Block) -> None:
        number = self._next
        self._next += 1
        self._blocks[number] = block
        if block.frame is not None:
            block.frame.left = block.left
        first, more = self._first[block.case], self._more[block.case]
        base = number << _SHIFT
        for record, key in enumerate(block.keys, base):
            if first.setdefault(key, record) != record:
                more.setdefault(key, []).append(record)
        self.held_tokens += sum(block.sizes)
        side = _OTHER_SIDE[block.case]
        alone = [size for size, met in zip(block.sizes, block.met, strict=True) if not met & side]
        block.alone = len(alone)
        self._count_unmet(block, len(alone), sum(alone), 1)
        gone = self._gone["trainer" if block.role == "engine" else "engine"]
        if gone and alone:
            for place, key in enumerate(block.keys):
                if key in gone and not block.met[place] & side:
                    block.reasons.setdefault(place, gone[key])

    def _count_unmet(self, block: Block, records: int, tokens: int, sign: int) -> None:
        if not records:
            return
        step = block.message.step
        left = self._unmet[step] + sign * records
        if left:
            self._unmet[step] = left
        else:
            del self._unmet[step]
        self._unmet_tokens[_ROLES[block.case]] += sign * tokens

    def _evict(self, number: int, unpaired: Unpaired) -> None:
        """Let go of records of the oldest block, in order, until what is held fits, or of them all."""
        block = self._blocks[number]
        over, places = self.held_tokens - self.limit_tokens, []
        for place in block.held():
            if over <= 0:
                break
            over -= block.sizes[place]
            places.append(place)
        self.evicted_tokens += sum(block.sizes[place] for place in places)
        for place in places:
            block.reasons.setdefault(place, "evicted")
        self._drop(number, places, unpaired)

    def _drop(self, number: int, places: Sequence[int], unpaired: Unpaired) -> None:
        block = self._blocks[number]
        first, more = self._first[block.case], self._more[block.case]
        base = number << _SHIFT
        groups: dict[int, list[int]] = {}
        for place in places:
            record, key = base + place, block.keys[place]
            groups.setdefault(block.met[place], []).append(place)
            if key not in more:
                del first[key]
                continue
            rest = more[key]
            if first[key] == record:
                first[key] = rest.pop(0)
            else:
                rest.remove(record)
            if not rest:
                del more[key]
        block.left -= len(places)
        if block.frame is not None:
            block.frame.left = block.left
        if block.left:
            for place in places:
                block.gone[place] = 1
        else:
            del self._blocks[number]
        for met, those in groups.items():
            tokens = sum(block.sizes[place] for place in those)
            self.held_tokens -= tokens
            met_other_side = bool(met & _OTHER_SIDE[block.case])
            if not met_other_side:
                block.alone -= len(those)
                self._count_unmet(block, len(those), tokens, -1)
                self._remember(block, those)
            versions = (block.versions.get(place, ()) for place in those) if block.versions else ()
            unpaired(
                Gone(
                    case=block.case,
                    step=block.message.step,
                    met=frozenset(case for case, bit in _BIT.items() if met & bit),
                    met_other_side=met_other_side,
                    records=len(those),
                    tokens=tokens,
                    other_versions=frozenset().union(*versions),
                    reasons={} if met_other_side else _reasons(block, those),
                    frame=block.frame,
                )
            )

    def retire(self, step: int, *, lag_steps: int, older_than: float, unpaired: Unpaired) -> None:
        """Let go of what a window over `step` has used up.

        Records of that step or an earlier one go (an engine's that met no trainer `lag_steps` later), and so
        do records of no stated step that came before `older_than`; `unpaired` is told of each.
        """
        over: list[tuple[int, Sequence[int]]] = []
        for number, block in self._blocks.items():
            stated = block.message.step
            if stated < 0:
                met_over, alone_over = True, block.arrived < older_than
            elif block.role == "trainer":
                met_over = alone_over = stated <= step
            else:
                met_over, alone_over = stated <= step, stated + lag_steps <= step
            if alone_over and met_over:
                over.append((number, block.held()))
            elif met_over and (met := [place for place in block.held() if not _is_alone(block, place)]):
                over.append((number, met))
        self._explain(step, over)
        for number, places in over:
            self._drop(number, places, unpaired)

    def _explain(self, step: int, over: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Have what is about to be let go alone say why."""
        for role, other_role in (("trainer", "engine"), ("engine", "trainer")):
            gone = [
                (block, place)
                for number, places in over
                if (block := self._blocks[number]).role == role and block.alone
                for place in places
                if _is_alone(block, place) and place not in block.reasons and place not in block.versions
            ]
            if gone:
                explain(gone, self._left_alone(other_role, step))

    def _left_alone(self, role: str, step: int) -> Iterator[Place]:
        """Give the records of a side that have met nothing of the other, those of the nearest step first."""
        blocks = [block for block in self._blocks.values() if block.alone and block.role == role]
        for block in sorted(blocks, key=lambda block: abs(block.message.step - step)):
            for place in block.held():
                if _is_alone(block, place):
                    yield block, place

    def _remember(self, block: Block, places: Sequence[int]) -> None:
        gone = self._gone[block.role]
        for place in places:
            evicted = block.reasons.get(place) == "evicted"
            gone[block.keys[place]] = "evicted" if evicted else "late"
        while len(gone) > _REMEMBERED:
            del gone[next(iter(gone))]

    def waiting(self, step: int) -> bool:
        """Whether a record of `step` or before has met nothing of the other side yet."""
        return any(0 <= one <= step for one in self._unmet)


def _step_of(pair: Pair, block: Block, other: Block) -> int:
    """Give the step of a pair: that of the second side, the first one's where it states none."""
    first, second = (block, other) if pair[0] == block.case else (other, block)
    return second.message.step if second.message.step >= 0 else first.message.step


def _is_alone(block: Block, place: int) -> bool:
    return not block.met[place] & _OTHER_SIDE[block.case]


def _note_near(block: Block, place: int, other: Block, theirs: int) -> None:
    """Note what kept two records of one digest apart: the version, or else that they are different parts of it."""
    if role_of(other.case) == role_of(block.case):
        return
    if _same_version(block.message, other.message):
        block.reasons[place] = other.reasons[theirs] = "length"
        return
    engine, trainer = (block, other) if role_of(block.case) == "engine" else (other, block)
    versions = (engine.message.weight_version, trainer.message.weight_version)
    block.versions.setdefault(place, set()).add(versions)
    other.versions.setdefault(theirs, set()).add(versions)


def _reasons(block: Block, places: Sequence[int]) -> dict[str, int]:
    """Give the tokens of records that are let go alone, by reason."""
    found: dict[str, int] = {}
    for place in places:
        reason = "version" if place in block.versions else block.reasons.get(place, ALONE[block.role])
        found[reason] = found.get(reason, 0) + block.sizes[place]
    return found


def _same_version(a: Logprobs, b: Logprobs) -> bool:
    return a.weight_version == b.weight_version or min(a.weight_version, b.weight_version) < 0


def _sampling(first: Logprobs, second: Logprobs) -> Iterable[tuple[str, str, str]]:
    """Give what differs in how both sides took logprobs, where one is the engine's and one the trainer's."""
    if role_of(first.case) == role_of(second.case):
        return
    if first.temperature != second.temperature:
        yield "temperature", repr(first.temperature), repr(second.temperature)
    # raw and processed logprobs are the same numbers where nothing is processed
    if first.logprobs_mode != second.logprobs_mode and not first.temperature == second.temperature == 1.0:
        yield "logprobs_mode", first.logprobs_mode, second.logprobs_mode


def _joined(parts: list[npt.NDArray[_Scalar]]) -> npt.NDArray[_Scalar]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
