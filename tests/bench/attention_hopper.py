# SPDX-License-Identifier: Apache-2.0
"""Times the sm90 attention on one GPU next to the library's own schedule: `python tests/bench/attention_hopper.py`.

Needs FlashAttention-3 as built into vLLM: installed, or named by ISOEXEC_FA3. What it times is proven by
`isoexec gate run --arch sm90 --function attention.mma_segments/1`, but for `layouts`: those are cuts into segments of other
lengths, functions that do not exist, timed to know whether one should. Times are medians of CUDA-graph replays in turns over the
same tensors (decode of few requests: rotating caches, so that the L2 is cold). `--parts` names what is run; `walks` and `layouts`
together take less than a minute. Lines go to the terminal, `attention-h200.json` to $OUT or the working directory.
"""

# ruff: noqa: E402, ARG005 - where the package is not installed, its links are put on the path first

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton
from attention_tuning import SPLITS, ahead  # type: ignore[import-not-found]  # beside this script
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
if find_spec("isoexec") is None:
    sys.path.insert(0, str(ROOT / ".src"))

from isoexec.kernels.attention.hopper import fa3, kernel, ops
from isoexec.kernels.attention.hopper.gate import native
from isoexec.kernels.attention.hopper.ops import Plan, attention, plan
from isoexec.kernels.attention.hopper.split import launch_split
from isoexec.kernels.gates.sequences import Batch
from isoexec.kernels.hopper.timing import capture, replay_times

BF16 = torch.bfloat16
MODELS = ((32, 8, 128), (16, 2, 256), (32, 8, 64))
LAYOUTS = {  # of 32768 keys: lengths of segments
    "8192": (8192,) * 4,
    "4096": (4096,) * 8,
    "2048": (2048,) * 16,
    "1024": (1024,) * 32,
    "growing": (1024, 1024, 2048, 4096, 8192, 16384),
    "growing to 4096": (512, 512, 1024, 2048) + (4096,) * 7,
    "growing to 2048": (512, 512, 1024) + (2048,) * 15,
    "long, the last short": (8192,) * 3 + (1024,) * 8,
}
WALKED = 32768  # keys of the request that is decoded by every split
WALKED_SEGMENTS = (4096, 2048)
TIMES: list[dict[str, Any]] = []
NOTES: list[str] = []
START = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:5.0f} s]", *words, flush=True)


def note(text: str) -> None:
    NOTES.append(text)
    say("note |", text)


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@contextmanager
def decoding(head_dim: int, way: str) -> Iterator[None]:
    """Decode by the library, by one of `SPLITS`, or in `tiles`."""
    few, tuning, tiled = ops.FEW_PROGRAMS, ops.SPLIT[head_dim], set(ops.TILED)
    ops.FEW_PROGRAMS = dict.fromkeys(few, 1 << 30 if way in SPLITS else 0)
    ops.SPLIT[head_dim] = replace(tuning, **SPLITS.get(way, {}))
    if way == "tiles":
        ops.TILED.add(head_dim)
    try:
        yield
    finally:
        ops.FEW_PROGRAMS, ops.SPLIT[head_dim] = few, tuning
        ops.TILED.intersection_update(tiled)


def differing(a: Tensor, b: Tensor) -> int:
    return int((a.contiguous().view(torch.int16) != b.contiguous().view(torch.int16)).sum())


def rand(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=BF16, device="cuda").normal_(std=scale)


def guarded(function: Callable[..., None], *args: Any) -> None:
    """Run one part; what breaks is said, and the others run all the same."""
    try:
        function(*args)
    except Exception:  # noqa: BLE001 - said, with its place
        note(f"{function.__name__}{args}: {traceback.format_exc(limit=-3)[-600:]}")
    torch.cuda.empty_cache()


def turns(
    op: str,
    shape: str,
    calls: dict[str, Callable[[int], Any]],
    copies: int = 1,
    replays: int = 7,
    **more: Any,
) -> None:
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = capture(call, copies)
        except Exception as error:  # noqa: BLE001 - said
            note(f"{op} {shape}: {name} could not be captured: {error!r:.200}")
    spans = replay_times(list(graphs.values()), copies, replays=replays)
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
    for provider, S in (("fa3", 4096), ("fa3", 8192), ("triton", 4096)):
        if provider == "triton" and most > 8192:
            continue  # half as fast: what is to be known of it is known by then
        step, position = filled(S, lengths, provider=provider)

        def run(i: int, step: Plan = step, position: Tensor = position) -> None:
            attention(q, k, v, position, step, scale=D**-0.5)

        calls[f"{provider} S{S}"] = run
    flops = sum(2 * n * n * H * D for n in lengths)
    turns("prefill", f"H{H}/{KV} D{D} {len(lengths)}x{lengths[0]}", calls, tflop=round(flops / 1e12, 2))


def time_window(H: int, KV: int, D: int, T: int, window: int) -> None:
    """The own kernel's window next to the library's, whose bits depend on neighbours."""
    q, k, v = rand(T, H, D), rand(T, KV, D), rand(T, KV, D)
    cu = ints([0, T])
    step, position = filled(4096, [T], provider="triton", window=window)
    turns(
        "window",
        f"H{H}/{KV} D{D} {T}, {window} keys",
        {
            "native": lambda i: native(q, k, v, cu, T, T, cu_k=cu, window=(window - 1, 0)),
            "triton": lambda i: attention(q, k, v, position, step, scale=D**-0.5),
        },
    )


def time_decode(
    H: int,
    KV: int,
    D: int,
    B: int,
    ctx: int,
    segments: tuple[int, ...],
    page: int = 16,
    splits: Iterable[str] = ("split",),
) -> None:
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
    results: dict[tuple[int, str], Tensor] = {}
    for S in segments:
        steps = []
        for _, _, blocks in caches:
            step = plan(requests=B, tokens=B, most_rows=1, most_keys=ctx, kv_segment=S, page=page)
            step.fill(cu, used, blocks=blocks)
            steps.append(step)
        for way in ["library", "tiles", *(splits if B == 1 else ())]:

            def run(i: int, steps: list[Plan] = steps, way: str = way, S: int = S) -> None:
                with decoding(D, way):
                    out = attention(q, caches[i][0], caches[i][1], position, steps[i], scale=D**-0.5)
                results.setdefault((S, way), out)

            calls[f"S{S} {way}"] = run
    turns("decode", f"H{H}/{KV} D{D} B{B} {ctx}", calls, copies, gbytes=round(4 * B * ctx * KV * D / 1e9, 2))
    for (S, way), out in results.items():
        if (found := differing(out, results[S, "library"])) > 0:
            note(f"H{H}/{KV} D{D} B{B} {ctx} S{S}: {way} differs from the library in {found} elements")


def laid_out(rows: list[int], counts: list[int], firsts: list[int], lengths: list[int], end: int) -> Tensor:
    """A table of the library's for entries of any length."""
    steps = [max(lengths) * kernel.TOTAL_STEP] * len(rows)
    columns = zip(rows, counts, lengths, firsts, steps, strict=True)
    return ints([list(row) for row in zip(*columns, (end, 0, 0, 0, 0), strict=True)])


def time_layouts(H: int, KV: int, D: int) -> None:
    """Segments of other lengths: decode of one request waits for the longest, prefill pays for their number."""
    T = sum(LAYOUTS["4096"])
    q, k, v = rand(T, H, D), rand(T, KV, D), rand(T, KV, D)
    cu, one, last = ints([0, T]), ints([0, 1]), q[-1:]
    where, position = ints([T - 1]), torch.arange(T, dtype=torch.int32, device="cuda")
    given: dict[str, Any] = {"scale": D**-0.5}
    decode: dict[str, Callable[[int], Any]] = {"native": lambda i: native(last, k, v, one, 1, T, cu_k=cu)}
    prefill: dict[str, Callable[[int], Any]] = {"native": lambda i: native(q, k, v, cu, T, T, cu_k=cu)}
    for name, lengths in LAYOUTS.items():
        n, most = len(lengths), max(lengths)
        starts = [sum(lengths[:j]) for j in range(n)]
        # the merge asks only how many segments a row has: as many of one length stand for them
        even = -(-T // n)
        single = laid_out(list(range(n)), [1] * n, starts, list(lengths), n)

        def decoded(i: int, table: Tensor = single, n: int = n, most: int = most, even: int = even) -> None:
            sizes = {"path": "causal", "most_rows": 1, "most_keys": most, **given}
            o, lse = fa3.call(last.repeat(n, 1, 1), k, v, table, None, **sizes)
            out = torch.empty_like(last)
            slots = lse.view(H, n, 1).transpose(0, 1)
            kernel.launch_merge(None, None, o.view(n, 1, H, D), slots, where, None, out, kv_segment=even)

        def split(i: int, table: Tensor = single, n: int = n, most: int = most, even: int = even) -> None:
            sizes = {"requests": 1, "kv_segment": most, "tuning": ops.SPLIT[D], **given}
            o, total, lse = launch_split(last, k, v, table, None, **sizes)
            out = torch.empty_like(last)
            slots, totals = (x.view(H, n, 1).transpose(0, 1) for x in (lse, total))
            parts = o.view(n, 1, H, D)
            kernel.launch_merge(None, None, parts, slots, where, None, out, kv_segment=even, totals=totals)

        own = laid_out(starts, list(lengths), starts, list(lengths), T)
        past = [
            laid_out([s + w], [T - s - w], [s], [w], T) for s, w in zip(starts[:-1], lengths, strict=False)
        ]

        def filled_in(
            i: int, own: Tensor = own, past: list[Tensor] = past, most: int = most, even: int = even
        ) -> None:
            out, parts = torch.empty_like(q), torch.empty(len(past), T, H, D, dtype=BF16, device="cuda")
            sizes = {"most_keys": most, **given}
            _, lse = fa3.call(q, k, v, own, None, path="causal", most_rows=most, out=out, **sizes)
            found = [
                fa3.call(q, k, v, table, None, path=fa3.PAST[D], most_rows=T, out=parts[j], **sizes)[1]
                for j, table in enumerate(past)
            ]
            kernel.launch_merge(out, lse, parts, torch.stack(found), position, None, out, kv_segment=even)

        decode[name], decode[f"{name}, split"], prefill[name] = decoded, split, filled_in
    turns("layouts, decode", f"H{H}/{KV} D{D} B1 {T}", decode)
    turns("layouts, prefill", f"H{H}/{KV} D{D} 1x{T}", prefill, replays=3)


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


def observe(H: int, KV: int, D: int, S: int, page: int) -> None:
    """What the library does outside the function: a sliding window, and what lies behind the last key."""
    lengths = (2 * S + 777, 700)
    rows = sum(lengths)
    q, k, v = rand(rows, H, D, scale=1.5), rand(rows, KV, D), rand(rows, KV, D)
    batch = Batch(q, k, v, lengths, kv_segment=S, page=page)
    n, cu = lengths[0], ints(batch.starts)
    places = list(range(400, n, 97))
    whole = native(q, k, v, cu, n, n, splits=1, cu_k=cu, window=(300, 0))
    one = native(
        *(q[places], batch.keys, batch.values, ints(range(len(places) + 1)), 1, n),
        splits=1,
        used=ints([p + 1 for p in places]),
        pages=batch.blocks[:1].expand(len(places), -1).contiguous(),
        window=(300, 0),
    )
    note(
        f"H{H}/{KV} D{D}: the library's sliding window of 300, decode against prefill: "
        f"{differing(one, whole[places])} of {one.numel()} elements differ"
    )
    few = slice(0, S + 10)
    tails = Batch(q[few], k[few], v[few], (S + 3, 7), kv_segment=S, page=page, tail=math.nan)
    packed = tails.packed()
    got, index = tails.rows([(0, 0, S + 3), (1, 0, 7)])
    some, at = tails.rows([(0, S + 2, S + 3), (1, 6, 7)])
    note(
        f"H{H}/{KV} D{D} page {page}: NaN behind the last key of a page: prefill differs in "
        f"{differing(got, packed[index])}, decode in {differing(some, packed[at])} elements"
    )


def prefills() -> None:
    for H, KV, D in MODELS:
        for lengths in ([2048], [2048] * 8, [4096] * 4, [8192], [32768]):
            guarded(time_prefill, H, KV, D, lengths)


def windows() -> None:
    for H, KV, D in MODELS:
        guarded(time_window, H, KV, D, 8192, 1024)


def decodes() -> None:
    for H, KV, D in MODELS:
        guarded(time_decode, H, KV, D, 1, 32768, (1024, 2048, 4096, 8192))
        guarded(time_decode, H, KV, D, 8, 32768, (4096,))
        guarded(time_decode, H, KV, D, 64, 32768, (4096, 8192))
        guarded(time_decode, H, KV, D, 256, 8192, (4096,))
    guarded(time_parts)


def compile_split(H: int, KV: int, D: int, S: int, way: str) -> None:
    """One decode by one split, in a process whose only task it is."""
    ctx, page = WALKED, 16
    keys, values = rand(ctx // page, page, KV, D), rand(ctx // page, page, KV, D)
    step = plan(requests=1, tokens=1, most_rows=1, most_keys=ctx, kv_segment=S, page=page)
    step.fill(ints([0, 1]), ints([ctx]), blocks=torch.arange(ctx // page, device="cuda").int().view(1, -1))
    with torch.no_grad(), decoding(D, way):
        attention(rand(1, H, D), keys, values, ints([ctx - 1]), step, scale=D**-0.5)
    torch.cuda.synchronize()


def walks() -> None:
    """Decode of one request by every split: what of it is tuning, and what the length of a segment."""
    jobs = [(*model, WALKED_SEGMENTS[0], way) for model in MODELS for way in SPLITS]
    say(f"{len(jobs)} splits compiled ahead in {ahead(compile_split, jobs):.0f} s")
    for H, KV, D in MODELS:
        for S in WALKED_SEGMENTS:
            guarded(time_decode, H, KV, D, 1, WALKED, (S,), 16, tuple(SPLITS))


def layouts() -> None:
    for H, KV, D in MODELS:
        guarded(time_layouts, H, KV, D)


def observations() -> None:
    for H, KV, D in MODELS:
        guarded(observe, H, KV, D, 1024, 16)


PARTS = {
    "prefill": prefills,
    "window": windows,
    "decode": decodes,
    "walks": walks,
    "layouts": layouts,
    "observe": observations,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to run (all)")
    parser.add_argument("--seconds", type=float, default=135.0, help="begin no part after so many (135)")
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
    torch.manual_seed(1)
    with torch.no_grad():
        for name in args.parts:
            if time.monotonic() - START > args.seconds:
                note(f"{name} was left out: {args.seconds} s are over")
                continue
            PARTS[name]()
    text = json.dumps({"made": made, "notes": NOTES, "times": TIMES}, indent=1)
    (Path(os.environ.get("OUT", ".")) / "attention-h200.json").write_text(text)


if __name__ == "__main__":
    main()
