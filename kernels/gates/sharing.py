# SPDX-License-Identifier: Apache-2.0
"""Real ranks of checks of an accelerator, of which several may share a GPU: eight of them, whatever GPUs there are.

Where each rank of a group can have a GPU of its own they talk over NCCL, otherwise over `staged`. A check's record says on how
many GPUs its ranks were (`gpus`): as many as there are ranks, or all that there were. Without a GPU they compute on the CPU, by
the same staged groups, as tests of gates do.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from isoexec.kernels.gates import ranks
from isoexec.kernels.gates.ranks import RankError, launch
from isoexec.kernels.gates.staged import NAME, register

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from isoexec.kernels.gates.checking import Run

__all__ = ["WORLD", "gpus_for", "here", "on_ranks", "subgroup"]

WORLD = 8  # processes of a pool, all of which can be one check's
GRACE = 2.0  # seconds until the end of a rank that others lost is seen here
# of ranks that have a group: as many as a check may ask for, and a square's rows and columns
GROUPS = ((0, 1), (0, 1, 2, 3), tuple(range(WORLD)), (2, 3), (0, 2), (1, 3))
_made: dict[tuple[int, ...], ProcessGroup] = {}


def on_ranks(run: Run, size: int, worker: Callable[..., Any], *args: object) -> list[Any]:
    """`worker(rank, size, group, *args)` in `size` processes of one group, or here with no group for 1; by rank.

    `worker` is a module's function, and returns tensors of the CPU in dicts, lists and tuples; `here` is where it computes. The
    check's domain says on how many GPUs several ranks were. Raises `RankError`.
    """
    if size == 1:
        return [worker(0, 1, None, *args)]
    device = run.device.type
    name = f"{device}, shared"
    if name not in ranks._pools:
        ranks._pools[name] = _Pool(device)
        launch(WORLD, _join, (device,), name)
    if device == "cuda":
        torch.cuda.empty_cache()  # what this process keeps for itself, ranks on its GPU may need
    found = launch(size, _work, (worker, *args), name)
    run.covers(gpus=gpus_for(device, size))
    return found


def gpus_for(device: str, size: int) -> int:
    """On how many GPUs `size` ranks of this kind of device are."""
    return min(size, torch.cuda.device_count()) if device == "cuda" else 0


def here(device: str) -> torch.device:
    """The device of this process: of a rank its GPU, which others may have too."""
    return torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def subgroup(*members: int) -> ProcessGroup:
    """In a rank: the group of these ranks of the pool, of those in `GROUPS`."""
    return _made[members]


class _Pool(ranks._Pool):
    """Eight processes, those beyond the GPUs beginning again at the first."""

    def __init__(self, device: str) -> None:
        self.world = WORLD
        context = multiprocessing.get_context("forkserver")
        # what every rank would import for itself; neither touches a GPU
        context.set_forkserver_preload([__name__, "triton"])
        self.folder = tempfile.TemporaryDirectory(prefix="isoexec-gate-")
        self.ends: list[Connection] = []
        self.processes = []
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.folder.name, device, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.ends.append(ours)
            self.processes.append(process)

    def call(self, size: int, worker: Callable[..., Any], args: tuple[object, ...]) -> list[Any]:
        """As every pool's; of several ranks that fail since one has died, the dead one is named."""
        try:
            return super().call(size, worker, args)
        except RankError as error:
            if error.rank >= size:
                raise
            sentinels = {self.processes[rank].sentinel: rank for rank in range(size)}
            dead = sorted(sentinels[one] for one in wait(list(sentinels), GRACE) if isinstance(one, int))
            if not dead or error.rank in dead:
                raise
            raise RankError(dead[0], f"its process ended; rank {error.rank}: {error.said}") from error


def _serve(rank: int, folder: str, device: str, end: Connection) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    register()
    # the pool itself is joined by gloo, whatever its groups talk over
    ranks._serve(rank, WORLD, folder, "cpu", end)


def _join(rank: int, size: int, host: ProcessGroup, device: str) -> None:
    """In every rank: make the groups, which all make in one order, whoever is in them."""
    del size, host
    for members in GROUPS:
        own = device == "cuda" and max(members) < torch.cuda.device_count()
        made = dist.new_group(list(members), backend="nccl" if own else NAME)
        if rank in members:
            _made[members] = made


def _work(rank: int, size: int, host: ProcessGroup, worker: Callable[..., Any], *args: object) -> Any:
    """In a rank: the worker, with the group that these ranks have on their devices."""
    del host
    return worker(rank, size, subgroup(*range(size)), *args)
