# SPDX-License-Identifier: Apache-2.0
"""Times the sm90 attention on one GPU next to the library's own schedule: `python tests/bench/attention_hopper.py`.

Needs FlashAttention-3 as built into vLLM: installed, or named by ISOEXEC_FA3. What it times is proven by
`isoexec gate run --arch sm90 --function attention.mma_segments/1`. Times are medians of CUDA-graph replays in turns over the
same tensors (decode of few requests: rotating caches, so that the L2 is cold). Lines go to the terminal, `attention-h200.json`
to $OUT or the working directory.
"""

# ruff: noqa: E402, ARG005 - where the package is not installed, its links are put on the path first

from __future__ import annotations

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

ROOT = Path(__file__).resolve().parents[2]
if find_spec("isoexec") is None:
    sys.path.insert(0, str(ROOT / ".src"))

from isoexec.kernels.attention.hopper import fa3, kernel, ops
from isoexec.kernels.attention.hopper.gate import Batch, ints, native
from isoexec.kernels.attention.hopper.ops import Plan, attention, plan
from isoexec.kernels.hopper.timing import capture, replay_times

BF16 = torch.bfloat16
MODELS = ((32, 8, 128), (16, 2, 256), (32, 8, 64))
FEW = ops.FEW_PROGRAMS
TIMES: list[dict[str, Any]] = []
NOTES: list[str] = []
START = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:5.0f} s]", *words, flush=True)


def note(text: str) -> None:
    NOTES.append(text)
    say("note |", text)


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


def turns(op: str, shape: str, calls: dict[str, Callable[[int], Any]], copies: int = 1, **more: Any) -> None:
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = capture(call, copies)
        except Exception as error:  # noqa: BLE001 - said
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
        for streams in (0, 1, 2):
            if most <= S and streams != 1:
                continue

            def run(i: int, step: Plan = step, position: Tensor = position, streams: int = streams) -> None:
                ops.SIDE_STREAMS = streams
                ops._side_streams.cache_clear()
                attention(q, k, v, position, step, scale=D**-0.5)

            calls[f"S{S} {streams} side streams"] = run
    flops = sum(2 * n * n * H * D for n in lengths)
    turns("prefill", f"H{H}/{KV} D{D} {len(lengths)}x{lengths[0]}", calls, tflop=round(flops / 1e12, 2))


def time_prefill_parts(H: int, KV: int, D: int, T: int, S: int) -> None:
    q, k, v = rand(T, H, D), rand(T, KV, D), rand(T, KV, D)
    cu, n = ints([0, T]), T // S - 1
    step, position = filled(S, [T])
    out, parts = torch.empty_like(q), torch.empty(n, T, H, D, dtype=BF16, device="cuda")
    _, own_lse = fa3.call(
        q, k, v, step.own, None, scale=D**-0.5, path="causal", most_rows=S, most_keys=S, out=out
    )
    lse = torch.stack([own_lse] * n)
    calls: dict[str, Callable[[int], Any]] = {"native": lambda i: native(q, k, v, cu, T, T, cu_k=cu)}
    calls["own"] = lambda i: fa3.call(
        q, k, v, step.own, None, scale=D**-0.5, path="causal", most_rows=S, most_keys=S, out=out
    )
    for j in range(n):

        def past(i: int, j: int = j) -> None:
            fa3.call(
                *(q, k, v, step.past[:, j : j + 2], None),
                scale=D**-0.5,
                path=fa3.PAST[D],
                most_rows=T,
                most_keys=S,
                out=parts[j],
            )

        calls[f"past {j}"] = past
    calls["merge"] = lambda i: kernel.launch_merge(
        out, own_lse, parts, lse, position, None, out, kv_segment=S
    )
    share = {"own": S / T, **{f"past {j}": 2 * S * (T - (j + 1) * S) / T**2 for j in range(n)}}
    turns(
        "parts", f"H{H}/{KV} D{D} prefill {T} S{S}", calls, share={a: round(b, 4) for a, b in share.items()}
    )


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

        for few in (0, 1 << 30) if B == 1 else (0,):

            def run(i: int, steps: list[Plan] = steps, few: int = few) -> None:
                ops.FEW_PROGRAMS = few
                attention(q, caches[i][0], caches[i][1], position, steps[i], scale=D**-0.5)
                ops.FEW_PROGRAMS = FEW

            calls[f"S{S} split" if few else f"S{S}"] = run
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


def times() -> None:
    for H, KV, D in MODELS:
        for lengths in ([2048], [4096], [2048] * 8, [4096] * 4, [8192], [16384], [32768]):
            guarded(time_prefill, H, KV, D, lengths)
        guarded(time_prefill_parts, H, KV, D, 32768, 8192)
    for H, KV, D in MODELS:
        guarded(time_decode, H, KV, D, 1, 32768, (1024, 2048, 4096, 8192))
        guarded(time_decode, H, KV, D, 1, 4096, (1024, 2048, 4096, 8192))
        guarded(time_decode, H, KV, D, 8, 32768, (2048, 4096, 8192))
        guarded(time_decode, H, KV, D, 64, 32768, (2048, 4096, 8192))
        guarded(time_decode, H, KV, D, 256, 32768, (4096, 8192))
        guarded(time_decode, H, KV, D, 64, 4096, (4096, 8192))
    guarded(time_parts)
    for H, KV, D in MODELS:
        for page in (16, 256):
            guarded(observe, H, KV, D, 1024, page)


def main() -> None:
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
        times()
    text = json.dumps({"made": made, "notes": NOTES, "times": TIMES}, indent=1)
    (Path(os.environ.get("OUT", ".")) / "attention-h200.json").write_text(text)


if __name__ == "__main__":
    main()
