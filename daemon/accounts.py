# SPDX-License-Identifier: Apache-2.0
"""What has become of each frame that came through a stream: held until the journal has what it says, then acknowledged.

A frame of data (logprobs, a step's end) is accounted for when nothing of it waits for a partner and every window that counts
it is in the journal; what a process says of itself (hello, attestation, weights, probe) when it has said something newer, or
its run is over. So a daemon that dies is given again exactly what died with it. The numbers that were accounted for go into the
journal with the window, in one transaction: a frame that comes again is known, and no gap is taken for a loss.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from isoexec.contracts.wire import Attestation, Bye, Hello, Logprobs, Message, Probe, Step, Weights

__all__ = ["Accounts", "Frame", "Lane", "LaneRow", "Spans"]

LaneRow = tuple[str, str, str, float]
"""(lane, run, numbers accounted for, unix seconds), as the journal keeps it."""


class Spans:
    """A set of counts that is mostly one run of them."""

    def __init__(self, text: str = "") -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            self._firsts.append(int(first))
            self._lasts.append(int(last or first))

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._firsts, number) - 1
        return at >= 0 and number <= self._lasts[at]

    def __len__(self) -> int:
        return sum(b - a + 1 for a, b in zip(self._firsts, self._lasts, strict=True))

    def __str__(self) -> str:
        spans = zip(self._firsts, self._lasts, strict=True)
        return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)

    @property
    def first(self) -> int:
        return self._firsts[0]

    @property
    def last(self) -> int:
        return self._lasts[-1]

    def add(self, number: int) -> None:
        if number in self:
            return
        at = bisect_right(self._firsts, number)
        joins_left = at > 0 and self._lasts[at - 1] == number - 1
        joins_right = at < len(self._firsts) and self._firsts[at] == number + 1
        if joins_left and joins_right:
            self._lasts[at - 1] = self._lasts.pop(at)
            del self._firsts[at]
        elif joins_left:
            self._lasts[at - 1] = number
        elif joins_right:
            self._firsts[at] = number
        else:
            self._firsts.insert(at, number)
            self._lasts.insert(at, number)


@dataclass(slots=True, eq=False)
class Frame:
    """One frame that is held. `left` counts its sequences that wait; `bar` is the last step in which any was counted.

    `ticket` acknowledges it; None where that was done early, for room.
    """

    lane: Lane
    seq: int
    ticket: Any
    kind: type[Message]
    data: bool
    weight_version: int = -1
    left: int = 0
    bar: int = -1

    def counted_in(self, step: int) -> None:
        self.bar = max(self.bar, step)


@dataclass(slots=True, eq=False)
class Lane:
    """The frames of one publisher, `key` its name for this start of it."""

    key: str
    run: str = ""
    taken: Spans = field(default_factory=Spans)
    held: dict[int, Frame] = field(default_factory=dict)
    refused: int = 0
    """Frames that came while there was no hello to take them under."""
    changed: bool = False

    def knows(self, seq: int) -> bool:
        return seq in self.held or seq in self.taken

    def row(self) -> LaneRow:
        return (self.key, self.run, str(self.taken), time.time())


class Accounts:
    """The lanes of one run on one shard."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self._done: list[Frame] = []
        self._ready: list[Any] = []

    @property
    def held(self) -> int:
        return sum(len(lane.held) for lane in self.lanes.values())

    def frames(self) -> Iterator[Frame]:
        """Every frame that is held."""
        for lane in self.lanes.values():
            yield from lane.held.values()

    def hold(self, lane: Lane, message: Message, ticket: Any) -> Frame:
        """Begin to account for a message; what it replaces is accounted for."""
        self.lanes[lane.key] = lane
        kind = type(message)
        frame = Frame(
            lane, message.seq, ticket, kind, data=kind in (Logprobs, Step),
            weight_version=message.weight_version if isinstance(message, Weights) else -1,
        )  # fmt: skip
        for old in self._replaced(lane, frame):
            self.done(old)
        lane.held[message.seq] = frame
        return frame

    def _replaced(self, lane: Lane, new: Frame) -> list[Frame]:
        if new.kind is Weights:
            return [
                old for old in lane.held.values()
                if old.kind is Weights and old.weight_version < new.weight_version
            ]  # fmt: skip
        if new.kind in (Hello, Attestation, Probe, Bye):
            return [old for old in lane.held.values() if old.kind is new.kind]
        return []

    def done(self, frame: Frame) -> None:
        """Note that nothing of a frame is still to come; it is acknowledged after the journal has it."""
        if frame.lane.held.pop(frame.seq, None) is None:
            return
        frame.lane.taken.add(frame.seq)
        frame.lane.changed = True
        self._done.append(frame)

    def settle(self, closed: int) -> list[LaneRow]:
        """Give the rows that go into the journal with the window of step `closed`."""
        for lane in self.lanes.values():
            for frame in list(lane.held.values()):
                if frame.data and frame.left == 0 and frame.bar <= closed:
                    self.done(frame)
        return self.rows()

    def rows(self) -> list[LaneRow]:
        """Give the lanes that are not in the journal as they are."""
        return [lane.row() for lane in self.lanes.values() if lane.changed]

    def kept(self) -> None:
        """Note that the journal has every row: what they account for can be acknowledged."""
        for lane in self.lanes.values():
            lane.changed = False
        self._ready.extend(frame.ticket for frame in self._done if frame.ticket is not None)
        self._done.clear()

    def finish(self) -> None:
        """End with everything that is held: the run is over."""
        for frame in list(self.frames()):
            self.done(frame)

    def ready(self) -> Iterable[Any]:
        """Give, once, the tickets of frames that can be acknowledged."""
        found, self._ready = self._ready, []
        return found
