# SPDX-License-Identifier: Apache-2.0
"""Digest what is loaded, tensor by tensor and shard by shard, without gathering a tensor anywhere.

The digest of a tensor is a sum over its elements of a 64-bit mix of (global position, bit pattern), in two lanes of different
seeds.  A sum does not care how the elements are spread, so every rank digests only the part it holds and the parts add up
(mod 2**64) to the digest of the whole, whatever the parallel layout.  It finds accidents (stale, missing, moved, zero or
changed elements), not forgeries.  On a GPU one kernel makes the same sums in one pass (`weights_kernel`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

__all__ = ["add_partials", "is_zero", "spans", "tensor_partial"]

_MASK = (1 << 64) - 1
_SEEDS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)
# the finalizer of MurmurHash3 (64 bits), Austin Appleby, public domain
_M1, _M2 = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # int64 >> is arithmetic; the mask makes it logical


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 33)) * _signed(_M1)
    x = (x ^ _shift_right(x, 33)) * _signed(_M2)
    return x ^ _shift_right(x, 33)


def _bits(t: torch.Tensor) -> torch.Tensor:
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.detach().contiguous().view(views[t.element_size()]).to(torch.int64)


def tensor_partial(t: torch.Tensor, global_shape: Sequence[int], offsets: Sequence[int]) -> tuple[int, int]:
    """Digest of one shard, two unsigned 64-bit lanes; shards of one tensor add up mod 2**64 to the digest of the whole.

    ``t`` holds the block of the global tensor that starts at ``offsets`` (one per dimension of ``global_shape``).  Any dtype of
    1, 2, 4 or 8 bytes; the dtype's bits are digested, so bf16 and float32 copies of one tensor have different digests.
    Raises ValueError when the block does not lie inside ``global_shape`` or the tensor is empty (an empty parameter is a
    packed weight that nobody can read, never evidence).
    """
    if t.dim() != len(global_shape) or t.dim() != len(offsets):
        raise ValueError(
            f"shard of {t.dim()} dimensions, global shape {tuple(global_shape)}, offsets {tuple(offsets)}"
        )
    if t.numel() == 0:
        raise ValueError("an empty tensor cannot be digested: its weights live where no probe can read them")
    for size, whole, start in zip(t.shape, global_shape, offsets, strict=True):
        if start < 0 or start + size > whole:
            raise ValueError(
                f"shard {tuple(t.shape)} at {tuple(offsets)} is outside of {tuple(global_shape)}"
            )
    lanes = _on_gpu(t, global_shape, offsets) if t.is_cuda else _in_torch(t, global_shape, offsets)
    return lanes[0] & _MASK, lanes[1] & _MASK


def _in_torch(t: torch.Tensor, global_shape: Sequence[int], offsets: Sequence[int]) -> list[int]:
    index = torch.zeros((), dtype=torch.int64, device=t.device)
    for dim, (size, start) in enumerate(zip(t.shape, offsets, strict=True)):
        stride = math.prod(global_shape[dim + 1 :])
        steps = torch.arange(start, start + size, dtype=torch.int64, device=t.device) * stride
        index = index.unsqueeze(-1) + steps
    # place in the high half, bits in the low one: no two (place, bits) of a tensor below 2**32 elements are mixed alike
    placed = (index << 32) ^ (index >> 32) ^ _bits(t)
    lanes = []
    for seed in _SEEDS:
        mixed = _mix(placed ^ _signed(seed))
        lanes.append(int(mixed.sum().item()))  # int64 addition wraps, which is the sum mod 2**64
    return lanes


def spans(
    shape: Sequence[int], global_shape: Sequence[int], offsets: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], int, int, int]]:
    """A block as parts of equal rows, at most two-dimensional: (place in its leading dimensions, rows, stride, base).

    A row is a run of elements that are neighbours in the whole tensor; ``stride`` of them lie between two rows' first ones and
    ``base`` before the part's first.
    """
    strides = [math.prod(global_shape[dim + 1 :]) for dim in range(len(shape))]
    base = sum(start * stride for start, stride in zip(offsets, strides, strict=True))
    # dimensions behind the last one that is cut are whole: they and it are one run
    run = max((d for d in range(len(shape)) if shape[d] != global_shape[d]), default=0)
    if run == 0:
        yield (), 1, 0, base
        return
    leading = shape[: run - 1]
    for place in itertools.product(*(range(size) for size in leading)):
        at = base + sum(i * stride for i, stride in zip(place, strides, strict=False))
        yield place, shape[run - 1], strides[run - 1], at


def _on_gpu(t: torch.Tensor, global_shape: Sequence[int], offsets: Sequence[int]) -> list[int]:
    from isoexec.probes.weights_kernel import lanes

    t = t.detach().contiguous()
    parts = [
        lanes(t[place] if place else t, rows=rows, stride=stride, base=base, seeds=_SEEDS, mixers=(_M1, _M2))
        for place, rows, stride, base in spans(t.shape, global_shape, offsets)
    ]
    return [int(lane) for lane in torch.stack(parts).sum(0).tolist()]


def add_partials(parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The digest of the tensor whose shards have these digests."""
    return sum(p[0] for p in parts) & _MASK, sum(p[1] for p in parts) & _MASK


def is_zero(t: torch.Tensor) -> bool:
    """Whether every element is zero (of either sign): a tensor that was allocated and never loaded."""
    return not bool(torch.any(t != 0))
