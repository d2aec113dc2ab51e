# SPDX-License-Identifier: Apache-2.0
"""Inputs of checks, made from integers so that they are the same on every machine, and the small faults planted in them."""

from __future__ import annotations

import torch
from torch import Tensor

from isoexec.kernels.canaries import fill

__all__ = ["DTYPES", "fill", "ids", "nudged", "odd_values", "shuffled", "wide"]

DTYPES = (torch.bfloat16, torch.float32)
PERIOD = 1_000_003  # a prime: rows of any common width start at another place of the pattern


def wide(*shape: int, salt: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """As `fill`, for tensors of many millions of elements: one pattern, repeated."""
    count = torch.Size(shape).numel()
    pattern = fill(min(count, PERIOD), salt=salt, dtype=dtype, scale=scale)
    return pattern.repeat(-(-count // PERIOD))[:count].view(shape)


def ids(count: int, below: int, salt: int) -> Tensor:
    """`count` integers in [0, below), spread."""
    return (torch.arange(count, dtype=torch.int64) * 7919 + salt * 104729) % below


def shuffled(count: int) -> Tensor:
    """A fixed permutation of `count` places that leaves few where they are."""
    return torch.argsort((torch.arange(count, dtype=torch.int64) * 2654435761 + 97) % 2**32)


def nudged(x: Tensor, every: int = 7) -> Tensor:
    """The next number up in every `every`-th element: a fault of one unit in the last place."""
    flat = x.detach().clone().view(-1)
    flat[::every] = torch.nextafter(flat[::every], torch.tensor(float("inf"), dtype=x.dtype))
    return flat.view(x.shape)


def odd_values(dtype: torch.dtype) -> Tensor:
    """Values at the ends of the range: zeros of both signs, subnormals, infinities, NaN, and arguments where exp ends."""
    tiny = torch.finfo(dtype).tiny
    return torch.tensor(
        [
            *(0.0, -0.0, 1.0, -1.0, tiny, -tiny, tiny / 4, -tiny / 4, 1e-30, 3e38, -3e38),
            *(87.0, -87.5, 88.7, -88.9, -104.0, 300.0, -300.0, float("inf"), float("-inf"), float("nan")),
        ],
        dtype=dtype,
    )
