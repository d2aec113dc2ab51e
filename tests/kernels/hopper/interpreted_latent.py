# SPDX-License-Identifier: Apache-2.0
"""The sm90 latent attention in Triton's interpreter: kernels against their specification, and its calls of the library.

In place of FlashAttention-3 stands a function with its signature that evaluates the specification. The library's bits need a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import interpreted as base  # type: ignore[import-not-found]  # patches the interpreter; first
import interpreted_attention  # type: ignore[import-not-found]  # its exp2 and log2 are rounded from fp64
import torch
from interpreted import differing, other, poisoned, rand, same
from torch import Tensor

from isoexec.kernels.attention.hopper.naive import segment
from isoexec.kernels.latent_attention.hopper import kernel, naive
from isoexec.kernels.latent_attention.hopper.backward import Tile, gradients

CHECKS: dict[str, Callable[[], None]] = {}
SCALE = 192**-0.5
Operands = tuple[Tensor, Tensor, Tensor, Tensor]
Packed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def operands(rows: int, heads: int, keys: int) -> Operands:
    return (
        rand(rows, heads, naive.ROPE),
        rand(rows, heads, naive.LATENT),
        rand(keys, naive.ROPE),
        rand(keys, naive.LATENT),
    )


def one_segment(x: Operands, visible: int, **free: Any) -> tuple[Tensor, Tensor]:
    R, H, _ = x[1].shape
    out, lse = poisoned(R, H, naive.LATENT), poisoned(H, R, dtype=torch.float32)
    kernel.launch_segment(*x, out, lse, visible=visible, scale=SCALE, hardware=False, **free)
    return out, lse


def specified(x: Operands, visible: int) -> tuple[Tensor, Tensor]:
    q, k = naive.joined(x[0], x[1]), naive.joined(x[2], x[3])
    limit = (visible + torch.arange(len(q))).clamp(max=len(k))
    found = [segment(q[:, h], k, x[3], limit, SCALE, naive.BLOCK) for h in range(q.shape[1])]
    return torch.stack([out for out, _ in found], 1), torch.stack([lse for _, lse in found])


@check
def a_latent_segment_has_its_specifications_bits() -> None:
    for rows, keys, visible in ((3, 130, 128), (20, 20, 1), (17, 64, 40)):
        x = operands(rows, 2, keys)
        got, want = one_segment(x, visible), specified(x, visible)
        same(got[0], want[0], (rows, keys, visible))
        same(got[1], want[1], (rows, keys, visible))


@check
def another_order_or_block_has_other_bits() -> None:
    x = operands(12, 1, 150)
    want = specified(x, 137)
    for free in ({"ascending": True}, {"latent_first": True}, {"keys": 32}):
        got = one_segment(x, 137, **free)
        assert sum(differing(a, b) for a, b in zip(got, want, strict=True)), free


@check
def the_reference_merges_its_segments() -> None:
    x = operands(75, 1, 75)
    got = kernel.reference(*x, SCALE, kv_segment=32, hardware=False)
    same(got, naive.attention(*x, SCALE, kv_segment=32), "segments of 32")
    other(got, naive.attention(*x, SCALE, kv_segment=64), "segments of 64")


def packed(lengths: list[int], heads: int) -> tuple[Packed, Tensor]:
    """Operands, outputs, log-sum-exps and output gradients of packed sequences, and where each begins."""
    T = sum(lengths)
    x = operands(T, heads, T)
    return (
        *x,
        rand(T, heads, naive.LATENT),
        rand(heads, T, dtype=torch.float32) + 4.0,
        rand(T, heads, naive.LATENT),
    ), (torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))


def of(x: Packed, rows: slice) -> Packed:
    return (x[0][rows], x[1][rows], x[2][rows], x[3][rows], x[4][rows], x[5][:, rows], x[6][rows])


@check
def gradients_have_their_specifications_bits_in_any_tile_and_pack() -> None:
    lengths = [70, 1, 45]
    x, q_start = packed(lengths, 2)
    for queries, keys in (((64, 32), 64), ((16, 64), 32), ((32, 16), 16)):
        tiles = (
            Tile(rows=queries[0], keys=queries[1], warps=4, stages=1),
            Tile(rows=naive.ROWS, keys=keys, warps=4, stages=1),
        )
        got = gradients(*x, q_start, max(lengths), SCALE, None, *tiles)
        for b, length in enumerate(lengths):
            rows = slice(int(q_start[b]), int(q_start[b]) + length)
            want = naive.gradients(*of(x, rows), SCALE)
            for a, b_ in zip(got, want, strict=True):
                same(a[rows], b_, (tiles, rows))


@check
def heads_of_another_rank_continue_the_chains() -> None:
    x, q_start = packed([40], 3)
    whole = gradients(*x, q_start, 40, SCALE)

    def heads(some: slice, start: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
        part = (x[0][:, some], x[1][:, some], x[2], x[3], x[4][:, some], x[5][some], x[6][:, some])
        return gradients(*part, q_start, 40, SCALE, start)

    first = heads(slice(0, 2), None)
    alone = heads(slice(2, 3), None)
    both = first[2] + alone[2], first[3] + alone[3]
    second = heads(slice(2, 3), (first[2], first[3]))
    for k in (2, 3):
        same(second[k], whole[k], "handed on")
        other(both[k - 2], whole[k], "sums of two ranks added")


if __name__ == "__main__":
    assert interpreted_attention.differing is differing
    base.CHECKS.clear()
    base.CHECKS.update({n: c for n, c in CHECKS.items() if n in sys.argv[1:] or len(sys.argv) == 1})
    base.main()
