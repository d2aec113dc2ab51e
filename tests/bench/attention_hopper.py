# SPDX-License-Identifier: Apache-2.0
"""Gates, then times, of the sm90 attention on one GPU: `python tests/bench/attention_hopper.py [--gates-only | --times-only]`.

Needs FlashAttention-3 as built into vLLM: installed, or named by ISOEXEC_FA3. Nothing is timed when a gate fails. Times are
medians of CUDA-graph replays in turns with the library's own schedule over the same tensors. Tables go to the terminal,
`attention-h200.json` to $OUT or the working directory.
"""

# ruff: noqa: E402 - where the package is not installed, its links are put on the path first

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

ROOT = Path(__file__).resolve().parents[2]
if find_spec("isoexec") is None:
    sys.path.insert(0, str(ROOT / ".src"))

from isoexec.kernels.attention.hopper import fa3, kernel
from isoexec.kernels.attention.hopper.ops import Plan, attention, plan
from isoexec.kernels.hopper.timing import capture, replay_times

BF16, FP32 = torch.bfloat16, torch.float32
VIEW = {BF16: torch.int16, FP32: torch.int32}
# query heads, KV heads, head dim, segment, page
SHAPES = (
    (32, 8, 128, 1024, 16),
    (16, 2, 256, 1024, 16),
    (32, 8, 64, 1024, 16),
    (12, 4, 128, 4096, 64),
    (4, 4, 128, 512, 256),
    (8, 1, 64, 2048, 128),
    (24, 4, 256, 4096, 64),
)
MODELS = ((32, 8, 128), (16, 2, 256), (32, 8, 64))
GATES: list[dict[str, Any]] = []
TIMES: list[dict[str, Any]] = []
NOTES: list[str] = []
START = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:5.0f} s]", *words, flush=True)


def note(text: str) -> None:
    NOTES.append(text)
    say("note |", text)


def gate(name: str, ok: bool, detail: str) -> None:
    GATES.append({"gate": name, "ok": bool(ok), "detail": detail})
    say("pass" if ok else "FAIL", "|", name, "|", detail)


def differing(a: Tensor, b: Tensor) -> int:
    assert (a.shape, a.dtype) == (b.shape, b.dtype), (a.shape, a.dtype, b.shape, b.dtype)
    return int((a.contiguous().view(VIEW[a.dtype]) != b.contiguous().view(VIEW[b.dtype])).sum())


def equal(name: str, *pairs: tuple[Tensor, Tensor]) -> None:
    wrong, total = sum(differing(a, b) for a, b in pairs), sum(b.numel() for _, b in pairs)
    gate(name, wrong == 0 and total > 0, f"{wrong} of {total} elements differ")


def control(name: str, got: Tensor, want: Tensor) -> None:
    count = differing(got, want)
    gate(f"control: {name}", count > 0, f"{count} of {want.numel()} elements differ")


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def rand(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=BF16, device="cuda").normal_(std=scale)


def poison() -> None:
    """Fill what the allocator will hand out next with NaN."""
    held = [torch.full((1 << n,), math.nan, device="cuda") for n in range(8, 28) for _ in range(2)]
    del held


class Batch:
    """Sequences packed, and the same keys in pages in random order; pages nobody owns hold NaN."""

    def __init__(
        self, H: int, KV: int, D: int, S: int, page: int, lengths: tuple[int, ...], tail: float = 0.0
    ) -> None:
        self.H, self.KV, self.D, self.S, self.page, self.lengths = H, KV, D, S, page, lengths
        self.starts = [0]
        for n in lengths:
            self.starts.append(self.starts[-1] + n)
        T = self.starts[-1]
        self.q, self.k, self.v = rand(T, H, D, scale=1.5), rand(T, KV, D), rand(T, KV, D)
        self.position = torch.cat([torch.arange(n, device="cuda") for n in lengths]).int()
        width = [-(-n // page) for n in lengths]
        order = torch.randperm(sum(width) + 5)
        self.blocks = torch.full((len(lengths), max(width) + 2), -1, dtype=torch.int32)
        self.keys = torch.full((len(order), page, KV, D), math.nan, dtype=BF16, device="cuda")
        self.values = self.keys.clone()
        used = 0
        for b, n in enumerate(lengths):
            mine = order[used : used + width[b]]
            used += width[b]
            self.blocks[b, : width[b]] = mine.int()
            for cache, x in ((self.keys, self.k), (self.values, self.v)):
                padded = torch.full((width[b] * page, KV, D), tail, dtype=BF16, device="cuda")
                padded[:n] = x[self.starts[b] : self.starts[b + 1]]
                cache[mine.cuda()] = padded.view(width[b], page, KV, D)
        self.blocks = self.blocks.cuda()
        self.scale = D**-0.5

    def packed(self, sinks: Tensor | None = None, S: int = 0, **free: Any) -> Tensor:
        most = max(self.lengths)
        step = plan(
            requests=len(self.lengths),
            tokens=len(self.q),
            most_rows=most,
            most_keys=most,
            kv_segment=S or self.S,
            **free,
        )
        step.fill(ints(self.starts), ints(self.lengths), k_start=ints(self.starts[:-1]))
        return attention(self.q, self.k, self.v, self.position, step, scale=self.scale, sinks=sinks)

    def rows(
        self, spans: list[tuple[int, int, int]], sinks: Tensor | None = None, **bounds: Any
    ) -> tuple[Tensor, Tensor]:
        """Rows [first, end) of sequences, (sequence, first, end), through the pages: (result, their indices)."""
        index = torch.cat([self.starts[b] + torch.arange(a, e) for b, a, e in spans]).cuda()
        sizes = [e - a for _, a, e in spans]
        given = {"most_rows": max(sizes), "most_keys": max(self.lengths), **bounds}
        step = plan(requests=len(spans), tokens=len(index), kv_segment=self.S, page=self.page, **given)
        at = [0]
        for n in sizes:
            at.append(at[-1] + n)
        step.fill(ints(at), ints([e for _, _, e in spans]), blocks=self.blocks[[b for b, _, _ in spans]])
        got = attention(
            self.q[index], self.keys, self.values, self.position[index], step, scale=self.scale, sinks=sinks
        )
        return got, index

    def reference(self, sinks: Tensor | None = None, **free: Any) -> Tensor:
        parts = [slice(a, b) for a, b in zip(self.starts, self.starts[1:], strict=False)]
        return torch.cat(
            [
                kernel.reference(
                    self.q[p], self.k[p], self.v[p], self.scale, kv_segment=self.S, sinks=sinks, **free
                )
                for p in parts
            ]
        )


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.float().transpose(0, 1)[None] for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)


def native(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, rows: int, keys: int, *, splits: int = 0, **given: Any
) -> Tensor:
    """The library as engines call it; `given`: cu_k, or used and pages; window, most_rows."""
    left, right = given.get("window", (-1, -1))
    out: Tensor = fa3.load()(
        *(q, k, v, None, None, None, None, cu_q, given.get("cu_k"), None, None, given.get("used")),
        *(rows, keys, given.get("pages"), None, None, None, None, None, None, None, None),
        *(q.shape[-1] ** -0.5, True, left, right, 0.0, True, None, splits, None, 0, None, 1, 0, None),
    )[0]
    return out


def gate_shape(H: int, KV: int, D: int, S: int, page: int) -> None:
    tag = f"H{H}/{KV} D{D} S{S} page {page}"
    n0 = 2 * S + 777
    lengths = (n0, 700, S, S + 1, 1)
    batch = Batch(H, KV, D, S, page, lengths)
    poison()
    want = batch.packed()
    assert not bool(want.isnan().any()), tag
    equal(f"{tag}: the library = the Triton reference, packed", (want, batch.reference()))
    first = slice(0, min(S, n0))
    out = torch.empty(S, H, D, dtype=BF16, device="cuda")
    lse = torch.empty(H, S, device="cuda")
    q, k, v = batch.q[first], batch.k[first], batch.v[first]
    kernel.launch_segment(q, k, v, out, lse, visible=1, scale=batch.scale)
    table = ints([[0, S], [S, 0], [S, 0], [0, 0], [S * kernel.TOTAL_STEP, 0]])
    o, le = fa3.call(q, k, v, table, None, scale=batch.scale, path="causal", most_rows=S, most_keys=S)
    equal(f"{tag}: first segment, output and log-sum-exp", (o, out), (le, lse))
    note(f"{tag}: of them outputs {differing(o, out)}, log-sum-exps {differing(le, lse)}")
    rows = batch.q[S : 2 * S]
    kernel.launch_segment(rows, k, v, out, lse, visible=S, scale=batch.scale)
    paths: tuple[fa3.Path3, ...] = ("spread", "window", "plain")
    for path in paths:
        try:
            o, le = fa3.call(rows, k, v, table, None, scale=batch.scale, path=path, most_rows=S, most_keys=S)
            found = differing(o, out), differing(le, lse)
        except RuntimeError as error:
            note(f"{tag}: rows beyond a segment by path {path}: {error}")
            continue
        if path in (fa3.PAST[D], "spread"):
            gate(f"{tag}: rows beyond a segment by path {path}", found == (0, 0), f"{found} differ")
        else:
            note(
                f"{tag}: rows beyond a segment by path {path}: {found} of {out.numel()} and {lse.numel()} differ"
            )
    poison()
    got, index = batch.rows([(b, 0, n) for b, n in enumerate(lengths)])
    equal(f"{tag}: prefill through pages", (got, want[index]))
    places = sorted({0, 1, 63, 64, 127, 128, 129, 255, 256, 500, S - 1, S, S + 1, 2 * S - 1, 2 * S, n0 - 1})
    poison()
    together, index = batch.rows([(0, p, p + 1) for p in places])
    equal(f"{tag}: decode", (together, want[index]))
    poison()
    pairs = []
    for i, p in enumerate(places):
        pairs.append((batch.rows([(0, p, p + 1)])[0], together[i : i + 1]))
    equal(f"{tag}: a decoded token alone and in company", *pairs)
    got, index = batch.rows([(b, n - 1, n) for b, n in enumerate(lengths)] * 40, most_keys=6 * S)
    equal(f"{tag}: decode, 200 requests and larger bounds", (got, want[index]))
    pairs = []
    for cut in ((0, 333, S - 1, S, S + 1, n0), (0, 1, 130, 2 * S + 5, n0), (0, S // 2, 3 * S // 2, n0)):
        poison()
        for a, e in zip(cut, cut[1:], strict=False):
            for folded in (True, False):
                got, index = batch.rows([(0, a, e)], folded=folded)
                pairs.append((got, want[index]))
    equal(f"{tag}: chunked prefill, one call and several", *pairs)
    pairs = []
    for span in ((0, S - 6, S + 7), (0, 100, 113), (0, 2 * S, 2 * S + 2)):
        got, index = batch.rows([span])
        pairs.append((got, want[index]))
    equal(f"{tag}: draft tokens", *pairs)
    got, index = batch.rows([(3, S, S + 1), (0, 100, 2 * S + 60), (1, 699, 700), (2, 5, 5), (1, 0, 700)])
    equal(f"{tag}: decode and prefill in one step", (got, want[index]))
    poison()
    equal(f"{tag}: rerun", *((batch.packed(), want) for _ in range(3)))
    equal(f"{tag}: past segments in one call", (batch.packed(folded=True), want))
    sinks = torch.empty(H, device="cuda").normal_(std=2.0)
    with_sinks = batch.packed(sinks)
    equal(f"{tag}: sinks, packed = reference", (with_sinks, batch.reference(sinks)))
    got, index = batch.rows([(0, p, p + 1) for p in places], sinks)
    equal(f"{tag}: sinks, decode", (got, with_sinks[index]))
    control(f"{tag}: sinks", with_sinks, want)
    control(f"{tag}: another segment", batch.packed(S=2 * S), want)
    cu = ints(batch.starts)
    control(
        f"{tag}: the library's own schedule, decode of {n0} keys",
        native(
            batch.q[n0 - 1 : n0],
            batch.keys,
            batch.values,
            ints([0, 1]),
            1,
            n0,
            used=ints([n0]),
            pages=batch.blocks[:1].contiguous(),
        ),
        want[n0 - 1 : n0],
    )
    control(
        f"{tag}: the library's own schedule, packed",
        native(batch.q, batch.k, batch.v, cu, n0, n0, cu_k=cu),
        want,
    )
    kernel.launch_segment(q, k, v, out, lse, visible=1, scale=batch.scale, ascending=True)
    le = fa3.call(q, k, v, table, None, scale=batch.scale, path="causal", most_rows=S, most_keys=S)[1]
    control(f"{tag}: a reference that walks its blocks upwards", lse, le)
    if D == 64:
        few, index = batch.rows([(0, p, p + 1) for p in places])
        before = fa3.FEWEST[64]
        fa3.FEWEST[64] = 1
        try:
            control(f"{tag}: few rows claimed", batch.rows([(0, p, p + 1) for p in places])[0], few)
        finally:
            fa3.FEWEST[64] = before
    windowed = native(batch.q, batch.k, batch.v, cu, n0, n0, splits=1, cu_k=cu, window=(300, 0))
    one = native(
        *(batch.q[[p for p in places if p > 300]], batch.keys, batch.values),
        ints(list(range(len([p for p in places if p > 300]) + 1))),
        *(1, n0),
        splits=1,
        used=ints([p + 1 for p in places if p > 300]),
        pages=batch.blocks[:1].expand(len([p for p in places if p > 300]), -1).contiguous(),
        window=(300, 0),
    )
    note(
        f"{tag}: the library's sliding window of 300, decode against prefill: "
        f"{differing(one, windowed[[p for p in places if p > 300]])} of {one.numel()} elements differ"
    )
    tails = Batch(H, KV, D, S, page, (S + 3, 7), tail=math.nan)
    packed = tails.packed()
    got, index = tails.rows([(0, 0, S + 3), (1, 0, 7)])
    some, at = tails.rows([(0, S + 2, S + 3), (1, 6, 7)])
    note(
        f"{tag}: NaN in the rest of a last page: prefill differs in {differing(got, packed[index])}, decode in "
        f"{differing(some, packed[at])} elements"
    )
    part = slice(0, n0)
    want32 = exact(batch.q[part], batch.k[part], batch.v[part])
    off, rounding = ((x.float() - want32).norm() / want32.norm() for x in (want[part], want32.bfloat16()))
    one_split = native(batch.q, batch.k, batch.v, cu, n0, n0, splits=1, cu_k=cu)[part]
    whole = (one_split.float() - want32).norm() / want32.norm()
    gate(
        f"{tag}: against fp32",
        float(off) < 1.2 * float(whole),
        f"relative error {off:.2e}, one split {whole:.2e}, rounding to bf16 alone {rounding:.2e}",
    )


def gate_graphs() -> None:
    """One CUDA graph of the plan's filling and the op, replayed on other lengths, pages and queries."""
    for D, KV in ((128, 8), (256, 2)):
        H, S, page = 4 * KV, 1024, 16
        batch = Batch(H, KV, D, S, page, (3000, 2048, 2047, 5))
        want = batch.packed()
        for rows in (1, 4):
            step = plan(requests=4, tokens=4 * rows, most_rows=rows, most_keys=4096, kv_segment=S, page=page)
            q = torch.zeros(4 * rows, H, D, dtype=BF16, device="cuda")
            position = torch.zeros(4 * rows, dtype=torch.int32, device="cuda")
            q_start, lengths = ints([rows * i for i in range(5)]), ints([rows] * 4)
            blocks = batch.blocks.clone()

            def run() -> Tensor:
                step.fill(q_start, lengths, blocks=blocks)
                return attention(q, batch.keys, batch.values, position, step, scale=batch.scale)

            run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run()
            pairs = []
            for back in (0, 1, 700, 900):
                ends = [max(rows, n - back) for n in batch.lengths]
                index = torch.cat(
                    [batch.starts[b] + torch.arange(e - rows, e) for b, e in enumerate(ends)]
                ).cuda()
                q.copy_(batch.q[index])
                position.copy_(batch.position[index])
                lengths.copy_(ints(ends))
                graph.replay()
                pairs.append((out.clone(), want[index]))
            equal(f"D{D}: a CUDA graph of {rows} rows a request replayed on other lengths", *pairs)


def gates() -> None:
    for shape in SHAPES:
        torch.manual_seed(sum(shape))
        guarded(gate_shape, *shape)
    guarded(gate_graphs)


def guarded(function: Callable[..., None], *args: Any) -> None:
    try:
        function(*args)
    except Exception:
        gate(f"{function.__name__}{args} ran", False, traceback.format_exc(limit=-4)[-900:])
    torch.cuda.empty_cache()


def turns(op: str, shape: str, calls: dict[str, Callable[[int], Any]], copies: int = 1, **more: Any) -> None:
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = capture(call, copies)
        except Exception as error:
            note(f"{op} {shape}: {name} could not be captured: {error!r:.200}")
    spans = replay_times(list(graphs.values()), copies, replays=7)
    found = {name: round(us, 1) for name, us in zip(graphs, spans, strict=True)}
    base = found["native"]
    ratios = {name: round(us / base, 3) for name, us in found.items() if name != "native"}
    TIMES.append({"op": op, "shape": shape, "native_us": base, "ratios": ratios, **more})
    say(op, shape, f"native {base} us", ratios, more)
    del graphs
    torch.cuda.empty_cache()


def filled(S: int, lengths: list[int], **free: Any) -> tuple[Plan, Tensor]:
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    step = plan(
        requests=len(lengths),
        tokens=starts[-1],
        most_rows=max(lengths),
        most_keys=max(lengths),
        kv_segment=S,
        **free,
    )
    step.fill(ints(starts), ints(lengths), k_start=ints(starts[:-1]))
    return step, torch.cat([torch.arange(n, device="cuda") for n in lengths]).int()


def time_prefill(H: int, KV: int, D: int, lengths: list[int]) -> None:
    T, most = sum(lengths), max(lengths)
    q, k, v = rand(T, H, D), rand(T, KV, D), rand(T, KV, D)
    cu = ints([sum(lengths[:i]) for i in range(len(lengths) + 1)])
    calls: dict[str, Callable[[int], Any]] = {
        "native": lambda i: native(q, k, v, cu, most, most, cu_k=cu),
        "noise": lambda i: native(q, k, v, cu, most, most, cu_k=cu),
    }
    for S in (4096, 8192):
        step, position = filled(S, lengths)
        for path in {64: ("spread", "window"), 128: ("window", "spread"), 256: ("plain", "spread")}[D]:
            if most <= S and path != fa3.PAST[D]:
                continue

            def run(i: int, step: Plan = step, position: Tensor = position, path: Any = path) -> None:
                before, fa3.PAST[D] = fa3.PAST[D], path
                try:
                    attention(q, k, v, position, step, scale=D**-0.5)
                finally:
                    fa3.PAST[D] = before

            calls[f"S{S} {path}"] = run
    flops = sum(2 * n * n * H * D for n in lengths)
    turns("prefill", f"H{H}/{KV} D{D} {len(lengths)}x{lengths[0]}", calls, tflop=round(flops / 1e12, 2))


def time_decode(H: int, KV: int, D: int, B: int, ctx: int, segments: tuple[int, ...], page: int = 16) -> None:
    width = ctx // page
    copies = 2 if B < 8 else 1
    caches = [
        (
            rand(B * width, page, KV, D),
            rand(B * width, page, KV, D),
            torch.randperm(B * width, device="cuda").int().view(B, width),
        )
        for _ in range(copies)
    ]
    q, used, cu = rand(B, H, D), ints([ctx] * B), ints(list(range(B + 1)))
    position = used - 1

    def whole(i: int) -> None:
        native(q, caches[i][0], caches[i][1], cu, 1, ctx, used=used, pages=caches[i][2])

    calls: dict[str, Callable[[int], Any]] = {"native": whole, "noise": whole}
    for S in segments:
        steps = []
        for _, _, blocks in caches:
            step = plan(requests=B, tokens=B, most_rows=1, most_keys=ctx, kv_segment=S, page=page)
            step.fill(cu, used, blocks=blocks)
            steps.append(step)

        def run(i: int, steps: list[Plan] = steps) -> None:
            attention(q, caches[i][0], caches[i][1], position, steps[i], scale=D**-0.5)

        calls[f"S{S}"] = run
    turns("decode", f"H{H}/{KV} D{D} B{B} {ctx}", calls, copies, gbytes=round(4 * B * ctx * KV * D / 1e9, 2))


def time_parts() -> None:
    """What a decode step of one request is made of."""
    H, KV, D, ctx, S, page = 32, 8, 128, 32768, 4096, 16
    n = ctx // S
    keys, values = rand(ctx // page, page, KV, D), rand(ctx // page, page, KV, D)
    blocks = torch.randperm(ctx // page, device="cuda").int().view(1, -1)
    q, cu, used = rand(1, H, D), ints([0, 1]), ints([ctx])
    step = plan(requests=1, tokens=1, most_rows=1, most_keys=ctx, kv_segment=S, page=page)
    step.fill(cu, used, blocks=blocks)
    many = q.repeat(n, 1, 1)
    o, lse = fa3.call(
        many, keys, values, step.own, step.own_pages, scale=D**-0.5, path="causal", most_rows=1, most_keys=S
    )
    slots, position, out = lse.view(H, n, 1).transpose(0, 1), used - 1, torch.empty_like(q)
    turns(
        "parts",
        f"H{H}/{KV} D{D} B1 {ctx} S{S}",
        {
            "native": lambda i: native(q, keys, values, cu, 1, ctx, used=used, pages=blocks),
            "queries": lambda i: q.repeat(n, 1, 1),
            "library": lambda i: fa3.call(
                many,
                keys,
                values,
                step.own,
                step.own_pages,
                scale=D**-0.5,
                path="causal",
                most_rows=1,
                most_keys=S,
            ),
            "merge": lambda i: kernel.launch_merge(
                None, None, o.view(n, 1, H, D), slots, position, None, out, kv_segment=S
            ),
            "fill": lambda i: step.fill(cu, used, blocks=blocks),
        },
    )


def times() -> None:
    for H, KV, D in MODELS:
        for lengths in ([2048] * 8, [4096] * 4, [8192], [16384], [32768]):
            guarded(time_prefill, H, KV, D, lengths)
    for H, KV, D in MODELS[:2]:
        guarded(time_decode, H, KV, D, 1, 32768, (1024, 2048, 4096, 8192))
        guarded(time_decode, H, KV, D, 8, 32768, (2048, 4096, 8192))
        guarded(time_decode, H, KV, D, 64, 32768, (2048, 4096, 8192))
        guarded(time_decode, H, KV, D, 256, 32768, (4096, 8192))
        guarded(time_decode, H, KV, D, 64, 4096, (4096,))
    guarded(time_parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gates-only", action="store_true")
    parser.add_argument("--times-only", action="store_true")
    args = parser.parse_args()
    made = {
        "device": torch.cuda.get_device_name(0),
        "driver": subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
        ).stdout.strip(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "fa3": asdict(fa3.identity()),
    }
    say(made)
    with torch.no_grad():
        if not args.times_only:
            gates()
        failed = [g["gate"] for g in GATES if not g["ok"]]
        if not args.gates_only and not failed:
            times()
    text = json.dumps({"made": made, "gates": GATES, "notes": NOTES, "times": TIMES}, indent=1)
    (Path(os.environ.get("OUT", ".")) / "attention-h200.json").write_text(text)
    say(f"{len(GATES)} gates, {len(failed)} failed", failed)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
