# SPDX-License-Identifier: Apache-2.0
"""Trials and times of the sm90 logprobs on one GPU: `python tests/bench/logprobs_hopper.py [--gate] [--quick]`.

Three questions, one table each, and `logprobs-h200.json` in $OUT or the working directory:

- from logits: which `Cut` reads bf16 and fp32 logits fastest, as a share of 4.8 TB/s and of a copy measured here, and the
  gradient next to torch's;
- from hidden states: tiles that never write logits, and chunks of logits by the linear's own providers, next to the product
  alone (bf16 and fp32 out); what is fastest goes into `plan.py`;
- forward and backward with and without logits, next to a linear followed by logprobs: time and the most memory.

Each candidate's bits are compared with the chosen one's before it is timed; one that differs is said and left out. `--gate`
first runs the quick gate of the fused function, which no shipped contract binds yet. About 6 minutes, 2 with `--quick`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from report import BANDWIDTH  # type: ignore[import-not-found]  # beside this script
from subjects import BF16, DEVICE, FP32, rand  # type: ignore[import-not-found]
from torch import Tensor

from isoexec.kernels.hopper.timing import capture, copies_for, replay_times
from isoexec.kernels.linear.hopper import cublaslt
from isoexec.kernels.linear.hopper.kernel import reference
from isoexec.kernels.linear.hopper.ops import linear
from isoexec.kernels.linear_logprobs.hopper import gate
from isoexec.kernels.linear_logprobs.hopper.kernel import launch_picked
from isoexec.kernels.linear_logprobs.hopper.ops import linear_logprobs, nodes
from isoexec.kernels.linear_logprobs.hopper.plan import CANDIDATES, FEW_ROWS, Chunks
from isoexec.kernels.logprobs.hopper.kernel import (
    Cut,
    launch_gradient,
    launch_merge,
    launch_partials,
    nodes_of,
)
from isoexec.kernels.logprobs.hopper.ops import joined, token_logprobs

PARTS = ("logits", "fused", "steps")
VOCAB, LEAVES = 151936, 8
CUTS = [
    Cut(blocks=blocks, join=join, rows=rows, warps=warps)
    for blocks, rows, warps in product((8, 16, 32), (1, 2), (1, 2, 4, 8))
    for join in {max(1, blocks * rows // warps // rows), blocks}
    if 16 <= blocks * rows * 4 // warps <= 128 and join <= blocks
]
CHUNKS = [Chunks(rows=rows, leaves=leaves) for rows, leaves in ((512, 8), (1024, 1), (2048, 1), (4096, 1))]
CHUNKS += [FEW_ROWS, Chunks(rows=1024, leaves=2), Chunks(rows=8192, leaves=1)]
TABLES: dict[str, list[dict[str, Any]]] = {}
START = time.monotonic()


def say(*words: object) -> None:
    """Print with the time since the start."""
    print(f"[{time.monotonic() - START:4.0f} s]", *words, flush=True)


def add(table: str, **row: Any) -> None:
    """A row of a table, printed at once."""
    TABLES.setdefault(table, []).append(row)
    say(table, *(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))


def in_turns(calls: dict[str, Callable[[int], Any]], copies: int, replays: int = 5) -> dict[str, float]:
    """Microseconds of each call; one that does not run is said and left out."""
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = capture(call, copies)
        except Exception as error:  # noqa: BLE001 - a candidate that does not run is left out, and said
            say("left out", name, repr(error)[:160])
    return dict(zip(graphs, replay_times(list(graphs.values()), copies, replays=replays), strict=True))


def from_logits(rows_of: tuple[int, ...]) -> None:
    """Cuts of the kernel that reads logits, at several numbers of rows."""
    for dtype in (BF16, FP32):
        for rows in rows_of:
            nbytes = rows * VOCAB * dtype.itemsize
            copies = min(copies_for(nbytes), 2 if rows >= 8192 else 8)
            zs = [rand(rows, VOCAB, dtype=dtype, scale=4.0) for _ in range(copies)]
            target = torch.arange(rows, device=DEVICE)
            want = token_logprobs(zs[0], target, vocab_leaves=LEAVES)

            def run(i: int, cut: Cut, zs: list[Tensor] = zs, target: Tensor = target) -> Tensor:
                count = len(target)
                shape = (count, LEAVES, nodes_of(VOCAB, LEAVES, cut.join))
                m, s = (torch.empty(shape, device=DEVICE) for _ in range(2))
                out, stats = torch.empty(count, device=DEVICE), torch.empty(count, 3, device=DEVICE)
                launch_partials(zs[i], None, m, s, None, cut)
                launch_merge(zs[i], target, None, m, s, None, out, None, stats)
                return out

            calls: dict[str, Callable[[int], Any]] = {}
            for cut in CUTS:
                try:
                    equal = torch.equal(run(0, cut), want)
                except Exception as error:  # noqa: BLE001 - as above
                    say("left out", cut, repr(error)[:160])
                    continue
                if equal:
                    calls[str(cut)] = partial(run, cut=cut)
                else:
                    say("OTHER BITS", cut)
            copy = torch.empty_like(zs[0])

            def copied_to(i: int, zs: list[Tensor] = zs, copy: Tensor = copy) -> None:
                copy.copy_(zs[i])

            def op(i: int, zs: list[Tensor] = zs, target: Tensor = target) -> Tensor:
                return token_logprobs(zs[i], target, vocab_leaves=LEAVES)

            calls |= {"copy": copied_to, "op": op}
            found = in_turns(calls, copies)
            copied = 2 * nbytes / found.pop("copy") / 1e6
            for name, us in sorted(found.items(), key=lambda pair: pair[1])[:6]:
                rate = nbytes / us / 1e6
                add(
                    "from logits",
                    dtype=str(dtype)[6:],
                    rows=rows,
                    cut=name,
                    us=us,
                    of_nominal=rate / BANDWIDTH,
                    of_copy=rate / copied,
                )
            if rows == max(rows_of):
                gradient(zs, target)
            del zs, copy, calls
            torch.cuda.empty_cache()


def gradient(zs: list[Tensor], target: Tensor) -> None:
    """The gradient's kernel by columns and warps."""
    rows, z = len(target), zs[0]
    g, out = rand(rows, dtype=FP32), torch.empty_like(z)
    stats = torch.ones(rows, 3, device=DEVICE)

    def run(i: int, columns: int, warps: int) -> None:
        launch_gradient(
            g,
            None,
            zs[i],
            target,
            None,
            None,
            stats,
            out,
            columns_per_program=columns,
            num_warps=warps,
        )

    found = in_turns(
        {
            f"{c} columns, {w} warps": partial(run, columns=c, warps=w)
            for c in (1024, 2048, 4096)
            for w in (2, 4, 8)
        },
        len(zs),
    )
    for name, us in sorted(found.items(), key=lambda pair: pair[1])[:3]:
        share = 2 * z.numel() * z.element_size() / us / 1e6 / BANDWIDTH
        add("gradient of logits", dtype=str(z.dtype)[6:], rows=rows, cut=name, us=us, of_nominal=share)


def fused(K: int, rows_of: tuple[int, ...]) -> None:
    """Providers of nodes from hidden states next to the product alone."""
    w = rand(VOCAB, K, scale=3.0 / K**0.5)
    for rows in rows_of:
        x, target = rand(rows, K), torch.arange(rows, device=DEVICE)
        few = slice(0, min(rows, 512))
        want = token_logprobs(reference(x[few], w, FP32), target[few], vocab_leaves=LEAVES)

        def run(_: int, plan: Any, x: Tensor = x, target: Tensor = target) -> Tensor:
            m, s, _u = nodes(x, w, None, LEAVES, entropy=False, plan=plan)
            picked = torch.empty(len(x), device=DEVICE)
            launch_picked(x, w, target, None, picked)
            return joined(picked, target, m, s, None, VOCAB, "")[0]

        calls: dict[str, Callable[[int], Any]] = {}
        for plan in (*CANDIDATES, *(c for c in CHUNKS if c.rows <= max(512, rows))):
            try:
                equal = torch.equal(run(0, plan)[few], want)
            except Exception as error:  # noqa: BLE001 - as above
                say("left out", plan, repr(error)[:160])
                continue
            if equal:
                calls[str(plan)] = partial(run, plan=plan)
            else:
                say("OTHER BITS", plan)

        def alone(_: int, x: Tensor = x, *, up: bool = False) -> Tensor:
            return linear(x, w, fp32_out=up)

        def then(_: int, x: Tensor = x, target: Tensor = target) -> Tensor:
            return token_logprobs(linear(x, w, fp32_out=True), target, vocab_leaves=LEAVES)

        calls |= {"product, bf16 out": alone, "product, fp32 out": partial(alone, up=True)}
        calls["product, then logprobs"] = then
        found = in_turns(calls, 1)
        best = min(found["product, bf16 out"], found["product, fp32 out"])
        for name, us in sorted(found.items(), key=lambda pair: pair[1]):
            flops = 2 * rows * VOCAB * K / us / 1e6
            add(
                "from hidden states",
                K=K,
                rows=rows,
                provider=name,
                us=us,
                of_product=us / best,
                tflops=flops,
            )
        torch.cuda.empty_cache()


def steps(K: int, rows: int) -> None:
    """A training step's head, with and without logits."""
    w, x = (rand(n, K, scale=3.0 / K**0.5).requires_grad_() for n in (VOCAB, rows))
    target, g = torch.arange(rows, device=DEVICE), rand(rows, dtype=FP32)

    def apart() -> tuple[Tensor, ...]:
        out = token_logprobs(linear(x, w, fp32_out=True), target, vocab_leaves=LEAVES)
        return out, *torch.autograd.grad(out, [x, w], g)

    def together() -> tuple[Tensor, ...]:
        out = linear_logprobs(x, w, target, vocab_leaves=LEAVES)
        return out, *torch.autograd.grad(out, [x, w], g)

    kept = {}
    for name, call in (("linear, then logprobs", apart), ("without logits", together)):
        kept[name] = call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held, begin = torch.cuda.memory_allocated(), time.perf_counter()
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        ms = (time.perf_counter() - begin) / 3 * 1e3
        peak = (torch.cuda.max_memory_allocated() - held) / 2**30
        add("forward and backward", K=K, rows=rows, how=name, ms=ms, gib=peak)
    equal = [torch.equal(a, b) for a, b in zip(*kept.values(), strict=True)]
    say("log p, d hidden, d weight equal:", equal)
    TABLES["forward and backward"][-1]["equal"] = equal


def gated() -> list[str]:
    """What the quick gate of the fused function finds."""
    constants: dict[str, str | int | bool] = {
        "step": 16,
        "accumulate": "float32",
        "block": 128,
        "vocab_leaves": LEAVES,
    }
    wrong = []
    for family in gate.GATE.families:
        check = gate.GATE.run(family, constants, full=False, device=DEVICE)
        say("gate", family, f"{check.elements} elements", *check.failures())
        wrong += [f"{family}: {why}" for why in check.failures()]
    return wrong


def main() -> int:
    """Run the trials; 1 where a gate fails, 2 without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gate", action="store_true", help="first run the quick gate of the fused function")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to run (all)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("needs a GPU of compute capability 9.0", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    cublaslt.claim()
    cublaslt.probe()
    if arguments.gate and (wrong := gated()):
        print("nothing is timed, for a gate fails:", *wrong, sep="\n  ", file=sys.stderr)
        return 1
    with torch.no_grad():
        if "logits" in arguments.parts:
            from_logits((64, 8192) if arguments.quick else (1, 64, 1024, 8192))
        for K in ((4096,) if arguments.quick else (1024, 2048, 4096)) if "fused" in arguments.parts else ():
            fused(K, (64, 128, 256, 8192) if arguments.quick else (1, 16, 64, 128, 256, 1024, 8192))
    if "steps" in arguments.parts:
        steps(4096, 4096)
    path = Path(os.environ.get("OUT", ".")) / "logprobs-h200.json"
    path.write_text(json.dumps({"torch": torch.__version__, **TABLES}, indent=1) + "\n")
    say("written", path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
