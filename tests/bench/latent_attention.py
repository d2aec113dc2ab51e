# SPDX-License-Identifier: Apache-2.0
"""Bits and times of the sm90 latent attention on one GPU: `python tests/bench/latent_attention.py`, in less than 90 s.

First, whether FlashAttention-3 as built into vLLM (installed, or named by ISOEXEC_FA3) has the reference's bits where its `q_v`
holds the latent part of queries; a build that has them can be listed in `latent_attention/hopper/ops.py`. Then times, next to
the library's own schedule: medians of CUDA-graph replays in turns, decode of few requests over rotating caches; with `--tiles`
also of other tiles. What is timed is proven by `isoexec gate run --arch sm90 --function attention.latent_segments/1`. Lines go to
the terminal, `latent-attention-h200.json` to $OUT or the working directory.
"""

# ruff: noqa: ARG005 - calls take the number of their copy

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from attention_hopper import (  # type: ignore[import-not-found]  # beside this script
    NOTES,
    differing,
    guarded,
    ints,
    note,
    rand,
    say,
)

from isoexec.kernels.attention.hopper import fa3
from isoexec.kernels.attention.hopper.tiles import Tile
from isoexec.kernels.gates import Run
from isoexec.kernels.hopper.timing import capture, replay_times
from isoexec.kernels.latent_attention.hopper import gate, ops, tiles
from isoexec.kernels.latent_attention.hopper.naive import HEAD, LATENT, ROPE
from isoexec.kernels.latent_attention.hopper.ops import Plan, latent_attention, plan

DEVICE = torch.device("cuda")
SEGMENT, PAGE = 4096, 64
SCALE = 192**-0.5
TIMES: list[dict[str, Any]] = []
TILES = (  # free of bits
    Tile(rows=16, warps=4, stages=2),
    Tile(rows=16, warps=8, stages=2),
    Tile(rows=32, warps=8, stages=2),
    Tile(rows=64, warps=8, stages=1),
)


def library() -> str:
    """The digest of the library's build, admitted for this process; "" where it is missing."""
    try:
        fa3.admit(fa3._build(fa3._find()))
        build = fa3.identity().build
    except fa3.LibraryMissingError as why:
        note(f"without the library: {why}")
        return ""
    ops.admit(build)
    return str(build)


def bits(heads: int, S: int, build: str) -> None:
    """Elements that differ from the reference, by the own kernels and by the library, packed, decoded and drafted."""
    run = Run(constants={"kv_segment": S}, full=False, device=DEVICE)
    batch = gate.KIND.batch(run, heads, (2 * S + 77, 700, S + 1, 1), PAGE)
    want, _ = batch.by_reference()
    spans = [(0, p, p + 1) for p in (0, 63, 64, S - 1, S, 2 * S, 2 * S + 76)]
    spans += [(0, S - 6, S + 7), (1, 699, 700), (0, 100, 2 * S + 60)]
    for provider in ("triton", "fa3") if build else ("triton",):
        packed = differing(batch.packed(provider=provider), want)
        got, index = batch.rows(spans, provider=provider)
        one, at = batch.rows(spans[:7], provider=provider)
        paged, decoded = differing(got, want[index]), differing(one, want[at])
        note(
            f"bits, {heads} heads, segments of {S}: {provider} differs in {packed} of {want.numel()} elements packed, "
            f"{paged} of {got.numel()} through pages, {decoded} of {one.numel()} decoded"
        )
    if build:
        n = batch.lengths[0]
        cu = ints(batch.starts)
        other = gate.native(batch, cu, n, n, cu_k=cu)
        note(f"control: by its own schedule the library differs in {differing(other[:n], want[:n])} elements")


def timed(op: str, shape: str, calls: dict[str, Callable[[int], Any]], copies: int, **more: Any) -> None:
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = capture(call, copies)
        except Exception as error:  # noqa: BLE001 - said
            note(f"{op} {shape}: {name} could not be captured: {error!r:.300}")
    spans = replay_times(list(graphs.values()), copies, replays=5)
    found = {name: round(us, 1) for name, us in zip(graphs, spans, strict=True)}
    base = found.get("native")
    ratios = {n: round(us / base, 3) for n, us in found.items() if n != "native"} if base else {}
    TIMES.append({"op": op, "shape": shape, "us": found, "ratios": ratios, **more})
    say(op, shape, found, ratios, more)
    del graphs
    torch.cuda.empty_cache()


@contextmanager
def settings(few: int, tile: Tile | None) -> Iterator[None]:
    """Decode split or not, and in a tile."""
    before, chosen, prefill = ops.FEW_PROGRAMS, tiles.decode_tile, tiles.PREFILL
    ops.FEW_PROGRAMS = few
    if tile is not None:
        tiles.decode_tile, tiles.PREFILL = (lambda heads: tile), tile
    try:
        yield
    finally:
        ops.FEW_PROGRAMS, tiles.decode_tile, tiles.PREFILL = before, chosen, prefill


def prefill(heads: int, lengths: list[int], build: str, others: bool) -> None:
    T, most = sum(lengths), max(lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    q, k = rand(T, heads, HEAD), rand(T, HEAD)
    parts = q[..., :ROPE], q[..., ROPE:], k[..., LATENT:], k[..., :LATENT]
    position = torch.cat([torch.arange(n, device=DEVICE) for n in lengths]).int()
    sizes = {"requests": len(lengths), "tokens": T, "most_rows": most, "most_keys": most}
    calls: dict[str, Callable[[int], Any]] = {}
    cu = ints(starts)
    if build:
        batch = gate.Sequences(q, k, k, lengths, kv_segment=SEGMENT, page=PAGE)
        batch.scale = SCALE
        calls["native"] = lambda i: gate.native(batch, cu, most, most, cu_k=cu)
    for name, provider, tile in (
        *([("library", "fa3", None)] if build else []),
        ("own", "triton", None),
        *((f"own {t.rows}x{t.warps}x{t.stages}", "triton", t) for t in (TILES if others else ())),
    ):
        step = plan(kv_segment=SEGMENT, provider=provider, device=DEVICE, **sizes)  # type: ignore[arg-type]
        step.fill(cu, ints(lengths), k_start=cu[:-1].contiguous())

        def run(i: int, step: Plan = step, tile: Tile | None = tile) -> None:
            with settings(ops.FEW_PROGRAMS, tile):
                latent_attention(*parts, position, step, scale=SCALE)

        calls[name] = run
    flops = sum(n * n * heads * (HEAD + LATENT) for n in lengths)
    timed("prefill", f"H{heads} {len(lengths)}x{lengths[0]}", calls, 1, tflop=round(flops / 1e12, 2))


def decode(heads: int, requests: int, context: int, build: str, others: bool) -> None:
    width = context // PAGE
    copies = 4 if requests < 8 else 1
    caches = [rand(requests * width, PAGE, HEAD) for _ in range(copies)]
    blocks = [torch.randperm(requests * width, device=DEVICE).int().view(requests, width) for _ in caches]
    q, used, cu = rand(requests, heads, HEAD), ints([context] * requests), ints(list(range(requests + 1)))
    position = used - 1
    calls: dict[str, Callable[[int], Any]] = {}
    if build:

        def native(i: int) -> None:
            cache = caches[i].unsqueeze(-2)
            fa3.load()(
                *(q[..., :ROPE], cache[..., LATENT:], cache[..., :LATENT], None, None, q[..., ROPE:], None),
                *(cu, None, None, None, used, 1, context, blocks[i]),
                *((None,) * 8),
                *(SCALE, True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None),
            )

        calls["native"] = native
    few = requests * (context // SEGMENT) <= 64
    for name, provider, split, tile in (
        *([("library", "fa3", 0, None), ("as chosen", "fa3", ops.FEW_PROGRAMS, None)] if build else []),
        ("own", "triton", 0, None),
        *([("own, split", "triton", 1 << 30, None)] if few else []),
        *((f"own {t.rows}x{t.warps}x{t.stages}", "triton", 0, t) for t in (TILES if others else ())),
    ):
        steps = []
        for of in blocks:
            step = plan(
                requests=requests,
                tokens=requests,
                most_rows=1,
                most_keys=context,
                kv_segment=SEGMENT,
                page=PAGE,
                device=DEVICE,
                provider=provider,  # type: ignore[arg-type]
            )
            step.fill(cu, used, blocks=of)
            steps.append(step)

        def run(i: int, steps: list[Plan] = steps, split: int = split, tile: Tile | None = tile) -> None:
            cache = caches[i]
            with settings(split, tile):
                latent_attention(
                    *(q[..., :ROPE], q[..., ROPE:], cache[..., LATENT:], cache[..., :LATENT]),
                    *(position, steps[i]),
                    scale=SCALE,
                )

        calls[name] = run
    gbytes = round(2 * requests * context * HEAD / 1e9, 3)
    timed("decode", f"H{heads} B{requests} {context}", calls, copies, gbytes=gbytes)


def backward(heads: int, lengths: list[int]) -> None:
    run = Run(constants={"kv_segment": SEGMENT}, full=False, device=DEVICE)
    batch = gate.KIND.batch(run, heads, lengths, PAGE)
    g = rand(sum(lengths), heads, LATENT)
    inputs = [x.detach().requires_grad_() for x in batch.inputs]
    attend = batch.call()

    def both(i: int) -> None:
        with torch.enable_grad():
            torch.autograd.grad(attend(*inputs), inputs, g)

    calls: dict[str, Callable[[int], Any]] = {"own": both}
    # both kernels of the gradients make scores and their gradients anew
    flops = sum(n * n * heads * (5 * HEAD + 4 * LATENT) for n in lengths)
    timed(
        "forward and backward",
        f"H{heads} {len(lengths)}x{lengths[0]}",
        calls,
        1,
        tflop=round(flops / 1e12, 2),
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiles", action="store_true")
    args = parser.parse_args(argv)
    torch.manual_seed(1)
    build = library()
    with torch.no_grad():
        for heads, S in ((16, 1024), (128, 256)):
            guarded(bits, heads, S, build)
        for requests, context in ((1, 4096), (1, 32768), (64, 4096), (64, 32768), (256, 4096), (256, 16384)):
            guarded(decode, 16, requests, context, build, args.tiles)
        guarded(decode, 128, 64, 4096, build, False)
        for heads, lengths in ((16, [8192]), (16, [4096] * 4), (16, [32768]), (128, [8192])):
            guarded(prefill, heads, lengths, build, args.tiles and lengths == [8192] and heads == 16)
        guarded(backward, 16, [4096])
    made = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "fa3": asdict(fa3.identity()) if build else None,
    }
    say(made)
    text = json.dumps({"made": made, "notes": NOTES, "times": TIMES}, indent=1)
    (Path(os.environ.get("OUT", ".")) / "latent-attention-h200.json").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
