# SPDX-License-Identifier: Apache-2.0
"""The sm90 attention in Triton's interpreter: its kernels against their specification, and its calls of the library.

In place of FlashAttention-3 stands a function with its signature that evaluates the specification; so what is checked here is
which rows and keys each call names, how the calls are put together, and the merge. The library's bits need a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import interpreted as base  # type: ignore[import-not-found]  # patches the interpreter; first
import numpy as np
import torch
from interpreted import differing, other, poisoned, rand, same
from torch import Tensor
from triton.runtime import interpreter

from isoexec.kernels.attention.hopper import backward, fa3, kernel, naive, ops, split, tiles
from isoexec.kernels.attention.hopper.ops import Plan, _attention, _tiles, plan
from isoexec.kernels.domain import DomainError

CHECKS: dict[str, Callable[[], None]] = {}
BF16 = torch.bfloat16
D, S, PAGE = 64, 32, 8  # a segment shorter than a block: the calls are checked here, not the library
SCALE = D**-0.5
ops.HARDWARE = False


def _wide(name: str) -> Callable[[Any, Any], Any]:
    """exp2 and log2 rounded from fp64, as the specification takes them."""

    def apply(self: Any, arg: Any) -> Any:
        found = getattr(np, name)(arg.data.astype(np.float64)).astype(np.float32)
        return interpreter.TensorHandle(found, arg.dtype.scalar)

    return apply


interpreter.InterpreterBuilder.create_exp2 = _wide("exp2")
interpreter.InterpreterBuilder.create_log2 = _wide("log2")


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def segment(
    q: Tensor, k: Tensor, v: Tensor, visible: int, scale: float = SCALE, **free: Any
) -> tuple[Tensor, Tensor]:
    out, lse = poisoned(*q.shape), poisoned(q.shape[1], len(q), dtype=torch.float32)
    kernel.launch_segment(q, k, v, out, lse, visible=visible, scale=scale, hardware=False, **free)
    return out, lse


def specified(q: Tensor, k: Tensor, v: Tensor, visible: int, scale: float = SCALE) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    limit = (visible + torch.arange(len(q))).clamp(max=len(k))
    found = [
        naive.segment(q[:, h], k[:, h // group], v[:, h // group], limit, scale) for h in range(q.shape[1])
    ]
    return torch.stack([out for out, _ in found], 1), torch.stack([lse for _, lse in found])


@check
def a_segment_has_its_specifications_bits() -> None:
    for width, rows, keys, visible in (
        (64, 5, 300, 290),
        (64, 20, 20, 1),
        (128, 3, 130, 128),
        (256, 4, 170, 160),
    ):
        q, k, v = rand(rows, 2, width, scale=2.0), rand(keys, 1, width), rand(keys, 1, width)
        got = segment(q, k, v, visible, width**-0.5)
        for a, b in zip(got, specified(q, k, v, visible, width**-0.5), strict=True):
            same(a, b, (width, rows, keys, visible))


@check
def a_row_of_a_segment_has_the_same_bits_alone_and_among_others() -> None:
    q, k, v = rand(20, 2, D), rand(150, 1, D), rand(150, 1, D)
    out, lse = segment(q, k, v, 131)
    for row in (0, 7, 19):
        alone = segment(q[row : row + 1], k, v, 131 + row)
        same(alone[0], out[row : row + 1], row)
        same(alone[1], lse[:, row : row + 1], row)
    shorter = segment(q[:7], k[:137], v[:137], 131)
    same(shorter[0], out[:7], "keys beyond the last row")


@check
def a_segment_differs_with_blocks_in_the_other_order_or_of_another_size() -> None:
    q, k, v = rand(16, 2, D, scale=2.0), rand(300, 1, D), rand(300, 1, D)
    _, lse = segment(q, k, v, 285)
    other(segment(q, k, v, 285, ascending=True)[1], lse, "ascending")
    other(segment(q, k, v, 285, keys=64)[1], lse, "blocks of 64")


@check
def a_segment_is_attention() -> None:
    q, k, v = rand(9, 2, D, scale=2.0), rand(200, 1, D), rand(200, 1, D)
    out, lse = segment(q, k, v, 192)
    s = torch.einsum("rhd,kd->hrk", q.double(), k[:, 0].double()) * SCALE
    s = s.masked_fill(torch.arange(200) >= (192 + torch.arange(9))[:, None], -torch.inf)
    exact = torch.einsum("hrk,kd->rhd", s.softmax(-1), v[:, 0].double())
    assert float((out.double() - exact).norm() / exact.norm()) < 4e-3
    assert float((lse.double() - s.logsumexp(-1)).abs().max()) < 1e-5


@check
def a_merge_has_its_specifications_bits() -> None:
    for slots in (1, 2, 5):
        for sinks in (None, rand(3, dtype=torch.float32)):
            parts, lse = rand(slots, 4, 3, D), rand(slots, 3, 4, dtype=torch.float32, scale=4.0)
            position = torch.tensor([0, S - 1, (slots - 1) * S, slots * S - 1], dtype=torch.int32)
            want = torch.stack(
                [
                    naive.merge(parts[: p // S + 1, t], lse[: p // S + 1, :, t], sinks)
                    for t, p in enumerate(position.tolist())
                ]
            )
            out = poisoned(4, 3, D)
            kernel.launch_merge(None, None, parts, lse, position, sinks, out, kv_segment=S)
            same(out, want, (slots, sinks is not None, "together"))
            mine = (position // S).long()
            own = parts[mine, torch.arange(4)].clone()
            own_lse = lse[mine, :, torch.arange(4)].t().contiguous()
            kernel.launch_merge(own, own_lse, parts, lse, position, sinks, own, kv_segment=S)
            same(own, want, (slots, sinks is not None, "own apart"))
    parts, lse = rand(5, 200, D), rand(5, 200, dtype=torch.float32)
    other(naive.merge(parts, lse), naive.merge(parts.flip(0), lse.flip(0)), "order")


def library(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *args: Any,
) -> list[Tensor]:
    """FlashAttention-3's forward by the specification; refuses what would be another code path."""
    _, _, _, out, cu_q, cu_k, _, used_q, used_k, most_rows, most_keys, pages, *rest = args
    scale, causal, left, right, _, _, metadata, splits, pack, _, s_aux, spread, rank, total = rest[8:]
    assert (metadata, splits, pack, s_aux, rank) == (None, 1, None, None, 0)
    assert most_rows >= fa3.FEWEST[q.shape[-1]]
    assert all(t.is_contiguous() and t.dtype == torch.int32 for t in (cu_q, used_q, used_k))
    assert len(cu_q) == len(used_q) + 1 == len(used_k) + 1
    assert (cu_k is None) != (pages is None)
    result = poisoned(*q.shape) if out is None else out
    lse = poisoned(q.shape[1], len(q), dtype=torch.float32)
    width = k.shape[1] if pages is not None else 0
    for e, (at, rows, keys) in enumerate(zip(cu_q.tolist(), used_q.tolist(), used_k.tolist(), strict=False)):
        if not rows:
            continue
        assert keys > 0
        assert rows <= most_rows
        assert at + rows <= len(q)
        if pages is None:
            own_k, own_v = (x[cu_k[e] : cu_k[e] + keys] for x in (k, v))
        else:
            assert pages.shape == (len(used_q), most_keys // width if left < 0 else pages.shape[1])
            of = pages[e, : -(-keys // width)].long()
            own_k, own_v = (x[of].flatten(0, 1)[:keys] for x in (k, v))
        if causal and spread > 1:
            step = torch.arange(rows)
            limit = (step + int(total[e]) - rows) // spread + 1
            assert int(limit.min()) >= keys, "a row beyond the segment must see all of it"
        elif causal:
            assert keys >= rows
            limit = torch.arange(rows) + 1 + keys - rows
        else:
            assert right == -1
            assert left == -1 or left > keys
            assert left == -1 or most_keys - 1 > left, "the library drops a window that covers all keys"
            limit = torch.full((rows,), keys)
        o, le = specified_rows(q[at : at + rows], own_k, own_v, limit.clamp(max=keys), scale)
        result[at : at + rows], lse[:, at : at + rows] = o, le
    return [result, lse]


def specified_rows(q: Tensor, k: Tensor, v: Tensor, limit: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    found = [
        naive.segment(q[:, h], k[:, h // group], v[:, h // group], limit, scale) for h in range(q.shape[1])
    ]
    return torch.stack([o for o, _ in found], 1), torch.stack([lse for _, lse in found])


@contextmanager
def tiled() -> Iterator[None]:
    ops.TILED.add(D)
    try:
        yield
    finally:
        ops.TILED.clear()


@contextmanager
def stand_in(past: str | None = None) -> Iterator[None]:
    load, paths, few = fa3.load, dict(fa3.PAST), ops.FEW_PROGRAMS
    ops.FEW_PROGRAMS = 0  # split decode asks for the chip's own exp2: it has a check of its own
    fa3.load = lambda: library  # type: ignore[assignment]
    if past:
        fa3.PAST.update(dict.fromkeys(fa3.PAST, past))  # type: ignore[arg-type]
    try:
        yield
    finally:
        fa3.load = load
        fa3.PAST.update(paths)
        ops.FEW_PROGRAMS = few


def run(step: Plan, q: Tensor, k: Tensor, v: Tensor, position: Tensor, sinks: Tensor | None = None) -> Tensor:
    return run_with_lse(step, q, k, v, position, sinks)[0]


def run_with_lse(
    step: Plan, q: Tensor, k: Tensor, v: Tensor, position: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    kernels: Any = (_tiles, _attention)
    tables: tuple[Any, ...] = (
        step.spans,
        step.owners,
        step.pages,
        step.units,
        sinks,
        q.shape[-1] ** -0.5,
        step.kv_segment,
    )
    if step.provider == "triton":
        sizes = (step.window, step.tokens, step.most_keys, step.single)
        found: tuple[Tensor, Tensor] = kernels[0](q, k, v, position, *tables, *sizes, True)
        return found
    calls: tuple[Any, ...] = (step.own, step.own_pages, step.past, step.past_pages)
    folded = (step.single, step.folded)
    bounds: tuple[Any, ...] = (step.requests, step.tokens, step.most_rows, step.most_keys)
    result: tuple[Tensor, Tensor] = kernels[1](q, k, v, position, *calls, *tables, *bounds, *folded, True)
    return result


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


LENGTHS = (2 * S + 5, 7, S, S + 1)
STARTS = (0, *np.cumsum(LENGTHS).tolist())


class Cache:
    """The same keys packed and in pages of a cache whose unused rows are NaN."""

    def __init__(self) -> None:
        self.q, self.k, self.v = (
            rand(STARTS[-1], 2, D, scale=2.0),
            rand(STARTS[-1], 1, D),
            rand(STARTS[-1], 1, D),
        )
        self.position = torch.cat([torch.arange(n) for n in LENGTHS]).int()
        width = [-(-n // PAGE) for n in LENGTHS]
        order = torch.randperm(sum(width) + 3).tolist()
        self.blocks = torch.full((len(LENGTHS), max(width)), -1, dtype=torch.int32)
        self.keys, self.values = poisoned(len(order), PAGE, 1, D), poisoned(len(order), PAGE, 1, D)
        for b, n in enumerate(LENGTHS):
            for w in range(width[b]):
                page, size = order.pop(), min(PAGE, n - w * PAGE)
                self.blocks[b, w] = page
                at = STARTS[b] + w * PAGE
                self.keys[page, :size], self.values[page, :size] = (
                    self.k[at : at + size],
                    self.v[at : at + size],
                )

    def whole(self, sinks: Tensor | None = None, window: int = 0) -> Tensor:
        return self.whole_with_lse(sinks, window)[0]

    def whole_with_lse(self, sinks: Tensor | None = None, window: int = 0) -> tuple[Tensor, Tensor]:
        parts = [slice(STARTS[b], STARTS[b + 1]) for b in range(len(LENGTHS))]
        given: dict[str, Any] = {"kv_segment": S, "sinks": sinks, "window": window}
        found = [naive.attention(self.q[p], self.k[p], self.v[p], SCALE, **given) for p in parts]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], 1)

    def packed(self, sinks: Tensor | None = None, **bounds: Any) -> Tensor:
        step = plan(
            requests=len(LENGTHS),
            tokens=len(self.q),
            most_rows=max(LENGTHS),
            most_keys=max(LENGTHS),
            kv_segment=S,
            device="cpu",
            **bounds,
        )
        step.fill(ints(STARTS), ints(LENGTHS), k_start=ints(STARTS[:-1]))
        return run(step, self.q, self.k, self.v, self.position, sinks)

    def rows(
        self, of: dict[int, tuple[int, int]], sinks: Tensor | None = None, **bounds: Any
    ) -> tuple[Tensor, Tensor]:
        """Request b's positions of[b] through the cache: (result, the rows' indices in the packed batch)."""
        return self.spans([(b, *span) for b, span in of.items()], sinks, **bounds)

    def spans(
        self, several: list[tuple[int, int, int]], sinks: Tensor | None = None, **bounds: Any
    ) -> tuple[Tensor, Tensor]:
        """As `rows`; a request may come more than once."""
        of = [b for b, _, _ in several]
        spans = [(first, end) for _, first, end in several]
        index = torch.cat([STARTS[b] + torch.arange(first, end) for b, first, end in several])
        step = plan(
            requests=len(of),
            tokens=len(index),
            most_rows=max(b - a for a, b in spans),
            kv_segment=S,
            page=PAGE,
            device="cpu",
            **{"most_keys": max(LENGTHS), **bounds},
        )
        step.fill(
            ints([0, *np.cumsum([b - a for a, b in spans])]),
            ints([b for _, b in spans]),
            blocks=self.blocks[of],
        )
        return run(step, self.q[index], self.keys, self.values, self.position[index], sinks), index


@check
def packed_batches_have_the_specifications_bits_on_every_path() -> None:
    cache = Cache()
    want = cache.whole()
    for past in fa3.PAST.values():
        for folded in (False, True):
            with stand_in(past):
                same(cache.packed(folded=folded), want, (past, folded))


@check
def the_references_own_segments_and_merge_have_the_specifications_bits() -> None:
    cache = Cache()
    sinks = rand(2, dtype=torch.float32)
    part = slice(STARTS[3], STARTS[4])
    for given in (None, sinks):
        got, lse = kernel.reference(
            cache.q[part], cache.k[part], cache.v[part], SCALE, kv_segment=S, sinks=given, hardware=False
        )
        want, want_lse = cache.whole_with_lse(given)
        same(got, want[part], given is not None)
        same(lse, want_lse[:, part], given is not None)


@check
def decode_prefill_and_chunks_through_pages_have_the_bits_of_the_packed_batch() -> None:
    cache = Cache()
    for sinks in (None, rand(2, dtype=torch.float32)):
        with stand_in():
            want = cache.packed(sinks)
            for of in (
                {b: (0, n) for b, n in enumerate(LENGTHS)},  # prefill
                {b: (n - 1, n) for b, n in enumerate(LENGTHS)},  # decode
                {0: (0, 1)},  # the first token alone
                {0: (S, S + 1), 3: (S - 1, S)},  # at the edge of a segment
                {0: (3, 2 * S + 4)},  # a chunk over three segments that starts inside one
                {0: (S - 6, S + 7)},  # draft tokens over an edge
                {3: (S, S + 1), 0: (10, 2 * S), 1: (0, 7)},  # decode and prefill in one step
            )[: None if sinks is None else 2]:
                got, index = cache.rows(of, sinks)
                same(got, want[index], of)
                if len(index) > 1 and sinks is None:
                    got, index = cache.rows(of, most_keys=6 * S, folded=False)
                    same(got, want[index], (of, "larger bounds, a call a segment"))


@check
def decode_split_by_keys_and_columns_has_the_bits_of_the_packed_batch() -> None:
    cache = Cache()
    want = cache.whole()
    of = [(0, 2 * S + 4), (0, S), (0, S - 1), (1, 6), (3, S)]
    index = torch.tensor([STARTS[b] + p for b, p in of])
    for paged in (True, False):
        step = plan(
            requests=len(of) + 1,
            tokens=len(of),
            most_rows=1,
            most_keys=5 * S,
            kv_segment=S,
            page=PAGE if paged else 0,
            device="cpu",
        )
        # the last request has no row
        blocks, starts = cache.blocks[[b for b, _ in of] + [2]], ints([STARTS[b] for b, _ in of] + [0])
        step.fill(
            ints([*range(len(of) + 1), len(of)]),
            ints([p + 1 for _, p in of] + [S]),
            **({"blocks": blocks} if paged else {"k_start": starts}),
        )
        k, v = (cache.keys, cache.values) if paged else (cache.k, cache.v)
        parts, totals, lse = split.launch_split(
            cache.q[index],
            *(k, v, step.own, step.own_pages),
            requests=len(of) + 1,
            kv_segment=S,
            scale=SCALE,
            tuning=split.Tuning(
                columns=32, warps=4, stages=3, score_blocks=2, score_warps=4, score_stages=3, ahead=2
            ),
            hardware=False,
        )
        out, n = poisoned(len(of), 2, D), len(parts) // len(of)
        kernel.launch_merge(
            None,
            None,
            parts.view(n, len(of), 2, D),
            lse.view(2, n, -1).transpose(0, 1),
            cache.position[index],
            None,
            out,
            kv_segment=S,
            totals=totals.view(2, n, -1).transpose(0, 1),
            hardware=False,
        )
        same(out, want[index], paged)


@check
def the_log_sum_exp_of_every_row_is_the_specifications() -> None:
    cache = Cache()
    for sinks in (None, rand(2, dtype=torch.float32)):
        want = cache.whole_with_lse(sinks)
        for provider in ("fa3", "triton"):
            step = plan(
                requests=len(LENGTHS),
                tokens=len(cache.q),
                most_rows=max(LENGTHS),
                most_keys=max(LENGTHS),
                kv_segment=S,
                device="cpu",
                provider=provider,
            )
            step.fill(ints(STARTS), ints(LENGTHS), k_start=ints(STARTS[:-1]))
            with stand_in():
                got = run_with_lse(step, cache.q, cache.k, cache.v, cache.position, sinks)
            for a, b in zip(got, want, strict=True):
                same(a, b, (provider, sinks is not None))


MANY = ((0, 0, LENGTHS[0]), (1, 2, 7), (2, S - 1, S), (0, S + 3, 2 * S + 1), (3, S - 6, S + 1))
FEW = ((0, 0, 1), (0, S, S + 1), (3, S - 1, S), (1, 5, 6), (0, 2 * S + 3, 2 * S + 4))


@check
def the_own_kernel_has_the_librarys_bits_packed_in_pages_in_chunks_and_in_decode() -> None:
    cache = Cache()
    for sinks in (None, rand(2, dtype=torch.float32)):
        want = cache.whole(sinks)
        same(cache.packed(sinks, provider="triton"), want, "packed")
        for spans in (MANY, FEW):
            got, index = cache.spans(list(spans), sinks, provider="triton")
            same(got, want[index], spans)
    with tiled():  # a plan of the library's whose decode the own kernel serves
        got, index = cache.spans(list(FEW), None)
        same(got, cache.whole()[index], "decode in a plan of the library's")


@check
def a_window_has_its_specifications_bits_packed_in_pages_in_chunks_and_in_decode() -> None:
    cache = Cache()
    for window in (1, 5, S, S + 9):
        want = cache.whole(window=window)
        same(cache.packed(provider="triton", window=window), want, (window, "packed"))
        for spans in (MANY, FEW):
            got, index = cache.spans(list(spans), provider="triton", window=window)
            same(got, want[index], (window, spans))
    sinks = rand(2, dtype=torch.float32)
    same(cache.packed(sinks, provider="triton", window=7), cache.whole(sinks, 7), "sinks")
    same(cache.packed(provider="triton", window=4 * S), cache.whole(), "a window wider than the sequence")
    other(cache.packed(provider="triton", window=5), cache.packed(provider="triton", window=6), "window")


@check
def tiles_and_groups_of_any_size_have_the_same_bits() -> None:
    for H, KV, width in ((6, 2, D), (5, 1, 128), (2, 1, 256)):
        n = 150
        q, k, v = rand(n, H, width, scale=2.0), rand(n, KV, width), rand(n, KV, width)
        for window in (0, 70):
            want, want_lse = naive.attention(q, k, v, width**-0.5, kv_segment=128, window=window)
            for rows in (16, 64):
                tile = tiles.Tile(rows=rows, warps=4, stages=2)
                held = tiles.tokens_of(tile, H // KV)
                spans = ints([[0], [n], [n], [0]])
                owners = torch.empty(2, n // held + 1, dtype=torch.int32)
                tiles.launch_map(spans[1], owners, unit=held)
                parts, lse = poisoned(2, n, H, width), poisoned(2, H, n, dtype=torch.float32)
                tiles.launch_tiles(
                    *(q, k, v, parts, lse, spans, owners, None),
                    scale=width**-0.5,
                    kv_segment=128,
                    window=window,
                    segments=2,
                    tile=tile,
                    tokens=held,
                    hardware=False,
                )
                out, whole = poisoned(n, H, width), poisoned(H, n, dtype=torch.float32)
                kernel.launch_merge(
                    *(None, None, parts, lse, torch.arange(n, dtype=torch.int32), None, out),
                    kv_segment=128,
                    window=window,
                    whole_lse=whole,
                    hardware=False,
                )
                same(out, want, (H, KV, width, window, rows))
                same(whole, want_lse, (H, KV, width, window, rows))


class Packed:
    """Sequences with their results, and the gradients' tables; the last row and key belong to nobody and are NaN."""

    def __init__(
        self, lengths: tuple[int, ...], H: int, KV: int, width: int, *, window: int = 0, sinks: bool = False
    ) -> None:
        self.lengths, self.window, self.scale = lengths, window, width**-0.5
        self.starts = [0, *np.cumsum(lengths).tolist()]
        rows = self.starts[-1] + 1
        self.q, self.k, self.v = (rand(rows, n, width, scale=1.5) for n in (H, KV, KV))
        self.g, self.out = rand(rows, H, width), poisoned(rows, H, width)
        self.lse = poisoned(H, rows, dtype=torch.float32)
        self.sinks = rand(H, dtype=torch.float32) if sinks else None
        for p in self.parts():
            own = (self.q[p], self.k[p], self.v[p])
            self.out[p], self.lse[:, p] = naive.attention(
                *own, self.scale, kv_segment=64, sinks=self.sinks, window=window
            )
        for x in (self.q, self.k, self.v, self.g):
            x[-1] = torch.nan

    def parts(self) -> list[slice]:
        return [slice(a, b) for a, b in zip(self.starts, self.starts[1:], strict=False)]

    def want(self) -> list[Tensor]:
        found = []
        for p in self.parts():
            g, q, k, v, out = (x[p] for x in (self.g, self.q, self.k, self.v, self.out))
            given: dict[str, Any] = {"window": self.window, "sinks": self.sinks}
            found.append(naive.gradients(g, q, k, v, out, self.lse[:, p], self.scale, **given))
        whole: list[Tensor] = [torch.cat(x) for x in list(zip(*found, strict=True))[:3]]
        if self.sinks is not None:
            total = torch.zeros_like(self.sinks)
            for one in found:
                assert one[3] is not None
                total = total + one[3]
            whole.append(-total)
        return whole

    def got(self, **free: Any) -> list[Tensor]:
        spans = ints([self.starts[:-1], self.lengths, self.lengths, self.starts[:-1]])
        units = torch.empty(2, len(self.q) // backward.UNIT + len(self.lengths) + 1, dtype=torch.int32)
        tiles.launch_map(spans[1], units, unit=backward.UNIT)
        found = backward.launch_gradients(
            *(self.q, self.k, self.v, self.out, self.lse, self.g, spans, units, self.sinks),
            scale=self.scale,
            window=self.window,
            most_rows=max(self.lengths),
            hardware=False,
            **free,
        )
        for x in found[:3]:
            assert x is not None
            assert not x[-1].any()
        return [x[:-1] if i < 3 else x for i, x in enumerate(found) if x is not None]


def walk(hold: int, step: int, *, apart: bool = False) -> backward.Walk:
    return backward.Walk(hold=hold, step=step, warps=4, stages=2, apart=apart)


@check
def gradients_have_their_specifications_bits_in_every_walk() -> None:
    packed = Packed((150, 1, 33), 4, 2, D, sinks=True)
    want = packed.want()
    for free in (
        {},
        {"workspace": 0},
        {"workspace": 0, "key": walk(64, 128), "query": walk(64, 32)},
        {"key": walk(64, 16, apart=True), "stored": walk(32, 128)},
        {"workspace": 1 << 19},  # a KV group at a time
    ):
        for a, b, name in zip(packed.got(**free), want, ("dq", "dk", "dv", "dsinks"), strict=True):
            same(a, b, (free, name))


@check
def gradients_of_wide_heads_and_of_windows_have_their_specifications_bits() -> None:
    for H, KV, width, window in ((1, 1, 128, 0), (2, 1, 256, 0), (3, 1, D, 40), (2, 2, D, 1)):
        packed = Packed((137, 20), H, KV, width, window=window)
        for a, b, name in zip(packed.got(), packed.want(), ("dq", "dk", "dv"), strict=True):
            same(a, b, (H, KV, width, window, name))


@check
def gradients_do_not_depend_on_company_place_padding_or_the_number_of_groups() -> None:
    packed = Packed((40, 133, 7), 4, 2, D)
    dq, dk, dv = packed.got()
    at = packed.parts()[1]
    alone = Packed((133,), 4, 2, D)
    for name in ("q", "k", "v", "g", "out"):
        getattr(alone, name)[:-1] = getattr(packed, name)[at]
    alone.lse[:, :-1] = packed.lse[:, at]
    for a, b in zip(alone.got(), (dq, dk, dv), strict=True):
        same(a, b[at], "alone")
    padded = Packed((133 + 60,), 4, 2, D)
    for name in ("q", "k", "v", "g", "out"):
        getattr(padded, name)[:133] = getattr(packed, name)[at]
    padded.g[133:-1] = 0.0
    padded.lse[:, :133] = packed.lse[:, at]
    for a, b in zip(padded.got(), (dq, dk, dv), strict=True):
        same(a[:133], b[at], "padded at the end")
    rank = Packed((40, 133, 7), 2, 1, D)
    for name, heads in (("q", 2), ("k", 1), ("v", 1), ("g", 2), ("out", 2)):
        setattr(rank, name, getattr(packed, name)[:, -heads:].contiguous())
    rank.lse = packed.lse[-2:].contiguous()
    for a, b in zip(rank.got(), (dq, dk, dv), strict=True):
        same(a, b[:, -a.shape[1] :], "one of two ranks")


@check
def gradients_are_those_of_attention_and_another_order_differs() -> None:
    packed = Packed((150,), 4, 2, D, sinks=True)
    found = packed.got()
    q, k, v = (x[:150].double().requires_grad_() for x in (packed.q, packed.k, packed.v))
    assert packed.sinks is not None
    sinks = packed.sinks.double().requires_grad_()
    wide_k, wide_v = (x.repeat_interleave(2, 1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q, wide_k) * packed.scale
    s = s.masked_fill(torch.ones(150, 150).triu(1).bool(), -torch.inf)
    p = torch.cat((s, sinks[:, None, None].expand(4, 150, 1)), -1).softmax(-1)[..., :-1]
    torch.einsum("hij,jhd->ihd", p, wide_v).backward(packed.g[:150].double())
    for a, b, name in zip(found, (q, k, v, sinks), ("dq", "dk", "dv", "dsinks"), strict=True):
        assert b.grad is not None
        error = float((a.double() - b.grad).norm() / b.grad.norm())
        assert error < 8e-3, (name, error)
    swapped = Packed((150,), 4, 2, D)
    order = [1, 0, 3, 2]  # the heads of each group in the other order
    for name in ("q", "g", "out"):
        setattr(swapped, name, getattr(packed, name)[:, order].contiguous())
    swapped.k, swapped.v, swapped.lse = packed.k, packed.v, packed.lse[order].contiguous()
    dq, dk, dv = swapped.got()
    same(dq, found[0][:, order], "a query's gradient knows no other head")
    other(dk, found[1], "heads in another order")
    other(dv, found[2], "heads in another order")


@check
def a_request_that_lacks_rows_of_its_keys_gets_no_number_for_a_gradient() -> None:
    packed = Packed((20, 30), 2, 1, D)
    spans = ints([packed.starts[:-1], packed.lengths, [20, 31], packed.starts[:-1]])
    units = torch.empty(2, 3, dtype=torch.int32)
    tiles.launch_map(spans[1], units, unit=backward.UNIT)
    tensors = (packed.q, packed.k, packed.v, packed.out, packed.lse, packed.g, spans, units, None)
    for x in backward.launch_gradients(*tensors, scale=packed.scale, window=0, most_rows=30, hardware=False)[
        :3
    ]:
        assert x is not None
        assert bool(x[:20].isfinite().all())
        assert bool(x[20:50].isnan().all())


@check
def requests_without_rows_and_pages_without_keys_change_nothing() -> None:
    cache = Cache()
    with stand_in():
        want = cache.packed()
        got, index = cache.rows({1: (6, 7), 2: (5, 5), 0: (60, 61)})
        same(got, want[index])


@check
def attention_differs_with_another_segment_and_without_its_sinks() -> None:
    cache = Cache()
    sinks = rand(2, dtype=torch.float32)
    with stand_in():
        other(cache.packed(sinks), cache.packed(), "sinks")
    part = slice(0, S + 8)
    rows = cache.q[part], cache.k[part], cache.v[part]
    other(
        kernel.reference(*rows, SCALE, kv_segment=S, hardware=False)[0],
        kernel.reference(*rows, SCALE, kv_segment=2 * S, hardware=False)[0],
        "kv_segment",
    )


@check
def what_is_outside_the_domain_is_refused() -> None:
    cache = Cache()
    for bounds in ({"most_keys": 33 * S}, {"kv_segment": 100, "page": 16}, {"most_rows": 0}):
        given = {"requests": 1, "tokens": 4, "most_rows": 4, "most_keys": 9, "kv_segment": S, "device": "cpu"}
        try:
            plan(**{**given, **bounds})  # type: ignore[arg-type]
        except DomainError:
            continue
        raise AssertionError(bounds)
    step = plan(requests=1, tokens=4, most_rows=4, most_keys=9, kv_segment=S, device="cpu")
    for q, k in (
        (cache.q[:4, :, :32], cache.k[..., :32]),
        (cache.q[:4].float(), cache.k.float()),
        (cache.q[:5], cache.k),
    ):
        try:
            run(step, q, k, k, torch.arange(len(q), dtype=torch.int32))
        except DomainError:
            continue
        raise AssertionError((q.shape, q.dtype))


if __name__ == "__main__":
    assert differing is base.differing
    base.CHECKS.clear()
    base.CHECKS.update({n: c for n, c in CHECKS.items() if n in sys.argv[1:] or len(sys.argv) == 1})
    base.main()
