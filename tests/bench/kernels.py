# SPDX-License-Identifier: Apache-2.0
"""Times of the sm90 kernels on one GPU, next to the stock operators: `python tests/bench/kernels.py [--tune | --tune-all]`.

Nothing is timed when a quick gate fails. Times are medians of CUDA-graph replays over rotating inputs (the L2 is cold), next to
the stock operator in the same run. `--tune` first measures the tiles of the few-row chain for weights that
`kernels/linear/hopper/table.json` lacks, `--tune-all` for all. Tables go to the terminal, `kernels-h200.json` and `.md` to $OUT
or the working directory. Needs torch and triton on a Hopper GPU, and of this project only `isoexec.kernels` and
`isoexec.contracts`.
"""

# ruff: noqa: E402 - where the package is not installed, its links are put on the path first

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton
from rows import FUNCTIONS, subjects, with_gradient  # type: ignore[import-not-found]  # beside this script
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

ROOT = Path(__file__).resolve().parents[2]
if find_spec("isoexec") is None:
    sys.path.insert(0, str(ROOT / ".src"))


from isoexec.contracts.evidence import default_store
from isoexec.kernels.gates.found import contracts_for
from isoexec.kernels.gates.running import State, jobs_of, proven, run_gates, single_thread
from isoexec.kernels.hopper.timing import capture, copies_for, graph_time, replay_times
from isoexec.kernels.linear.hopper import cublaslt, tuning
from isoexec.kernels.linear.hopper import table as linear_table
from isoexec.kernels.linear.hopper.ops import linear
from isoexec.kernels.logprobs.hopper.ops import token_logprobs
from isoexec.kernels.registry import source_digest
from isoexec.kernels.rope.hopper.ops import table_digest

TIMED = ("linear.mma_chain/1", "logprobs.blocks/2", *FUNCTIONS)
TRAINED = 1024  # rows from which gradients are timed
COMPILED = (64, 8192)  # rows at which the native op is compiled too
LINEAR_TIMES = (1, 16, 64, 128, 1024, 8192)
ROW_TIMES = LINEAR_TIMES
VOCAB, LEAVES, BASE, HEAD_DIM = 151936, 8, 1e6, 128
BANDWIDTH, TENSOR = 4.8, 989.0  # TB/s and bf16 TFLOP/s of an H200 as its data sheet says
BF16, FP32 = torch.bfloat16, torch.float32
Call = Callable[[int], Any]

TIMES: list[dict[str, Any]] = []
START = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:5.0f} s]", *words, flush=True)


def rand(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(std=scale)


def failing() -> list[str]:
    """What the quick gates of the functions timed here find, where no record proves them in this environment."""
    jobs, now = jobs_of(TIMED, "sm90", contracts_for("sm90"), full=False), time.time()
    by_function = {name: [job for job in jobs if job.gate.function == name] for name in TIMED}
    with single_thread():
        held = [name for name in TIMED if proven(by_function[name], default_store(), now=now)]
    say("proven by records:", ", ".join(held) or "nothing")
    jobs = [job for job in jobs if job.gate.function not in held]
    if not jobs:
        return []
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_gates(jobs, State(Path(folder)), fresh=True, said=lambda *_: None)
        return [f"{one.gate.function} {why}" for one in outcomes for why in one.failures]


# Times


def compared(native: Call, ours: Call, copies: int) -> dict[str, float]:
    """Times in turns: native twice (its second graph shows the noise), with cuBLAS as torch ships it, and ours."""
    before = cublaslt.switches()
    cublaslt.restore(cublaslt.SHIPPED)
    try:
        graphs = [capture(native, copies), capture(native, copies)]
    finally:
        cublaslt.restore(before)
    first, again, own = replay_times([*graphs, capture(ours, copies)], copies)
    return {"native": first, "again": again, "ours": own}


def time_linear() -> None:
    for name, N, K in tuning.WEIGHTS:
        copies = copies_for(2 * N * K)
        ws = [rand(N, K, scale=K**-0.5) for _ in range(copies)]
        for M in LINEAR_TIMES:
            x = rand(M, K)
            n = min(copies, 4) if M >= 8192 else copies

            def stock(i: int, *, x: Tensor = x, ws: list[Tensor] = ws, up: bool = False) -> Tensor:
                y = F.linear(x, ws[i])
                return y.float() if up else y

            def own(i: int, *, x: Tensor = x, ws: list[Tensor] = ws, up: bool = False) -> Tensor:
                return linear(x, ws[i], fp32_out=up)

            tile = linear_table.tile_for(N, K, M)
            for up in (False, True) if "lm_head" in name else (False,):
                row: dict[str, Any] = {
                    "op": "linear, fp32 out" if up else "linear",
                    "shape": f"{name} {N}x{K}",
                }
                row |= {"rows": M, **compared(partial(stock, up=up), partial(own, up=up), n)}
                row["provider"] = "cublaslt" if tile is None else f"few_rows {tile.kind}"
                row["tflops"] = 2 * M * N * K / row["ours"] / 1e6
                row["tb_per_s"] = (2 * (N * K + M * K) + M * N * (4 if up else 2)) / row["ours"] / 1e6
                TIMES.append(row)
        del ws
        torch.cuda.empty_cache()
    show("linear")


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def inductor(function: Callable[..., Any], inputs: list[tuple[Any, ...]], wrap: Wrap) -> float | None:
    """The native op compiled for this shape, or None with the reason printed."""
    torch._dynamo.reset()
    try:
        fast = wrap(torch.compile(function, dynamic=False))
        return graph_time(lambda i: fast(*inputs[i]), len(inputs))
    except Exception as error:  # noqa: BLE001 - a comparison only; its absence is shown in the table
        say("no compiled time:", repr(error)[:200])
        return None


Make = Callable[[], tuple[Any, ...]]


def time_row(
    op: str,
    shape: str,
    M: int,
    nbytes: int,
    make: Make,
    native: Callable[..., Any],
    ours: Callable[..., Any],
    wrap: Wrap = lambda call: call,
) -> None:
    copies = copies_for(nbytes)
    inputs = [make() for _ in range(copies)]
    row: dict[str, Any] = {"op": op, "shape": shape, "rows": M}
    row |= compared(lambda i: wrap(native)(*inputs[i]), lambda i: wrap(ours)(*inputs[i]), copies)
    row["tb_per_s"] = nbytes / row["ours"] / 1e6
    if M in COMPILED:
        row["compiled"] = inductor(native, inputs, wrap)
    TIMES.append(row)


def native_logprobs(z: Tensor, t: Tensor) -> Tensor:
    return torch.log_softmax(z, -1, dtype=FP32).gather(-1, t.unsqueeze(-1)).squeeze(-1)


def own_logprobs(z: Tensor, t: Tensor) -> Tensor:
    return token_logprobs(z, t, vocab_leaves=LEAVES)


def time_rows() -> None:
    for M in ROW_TIMES:
        for one in subjects(M):
            time_row(one.op, one.shape, M, one.nbytes, one.make, one.native, one.ours)
            if one.learned and M >= TRAINED:
                nbytes, wrap = one.nbytes + one.back_bytes, partial(with_gradient, learned=one.learned)
                op = f"{one.op}, gradient too"
                time_row(op, one.shape, M, nbytes, one.make, one.native, one.ours, wrap)
        torch.cuda.empty_cache()
    for dtype in (BF16, FP32):
        for M in ROW_TIMES:

            def logits(M: int = M, dtype: torch.dtype = dtype) -> tuple[Any, ...]:
                return rand(M, VOCAB, dtype=dtype), torch.arange(M, device="cuda")

            name = f"{VOCAB} {str(dtype)[6:]}"
            time_row("logprobs", name, M, VOCAB * M * dtype.itemsize, logits, native_logprobs, own_logprobs)
    show("rows")


# Report


def versions() -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def out_folder() -> Path:
    return Path(os.environ.get("OUT", "."))


def lines(kind: str) -> list[str]:
    """Markdown of one kind of times in us; `ratio` is ours / native (above 1 is slower), `noise` native / native.

    `roofline` is the greater share of the chip's bandwidth or arithmetic."""
    rows = [r for r in TIMES if r["op"].startswith("linear") == (kind == "linear")]
    extra = ["provider", "tflops"] if kind == "linear" else ["compiled"]
    head = ["op", "shape", "rows", "native", "noise", "ours", "ratio", *extra, "tb_per_s", "roofline"]
    text = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        cells = {**r, "ratio": r["ours"] / r["native"], "noise": r["again"] / r["native"]}
        cells["roofline"] = max(r["tb_per_s"] / BANDWIDTH, r.get("tflops", 0.0) / TENSOR)
        shown = [cells.get(h) for h in head]
        text.append(
            "| "
            + " | ".join(f"{c:.2f}" if isinstance(c, float) else "" if c is None else str(c) for c in shown)
            + " |"
        )
    return text


def show(kind: str) -> None:
    print("\n".join(lines(kind)), flush=True)


def write(seconds: float) -> None:
    facts = {
        **versions(),
        "driver": subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip(),
        "sources": {name: source_digest(name, "sm90") for name in TIMED},
        "rope_table": table_digest(HEAD_DIM, BASE, torch.device("cuda", 0)),
        "seconds": round(seconds),
    }
    folder = out_folder()
    (folder / "kernels-h200.json").write_text(json.dumps({**facts, "times": TIMES}, indent=1) + "\n")
    text = [
        *(f"- {k}: {v}" for k, v in facts.items()),
        "",
    ]
    (folder / "kernels-h200.md").write_text("\n".join([*text, *lines("linear"), "", *lines("rows")]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tune", action="store_true", help="first measure tiles of weights the table lacks")
    parser.add_argument("--tune-all", action="store_true", help="first measure tiles of every weight")
    parser.add_argument("--no-times", action="store_true", help="stop there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("needs a GPU of compute capability 9.0", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    say(versions())
    with torch.no_grad():
        cublaslt.claim()
        cublaslt.probe()
        if arguments.tune or arguments.tune_all:
            tuning.extend(linear_table.PATH, say, every=arguments.tune_all)
            linear_table.tiles.cache_clear()
            (out_folder() / "table.json").write_text(linear_table.PATH.read_text())
        if arguments.no_times:
            return 0
        if found := failing():
            print("nothing is timed, for gates fail:", *found, sep="\n  ", file=sys.stderr)
            return 1
        time_rows()
        time_linear()
    write(time.monotonic() - START)
    return 0


if __name__ == "__main__":
    sys.exit(main())
