# SPDX-License-Identifier: Apache-2.0
"""Measures the few-row chain's tiles against cuBLASLt for each weight and makes the entries of `table.json`."""

from __future__ import annotations

import json
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch
import triton

from isoexec.kernels.hopper.timing import capture, copies_for, replay_times
from isoexec.kernels.linear.hopper import cublaslt
from isoexec.kernels.linear.hopper.kernel import Kind, Tile, launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from torch import Tensor

__all__ = ["BUCKETS", "WEIGHTS", "candidates", "extend", "tune"]

# name, N, K: Qwen3-0.6B, Qwen3-8B, Qwen3.5-35B-A3B with its gated attention and Gated DeltaNet, and what Qwen3-30B-A3B and
# MiMo-7B have beside these
WEIGHTS = (
    ("0.6B qkv", 4096, 1024),
    ("0.6B o", 1024, 2048),
    ("0.6B gate_up", 6144, 1024),
    ("0.6B down", 1024, 3072),
    ("0.6B lm_head", 151936, 1024),
    ("8B qkv", 6144, 4096),
    ("8B o", 4096, 4096),
    ("8B gate_up", 24576, 4096),
    ("8B down", 4096, 12288),
    ("8B lm_head", 151936, 4096),
    ("35B qkv", 9216, 2048),
    ("35B gdn_in", 12288, 2048),
    ("35B out", 2048, 4096),
    ("35B shared_down", 2048, 512),
    ("35B lm_head", 248320, 2048),
    ("30B qkv", 5120, 2048),
    ("30B lm_head", 151936, 2048),
    ("MiMo gate_up", 22016, 4096),
    ("MiMo down", 4096, 11008),
    ("MiMo lm_head", 151680, 4096),
)

BUCKETS = (1, 16, 32, 64, 128)  # rows for which a choice is measured
_SHARED = 225_000  # bytes of shared memory a block may take
_WORTH = 0.99  # the chain serves a bucket where it takes less than this share of the library's time
_SHORT_LIST = 4  # tiles measured again, in turns with the library
_CUTS: dict[Kind, tuple[tuple[int, int, int, int], ...]] = {  # columns, depth, warps, stages
    "pointers": (
        (16, 256, 2, 6),
        (32, 256, 2, 4),
        (32, 256, 4, 4),
        (32, 128, 2, 6),
        (64, 128, 4, 4),
        (64, 64, 4, 6),
        (128, 64, 4, 4),
    ),
    "maps": (
        (32, 256, 4, 4),
        (32, 128, 4, 8),
        (64, 64, 4, 8),
        (64, 128, 4, 4),
        (64, 128, 4, 6),
        (128, 64, 4, 6),
        (128, 128, 4, 3),
    ),
    "swapped": (
        (64, 64, 4, 8),
        (64, 128, 4, 4),
        (64, 128, 4, 6),
        (64, 256, 4, 4),
        (128, 64, 4, 6),
        (128, 128, 8, 4),
    ),
}


def candidates(M: int) -> list[Tile]:
    """Tiles worth a trial for M rows."""
    found = {
        Tile(kind=kind, rows=rows, columns=columns, depth=depth, warps=warps, stages=stages)
        for kind, cuts in _CUTS.items()
        for columns, depth, warps, stages in cuts
        for rows in (min(max(16, M), 64), max(16, M))
        if (rows + columns) * depth * 2 * stages <= _SHARED
    }
    return sorted(found, key=str)


def _build(tile: Tile) -> str:
    """Compile one tile into Triton's cache; returns what went wrong."""
    x = torch.zeros(tile.rows, 1024, dtype=torch.bfloat16, device="cuda")
    w = torch.zeros(256, 1024, dtype=torch.bfloat16, device="cuda")
    try:
        launch(x, w, torch.empty(tile.rows, 256, dtype=torch.bfloat16, device="cuda"), tile)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - a tile that does not build is left out, and said
        return repr(error)[:200]
    return ""


def _steps(N: int, K: int, usable: list[Tile]) -> list[dict[str, Any]]:
    copies = copies_for(2 * N * K)
    ws = [torch.empty(N, K, dtype=torch.bfloat16, device="cuda").normal_(std=K**-0.5) for _ in range(copies)]
    steps: list[dict[str, Any]] = []
    for M in BUCKETS:
        x = torch.randn(M, K, device="cuda").bfloat16()

        def chain(i: int, x: Tensor = x, *, tile: Tile) -> None:
            launch(x, ws[i], torch.empty(len(x), N, dtype=torch.bfloat16, device="cuda"), tile)

        def library(i: int, x: Tensor = x) -> None:
            cublaslt.linear(x, ws[i])

        fitting = [t for t in candidates(M) if t in usable and K % t.depth == 0]
        graphs = {t: capture(partial(chain, tile=t), copies) for t in fitting}
        screened = dict(zip(fitting, replay_times(list(graphs.values()), copies, replays=3), strict=True))
        short = sorted(screened, key=lambda t: screened[t])[:_SHORT_LIST]
        turns = [capture(library, copies), *(graphs[t] for t in short)]
        library_us, *spans = (round(us, 2) for us in replay_times(turns, copies, replays=15))
        us, best = min(zip(spans, short, strict=True), key=lambda pair: pair[0])
        ours = M == 1 or us < _WORTH * library_us
        steps.append({"up_to": M, "tile": asdict(best) if ours else None, "us": us, "library_us": library_us})
    while steps[-1]["tile"] is None:
        steps.pop()
    return steps


def tune(weights: Iterable[tuple[str, int, int]], say: Callable[..., None]) -> list[dict[str, Any]]:
    """Entries (name, N, K, few_rows) of the table; `say` gets progress. Needs `cublaslt.claim()` and a GPU."""
    every = sorted({t for M in BUCKETS for t in candidates(M)}, key=str)
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        troubles = dict(zip(every, pool.map(_build, every, chunksize=4), strict=True))
    for tile, trouble in troubles.items():
        if trouble:
            say("left out", tile, trouble)
    usable = [t for t in every if not troubles[t]]
    say(f"{len(usable)} of {len(every)} tiles built")
    entries = []
    for name, N, K in weights:
        steps = _steps(N, K, usable)
        spans = ", ".join(f"M{s['up_to']} {s['us']}/{s['library_us']}" for s in steps)
        say("tuned", name, "chain/cublaslt us:", spans)
        entries.append({"name": name, "N": N, "K": K, "few_rows": steps})
        torch.cuda.empty_cache()
    return entries


def extend(path: Path, say: Callable[..., None], *, every: bool = False) -> None:
    """Add the weights that the table lacks, or measure `every` one anew. Needs `cublaslt.claim()` and a GPU."""
    held = {} if every else {(e["N"], e["K"]): e for e in json.loads(path.read_text())["weights"]}
    lacking = [one for one in WEIGHTS if one[1:] not in held]
    held |= {(e["N"], e["K"]): e for e in tune(lacking, say)}
    facts = {
        "arch": "sm90",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    entries = [held[N, K] for _, N, K in WEIGHTS]
    path.write_text(json.dumps({**facts, "weights": entries}, indent=1) + "\n")
