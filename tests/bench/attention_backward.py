# SPDX-License-Identifier: Apache-2.0
"""Times the sm90 attention's own gradients next to other libraries' on one GPU: `python tests/bench/attention_backward.py`.

One causal sequence of bf16. Candidates: the own kernels; torch's FlashAttention-2 and cuDNN; cuDNN's frontend
(`nvidia-cudnn-frontend`) and FlashAttention-4 (`flash-attn-4`) where they can be imported. Each is asked again for the same
gradients and its elements that differ are counted. Ratios are to the fastest that does not promise to repeat itself. `--tune`
times other blocks of the own kernels instead, all free of bits, in less than a minute: `attention_tuning.py` has them. Lines go
to the terminal, a table at the end, `attention-backward-h200.json` or `attention-walks-h200.json` to $OUT or to where one is.
"""

# ruff: noqa: E402, BLE001 - where the package is not installed, its links are put on the path first; what breaks is said

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
import triton
from attention_tuning import ahead, walks_of  # type: ignore[import-not-found]  # beside this script
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
if find_spec("isoexec") is None:
    sys.path.insert(0, str(ROOT / ".src"))

from isoexec.kernels.attention.hopper.backward import QUERY, STORED, Walk, launch_gradients
from isoexec.kernels.attention.hopper.ops import plan
from isoexec.kernels.attention_cudnn.hopper import frontend as cudnn
from isoexec.kernels.hopper.timing import capture, replay_times

BF16 = torch.bfloat16
MODELS = ((32, 8, 128), (16, 2, 256), (32, 8, 64))  # query heads, KV heads, head dim
TOKENS = (2048, 8192, 32768)
AGAIN = 4  # how often the same gradients are asked for again
REPLAYS = 5
ROOM = 40 << 30  # bytes in which every KV group's products fit at 32k tokens
TOO_FAR = 0.02  # of the norm: the same gradient, by other roundings
START = time.monotonic()

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One sequence: q, out, g [1, T, H, D], k, v [1, T, KV, D], lse [1, H, T], natural and of scaled scores.

    `random` is the state that torch's forward hands its backward; nothing is dropped.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    g: Tensor
    random: tuple[Tensor, Tensor]
    scale: float

    @property
    def flops(self) -> float:
        """Five products over the lower triangle."""
        _, T, H, D = self.q.shape
        return 5.0 * T * T * H * D


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Who computes gradients; `repeats` says that the same bits are promised."""

    name: str
    repeats: bool
    make: Callable[[Case], Callable[[], Gradients]]


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:5.0f} s]", *words, flush=True)


def made(T: int, H: int, KV: int, D: int) -> Case:
    def rand(heads: int) -> Tensor:
        return torch.empty(1, T, heads, D, dtype=BF16, device="cuda").normal_()

    q, k, v, g = rand(H), rand(KV), rand(KV), rand(H)
    given = (None, None, T, T, 0.0, True, False)
    out, lse, *random, _ = torch.ops.aten._flash_attention_forward(q, k, v, *given, scale=D**-0.5)
    return Case(q=q, k=k, v=v, out=out, lse=lse, g=g, random=(random[0], random[1]), scale=D**-0.5)


def own(workspace: int = -1, **walks: Any) -> Callable[[Case], Callable[[], Gradients]]:
    """The own kernels with so many bytes for products that are written down; 0 computes them twice.

    `walks` are `key`, `query` and `stored`, each a `Walk`.
    """

    def make(case: Case) -> Callable[[], Gradients]:
        T = case.q.shape[1]
        sizes = {"requests": 1, "tokens": T, "most_rows": T, "most_keys": T}
        device = case.q.device
        step = plan(**sizes, kv_segment=4096, gradients=True, provider="triton", device=device)  # type: ignore[arg-type]
        ends = torch.tensor([0, T], dtype=torch.int32, device=device)
        step.fill(ends, ends[1:], k_start=ends[:1])
        q, k, v, out, g = (x[0] for x in (case.q, case.k, case.v, case.out, case.g))
        assert step.units is not None
        tables = (step.spans, step.units, None)

        def run() -> Gradients:
            dq, dk, dv, _ = launch_gradients(
                *(q, k, v, out, case.lse[0], g, *tables),
                scale=case.scale,
                window=0,
                most_rows=T,
                workspace=workspace,
                **walks,
            )
            return dq[None], dk[None], dv[None]

        return run

    return make


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Torch's own switch, without the NaN that it would fill fresh memory with."""
    before, flags = torch.are_deterministic_algorithms_enabled(), cast("Any", torch.utils.deterministic)
    filled, flags.fill_uninitialized_memory = flags.fill_uninitialized_memory, False
    torch.use_deterministic_algorithms(wanted)  # where it only warns, FlashAttention-2 goes on as it was
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        flags.fill_uninitialized_memory = filled


def flash2(repeats: bool) -> Callable[[Case], Callable[[], Gradients]]:
    def make(case: Case) -> Callable[[], Gradients]:
        T = case.q.shape[1]
        given = (None, None, T, T, 0.0, True, *case.random)

        def run() -> Gradients:
            with deterministic(repeats):
                dq, dk, dv = torch.ops.aten._flash_attention_backward(
                    *(case.g, case.q, case.k, case.v, case.out, case.lse, *given), scale=case.scale
                )
            return dq, dk, dv

        return run

    return make


def torch_cudnn(case: Case) -> Callable[[], Gradients]:
    """The cuDNN backend of torch's scaled_dot_product_attention, whose tensors have heads before rows."""
    q, k, v, g = (x.transpose(1, 2) for x in (case.q, case.k, case.v, case.g))
    out, lse, cu_q, cu_k, most_q, most_k, seed, offset, _ = (
        torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, True, False, scale=case.scale
        )
    )
    no_bias: Any = None

    def run() -> Gradients:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(g, q, k, v, out, lse, seed, offset, no_bias, cu_q, cu_k, most_q, most_k, 0.0, True),
            scale=case.scale,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    return run


def frontend(repeats: bool) -> Callable[[Case], Callable[[], Gradients]]:
    """cuDNN by its frontend, as attention.mma_segments_cudnn/1 calls it, or without the promise to repeat."""

    def make(case: Case) -> Callable[[], Gradients]:
        given = {"q": case.q, "k": case.k, "v": case.v, "o": case.out, "dO": case.g}
        handle = cudnn.load().create_handle()
        graph = cudnn.Graph.build(given, case.lse, scale=case.scale, handle=handle, repeats=repeats)
        room = torch.empty(graph.workspace, dtype=torch.uint8, device="cuda")
        found = (torch.empty_like(case.q), torch.empty_like(case.k), torch.empty_like(case.v))

        def run() -> Gradients:
            graph.run(given, case.lse, found, room)
            return found

        return run

    return make


def flash4(repeats: bool) -> Callable[[Case], Callable[[], Gradients]]:
    def make(case: Case) -> Callable[[], Gradients]:
        backward: Any = import_module("flash_attn.cute.interface")._flash_attn_bwd

        def run() -> Gradients:
            dq, dk, dv = backward(
                *(case.q, case.k, case.v, case.out, case.g, case.lse),
                softmax_scale=case.scale,
                causal=True,
                deterministic=repeats,
            )[:3]
            return dq, dk, dv

        return run

    return make


CANDIDATES = (
    Candidate(name="own", repeats=True, make=own()),
    Candidate(name="own, 40 GiB for products", repeats=True, make=own(ROOM)),
    Candidate(name="own, products twice", repeats=True, make=own(0)),
    Candidate(name="torch FA2", repeats=False, make=flash2(False)),
    Candidate(name="torch FA2, deterministic", repeats=True, make=flash2(True)),
    Candidate(name="torch cuDNN", repeats=False, make=torch_cudnn),
    Candidate(name="cuDNN frontend", repeats=False, make=frontend(False)),
    Candidate(name="cuDNN frontend, deterministic", repeats=True, make=frontend(True)),
    Candidate(name="FA4", repeats=False, make=flash4(False)),
    Candidate(name="FA4, deterministic", repeats=True, make=flash4(True)),
)
NEEDED = {"cuDNN frontend": "cudnn", "FA4": "flash_attn.cute.interface"}


def installed(name: str) -> str:
    """Why a candidate's library cannot be imported, or nothing."""
    module = next((module for start, module in NEEDED.items() if name.startswith(start)), None)
    if module is None:
        return ""
    try:
        import_module(module)
    except Exception as error:
        return f"not installed ({type(error).__name__}: {error!s:.120})"
    return ""


def differing(a: Gradients, b: Gradients) -> int:
    return sum(
        int((x.contiguous().view(torch.int16) != y.contiguous().view(torch.int16)).sum())
        for x, y in zip(a, b, strict=True)
    )


def off(a: Gradients, b: Gradients) -> float:
    return max(float((x - y).float().norm() / y.float().norm()) for x, y in zip(a, b, strict=True))


def eager(run: Callable[[], Gradients]) -> float:
    """Median microseconds of calls one after the other, for what no graph can hold."""
    spans = []
    for _ in range(REPLAYS + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3)
    return sorted(spans[1:])[REPLAYS // 2]


def measure(one: Candidate, case: Case, want: Gradients | None) -> tuple[dict[str, Any], Gradients]:
    run = one.make(case)
    first: Gradients = tuple(x.clone() for x in run())  # type: ignore[assignment]
    differ = [differing(run(), first) for _ in range(AGAIN)]
    away = 0.0 if want is None else off(first, want)
    how = "graph"
    try:
        us = replay_times([capture(lambda _: run(), 1)], 1, replays=REPLAYS)[0]
    except Exception as error:
        torch.cuda.synchronize()
        how, us = f"eager ({type(error).__name__})", eager(run)
    found = {
        "us": round(us, 1),
        "tflops": round(case.flops / us / 1e6),
        "differing": max(differ),
        "off": round(away, 5),
        "timed": how,
        "repeats": one.repeats,
    }
    return found, first


def measured(T: int, H: int, KV: int, D: int, missing: dict[str, str], until: float) -> dict[str, Any]:
    case, want = made(T, H, KV, D), None
    found: dict[str, dict[str, Any]] = {}
    for one in CANDIDATES:
        if why := missing[one.name]:
            found[one.name] = {"why": why}
            continue
        if time.monotonic() - START > until:
            found[one.name] = {"why": "left out: no time left"}
            continue
        try:
            row, first = measure(one, case, want)
            if want is None:
                want = first
            if row["off"] > TOO_FAR:
                row["why"] = f"another gradient: {row['off']} of the norm away from the own"
            found[one.name] = row
        except Exception as error:
            found[one.name] = {"why": f"{type(error).__name__}: {error!s:.200}"}
        torch.cuda.empty_cache()
        say(f"H{H}/{KV} D{D} {T}", one.name, found[one.name])
    loose = [row["us"] for row in found.values() if "why" not in row and not row["repeats"]]
    for row in found.values():
        if "why" not in row and loose:
            row["ratio"] = round(row["us"] / min(loose), 3)
    return {"shape": f"H{H}/{KV} D{D} {T}", "candidates": found}


def table(results: list[dict[str, Any]]) -> str:
    """Rows are shapes, columns candidates: microseconds (ratio), with the elements that differed between runs if any did."""

    def cell(row: dict[str, Any]) -> str:
        if "why" in row:
            return "-"
        changing = f", {row['differing']} differ" if row["differing"] else ""
        return f"{row['us']:.0f} ({row.get('ratio', '-')}{changing})"

    names = [one.name for one in CANDIDATES]
    lines = [f"| shape | {' | '.join(names)} |", "|" + "---|" * (len(names) + 1)]
    lines += [
        f"| {one['shape']} | {' | '.join(cell(one['candidates'][n]) for n in names)} |" for one in results
    ]
    return "\n".join(lines)


TUNED = 8192  # rows of the sequence over which walks are timed
SMALL = 256  # and over which they are compiled: the same kernels


def compile_one(H: int, KV: int, D: int, walks: dict[str, Walk]) -> None:
    """One gradient over few rows, in a process whose only task it is."""
    torch.manual_seed(1)
    with torch.no_grad():
        own(_room(walks), **walks)(made(SMALL, H, KV, D))()
    torch.cuda.synchronize()


def _room(walks: dict[str, Walk]) -> int:
    """Bytes for products: none where the walk is of query rows, which computes them twice; else as it serves."""
    return 0 if "query" in walks else ROOM if "stored" in walks else -1


def named(D: int) -> dict[str, dict[str, Walk]]:
    """Every walk of a head dim by its name: first the ones that serve, with and without products written down."""
    served = {"as it is": {}, "products twice": {"query": QUERY[D]}, "products stored": {"stored": STORED[D]}}
    return served | walks_of(D)


def tune(until: float) -> list[dict[str, Any]]:
    """Every walk at 8192 tokens: its time, and that it has the bits of the walk as it is."""
    jobs = [(*model, walks) for model in MODELS for walks in named(model[2]).values()]
    say(f"{len(jobs)} walks compiled ahead in {ahead(compile_one, jobs):.0f} s")
    found = []
    for H, KV, D in MODELS:
        case, want = made(TUNED, H, KV, D), None
        base: dict[int, float] = {}
        for name, walks in named(D).items():
            if time.monotonic() - START > until:
                say(f"D{D} {name}: left out, no time left")
                continue
            try:
                row, first = measure(
                    Candidate(name=name, repeats=True, make=own(_room(walks), **walks)), case, None
                )
            except Exception as error:
                say(f"D{D} {name}: {type(error).__name__}: {error!s:.160}")
                torch.cuda.empty_cache()
                continue
            want = first if want is None else want
            row |= {"D": D, "walk": name, "other_bits": differing(first, want)}
            # against the walk that serves, with as much room for products
            row["ratio"] = round(row["us"] / base.setdefault(_room(walks), row["us"]), 3)
            found.append(row)
            say(f"D{D} {name}", row)
            torch.cuda.empty_cache()
        best = sorted((one for one in found if one["D"] == D), key=lambda one: one["us"])[:4]
        say(f"D{D} fastest:", [(one["walk"], one["us"]) for one in best])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=135.0, help="begin nothing after so many (135)")
    parser.add_argument("--tune", action="store_true", help="time other blocks of the own kernels instead")
    args = parser.parse_args()
    until = args.seconds
    torch.manual_seed(1)
    versions = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton.__version__,
    }
    say(versions)
    if args.tune:
        with torch.no_grad():
            _write("attention-walks-h200.json", {"made": versions, "walks": tune(min(until, 55.0))})
        return
    missing = {one.name: installed(one.name) for one in CANDIDATES}
    for name, why in missing.items():
        if why:
            say(name, why)
    results = []
    with torch.no_grad():
        for T in TOKENS:
            for H, KV, D in MODELS:
                results.append(measured(T, H, KV, D, missing, until))
    print(table(results))
    _write("attention-backward-h200.json", {"made": versions, "missing": missing, "results": results})


def _write(name: str, found: dict[str, Any]) -> None:
    (Path(os.environ.get("OUT", ".")) / name).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
