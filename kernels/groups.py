# SPDX-License-Identifier: Apache-2.0
"""Process groups by name, as an op's schema can carry them; the empty name is the group of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from isoexec.kernels.domain import DomainError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["all_reduce", "gather_rows", "name_of", "rank_of", "resolve", "size_of"]


def name_of(group: ProcessGroup | None) -> str:
    """The group's registered name, or "" for no group and for a group of one rank."""
    return "" if group is None or group.size() == 1 else str(group.group_name)


def resolve(name: str) -> ProcessGroup:
    """The live process group of a name from `name_of`."""
    group: ProcessGroup = getattr(distributed_c10d, "_resolve_process_group")(name)  # noqa: B009
    return group


def size_of(name: str) -> int:
    """How many ranks the named group has."""
    return resolve(name).size() if name else 1


def rank_of(name: str) -> int:
    """Rank of this process in the named group."""
    return resolve(name).rank() if name else 0


def gather_rows(x: Tensor, name: str) -> Tensor:
    """Every rank's rows in rank order: `[s, ...]` becomes `[s * ranks, ...]`."""
    if not name:
        return x
    group = resolve(name)
    x = x.contiguous()
    whole = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    dist.all_gather(list(whole.chunk(group.size(), 0)), x, group=group)
    return whole


def all_reduce(x: Tensor, name: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """In-place reduction; callers use it only where order cannot matter (max, integers, one non-zero term)."""
    if name:
        dist.all_reduce(x, op=op, group=resolve(name))
    return x


def own_rows(x: Tensor, name: str, op: str) -> Tensor:
    """The block of dim 0 that this rank owns."""
    size = size_of(name)
    if x.shape[0] % size:
        raise DomainError(op, f"{x.shape[0]} rows over {size} ranks", "equal row blocks on every rank")
    return x.chunk(size, 0)[rank_of(name)] if size > 1 else x


def rows_like(x: Tensor, rows: int, *tail: int) -> Tensor:
    """Uninitialised fp32 `[rows, *tail]` beside `x`."""
    return torch.empty((rows, *tail), dtype=torch.float32, device=x.device)
