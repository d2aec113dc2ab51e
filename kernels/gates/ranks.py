# SPDX-License-Identifier: Apache-2.0
"""Real process groups for checks: processes that stay for the whole run, so that a check costs no start of a process."""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from isoexec.contracts.errors import IsoExecError

__all__ = ["RankError", "close", "launch"]

WORLD = 4  # processes of a pool on CPU; a check may ask for groups of 2 and 4
PATIENCE = 300.0  # seconds; a rank that waits longer for another has lost it
_pools: dict[str, _Pool] = {}


class RankError(IsoExecError):
    """A rank of a check raised, died or waited in vain: `rank` and what it said."""

    def __init__(self, rank: int, said: str) -> None:
        self.rank = rank
        self.said = said
        super().__init__(rank, said)

    def __str__(self) -> str:
        return f"rank {self.rank} of a check failed: {self.said}"


def launch(size: int, worker: Callable[..., Any], args: tuple[object, ...], device: str = "cpu") -> list[Any]:
    """What `worker(rank, size, group, *args)` returns in each of `size` processes, by rank; raises `RankError`.

    `worker` is a module's function: it is sent by name. A failure ends the pool, and the next call starts another.
    """
    pool = _pools.get(device)
    if pool is None:
        pool = _pools[device] = _Pool(device)
    try:
        return pool.call(size, worker, args)
    except BaseException:
        close()
        raise


def close() -> None:
    """End the processes of every pool."""
    while _pools:
        _pools.popitem()[1].close()


class _Pool:
    def __init__(self, device: str) -> None:
        self.world = WORLD if device == "cpu" else torch.cuda.device_count()
        # forked from a server that has only imported torch, never from this process and its threads
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.folder = tempfile.TemporaryDirectory(prefix="isoexec-gate-")
        self.ends: list[Connection] = []
        self.processes = []
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, self.folder.name, device, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.ends.append(ours)
            self.processes.append(process)

    def call(self, size: int, worker: Callable[..., Any], args: tuple[object, ...]) -> list[Any]:
        if not 1 < size <= self.world or size & (size - 1):
            raise RankError(size, f"a group of {size} was wanted, the pool has 2, 4, ... up to {self.world}")
        for end in self.ends[:size]:
            end.send((size, worker, args))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + PATIENCE
        while len(results) < size:
            waiting = {self.ends[rank]: rank for rank in range(size) if rank not in results}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankError(min(waiting.values()), f"no answer in {PATIENCE:.0f} s")
            for rank in (waiting[end] for end in waiting if end in ready):
                try:
                    error, data = self.ends[rank].recv()
                except EOFError:
                    raise RankError(rank, "its process ended") from None
                if error:
                    raise RankError(rank, error)
                results[rank] = torch.load(io.BytesIO(data), weights_only=True)
        return [results[rank] for rank in range(size)]

    def close(self) -> None:
        for end in self.ends:
            end.close()
        for process in self.processes:
            process.terminate()
            process.join(5)
        self.folder.cleanup()


def _serve(rank: int, world: int, folder: str, device: str, end: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run that is interrupted ends its ranks
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = FileStore(f"{folder}/store", world)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=PATIENCE)
    )
    groups = {world: dist.group.WORLD}
    size = 2
    while size < world:
        groups[size] = dist.new_group(list(range(size)))
        size *= 2
    while True:
        try:
            size, worker, args = end.recv()
        except (EOFError, OSError):
            return  # the run has ended
        try:
            out = io.BytesIO()
            torch.save(worker(rank, size, groups[size], *args), out)
            end.send(("", out.getvalue()))
        except Exception as error:  # noqa: BLE001 - told to the run, which ends the pool
            last = traceback.extract_tb(error.__traceback__)[-1]
            end.send((f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})", b""))


atexit.register(close)
