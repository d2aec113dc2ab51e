# SPDX-License-Identifier: Apache-2.0
"""Measures tiles against cuBLASLt for each weight and product, and makes the entries of `table.json`.

Forward products take tiles of the few-row kernel; gradients and products that go on from an accumulator those of `chains`.
"""

from __future__ import annotations

import json
import math
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch
import triton

from isoexec.kernels.hopper.timing import capture, copies_for, replay_times
from isoexec.kernels.linear.hopper import chains, cublaslt
from isoexec.kernels.linear.hopper.kernel import Kind, Tile, launch
from isoexec.kernels.linear.hopper.table import PRODUCTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from torch import Tensor

    from isoexec.kernels.linear.hopper.chains import Layout
    from isoexec.kernels.linear.hopper.table import Product

__all__ = [
    "BUCKETS",
    "CHAIN_TILES",
    "WEIGHTS",
    "candidates",
    "extend",
    "extend_products",
    "tune",
]

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
_DEVICE = "cuda"
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

# rows for which a choice of another product is measured; the last serves all that are more, but a head's
PRODUCT_BUCKETS: dict[Product, tuple[int, ...]] = {
    "input": (1, 16, 64, 128, 1024, 8192),
    "weight": (16, 128, 1024, 8192),
    "continue": (1, 16, 64, 128, 512, 1024, 8192),
}
HEAD = 32768  # outputs from which a weight is a head's: never row-parallel, and rows are fewer here
HEAD_ROWS = 1024
# kind, rows, columns, depth, warps, stages: few rows first, then many
_CHAIN_CUTS: tuple[tuple[Kind, int, int, int, int, int], ...] = (
    ("swapped", 16, 64, 128, 4, 6),
    ("swapped", 16, 64, 256, 4, 4),
    ("swapped", 16, 128, 64, 4, 8),
    ("swapped", 32, 64, 128, 4, 6),
    ("swapped", 64, 64, 128, 4, 4),
    ("swapped", 64, 128, 64, 4, 6),
    ("maps", 64, 64, 128, 4, 4),
    ("maps", 64, 128, 64, 4, 6),
    ("maps", 64, 256, 64, 8, 4),
    ("maps", 128, 64, 64, 4, 6),
    ("maps", 128, 128, 64, 8, 4),
    ("maps", 128, 128, 64, 4, 4),
    ("maps", 256, 128, 64, 8, 3),
    ("maps", 128, 256, 64, 8, 3),
)
CHAIN_TILES = tuple(
    Tile(kind=kind, rows=rows, columns=columns, depth=depth, warps=warps, stages=stages)
    for kind, rows, columns, depth, warps, stages in _CHAIN_CUTS
)


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
    x = torch.zeros(tile.rows, 1024, dtype=torch.bfloat16, device=_DEVICE)
    w = torch.zeros(256, 1024, dtype=torch.bfloat16, device=_DEVICE)
    try:
        launch(x, w, torch.empty(tile.rows, 256, dtype=torch.bfloat16, device=_DEVICE), tile)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - a tile that does not build is left out, and said
        return repr(error)[:200]
    return ""


def _steps(N: int, K: int, usable: list[Tile]) -> list[dict[str, Any]]:
    copies = copies_for(2 * N * K)
    ws = [torch.empty(N, K, dtype=torch.bfloat16, device=_DEVICE).normal_(std=K**-0.5) for _ in range(copies)]
    steps: list[dict[str, Any]] = []
    for M in BUCKETS:
        x = torch.randn(M, K, device=_DEVICE).bfloat16()

        def chain(i: int, x: Tensor = x, *, tile: Tile) -> None:
            launch(x, ws[i], torch.empty(len(x), N, dtype=torch.bfloat16, device=_DEVICE), tile)

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


def _build_chain(job: tuple[Product, Tile]) -> str:
    """Compile one tile of a product into Triton's cache; returns what went wrong."""
    product, tile = job
    layout, wide = _layout(product)
    a, b = _operands(layout, 256, 256, 256)
    out = torch.empty(256, 256, dtype=wide, device=_DEVICE)
    try:
        chains.launch(layout, a, b, out if product == "continue" else None, out, tile)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - a tile that does not build is left out, and said
        return repr(error)[:200]
    return ""


def _usable(products: Iterable[Product], say: Callable[..., None]) -> dict[Product, list[Tile]]:
    """The tiles of each product that build, compiled beside one another."""
    jobs = [(product, tile) for product in products for tile in CHAIN_TILES]
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        troubles = dict(zip(jobs, pool.map(_build_chain, jobs), strict=True))
    for (product, tile), trouble in troubles.items():
        if trouble:
            say("left out", product, tile, trouble)
    return {
        name: [tile for product, tile in jobs if product == name and not troubles[product, tile]]
        for name, _ in jobs
    }


def _layout(product: Product) -> tuple[Layout, torch.dtype]:
    """Where a product's operands lie, and the dtype of its result."""
    return ("forward", torch.float32) if product == "continue" else (product, torch.bfloat16)


def _fits(tile: Tile, M: int, layout: Layout) -> bool:
    """Whether a tile is worth a trial: one for few rows is not for many; a weight gradient's rows are always many."""
    if layout == "weight":
        return tile.rows >= 64
    return tile.rows <= 2 * max(16, M) and (M <= 512 or tile.rows >= 64)


def _operands(layout: Layout, M: int, N: int, K: int) -> tuple[Tensor, Tensor]:
    def rand(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=_DEVICE).normal_()

    if layout == "forward":
        return rand(M, K), rand(N, K)
    return (rand(M, N), rand(N, K)) if layout == "input" else (rand(M, N), rand(M, K))


_LIBRARY: dict[Layout, Callable[..., Tensor]] = {
    "forward": cublaslt.linear,
    "input": cublaslt.input_gradient,
    "weight": cublaslt.weight_gradient,
}


def _product_steps(product: Product, N: int, K: int, usable: list[Tile]) -> list[dict[str, Any]]:
    layout, wide = _layout(product)
    steps: list[dict[str, Any]] = []
    buckets = [M for M in PRODUCT_BUCKETS[product] if N < HEAD or M <= HEAD_ROWS]
    for M in buckets:
        rows, columns = {"forward": (M, N), "input": (M, K), "weight": (N, K)}[layout]
        touched = 2 * (M * N + N * K + M * K)
        copies = min(8, copies_for(touched))
        held = [_operands(layout, M, N, K) for _ in range(copies)]
        out = torch.empty(rows, columns, dtype=wide, device=_DEVICE)
        acc = torch.zeros(rows, columns, device=_DEVICE) if product == "continue" else None

        def chain(i: int, tile: Tile, held: Any = held, out: Tensor = out, acc: Tensor | None = acc) -> None:
            a, b = held[i]
            chains.launch(layout, a, b, acc, out, tile)

        def library(i: int, held: Any = held) -> None:
            a, b = held[i]
            _LIBRARY[layout](a, b, wide)

        fitting = [t for t in usable if _fits(t, M, layout)]
        graphs = [capture(library, copies), *(capture(partial(chain, tile=t), copies) for t in fitting)]
        library_us, *spans = (round(us, 2) for us in replay_times(graphs, copies, replays=5))
        us, best = min(zip(spans, fitting, strict=True), key=lambda pair: pair[0])
        ours = product == "continue" or buckets[0] == M or us < _WORTH * library_us
        last = buckets[-1] == M
        limit = None if last and N < HEAD else M
        steps.append(
            {"up_to": limit, "tile": asdict(best) if ours else None, "us": us, "library_us": library_us}
        )
        del held, out, acc, graphs
        torch.cuda.empty_cache()
    while steps[-1]["tile"] is None:
        steps.pop()
    return steps


def extend_products(
    path: Path,
    say: Callable[..., None],
    *,
    every: bool = False,
    names: tuple[str, ...] = (),
    ends: float = math.inf,
) -> None:
    """Measure gradients and continued products of the weights that the table lacks, or of `every` one anew, and write them.

    Of the weights whose names start with one of `names`, where some are given. The table is written after each weight, and what
    is left at `ends` (of `time.monotonic`) is said. Needs `cublaslt.claim()` and a GPU.
    """
    table = json.loads(path.read_text())
    held: dict[str, list[dict[str, Any]]] = table.get("products", {})
    have = {name: {(e["N"], e["K"]): e for e in held.get(name, [])} for name in PRODUCTS}
    lacking = [
        (product, name, N, K)
        for product in PRODUCTS
        for name, N, K in WEIGHTS
        if (every or (N, K) not in have[product])
        and (not names or name.startswith(names))
        and not (product == "continue" and N >= HEAD)
    ]
    usable = _usable(dict.fromkeys(product for product, *_ in lacking), say)
    for at, (product, name, N, K) in enumerate(lacking):
        if time.monotonic() > ends:
            say("time is over before", *(f"{product} {name}," for product, name, *_ in lacking[at:]))
            return
        steps = _product_steps(product, N, K, usable[product])
        say("tuned", product, name, *(f"M{s['up_to']} {s['us']}/{s['library_us']}" for s in steps))
        have[product][N, K] = {"name": name, "N": N, "K": K, "steps": steps}
        held = {p: [have[p][N, K] for _, N, K in WEIGHTS if (N, K) in have[p]] for p in PRODUCTS}
        path.write_text(json.dumps({**table, "products": held}, indent=1) + "\n")


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
    others = json.loads(path.read_text()).get("products")
    products = {"products": others} if others else {}
    path.write_text(json.dumps({**facts, "weights": entries, **products}, indent=1) + "\n")
