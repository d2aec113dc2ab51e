# SPDX-License-Identifier: Apache-2.0
"""Digest what is loaded, tensor by tensor and shard by shard, without gathering a tensor anywhere.

The digest of a tensor is a sum over its elements of a 64-bit mix of (global position, bit pattern), in two lanes of different
seeds.  A sum does not care how the elements are spread, so every rank digests only the part it holds and the parts add up
(mod 2**64) to the digest of the whole, whatever the parallel layout.  It finds accidents (stale, missing, moved, zero or
changed elements), not forgeries.  On a GPU one kernel makes the same sums of many tensors in one pass (`weights_kernel`), and the
host waits for it once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch

__all__ = [
    "Block",
    "Partial",
    "WeightPartials",
    "add_named",
    "add_partials",
    "is_zero",
    "spans",
    "tensor_partial",
    "tensor_partials",
    "weight_partials",
]

_MASK = (1 << 64) - 1
_SEEDS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)
# the finalizer of MurmurHash3 (64 bits), Austin Appleby, public domain
_M1, _M2 = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
_COPIED = 1 << 28  # bytes of copies of scattered blocks that may wait for the kernel


class Block(NamedTuple):
    """``tensor`` is the block of a whole tensor of shape ``whole`` that starts at ``offsets``, one per dimension."""

    tensor: torch.Tensor
    whole: Sequence[int]
    offsets: Sequence[int]


class Partial(NamedTuple):
    """What is known of a block: its digest, two unsigned 64-bit lanes, and whether all of it is zero (`is_zero`)."""

    lanes: tuple[int, int]
    zero: bool


class WeightPartials(NamedTuple):
    """By name, of the blocks a rank answers for: digest partials, elements covered, elements in all.

    ``zero`` are the names whose block holds nothing but zeros.
    """

    tensors: dict[str, tuple[int, int]]
    numel: dict[str, int]
    total: dict[str, int]
    zero: list[str]


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
    return tensor_partials([Block(t, global_shape, offsets)])[0].lanes


def tensor_partials(blocks: Iterable[Block]) -> list[Partial]:
    """`tensor_partial` and `is_zero` of many blocks, in order; the host waits once for those of a GPU, whatever their number.

    The blocks of a GPU are on one.  Raises ValueError as `tensor_partial`, for the first block that cannot be digested.
    """
    found: dict[int, Partial] = {}
    there: dict[int, Block] = {}
    for index, block in enumerate(blocks):
        _check(block)
        if block.tensor.is_cuda:
            there[index] = block
        else:
            low, high = _in_torch(*block)
            found[index] = Partial((low & _MASK, high & _MASK), is_zero(block.tensor))
    if there:
        found |= zip(there, _on_gpu(there.values()), strict=True)
    return [found[index] for index in sorted(found)]


def weight_partials(blocks: Iterable[tuple[str, Block]]) -> WeightPartials:
    """`tensor_partials` of named blocks, which on a CPU are read one at a time."""
    names: list[str] = []
    numel: dict[str, int] = {}
    total: dict[str, int] = {}

    def noted() -> Iterator[Block]:
        for name, block in blocks:
            names.append(name)
            numel[name] = block.tensor.numel()
            total[name] = math.prod(block.whole)
            yield block

    digests = tensor_partials(noted())
    found = dict(zip(names, digests, strict=True))
    return WeightPartials(
        tensors={name: of.lanes for name, of in found.items()},
        numel=numel,
        total=total,
        zero=[name for name, of in found.items() if of.zero],
    )


def _check(block: Block) -> None:
    t, whole, offsets = block
    if t.dim() != len(whole) or t.dim() != len(offsets):
        raise ValueError(
            f"shard of {t.dim()} dimensions, global shape {tuple(whole)}, offsets {tuple(offsets)}"
        )
    if t.numel() == 0:
        raise ValueError("an empty tensor cannot be digested: its weights live where no probe can read them")
    for size, most, start in zip(t.shape, whole, offsets, strict=True):
        if start < 0 or start + size > most:
            raise ValueError(f"shard {tuple(t.shape)} at {tuple(offsets)} is outside of {tuple(whole)}")


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


def _on_gpu(blocks: Iterable[Block]) -> list[Partial]:
    """The kernel's; blocks whose rows lie scattered are copied, and the copies freed as soon as the kernel is in the queue."""
    from isoexec.probes.weights_kernel import Run, sums

    parts: list[int] = []  # how many runs each block has
    made: list[torch.Tensor] = []
    runs: list[Run] = []
    copied = 0
    for t, whole, offsets in blocks:
        bits = t.detach().contiguous()
        mask = _magnitude(t.dtype)
        of = [
            Run(bits[place] if place else bits, rows, stride, base, mask)
            for place, rows, stride, base in spans(t.shape, whole, offsets)
        ]
        parts.append(len(of))
        runs += of
        copied += 0 if bits.data_ptr() == t.data_ptr() else bits.numel() * bits.element_size()
        if copied > _COPIED:
            made.append(sums(runs, seeds=_SEEDS, mixers=(_M1, _M2)))
            runs, copied = [], 0
    if runs:
        made.append(sums(runs, seeds=_SEEDS, mixers=(_M1, _M2)))
    lines = iter(torch.cat(made).tolist())
    found = []
    for count in parts:
        own = list(itertools.islice(lines, count))
        low, high, some = (sum(column) for column in zip(*own, strict=True))
        found.append(Partial((low & _MASK, high & _MASK), some == 0))
    return found


@cache
def _magnitude(dtype: torch.dtype) -> int:
    """Bits of an element, as int64, of which none is set in a zero of either sign."""
    return ~int(_bits(torch.tensor([-0.0]).to(dtype)).item())


def add_partials(parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The digest of the tensor whose shards have these digests."""
    return sum(p[0] for p in parts) & _MASK, sum(p[1] for p in parts) & _MASK


def add_named(ranks: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """`add_partials` by name, in order: digests of whole tensors from those of the blocks that each rank answers for."""
    names = sorted({name for own in ranks for name in own})
    return {name: add_partials([own[name] for own in ranks if name in own]) for name in names}


def is_zero(t: torch.Tensor) -> bool:
    """Whether every element is zero (of either sign): a tensor that was allocated and never loaded."""
    return not bool(torch.any(t != 0))
