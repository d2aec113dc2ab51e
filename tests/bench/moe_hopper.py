# SPDX-License-Identifier: Apache-2.0
"""Trials of the experts' ops on one Hopper GPU: `python tests/bench/moe_hopper.py [--decide] [--tune] [--cuts]`.

`--decide` (half a minute) compares torch's grouped product in its three layouts with the chain and writes those with its bits to
`kernels/grouped_linear/hopper/table.json`; run it first on a new torch. `--tune` (two minutes) measures the tiles of
`candidates.py` against the library for few rows, at the shapes of Qwen3-30B-A3B and Qwen3.5-35B-A3B, and writes the steps.
`--cuts` prints times of the moving kernels under their free settings. A copy of the table goes to $OUT or the working directory.
`kernels.py --only experts` times the ops next to torch's own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from subjects import BF16, DEVICE, FP32, rand  # type: ignore[import-not-found]  # beside this script
from torch import Tensor

from isoexec.kernels.combine.hopper.kernel import launch_gradient, launch_sum
from isoexec.kernels.dispatch.hopper.kernel import launch_rows
from isoexec.kernels.dispatch.hopper.ops import plan
from isoexec.kernels.grouped_linear.hopper import kernel, products, table
from isoexec.kernels.grouped_linear.hopper.candidates import TILES
from isoexec.kernels.hopper.timing import capture, copies_for, replay_times
from isoexec.kernels.linear.hopper import cublaslt
from isoexec.kernels.router.hopper.kernel import launch_softmax
from isoexec.kernels.router.hopper.ops import softmax_topk

# name, experts, places, hidden, inner width
MODELS = (("30B", 128, 8, 2048, 768), ("35B", 256, 8, 2048, 512))
FEW = (8, 16, 32, 64, 128, 256, 512, 1024)  # rows of all experts together for which a tile is tried
TOKENS = 8192  # for which free settings are tried
_WORTH = 0.99  # a tile serves where it takes less than this share of the library's time
START = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:5.0f} s]", *words, flush=True)


def routed(tokens: int, experts: int, places: int) -> tuple[Tensor, Tensor]:
    """Weights and experts of random logits, so unequal loads as a router has them."""
    return softmax_topk(rand(tokens, experts, dtype=FP32), places)


def compared(experts: int, N: int, K: int, rows: int) -> dict[str, int]:
    """How many elements of torch's grouped product differ from the chain, by layout."""
    x, dy, w = rand(rows, K), rand(rows, N), rand(experts, N, K, scale=K**-0.5)
    owner = torch.randint(0, experts, (rows,), device=DEVICE)
    owner[: rows // 3] = experts // 2
    bounds = torch.arange(experts + 1, device=DEVICE)
    offsets = torch.searchsorted(owner.sort().values, bounds).to(torch.int32)
    calls = {
        "forward": (partial(products.library, x, w, offsets), kernel.reference(x, w, offsets)),
        "input": (
            partial(products.library_input, dy, w, offsets),
            kernel.reference(dy, w, offsets, down=True),
        ),
        "weight": (partial(products.library_weight, dy, x, offsets), kernel.weight_reference(dy, x, offsets)),
    }
    found = {}
    for name, (call, want) in calls.items():
        try:
            found[name] = int((call().view(torch.int16) != want.view(torch.int16)).sum())
        except RuntimeError as error:
            say(name, "is refused by torch:", str(error).partition("\n")[0])
            found[name] = want.numel()
        say(
            f"torch._grouped_mm {name} {experts}x{N}x{K}, {rows} rows: {found[name]} of {want.numel()} elements differ"
        )
    return found


def decide() -> None:
    """Which layouts of torch's grouped product have the chain's bits; writes them to the table."""
    shapes = ((128, 1536, 2048, 8192), (256, 2048, 512, 4111), (16, 2048, 768, 77), (64, 1024, 2048, 8))
    every = [compared(*shape) for shape in shapes]
    held = json.loads(table.PATH.read_text())
    held["library"] = [name for name in table.LAYOUTS if not any(one[name] for one in every)]
    write(held)
    say("the library serves", ", ".join(held["library"]) or "nothing")


def write(held: dict[str, Any]) -> None:
    """Write the table, one weight a line, and forget what was read of it."""
    weights = ",\n".join(f"  {json.dumps(entry)}" for entry in held["weights"])
    facts = "".join(f" {json.dumps(k)}: {json.dumps(v)},\n" for k, v in held.items() if k != "weights")
    table.PATH.write_text(f'{{\n{facts} "weights": [\n{weights}\n ]\n}}\n')
    for cached in (table._table, table._served, table.library_serves):
        cached.cache_clear()


def fastest(ws: list[Tensor], rows: int, down: bool) -> tuple[float, float, kernel.Tile]:
    """Microseconds of the library and of the best tile, and that tile, for so many rows of all experts together."""
    experts, N, K = ws[0].shape
    a = rand(rows, N if down else K)
    owner = torch.randint(0, experts, (rows,), device=DEVICE).sort().values
    offsets = torch.searchsorted(owner, torch.arange(experts + 1, device=DEVICE)).to(torch.int32)
    out = torch.empty(rows, K if down else N, dtype=BF16, device=DEVICE)

    def own(i: int, *, tile: kernel.Tile) -> None:
        kernel.launch(a, ws[i], offsets, None, out, tile, down=down)

    def library(i: int) -> Tensor:
        return (products.library_input if down else products.library)(a, ws[i], offsets)

    graphs = [capture(library, len(ws)), *(capture(partial(own, tile=tile), len(ws)) for tile in TILES)]
    theirs, *spans = replay_times(graphs, len(ws), replays=5)
    us, tile = min(zip(spans, TILES, strict=True), key=lambda pair: pair[0])
    return round(theirs, 2), round(us, 2), tile


def tune() -> None:
    """The table's steps for few rows, forward and input gradient, of the weights of `MODELS`."""
    held = json.loads(table.PATH.read_text())
    by_weight = {(e["N"], e["K"]): e for e in held["weights"]}
    for model, experts, _, hidden, inner in MODELS:
        for N, K in ((2 * inner, hidden), (hidden, inner)):
            copies = copies_for(2 * experts * N * K)
            ws = [rand(experts, N, K, scale=K**-0.5) for _ in range(copies)]
            for layout in ("forward", "input"):
                steps = []
                for rows in FEW:
                    theirs, us, tile = fastest(ws, rows, layout == "input")
                    say(
                        f"{model} {layout} {N}x{K} {rows} rows: library {theirs} us, best tile {us} us, {tile}"
                    )
                    if us >= _WORTH * theirs and layout in held["library"]:
                        break
                    steps.append({"up_to": rows, "tile": asdict(tile), "us": us, "library_us": theirs})
                by_weight[N, K][layout] = steps
            ws.clear()
            torch.cuda.empty_cache()
    write(held)


def cuts() -> None:
    """Free settings of the moving kernels at 8192 tokens of Qwen3.5-35B-A3B, to choose the defaults in their `launch` by."""
    tokens, (_, experts, places, hidden, _) = TOKENS, MODELS[-1]
    copies = 2
    logits = [rand(tokens, experts, dtype=FP32) for _ in range(copies)]
    weights, ids = routed(tokens, experts, places)
    made = plan(ids, 0, experts)
    ys = [rand(tokens * places, hidden) for _ in range(copies)]
    out, grad, dy = rand(tokens, hidden), rand(tokens, hidden), rand(tokens * places, hidden)
    dw = torch.empty_like(weights)

    def route(i: int, **free: int) -> None:
        launch_softmax(logits[i], torch.empty_like(weights), torch.empty_like(ids), **free)  # type: ignore[arg-type]

    def add(i: int, **free: int) -> None:
        launch_sum(ys[i], made.rows, weights, None, out, places, **free)

    def part(i: int, **free: int) -> None:
        launch_gradient(grad, ys[i], made.rows, weights, dy, dw, **free)

    def move(_: int, **free: int) -> None:
        launch_rows(out, made.slots, dy, places, **free)  # type: ignore[arg-type]

    warps = [{"num_warps": n} for n in (1, 2, 4, 8)]
    blocks = [{"block": n} for n in (512, 1024, 2048)]
    trials: dict[str, tuple[Callable[..., None], list[dict[str, int]]]] = {
        "router": (route, [{"rows_per_program": n, **w} for n in (1, 2, 4, 8) for w in warps[:3]]),
        "combine": (add, [{**b, **w} for b in blocks for w in warps[1:]]),
        "combine gradient": (part, warps[1:]),
        "dispatch": (move, blocks),
    }
    for op, (call, every) in trials.items():
        graphs = [capture(partial(call, **free), copies) for free in every]
        spans = replay_times(graphs, copies, replays=5)
        ordered = sorted(zip(spans, map(str, every), strict=True))
        say(op, "; ".join(f"{free} {us:.1f} us" for us, free in ordered))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--decide", action="store_true", help="ask torch's grouped product for its bits first"
    )
    parser.add_argument("--tune", action="store_true", help="measure tiles for few rows and write the table")
    parser.add_argument("--cuts", action="store_true", help="time the moving kernels' free settings")
    given = parser.parse_args()
    if not (given.decide or given.tune or given.cuts):
        parser.error("nothing to do: --decide, --tune or --cuts")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("needs a GPU of compute capability 9.0", file=sys.stderr)
        return 2
    cublaslt.claim()
    with torch.no_grad():
        if given.decide:
            decide()
        if given.tune:
            tune()
        if given.cuts:
            cuts()
    (Path(os.environ.get("OUT", ".")) / "grouped-table.json").write_text(table.PATH.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
