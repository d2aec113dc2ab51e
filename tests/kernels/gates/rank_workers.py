# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_ranks.py do: other processes find it by name."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def total(rank: int, size: int, group: ProcessGroup, add: int) -> dict[str, torch.Tensor]:
    x = torch.tensor([rank + add])
    dist.all_reduce(x, group=group)
    return {"sum": x, "pid": torch.tensor(os.getpid())}


def fails_on_one(rank: int, size: int, group: ProcessGroup) -> torch.Tensor:
    if rank == 1:
        raise ValueError("this rank is ill")
    return torch.zeros(1)


def dies_on_one(rank: int, size: int, group: ProcessGroup) -> torch.Tensor:
    if rank == 1:
        os._exit(3)
    return torch.zeros(1)
