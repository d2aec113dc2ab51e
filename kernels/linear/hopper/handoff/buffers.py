# SPDX-License-Identifier: Apache-2.0
"""A group's symmetric memory: what ranks write into one another, and how a peer that is lost is reported."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from isoexec.contracts.errors import IsoExecError
from isoexec.kernels.domain import require
from isoexec.kernels.groups import name_of, resolve
from isoexec.kernels.linear.hopper.handoff import protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = [
    "Memory",
    "PeerLostError",
    "Room",
    "RoomError",
    "SymmetricMemory",
    "check",
    "close",
    "open_room",
    "room_of",
]

PATIENCE = 20.0  # seconds a GPU waits for a peer
_ALIGN = 1024
_ROOMS: dict[str, Room] = {}


class PeerLostError(IsoExecError):
    """A GPU waited for a peer in vain: `group`, `rank`, `peer`, `what` did not come, `seconds` it waited."""

    def __init__(self, group: str, rank: int, peer: int, what: str, seconds: float) -> None:
        self.group = group
        self.rank = rank
        self.peer = peer
        self.what = what
        self.seconds = seconds
        super().__init__(group, rank, peer, what, seconds)

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of group {self.group} waited {self.seconds:g} s for {self.what} from rank {self.peer}; results "
            f"since then are NaN. Look at rank {self.peer}'s log: it stopped, raised, or called the products of this group in "
            "another order or with other sizes. Then start the group again, or wait longer with setup(..., patience=seconds)"
        )


class RoomError(IsoExecError):
    """A group's memory is missing or too small: `wanted` and `found` in words."""

    def __init__(self, wanted: str, found: str) -> None:
        self.wanted = wanted
        self.found = found
        super().__init__(wanted, found)

    def __str__(self) -> str:
        return (
            f"the hand-off needs {self.wanted}, found {self.found}; call handoff.ops.setup(group, max_elements) on every rank "
            "of the group, once, before the first product and outside graph capture"
        )


class Memory(Protocol):
    """As many bytes on each rank of a group, all of them mapped here."""

    rank: int

    @property
    def bases(self) -> Sequence[int]:
        """Where each rank's bytes lie in this process's addresses."""
        ...

    def view(self, rank: int, dtype: torch.dtype, offset: int, count: int) -> Tensor:
        """`count` elements of a rank's bytes from byte `offset`."""
        ...


class SymmetricMemory:
    """torch's symmetric memory over NVLink, plain peer addresses only."""

    def __init__(self, group: ProcessGroup, nbytes: int, device: torch.device) -> None:
        # a program that uses multicast can put a host's GPUs out of service, and no schedule here needs it
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self.rank = group.rank()
        self._own = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self._own, group)
        self._views: dict[tuple[int, torch.dtype, int, int], Tensor] = {}
        self.bases = [self.view(rank, torch.uint8, 0, 1).data_ptr() for rank in range(group.size())]

    def view(self, rank: int, dtype: torch.dtype, offset: int, count: int) -> Tensor:
        key = rank, dtype, offset, count
        if key not in self._views:
            self._views[key] = self._handle.get_buffer(rank, (count,), dtype, offset // dtype.itemsize)
        return self._views[key]


@dataclass(frozen=True, kw_only=True)
class Room:
    """One group's buffers and counters; `inbox` takes accumulators or gathered operands, `results` what others computed."""

    name: str
    rank: int
    ranks: int
    processors: int
    elements: int
    memory: Memory
    bases: Tensor  # int64 [ranks], on the device
    state: Tensor  # int64 [protocol.STATE], on the device
    mirror: Tensor  # int64 [1], in host memory that the device writes
    seconds: float
    patience: int
    inbox_at: int
    results_at: int

    def inbox(self, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A rank's inbox, flat."""
        return self.memory.view(rank, dtype, self.inbox_at, 4 * self.elements // dtype.itemsize)

    def results(self, rank: int, dtype: torch.dtype) -> Tensor:
        """A rank's results, flat."""
        return self.memory.view(rank, dtype, self.results_at, 2 * self.elements // dtype.itemsize)

    def require_inbox(self, nbytes: int) -> None:
        """Raise `RoomError` unless the inbox holds as many bytes."""
        if nbytes > 4 * self.elements:
            raise RoomError(f"max_elements of at least {-(-nbytes // 4)}", f"{self.elements}")

    def require_results(self, out: Tensor) -> None:
        """Raise `RoomError` unless the results of others have room for as much as `out`."""
        nbytes = out.numel() * out.element_size()
        if nbytes > 2 * self.elements:
            raise RoomError(f"max_elements of at least {-(-nbytes // 2)}", f"{self.elements}")

    def check(self) -> None:
        """Raise `PeerLostError` where a launch waited in vain; reads host memory, waits for nothing."""
        code = int(self.mirror[0])
        if code:
            what, peer = protocol.meaning_of(code)
            raise PeerLostError(self.name, self.rank, peer, what, self.seconds)


def sizes(elements: int) -> tuple[int, int, int]:
    """(bytes in all, where the inbox starts, where results start) for fp32 accumulators and bf16 results of `elements`."""
    inbox_at = -(-4 * protocol.WORDS // _ALIGN) * _ALIGN
    results_at = inbox_at + -(-4 * elements // _ALIGN) * _ALIGN
    return results_at + -(-2 * elements // _ALIGN) * _ALIGN, inbox_at, results_at


def furnish(
    name: str, ranks: int, memory: Memory, elements: int, device: torch.device, seconds: float
) -> Room:
    """Buffers over a memory whose words are zero on every rank."""
    on_gpu = device.type == "cuda"
    _, inbox_at, results_at = sizes(elements)
    room = Room(
        name=name,
        rank=memory.rank,
        ranks=ranks,
        processors=torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 2,
        elements=elements,
        memory=memory,
        bases=torch.tensor(list(memory.bases), dtype=torch.int64, device=device),
        state=torch.zeros(protocol.STATE, dtype=torch.int64, device=device),
        mirror=torch.zeros(1, dtype=torch.int64, pin_memory=on_gpu),
        seconds=seconds,
        # a CPU has no such clock: it counts polls
        patience=int(seconds * (1e9 if on_gpu else 2e3)),
        inbox_at=inbox_at,
        results_at=results_at,
    )
    _ROOMS[name] = room
    return room


def open_room(group: ProcessGroup, elements: int, seconds: float = PATIENCE) -> Room:
    """Allocate and exchange a group's symmetric memory, 6 bytes an element; every rank calls it with the same numbers."""
    name = name_of(group)
    require(
        1 < group.size() <= protocol.MOST_RANKS,
        "handoff.setup",
        f"{group.size()} ranks",
        f"2 to {protocol.MOST_RANKS}",
    )
    elements = -(-elements // _ALIGN) * _ALIGN
    require(0 < elements < 2**31, "handoff.setup", f"{elements} elements", "1 to 2^31 - 1")
    held = _ROOMS.get(name)
    if held is not None and held.elements >= elements:
        return held
    device = torch.device("cuda", torch.cuda.current_device())
    total, _, _ = sizes(elements)
    memory = SymmetricMemory(group, total, device)
    memory.view(memory.rank, torch.int32, 0, protocol.WORDS).zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group=group)  # no rank writes a word before all words are zero
    return furnish(name, group.size(), memory, elements, device, seconds)


def room_of(name: str) -> Room:
    """The room of a group by its name; raises `RoomError` where it has none, `PeerLostError` where it lost a peer."""
    room = _ROOMS.get(name)
    if room is None:
        ranks = resolve(name).size() if name else 1
        raise RoomError("memory shared by a group of several ranks", f"none for group {name!r} of {ranks}")
    room.check()
    return room


def reset(group: ProcessGroup) -> None:
    """Forget a lost peer and all that was under way; every rank calls it, once nothing of the group runs any more."""
    room = _ROOMS[name_of(group)]
    torch.cuda.synchronize(room.state.device)
    dist.barrier(group=group)
    room.memory.view(room.rank, torch.int32, 0, protocol.WORDS).zero_()
    room.state.zero_()
    room.mirror.zero_()
    torch.cuda.synchronize(room.state.device)
    dist.barrier(group=group)


def check() -> None:
    """Raise `PeerLostError` for the first group of this process that lost a peer."""
    for room in _ROOMS.values():
        room.check()


def close(group: ProcessGroup) -> None:
    """Give a group's memory back; every rank calls it, with no product under way."""
    _ROOMS.pop(name_of(group), None)
