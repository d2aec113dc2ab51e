# SPDX-License-Identifier: Apache-2.0
"""Moves the rows of a layer with experts between the ranks that own the tokens and those that own the experts.

Rows travel as they are: nothing is added and nothing is rounded on the way, so what a token's experts give is summed where the
token lives.  A rank of the exchange is a source of tokens and holds experts, or a shard of them under expert tensor parallelism;
every shard of an expert gets its rows, and one of them returns the result, which they all have.  Sources come in rank order,
which is the order of tokens: sequence-parallel ranks hold consecutive blocks of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["Exchange", "misplaced"]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One forward's exchange over ``group``, of ``shards`` ranks (ETP) to each of its owners of experts (EP).

    ``sent`` are this rank's rows for each owner, in the order of its rows; ``received`` [sources, experts held] the rows that
    come from each rank, all in Python integers; ``order`` [R] takes what was received by source into the order of experts.
    """

    group: ProcessGroup
    shards: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: Tensor
    inverse: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, offsets: Tensor, group: ProcessGroup, shards: int) -> Exchange:
        """Agree on who sends what: ``offsets`` [experts + 1] are those of this rank's rows, by expert of the whole layer.

        Every rank of the group must call.
        """
        counts = offsets.diff()
        owners = group.size() // shards
        held = counts.numel() // owners
        everyone = counts.new_empty((group.size(), counts.numel()))
        dist.all_gather(list(everyone.unbind(0)), counts, group=group)
        first = group.rank() // shards * held
        mine = everyone[:, first : first + held]
        expert = torch.arange(held, device=counts.device).repeat(group.size())
        order = expert.repeat_interleave(mine.reshape(-1)).argsort(stable=True)
        return cls(
            group=group,
            shards=shards,
            sent=tuple(counts.view(owners, held).sum(1).tolist()),
            received=tuple(mine.sum(1).tolist()),
            order=order,
            inverse=order.argsort(),
            offsets=torch.cat([offsets[:1], mine.sum(0).cumsum(0)]),
        )

    def out(self, rows: Tensor) -> Tensor:
        """Take this rank's rows [T * k, H], by expert -> the rows of the experts it holds [R, H], by expert, then by token."""
        return _Out.apply(rows, self)

    def back(self, rows: Tensor) -> Tensor:
        """Take what the experts here gave [R, H] -> what this rank's own rows got [T * k, H], in their order."""
        return _Back.apply(rows, self)

    def move_out(self, rows: Tensor) -> Tensor:
        """`out` without a gradient."""
        if self.shards > 1:
            rows = torch.cat([part for part in rows.split(self.sent) for _ in range(self.shards)])
        got = rows.new_empty((sum(self.received), rows.shape[1]))
        sent = [count for count in self.sent for _ in range(self.shards)]
        dist.all_to_all_single(got, rows.contiguous(), list(self.received), sent, group=self.group)
        return got.index_select(0, self.order)

    def move_back(self, rows: Tensor) -> Tensor:
        """`back` without a gradient."""
        rank, size = self.group.rank(), self.group.size()
        rows = rows.index_select(0, self.inverse)
        # source s is answered by the shard of number s modulo the shards
        answers = [self.received[s] if s % self.shards == rank % self.shards else 0 for s in range(size)]
        if self.shards > 1:
            parts = rows.split(self.received)
            rows = torch.cat([part[:count] for part, count in zip(parts, answers, strict=True)])
        wanted = [
            self.sent[d // self.shards] if rank % self.shards == d % self.shards else 0 for d in range(size)
        ]
        got = rows.new_empty((sum(wanted), rows.shape[1]))
        dist.all_to_all_single(got, rows.contiguous(), wanted, answers, group=self.group)
        return got


class _Out(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.move_out(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.move_back(gradient), None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.move_back(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.move_out(gradient), None


def misplaced(
    group: ProcessGroup, owners: ProcessGroup, shards: ProcessGroup, tokens: ProcessGroup
) -> str | None:
    """In words, what in the groups of a layer the exchange cannot serve, or None.

    ``owners`` are the ranks that share the experts out (EP), ``shards`` those that share an expert (ETP), ``group`` both of them
    together, and ``tokens`` the tensor-parallel ranks.
    """
    sizes = f"EP {owners.size()} x ETP {shards.size()} under TP {tokens.size()}"
    if group.size() != owners.size() * shards.size():
        return f"{sizes}: {group.size()} ranks in the group of both"
    if group.size() % tokens.size():
        return f"{sizes}: tensor-parallel ranks hold copies of experts, whose gradients would be sums of partial ones"
    if group.rank() != owners.rank() * shards.size() + shards.rank():
        return f"{sizes}: rank {group.rank()} of both is {owners.rank()} of EP and {shards.rank()} of ETP"
    ranks = dist.get_process_group_ranks(group)
    inside = dist.get_process_group_ranks(tokens)
    first = ranks.index(inside[0]) if inside[0] in ranks else -1
    if first < 0 or ranks[first : first + len(inside)] != inside:
        return f"{sizes}: the tensor-parallel ranks {inside} are not neighbours in {ranks}"
    return None
