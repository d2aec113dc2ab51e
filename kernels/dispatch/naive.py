# SPDX-License-Identifier: Apache-2.0
"""moe.dispatch/1: rows move as they are, by expert and then by token; their gradients are added in routing order.

A slot is token * k + place: the place-th choice of a token. A row lies at one slot whoever computes it, so neither ownership
of experts nor an exchange can change what is added, or in which order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """Where the rows of experts `first` to `first + count` come from.

    `slots` int64 [R] says of each row which slot it is of; expert `first + i` has rows `offsets[i]` to `offsets[i + 1]`
    (int64 [count + 1]). On sm90 R is tokens * k, and rows after the last offset are of no slot (-1). `tokens` and `places`
    are T and k of the experts that were planned.
    """

    slots: Tensor
    offsets: Tensor
    first: int
    count: int
    tokens: int
    places: int


def plan(experts: Tensor, first: int, count: int) -> DispatchPlan:
    """Experts int64 [T, k] -> the plan of experts [first, first + count)."""
    tokens, places = experts.shape
    flat = experts.reshape(-1)
    order = flat.sort(stable=True)
    low, high = torch.searchsorted(
        order.values, torch.tensor([first, first + count], device=flat.device)
    ).tolist()
    bounds = torch.arange(first, first + count + 1, device=flat.device)
    offsets = torch.searchsorted(order.values, bounds) - low
    return DispatchPlan(
        slots=order.indices[low:high], offsets=offsets, first=first, count=count, tokens=tokens, places=places
    )


def dispatch(x: Tensor, slots: Tensor, places: int) -> Tensor:
    """X [T, H] -> [R, H]."""
    return x[slots // places]


def by_slot(y: Tensor, slots: Tensor, total: int) -> Tensor:
    """Y [R, H] -> [total, H], zero where no row is of the slot."""
    out = torch.zeros(total, y.shape[1], dtype=y.dtype, device=y.device)
    out[slots] = y
    return out


def dispatch_backward(rows: Tensor, places: int) -> Tensor:
    """Gradients by slot [T * k, H] -> [T, H]: a token's slots added in routing order in fp32, from zero, rounded once."""
    g = rows.view(-1, places, rows.shape[1]).float()
    total = torch.zeros_like(g[:, 0])
    for j in range(places):
        total = total + g[:, j]
    return total.to(rows.dtype)
