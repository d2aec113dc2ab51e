# SPDX-License-Identifier: Apache-2.0
"""Gradient clipping whose global norm has the same bits under every layout: an exact integer sum of squares.

Megatron adds squares per rank in fp32, then over ranks, so its norm changes with the layout in the last bits, and clipping then
changes every weight.  The norm methods are set on the optimizer instances; no Megatron symbol is replaced.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.kernels.grad_norm import exact_sq_sum

__all__ = ["bind_grad_norm", "leaves", "norm_is_exact", "sum_of_squares"]

_EXACT: WeakSet[Callable[..., Any]] = WeakSet()


def leaves(optimizer: Any) -> list[Any]:
    """The optimizers a chained optimizer steps one by one, or the optimizer itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def sum_of_squares(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> Tensor:
    """The kernel's exact sum; the one path of the bound methods and of the canary."""
    return exact_sq_sum(tensors, group)


def norm_is_exact(optimizer: Any) -> bool:
    """Whether the optimizer and each in its chain still hold the methods that :func:`bind_grad_norm` gave them."""
    owners = {id(o): o for o in (optimizer, *leaves(optimizer))}.values()
    return all(vars(o).get("get_grad_norm") in _EXACT for o in owners) and all(
        vars(o).get("clip_grad_norm") in _EXACT for o in leaves(optimizer)
    )


def bind_grad_norm(optimizer: Any, sums: ModuleType | None = None) -> Callable[[], None]:
    """Give ``optimizer`` and each optimizer in its chain the exact norm; returns a function that takes it away again.

    Which gradients count is still Megatron's choice (``get_grads_for_grad_norm``): shared and tensor-parallel duplicates once.
    ``sums`` is the module whose ``sum_of_squares`` is taken, by default this one.
    """
    bound: list[tuple[Any, str]] = []
    of = sums or sys.modules[__name__]

    def put(owner: Any, name: str, method: Callable[..., Any]) -> None:
        setattr(owner, name, method)
        _EXACT.add(method)
        bound.append((owner, name))

    @torch.no_grad()
    def norm_of(parts: list[Any]) -> float:
        grads: list[Tensor] = [g for part in parts for g in part.get_grads_for_grad_norm()]
        return math.sqrt(float(of.sum_of_squares(grads, parts[0].get_grad_stats_parallel_group())))

    def clip(part: Any, limit: float) -> float:
        norm = norm_of([part])
        parameters = part.get_parameters()
        if limit > 0.0 and parameters:
            clip_grad_by_total_norm_fp32(parameters, limit, norm)
        return norm

    for part in leaves(optimizer):
        put(part, "get_grad_norm", lambda part=part: norm_of([part]))
        put(part, "clip_grad_norm", lambda limit, part=part: clip(part, limit))
    if hasattr(optimizer, "chained_optimizers"):
        put(optimizer, "get_grad_norm", lambda: norm_of(leaves(optimizer)))

    def undo() -> None:
        for owner, name in bound:
            vars(owner).pop(name, None)

    return undo
