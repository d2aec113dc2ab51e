# SPDX-License-Identifier: Apache-2.0
"""Experts on one Hopper GPU: `python tests/bench/moe_hopper.py [--decide] [--tune] [--no-gates]`, about three minutes.

Times of routers, plans, moved rows, grouped products, combine and their gradients at the shapes of Qwen3-30B-A3B and
Qwen3.5-35B-A3B, 1 to 8192 tokens, next to torch's own, as medians of CUDA-graph replays over rotating inputs. Nothing is timed
where a quick gate fails. `--decide` (half a minute) compares torch's grouped product in its three layouts with the chain and
writes those with its bits to `kernels/grouped_linear/hopper/table.json`; run it first on a new torch. `--tune` (two minutes more)
measures the tiles of `candidates.py` against the library for few rows and writes the table's steps. Tables go to the terminal,
`moe-h200.json` and `.md` and a copy of the table to $OUT or the working directory. Needs torch and triton, and of this project
`isoexec.kernels` and `isoexec.contracts`.
"""

# ruff: noqa: E402 - where the package is not installed, its links are put on the path first

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
if find_spec("isoexec") is None:
    sys.path.insert(0, str(ROOT / ".src"))

from isoexec.kernels import registry
from isoexec.kernels.combine.hopper.kernel import launch_gradient, launch_sum
from isoexec.kernels.combine.hopper.ops import combine, combine_rows
from isoexec.kernels.dispatch.hopper.kernel import launch_rows
from isoexec.kernels.dispatch.hopper.ops import by_slot, dispatch, plan
from isoexec.kernels.gates.found import gate_for
from isoexec.kernels.gates.running import single_thread
from isoexec.kernels.grouped_linear.hopper import kernel, ops, products, table
from isoexec.kernels.grouped_linear.hopper.candidates import TILES
from isoexec.kernels.hopper.timing import capture, copies_for, replay_times
from isoexec.kernels.linear.hopper import cublaslt
from isoexec.kernels.router.hopper.kernel import launch_softmax
from isoexec.kernels.router.hopper.ops import softmax_topk
from isoexec.kernels.shared_gate.hopper.ops import shared_gate

TIMED = (
    "router.softmax_topk/1",
    "moe.dispatch/1",
    "linear.grouped_mma_chain/1",
    "moe.combine/1",
    "moe.shared_gate/1",
)
# name, experts, places, hidden, inner width
MODELS = (("30B", 128, 8, 2048, 768), ("35B", 256, 8, 2048, 512))
TOKENS = (1, 16, 64, 128, 1024, 8192)
FEW = (8, 16, 32, 64, 128, 256, 512, 1024)  # rows of all experts together for which a tile is tried
BANDWIDTH, TENSOR = 4.8, 989.0  # TB/s and bf16 TFLOP/s of an H200 as its data sheet says
BF16, FP32 = torch.bfloat16, torch.float32
_WORTH = 0.99  # a tile serves where it takes less than this share of the library's time
Call = Callable[[int], Any]

TIMES: list[dict[str, Any]] = []
START = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:5.0f} s]", *words, flush=True)


def rand(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(std=scale)


def routed(tokens: int, experts: int, places: int) -> tuple[Tensor, Tensor]:
    """Weights and experts of random logits, so unequal loads as a router has them."""
    return softmax_topk(rand(tokens, experts, dtype=FP32), places)


def note(
    op: str, model: str, tokens: int, calls: dict[str, Call], copies: int, nbytes: float, flops: float = 0.0
) -> None:
    """Time the calls in turns and keep what the first of them reaches of the roofline."""
    spans = dict(zip(calls, replay_times([capture(c, copies) for c in calls.values()], copies), strict=True))
    ours = next(iter(spans.values()))
    floor = max(nbytes / BANDWIDTH / 1e6, flops / TENSOR / 1e6)
    row = {"op": op, "model": model, "tokens": tokens, **{name: round(us, 2) for name, us in spans.items()}}
    TIMES.append(row | {"roofline": round(floor / ours, 3), "tb_per_s": round(nbytes / ours / 1e6, 2)})


def failing() -> list[str]:
    """What the quick gates of the functions timed here find."""
    found = []
    with single_thread():
        for name in TIMED:
            gate = gate_for(name, "sm90")
            constants = dict(registry.FUNCTIONS[name].fixed)
            for family in gate.families:
                if family in ("partition_invariance", "rerun_determinism"):
                    continue
                check = gate.run(family, constants, full=False, device=torch.device("cuda"))
                found += [f"{name} {family}: {why}" for why in check.failures()]
            say("quick gate", name, "holds" if not any(f.startswith(name) for f in found) else "FAILS")
    return found


def compared(experts: int, N: int, K: int, rows: int) -> dict[str, int]:
    """How many elements of torch's grouped product differ from the chain, by layout."""
    x, dy, w = rand(rows, K), rand(rows, N), rand(experts, N, K, scale=K**-0.5)
    owner = torch.randint(0, experts, (rows,), device="cuda")
    owner[: rows // 3] = experts // 2
    bounds = torch.arange(experts + 1, device="cuda")
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
    owner = torch.randint(0, experts, (rows,), device="cuda").sort().values
    offsets = torch.searchsorted(owner, torch.arange(experts + 1, device="cuda")).to(torch.int32)
    out = torch.empty(rows, K if down else N, dtype=BF16, device="cuda")

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


def time_moving(model: str, experts: int, places: int, hidden: int, tokens: int) -> None:
    """Routers, plans, rows, combine, and the gradients of the last two."""
    slots = tokens * places
    copies = copies_for(slots * hidden * 2)
    logits = [rand(tokens, experts, dtype=FP32) for _ in range(copies)]

    def stock_router(i: int) -> Tensor:
        weights, _ = torch.softmax(logits[i], -1).topk(places)
        return weights / weights.sum(-1, keepdim=True)

    calls: dict[str, Call] = {"ours": lambda i: softmax_topk(logits[i], places)[0], "native": stock_router}
    note("router", model, tokens, calls, copies, tokens * experts * 4)
    weights, ids = routed(tokens, experts, places)
    made = plan(ids, 0, experts)

    def stock_plan(_: int) -> tuple[Tensor, Tensor]:  # bincount reads a size back: it is not for a graph
        ordered = ids.view(-1).sort(stable=True)
        return ordered.indices, torch.searchsorted(ordered.values, torch.arange(experts + 1, device="cuda"))

    calls = {"ours": lambda _: plan(ids, 0, experts), "native": stock_plan}
    note("plan", model, tokens, calls, 4, slots * 16)
    xs = [rand(tokens, hidden) for _ in range(copies)]
    index = made.slots // places
    calls = {"ours": lambda i: dispatch(xs[i], made), "native": lambda i: xs[i].index_select(0, index)}
    note("dispatch", model, tokens, calls, copies, (slots + tokens) * hidden * 2)
    ys = [rand(slots, hidden) for _ in range(copies)]
    shared, grad = rand(tokens, hidden), rand(tokens, hidden)
    flat = weights.view(-1).index_select(0, made.slots).unsqueeze(1)

    def stock_combine(i: int) -> Tensor:
        out = torch.zeros(tokens, hidden, dtype=FP32, device="cuda")
        return out.index_add_(0, index, ys[i].float() * flat).to(BF16)

    def stock_gradient(i: int) -> Tensor:
        return torch.zeros(tokens, hidden, dtype=BF16, device="cuda").index_add_(0, index, ys[i])

    calls = {
        "ours": lambda i: combine(ys[i], weights),
        "by a map": lambda i: combine_rows(ys[i], made.rows, weights),
        "with shared": lambda i: combine_rows(ys[i], made.rows, weights, shared),
        "by slot first": lambda i: combine(by_slot(ys[i], made), weights),
        "native": stock_combine,
    }
    moved = (slots + tokens) * hidden * 2
    note("combine", model, tokens, calls, copies, moved)
    grads = torch.ops.isoexec
    calls = {"ours": lambda i: grads.sm90_moe_combine_grad(grad, ys[i], made.rows, weights)}
    note("combine gradient", model, tokens, calls, copies, moved + slots * hidden * 2)
    calls = {
        "ours": lambda i: grads.sm90_moe_dispatch_grad(ys[i], made.rows, places, ""),
        "native": stock_gradient,
    }
    note("dispatch gradient", model, tokens, calls, copies, moved)
    if model == "35B":
        w = rand(1, hidden, scale=hidden**-0.5)
        calls = {
            "ours": lambda i: shared_gate(shared, xs[i], w),
            "native": lambda i: torch.sigmoid(xs[i] @ w.t()) * shared,
        }
        note("shared gate", model, tokens, calls, copies, 3 * tokens * hidden * 2)


def time_products(model: str, name: str, ws: list[Tensor], places: int, tokens: int) -> None:
    """One linear and its gradients next to torch's grouped product and the one tile of the reference."""
    experts, N, K = ws[0].shape
    rows = tokens * places
    ends = plan(routed(tokens, experts, places)[1], 0, experts).offsets
    busy = int((ends.diff() > 0).sum())
    x, dy = rand(rows, K), rand(rows, N)
    nbytes, flops = 2.0 * (busy * N * K + rows * (N + K)), 2.0 * rows * N * K
    calls: dict[str, Call] = {
        "ours": lambda i: ops.grouped_linear(x, ws[i], ends),
        "native": lambda i: products._grouped(x, ws[i].transpose(1, 2), ends[1:]),
        "one tile": lambda i: kernel.reference(x, ws[i], ends),
    }
    note(name, model, tokens, calls, len(ws), nbytes, flops)
    if tokens < 1024:
        return
    calls = {
        "ours": lambda i: ops.input_gradient(dy, ws[i], ends),
        "native": lambda i: products._grouped(dy, ws[i], ends[1:]),
        "one tile": lambda i: kernel.reference(dy, ws[i], ends, down=True),
    }
    note(f"{name} input gradient", model, tokens, calls, len(ws), nbytes, flops)
    calls = {
        "ours": lambda _: ops.weight_gradient(dy, x, ends),
        "one tile": lambda _: kernel.weight_reference(dy, x, ends),
    }
    if table.library_serves("weight"):
        calls["native"] = lambda _: products._grouped(dy.t(), x, ends[1:])
    note(f"{name} weight gradient", model, tokens, calls, 2, 2.0 * (experts * N * K + rows * (N + K)), flops)


def time_model(model: str, experts: int, places: int, hidden: int, inner: int) -> None:
    """Everything of one model's layers."""
    for tokens in TOKENS:
        time_moving(model, experts, places, hidden, tokens)
    for name, N, K in (("fc1", 2 * inner, hidden), ("fc2", hidden, inner)):
        ws = [rand(experts, N, K, scale=K**-0.5) for _ in range(copies_for(2 * experts * N * K))]
        for tokens in TOKENS:
            time_products(model, name, ws, places, tokens)
        ws.clear()
        torch.cuda.empty_cache()
    say("timed", model)


def cuts() -> None:
    """Free settings of the moving kernels at 8192 tokens of Qwen3.5-35B-A3B, to choose the defaults in their `launch` by."""
    tokens, (_, experts, places, hidden, _) = TOKENS[-1], MODELS[-1]
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


def show() -> str:
    """The tables as Markdown, one an op."""
    lines = []
    for op in dict.fromkeys(row["op"] for row in TIMES):
        rows = [row for row in TIMES if row["op"] == op]
        columns = list(dict.fromkeys(name for row in rows for name in row if name != "op"))
        lines += ["", f"### {op}, us", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(str(row.get(name, "")) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--decide", action="store_true", help="ask torch's grouped product for its bits first"
    )
    parser.add_argument("--tune", action="store_true", help="measure tiles for few rows and write the table")
    parser.add_argument("--no-gates", action="store_true", help="time without running the quick gates")
    given = parser.parse_args()
    out = Path(os.environ.get("OUT", tempfile.gettempdir() if not os.access(".", os.W_OK) else "."))
    cublaslt.claim()
    with torch.no_grad():
        if given.decide:
            decide()
        failures = [] if given.no_gates else failing()
        if failures:
            say("nothing is timed:", *failures)
            raise SystemExit(1)
        if given.tune:
            tune()
        cuts()
        for one in MODELS:
            time_model(*one)
    facts = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    text = show()
    (out / "moe-h200.json").write_text(json.dumps({**facts, "times": TIMES}, indent=1) + "\n")
    (out / "moe-h200.md").write_text(f"{', '.join(f'{k} {v}' for k, v in facts.items())}\n{text}\n")
    (out / "table.json").write_text(table.PATH.read_text())
    print(text)


if __name__ == "__main__":
    main()
