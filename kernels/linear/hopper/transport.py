# SPDX-License-Identifier: Apache-2.0
"""How an accumulator travels from rank to rank, and by which schedule a sharded product is made: free of bits.

A transport is a module with what `Transport` names, registered by name and imported when it is first used. `plain` is
torch.distributed and works everywhere; `symmetric` writes into the next rank's memory. Every rank must take the same one, so
`prepare` lets the ranks of a group agree, once a group, before the first product and outside of CUDA graphs.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
import torch.distributed as dist

from isoexec.contracts.errors import IsoExecError
from isoexec.kernels.domain import require

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    # make(stage, rows, accumulator or None, dtype of the result, where to write it or None)
    Make = Callable[[int, slice, Tensor | None, torch.dtype, Tensor | None], Tensor]

__all__ = [
    "TRANSPORTS",
    "Choice",
    "Form",
    "LostPeerError",
    "Make",
    "Schedule",
    "Transport",
    "TransportError",
    "able",
    "finish",
    "prepare",
    "register",
    "schedule_for",
    "track",
    "use",
]

Form = Literal["all", "rows"]  # every rank gets the whole result, or its own block of rows

PATH = Path(__file__).with_name("schedules.json")
PATIENCE = 300.0  # seconds that a rank waits for another

# in order of preference
TRANSPORTS: dict[str, str] = {
    "symmetric": "isoexec.kernels.linear.hopper.symmetric",
    "plain": "isoexec.kernels.linear.hopper.plain",
}


class Transport(Protocol):
    """What a transport's module offers; tensors are bf16, results are rounded once to `out_dtype`."""

    @property
    def ONE_HOST(self) -> bool:
        """Whether the ranks must share a host."""

    @property
    def OWN_GPU(self) -> bool:
        """Whether each rank must have a GPU of its own."""

    def available(self, group: ProcessGroup, device: torch.device) -> str:
        """Return "" where this rank can use it, else why not. No communication."""

    def open_group(self, group: ProcessGroup, device: torch.device) -> None:
        """Make what the group needs, on all ranks at once and outside of CUDA graphs."""

    def check(self, group: ProcessGroup) -> None:
        """Raise where a product of the group is known to have failed on the GPU; waits for nothing."""

    def row_product(
        self, x: Tensor, w: Tensor, group: ProcessGroup, form: Form, out_dtype: torch.dtype
    ) -> Tensor:
        """`x [M, K / ranks] @ w [N, K / ranks]^T` by the chain over all ranks' K: [M, N], or [M / ranks, N] as rows."""

    def column_gradient(
        self,
        dy: Tensor,
        w: Tensor,
        group: ProcessGroup,
        parts: Sequence[int],
        form: Form,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """`dy [M, N / ranks] @ w [N / ranks, K]` by the chain over all ranks' N, part by part: [M, K] or [M / ranks, K]."""

    def gathered_product(
        self, x: Tensor, w_outputs: Tensor, group: ProcessGroup, form: Form, out_dtype: torch.dtype
    ) -> Tensor:
        """`row_product` by all of K on one rank for its share of the outputs: `w_outputs [N / ranks, K]`."""

    def hand_off(
        self,
        make: Make,
        *,
        rows: int,
        width: int,
        device: torch.device,
        group: ProcessGroup,
        stages: int,
        out_dtype: torch.dtype,
        name: str,
    ) -> Tensor:
        """`[rows, width]` on every rank, of products that the caller makes: stage by stage, rounded in the last.

        Stage s is made on rank s mod ranks, in row blocks, by `make(stage, rows, acc, dtype, out)`: it goes on from contiguous
        `acc` (None in the first stage), in fp32 but in the last stage, and writes to contiguous `out` where that is given.
        """


class TransportError(IsoExecError):
    """A transport that cannot be used: what was `wanted`, what was `found`, the `fix`."""

    def __init__(self, wanted: str, found: str, fix: str) -> None:
        self.wanted = wanted
        self.found = found
        self.fix = fix
        super().__init__(wanted, found, fix)

    def __str__(self) -> str:
        return f"wanted {self.wanted}, found {self.found}; {self.fix}"


class LostPeerError(IsoExecError):
    """A rank waited in vain: its `rank` of `size`, the `step` it was in, the `seconds` it gave, and what the backend `said`."""

    def __init__(self, *, rank: int, size: int, step: str, seconds: float, said: str) -> None:
        self.rank = rank
        self.size = size
        self.step = step
        self.seconds = seconds
        self.said = said
        super().__init__(rank, size, step, seconds, said)

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.size} lost a peer in {self.step} (patience {self.seconds:.0f} s): {self.said}. Another "
            "rank of the group has died, or makes other calls than this one: read the logs of every rank, the first to fail "
            "says why, and restart the job; nothing of an unfinished product can be used"
        )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The transport that the ranks of a group agreed on, and why it is not a preferred one."""

    name: str
    reason: str
    module: Transport


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How many row blocks a hand-off is cut into, and up to how many rows gather-K is taken where weights for it are held."""

    blocks: int
    gather_rows: int


_wanted: str | None = None
_choices: dict[str, Choice] = {}


def register(name: str, module: str) -> None:
    """Offer a transport before all others; `module` is imported when a group is prepared."""
    rest = {k: v for k, v in TRANSPORTS.items() if k != name}
    TRANSPORTS.clear()
    TRANSPORTS.update({name: module, **rest})
    _choices.clear()


def use(name: str | None) -> None:
    """Take only this transport in this process, or again whichever is preferred and available; the same on every rank."""
    global _wanted
    if name is not None and name not in TRANSPORTS:
        raise TransportError(f"one of {list(TRANSPORTS)}", repr(name), "register it first")
    _wanted = name
    _choices.clear()


def _look(name: str, group: ProcessGroup, device: torch.device) -> tuple[Transport | None, str]:
    try:
        module = cast("Transport", import_module(TRANSPORTS[name]))
    except ImportError as error:
        return None, f"{name}: {error}"
    why = module.available(group, device)
    return (None, f"{name}: {why}") if why else (module, "")


def _agree(
    group: ProcessGroup, device: torch.device
) -> tuple[dict[str, tuple[Transport | None, str]], set[int]]:
    """What every rank of the group can use, by name, or why not; and which transports its ranks want.

    All ranks say once what each can use, on which host it is, and which GPU it has: nobody has to try.
    """
    names = list(TRANSPORTS)
    found = {name: _look(name, group, device) for name in names}
    own = [
        *(int(module is not None) for module, _ in found.values()),
        _number(socket.gethostname()),
        _number(_place(group, device)),
        names.index(_wanted) if _wanted else -1,
    ]
    votes = torch.tensor(own, dtype=torch.int64, device=device)
    every = votes.new_empty(group.size() * len(own))
    dist.all_gather_into_tensor(every, votes, group=group)
    *can, hosts, places, wanted = zip(*every.view(group.size(), -1).tolist(), strict=True)
    for name, yes in zip(names, can, strict=True):
        module, why = found[name]
        if module is not None and not all(yes):
            why = f"{name}: not on every rank"
        elif module is not None and module.ONE_HOST and len(set(hosts)) > 1:
            why = f"{name}: ranks on several hosts"
        elif module is not None and module.OWN_GPU and len(set(places)) < group.size():
            why = f"{name}: {group.size()} ranks on {len(set(places))} GPUs, and it needs one a rank"
        found[name] = (None, why) if why else (module, "")
    return found, set(wanted)


def _number(said: str) -> int:
    """A string as a non-negative int64."""
    return int.from_bytes(hashlib.sha256(said.encode()).digest()[:8]) >> 1


def _place(group: ProcessGroup, device: torch.device) -> str:
    """Where a rank computes: its GPU, by the id that it has in any process, or itself on a CPU."""
    if device.type != "cuda":
        return f"rank {group.rank()}"
    return f"GPU {torch.cuda.get_device_properties(device).uuid}"


def able(group: ProcessGroup, device: torch.device) -> dict[str, str]:
    """By transport, "" where every rank of the group could use it, else why not; all ranks ask at the same time."""
    return {name: why for name, (_, why) in _agree(group, device)[0].items()}


def prepare(group: ProcessGroup, device: torch.device) -> Choice:
    """The transport of a group, agreed between its ranks at the first call, which also makes the group's communicator.

    Raises `TransportError` where ranks want different ones, the wanted one is missing somewhere, or a graph is being captured.
    """
    key = f"{group.group_name} {device}"
    if key in _choices:
        return _choices[key]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise TransportError(
            "a group that was prepared before a CUDA graph is captured",
            f"the first product over group {group.group_name} inside a capture",
            "call transport.prepare(group, device) on every rank, or run the layer once, before capturing",
        )
    found, wanted = _agree(group, device)
    if len(wanted) > 1:
        raise TransportError(
            "one transport on every rank", f"several, {_wanted!r} here", "call transport.use alike"
        )
    names = list(found)
    name = _wanted or next((one for one, (module, _) in found.items() if module is not None), None)
    module = found[name][0] if name else None
    if name is None or module is None:
        said = found[name][1] if name else "; ".join(why for _, why in found.values())
        raise TransportError(
            f"a transport for group {group.group_name}", said, "name another with transport.use"
        )
    module.open_group(group, device)
    passed = [] if _wanted else [found[one][1] for one in names[: names.index(name)]]
    chosen = Choice(name=name, reason="; ".join(passed), module=module)
    _choices[key] = chosen
    return chosen


@cache
def _schedules() -> Any:
    return json.loads(PATH.read_text())["schedules"]


def schedule_for(transport: str, ranks: int, rows: int) -> Schedule:
    """The checked-in schedule of a transport for this many rows; bits are the same under any."""
    held = [e for e in _schedules() if e["transport"] == transport and e["ranks"] <= ranks]
    require(
        bool(held),
        "sm90_linear",
        f"transport {transport} over {ranks} ranks",
        f"the schedules in {PATH.name}",
    )
    entry = max(held, key=lambda e: e["ranks"])
    blocks = next(step["blocks"] for step in entry["steps"] if step["up_to"] is None or step["up_to"] >= rows)
    return Schedule(blocks=blocks, gather_rows=entry["gather_rows"])


# Waiting. On CPU a wait has a patience of its own. On a GPU a wait only orders streams, so each step leaves an event, and
# `finish` looks at them from the host; NCCL's own watchdog has the timeout that the process group was made with.

_steps: dict[str, list[tuple[Any, str]]] = {}
_KEPT = 256


def track(group: ProcessGroup, step: str) -> None:
    """Leave a mark on the current stream behind a step of a group, for `finish` to name; nothing inside a capture."""
    if torch.cuda.is_current_stream_capturing():
        return
    event = torch.cuda.Event()
    event.record()
    marks = _steps.setdefault(group.group_name, [])
    marks.append((event, step))
    if len(marks) > _KEPT:
        marks[:] = [mark for mark in marks if not mark[0].query()][-_KEPT:]


def finish(group: ProcessGroup, *, patience: float | None = None) -> None:
    """Wait on the host until every tracked step of the group has run; raise `LostPeerError` that names the first that has not.

    A transport that notices on the GPU raises its own error.

    Call it where a trainer or an engine waits for the GPU anyway, such as at the end of a step.
    """
    limit = PATIENCE if patience is None else patience
    deadline = time.monotonic() + limit
    for event, step in _steps.pop(group.group_name, []):
        while not event.query():
            if time.monotonic() > deadline:
                raise LostPeerError(
                    rank=group.rank(),
                    size=group.size(),
                    step=step,
                    seconds=limit,
                    said="the GPU still waits for it",
                )
            time.sleep(1e-4)
    for key, chosen in _choices.items():
        if key.startswith(f"{group.group_name} "):
            chosen.module.check(group)
