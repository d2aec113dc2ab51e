# SPDX-License-Identifier: Apache-2.0
"""The sm90 latent attention in Triton's interpreter: kernels against their specification, and its calls of the library.

In place of FlashAttention-3 stands a function with its signature that evaluates the specification. The library's bits need a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import interpreted as base  # type: ignore[import-not-found]  # patches the interpreter; first
import interpreted_attention  # type: ignore[import-not-found]  # its exp2 and log2 are rounded from fp64
import torch
from interpreted import differing, other, poisoned, rand, same
from interpreted_attention import ints
from torch import Tensor

from isoexec.kernels.attention.hopper import fa3, segments, tiles
from isoexec.kernels.attention.hopper.backward import UNIT
from isoexec.kernels.attention.hopper.naive import segment
from isoexec.kernels.attention.hopper.segments import merged
from isoexec.kernels.domain import DomainError
from isoexec.kernels.latent_attention.hopper import backward, naive, ops, reference
from isoexec.kernels.latent_attention.hopper.tiles import launch_tiles

from attention_stand_in import launch_merge, specified_merge  # type: ignore[import-not-found]  # isort: skip

CHECKS: dict[str, Callable[[], None]] = {}
SCALE = 192**-0.5
H, S, PAGE = 2, 80, 16  # a block and a part of one in a segment
LENGTHS = (2 * S + 5, 7, S, S + 1)
STARTS = (0, *torch.tensor(LENGTHS).cumsum(0).tolist())
Operands = tuple[Tensor, Tensor, Tensor, Tensor]
Trained = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
ops.HARDWARE = False


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
    rows, heads, _ = x[1].shape
    out, lse = poisoned(rows, heads, naive.LATENT), poisoned(heads, rows, dtype=torch.float32)
    reference.launch_segment(*x, out, lse, visible=visible, scale=SCALE, hardware=False, **free)
    return out, lse


def specified(x: Operands, limit: Tensor, scale: float = SCALE) -> tuple[Tensor, Tensor]:
    q, k = naive.joined(x[0], x[1]), naive.joined(x[2], x[3])
    found = [segment(q[:, h], k, x[3], limit, scale, naive.BLOCK) for h in range(q.shape[1])]
    return torch.stack([out for out, _ in found], 1), torch.stack([lse for _, lse in found])


@check
def a_segment_has_its_specifications_bits() -> None:
    for rows, keys, visible in ((3, 130, 128), (20, 20, 1), (17, 64, 40)):
        x = operands(rows, 2, keys)
        want = specified(x, (visible + torch.arange(rows)).clamp(max=keys))
        for a, b in zip(one_segment(x, visible), want, strict=True):
            same(a, b, (rows, keys, visible))


@check
def another_order_or_block_has_other_bits() -> None:
    x = operands(12, 1, 150)
    want = specified(x, 137 + torch.arange(12))
    for free in ({"ascending": True}, {"latent_first": True}, {"keys": 32}):
        got = one_segment(x, 137, **free)
        assert sum(differing(a, b) for a, b in zip(got, want, strict=True)), free


@check
def the_reference_merges_its_segments() -> None:
    x = operands(75, 1, 75)
    got = reference.reference(*x, SCALE, kv_segment=32, hardware=False)
    for a, b in zip(got, naive.attention(*x, SCALE, kv_segment=32), strict=True):
        same(a, b, "segments of 32")
    other(got[0], naive.attention(*x, SCALE, kv_segment=64)[0], "segments of 64")


class Cache:
    """The same keys packed, and in pages of one cache, latent before rotated part, whose unused rows are NaN."""

    def __init__(self, heads: int = H) -> None:
        self.x = operands(STARTS[-1], heads, STARTS[-1])
        self.position = torch.cat([torch.arange(n) for n in LENGTHS]).int()
        width = [-(-n // PAGE) for n in LENGTHS]
        order = torch.randperm(sum(width) + 3).tolist()
        self.blocks = torch.full((len(LENGTHS), max(width)), -1, dtype=torch.int32)
        cache = poisoned(len(order), PAGE, naive.HEAD)
        self.latent, self.k_rope = cache[..., : naive.LATENT], cache[..., naive.LATENT :]
        for b, n in enumerate(LENGTHS):
            for w in range(width[b]):
                page, size = order.pop(), min(PAGE, n - w * PAGE)
                self.blocks[b, w] = page
                at = STARTS[b] + w * PAGE
                self.k_rope[page, :size], self.latent[page, :size] = (t[at : at + size] for t in self.x[2:])

    def whole(self) -> tuple[Tensor, Tensor]:
        parts = [slice(STARTS[b], STARTS[b + 1]) for b in range(len(LENGTHS))]
        q_rope, q_latent, k_rope, latent = self.x
        found = [
            naive.attention(q_rope[p], q_latent[p], k_rope[p], latent[p], SCALE, kv_segment=S) for p in parts
        ]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], 1)

    def packed(self, **free: Any) -> tuple[Tensor, Tensor]:
        most = max(LENGTHS)
        step = ops.plan(
            requests=len(LENGTHS),
            tokens=STARTS[-1],
            most_rows=most,
            most_keys=most,
            kv_segment=S,
            device="cpu",
            **free,
        )
        step.fill(ints(STARTS), ints(LENGTHS), k_start=ints(STARTS[:-1]))
        return run(step, *self.x, self.position)

    def spans(self, several: list[tuple[int, int, int]], **free: Any) -> tuple[Tensor, Tensor]:
        """Rows through the pages, as an engine's step: (result, the rows' places in the packed batch)."""
        index = torch.cat([STARTS[b] + torch.arange(first, end) for b, first, end in several])
        sizes = [end - first for _, first, end in several]
        step = ops.plan(
            requests=len(several),
            tokens=len(index),
            most_rows=max(sizes),
            page=PAGE,
            device="cpu",
            **{"most_keys": max(LENGTHS), "kv_segment": S, **free},
        )
        step.fill(
            ints([0, *torch.tensor(sizes).cumsum(0).tolist()]),
            ints([end for _, _, end in several]),
            blocks=self.blocks[[b for b, _, _ in several]],
        )
        q = (t[index] for t in self.x[:2])
        return run(step, *q, self.k_rope, self.latent, self.position[index])[0], index


def run(step: Any, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """The op's kernel, which is registered for a GPU."""
    kernel: Any = ops._attention
    found: tuple[Tensor, Tensor] = kernel(
        *(*tensors, step.own, step.own_pages, step.past, step.past_pages),
        *(step.spans, step.owners, step.pages, step.units, step.maker, "", SCALE),
        *(step.kv_segment, step.page, step.tokens, step.most_rows, step.most_keys),
        *(step.single, step.folded, True),
    )
    return found


def library(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> list[Tensor]:
    """FlashAttention-3's forward with a latent query by the specification; refuses what would be another code path."""
    _, _, q_v, out, cu_q, cu_k, _, used_q, used_k, most_rows, _, pages, *rest = args
    scale, causal, left, right, _, _, metadata, splits, pack, _, s_aux, spread, _, _ = rest[8:]
    assert (metadata, splits, pack, s_aux, spread, left, right) == (None, 1, None, None, 1, -1, -1)
    assert (q.shape[-1], q_v.shape[-1], k.shape[-2:], v.shape[-2:]) == (64, 512, (1, 64), (1, 512))
    result = poisoned(*q_v.shape) if out is None else out
    lse = poisoned(q.shape[1], len(q), dtype=torch.float32)
    for e, (at, rows, keys) in enumerate(zip(cu_q.tolist(), used_q.tolist(), used_k.tolist(), strict=False)):
        if not rows:
            continue
        assert keys > 0
        assert rows <= most_rows
        assert at + rows <= len(q)
        if pages is None:
            own = [t[cu_k[e] : cu_k[e] + keys, 0] for t in (k, v)]
        else:
            of = pages[e, : -(-keys // k.shape[1])].long()
            own = [t[of].flatten(0, 1)[:keys, 0] for t in (k, v)]
        limit = torch.arange(rows) + 1 + keys - rows if causal else torch.full((rows,), keys)
        assert int(limit.min()) > 0
        some = slice(at, at + rows)
        result[some], lse[:, some] = specified((q[some], q_v[some], own[0], own[1]), limit, scale)
    return [result, lse]


@contextmanager
def quick_merge(rows: int = 0) -> Iterator[None]:
    """More than 50 rows are merged by the merge's specification: it has checks of its own, and each row is a program."""
    if rows > 50:
        segments.launch_merge = specified_merge  # type: ignore[attr-defined]
    try:
        yield
    finally:
        segments.launch_merge = launch_merge  # type: ignore[attr-defined]


@contextmanager
def stand_in(few: int = 0) -> Iterator[None]:
    """The library's place taken; `few` programs are split."""
    before, ops.FEW_PROGRAMS = ops.FEW_PROGRAMS, few
    load, require = fa3.load, ops._require_library
    fa3.load = lambda: library  # type: ignore[assignment]
    ops._require_library = lambda: None
    try:
        yield
    finally:
        fa3.load, ops._require_library, ops.FEW_PROGRAMS = load, require, before


@check
def packed_batches_have_the_specifications_bits_by_either_provider() -> None:
    cache = Cache()
    want = cache.whole()
    merges = quick_merge(), quick_merge(STARTS[-1]), quick_merge(STARTS[-1])
    forms: tuple[dict[str, Any], ...] = (
        {"provider": "triton"},
        {"provider": "fa3", "folded": True},
        {"folded": False},
    )
    for free, merge in zip(forms, merges, strict=True):
        with stand_in(), merge:
            for a, b in zip(cache.packed(**free), want, strict=True):
                same(a, b, free)


@check
def decode_prefill_and_chunks_through_pages_have_the_bits_of_the_packed_batch() -> None:
    cache = Cache()
    want, _ = cache.whole()
    for of in (
        [(b, 0, n) for b, n in enumerate(LENGTHS)],  # prefill
        [(b, n - 1, n) for b, n in enumerate(LENGTHS)],  # decode
        [(0, 0, 1)],  # the first token alone
        [(0, S, S + 1), (3, S - 1, S)],  # at the edge of a segment
        [(0, 3, 2 * S + 4)],  # a chunk over three segments that starts inside one
        [(0, S - 3, S + 4), (2, S - 6, S)],  # draft tokens
        [(1, 6, 7), (2, 5, 5), (0, 60, 61), (3, 0, S + 1)],  # a request without a row
    ):
        for provider, few in (("triton", 0), ("triton", 1 << 30), ("fa3", 0)):
            if few and any(end - first > 1 for _, first, end in of):
                continue
            with stand_in(few), quick_merge(sum(end - first for _, first, end in of)):
                got, index = cache.spans(of, provider=provider)
            same(got, want[index], (of, provider, few))
    with stand_in(), quick_merge(2 * S):
        got, index = cache.spans([(0, 0, 2 * S)], provider="triton", kv_segment=2 * S)
    other(got, want[index], "another segment")


@check
def bounds_that_are_not_reached_change_nothing() -> None:
    cache = Cache()
    want, _ = cache.whole()
    for provider, few in (("triton", 0), ("triton", 1 << 30), ("fa3", 0)):
        with stand_in(few):
            got, index = cache.spans([(0, 7, 8), (3, 2, 3)], provider=provider, most_keys=5 * S)
        same(got, want[index], (provider, few))


@check
def split_decode_takes_heads_in_groups() -> None:
    for heads in (18,):
        cache = Cache(heads)
        want, _ = cache.whole()
        with stand_in(1 << 30):
            got, index = cache.spans([(0, S + 1, S + 2), (1, 5, 6)], provider="triton")
        same(got, want[index], heads)


@check
def every_tile_has_the_same_bits() -> None:
    rows = S + 5
    for heads, sizes in ((5, (16, 32, 64)), (18, (16,))):  # 18 heads are two tiles of nine
        x = operands(rows, heads, rows)
        want, _ = naive.attention(*x, SCALE, kv_segment=S)
        spans = ints([[0], [rows], [rows], [0]])
        for size in sizes:
            tile = tiles.Tile(rows=size, warps=4, stages=1)
            tokens = max(1, size // heads)
            owners = torch.empty(2, rows // tokens + 1, dtype=torch.int32)
            tiles.launch_map(spans[1], owners, unit=tokens)
            parts = poisoned(2, rows, heads, naive.LATENT)
            lse = poisoned(2, heads, rows, dtype=torch.float32)
            free: dict[str, Any] = {"scale": SCALE, "kv_segment": S, "tile": tile, "tokens": tokens}
            launch_tiles(*x, parts, lse, spans, owners, None, **free, hardware=False)
            position = torch.arange(rows, dtype=torch.int32)
            with quick_merge(rows):
                got, _ = merged(parts, lse, position, None, kv_segment=S, with_lse=False, hardware=False)
            same(got, want, (heads, size))


class Packed:
    """Packed sequences with what their gradients are made from, and rows beyond the last of them."""

    def __init__(self, lengths: tuple[int, ...], heads: int) -> None:
        self.lengths = lengths
        self.starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        rows = self.starts[-1] + 1
        x = operands(rows, heads, rows)
        lse = rand(heads, rows, dtype=torch.float32) + 4.0
        self.x = (*x, rand(rows, heads, naive.LATENT), lse, rand(rows, heads, naive.LATENT))

    def of(self, b: int, heads: slice = slice(None)) -> Trained:
        at = slice(self.starts[b], self.starts[b + 1])
        q_rope, q_latent, k_rope, latent, out, lse, dout = self.x
        return (
            *(q_rope[at, heads], q_latent[at, heads], k_rope[at], latent[at]),
            *(out[at, heads], lse[heads, at], dout[at, heads]),
        )

    def given(self, heads: slice = slice(None), keys: tuple[int, ...] = ()) -> backward.Operands:
        q_rope, q_latent, k_rope, latent, out, lse, dout = self.x
        spans = ints([self.starts[:-1], self.lengths, keys or self.lengths, self.starts[:-1]])
        units = torch.empty(2, len(latent) // UNIT + len(self.lengths), dtype=torch.int32)
        tiles.launch_map(spans[1], units, unit=UNIT)
        delta = backward.launch_delta(out[:, heads], dout[:, heads])
        return backward.Operands.made(
            *(q_rope[:, heads], q_latent[:, heads], k_rope, latent, lse[heads], delta, dout[:, heads]),
            *(spans, units),
            scale=SCALE,
        )


@check
def gradients_have_their_specifications_bits_in_any_tile_and_pack() -> None:
    packed = Packed((150, 1, 45), 2)
    want = [naive.gradients(*packed.of(b), SCALE) for b in range(3)]
    for queries, keys in (((64, 32), 64), ((16, 64), 32), ((32, 16), 16)):
        given = packed.given()
        dq = backward.launch_queries(
            given, backward.Tile(rows=queries[0], keys=queries[1], warps=4, stages=1)
        )
        dkeys = backward.launch_keys(
            *(given, slice(0, packed.starts[-1] + 1), None, torch.float32, None),
            backward.Tile(rows=naive.ROWS, keys=keys, warps=4, stages=1),
        )
        got = (*dq, dkeys)
        for i, a in enumerate(got):
            same(a[:-1], torch.cat([w[i] for w in want]), (queries, keys, i))
            assert not a[-1].any(), "a row of no sequence"


@check
def keys_by_blocks_and_heads_of_another_rank_continue_the_chains() -> None:
    packed = Packed((140, 20), 3)
    rows = packed.starts[-1]
    want = torch.cat([naive.gradients(*packed.of(b), SCALE)[2] for b in range(2)])
    first, second = packed.given(slice(0, 2)), packed.given(slice(2, 3))
    got, alone = [], []
    for a, b in ((0, 37), (37, 128), (128, 150), (150, rows)):
        acc = backward.launch_keys(first, slice(a, b), None, torch.float32)
        got.append(backward.launch_keys(second, slice(a, b), acc, torch.bfloat16))
        alone.append(acc + backward.launch_keys(second, slice(a, b), None, torch.float32))
    same(torch.cat(got), want.bfloat16(), "handed on")
    other(torch.cat(alone), want, "sums of two ranks added")
    begun = naive.gradients(*packed.of(0, slice(0, 2)), SCALE)[2]
    same(
        naive.gradients(*packed.of(0, slice(2, 3)), SCALE, begun)[2], want[:140], "the specification's start"
    )


@check
def a_request_that_lacks_rows_of_its_keys_gets_no_number_for_a_gradient() -> None:
    packed = Packed((20, 30), 1)
    given = packed.given(keys=(20, 31))
    for x in (
        *backward.launch_queries(given),
        backward.launch_keys(given, slice(0, 50), None, torch.bfloat16),
    ):
        assert bool(x[:20].isfinite().all())
        assert bool(x[20:50].isnan().all())


@check
def the_reference_of_the_gradients_is_the_specification() -> None:
    packed = Packed((40,), 2)
    got, want = reference.gradients(*packed.of(0), SCALE), naive.gradients(*packed.of(0), SCALE)
    for a, b in zip(got, want, strict=True):
        same(a, b)


@check
def what_is_outside_the_domain_is_refused() -> None:
    cache = Cache()
    step = ops.plan(
        requests=1, tokens=4, most_rows=4, most_keys=9, kv_segment=S, provider="triton", device="cpu"
    )
    q_rope, q_latent, k_rope, latent = (t[:4] for t in cache.x)
    position = cache.position[:4]
    for tensors in (
        (q_rope, q_latent[..., :256], k_rope, latent[..., :256], position),
        (q_rope.float(), q_latent, k_rope, latent, position),
        (q_rope, q_latent, k_rope, latent, position.long()),
        (q_rope, q_latent[:3], k_rope, latent, position),
        (q_rope, q_latent, cache.k_rope, cache.latent, position),
    ):
        try:
            run(step, *tensors)
        except DomainError:
            continue
        raise AssertionError([t.shape for t in tensors])


if __name__ == "__main__":
    assert interpreted_attention.differing is differing
    base.CHECKS.clear()
    base.CHECKS.update({n: c for n, c in CHECKS.items() if n in sys.argv[1:] or len(sys.argv) == 1})
    base.main()
