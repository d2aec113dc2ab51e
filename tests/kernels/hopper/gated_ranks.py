# SPDX-License-Identifier: Apache-2.0
"""Runs what sm90 gates compare over ranks, with real ones, in Triton's interpreter; prints what failed, and what was covered.

`python -c "import gated_ranks; gated_ranks.main()" [MOST] [OP ...]` in this folder: up to MOST ranks (8), which compute on the
CPU and otherwise do what ranks of one GPU do. The dense products are the specification's: their kernels have checks of their own.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import gated  # type: ignore[import-not-found]  # patches the interpreter, and gives ops CPU kernels; first
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.kernels.gates import Run, degrees, norms, sharing
from isoexec.kernels.grouped_linear.hopper import products as grouped_products
from isoexec.kernels.grouped_linear.hopper import table as grouped_table
from isoexec.kernels.linear.hopper import chains, kernel, naive, products

BF16 = torch.bfloat16
LEAVES = {"block": 128, "vocab_leaves": 16}
# sizes that eight ranks can share; more leaves than ranks, each of three blocks: two or four make one tree however they are cut
SHARED: dict[str, dict[str, Any]] = {
    "embedding": {},
    "grad_norm": {},
    "rms_norm": {},
    "rms_norm_centred": {},
    "rms_norm_gated": {},
    "dispatch": {"TOKENS": 8},
    "combine": {"TOKENS": 8},
    "grouped_linear": {"SHARED": (8, 256, 48, 128), "PLANTED": (2, 16, 128), "FEW": 32},
    "linear": {
        "SHARED_WEIGHTS": ((256, 128),),
        # two parts of two 16s for each of eight ranks, and so many numbers that rounding hides not all
        "PLANTED": (64, 512, 1024),
        "SHARED_ROWS": (1, 8),
        "SHARED_HEADS": ((256, 128),),
        "WEIGHT_ROWS": 8,
        "weights": lambda _: ((64, 128),),
    },
    "logprobs": {"VOCABULARIES": (6144,), "SHARED": 8, "PLANTED": 1024},
    "linear_logprobs": {"SHARED_HEAD": (6144, 64), "QUICK_HEADS": ((6144, 64),), "SHARED": 8},
    "latent_attention": {"HEADS": (8,)},
}
CONSTANTS = {
    op: {**gated.CONSTANTS[op], **(LEAVES if "logprobs" in op else {})}
    for op in SHARED
    if op in gated.CONSTANTS
}
CONSTANTS["latent_attention"] = {"kv_segment": 96}
HEAD = "linear to fp32"  # the linear once more, as a head and a router have it
CONSTANTS[HEAD] = {**CONSTANTS["linear"], "boundary": "float32"}


def product(
    layout: str, a: Tensor, b: Tensor, acc: Tensor | None, out_dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """`products.product` by the specification."""
    left, right = (a.t(), b.t()) if layout == "weight" else (a, b.t() if layout == "input" else b)
    y = naive.chain(left, right, acc).to(out_dtype)
    return y if out is None else out.copy_(y)


def tiled(layout: str, a: Tensor, b: Tensor, acc: Tensor | None = None, dtype: torch.dtype = BF16) -> Tensor:
    """`chains.reference` by the specification."""
    return product(layout, a, b, acc, dtype)


def reference(x: Tensor, w: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    """`kernel.reference` by the specification."""
    return product("forward", x, w, None, dtype)


_ready: list[str] = []


def ready(op: str) -> Any:
    """The gate of an op at its sizes, in this process; where it is another's turn, tables are its."""
    if not _ready:
        gated.smaller()
        gated.replace(products, product=product)
        gated.replace(chains, reference=tiled)
        gated.replace(kernel, reference=reference)
        experts_ranks = import_module("experts_ranks")  # after the ops have their CPU kernels
        gated.replace(
            grouped_products, rows_product=experts_ranks._rows, weight_product=experts_ranks._weight
        )
        gated.replace(grouped_table, weights=lambda: ((256, 48), (48, 128), (32, 64)))
        gated.replace(norms, RANKED={"SP": (128, 1, 24), "TP": (4, 1, 8, 16)}, DEGREES=(1, 2, 4, 8))
    if op not in _ready:
        gate = import_module("gated_latent").smaller() if op == "latent_attention" else gated.small(op)
        if op == "linear_logprobs":
            gated.replace(
                import_module("isoexec.kernels.linear.hopper.table"),
                tiles=lambda: {(6144, 64): ((8192, gated.HEAD_TILE),)},
            )
        for name in ("reference",):
            if hasattr(gate, name) and op not in ("grouped_linear", "latent_attention"):
                setattr(gate, name, reference)
        for name, value in SHARED[op].items():
            gated.replace(gate, **{name: value})
        if "DEGREES" in vars(gate):
            gate.DEGREES = (1, 2, 4, 8)
        _ready[:] = [op]
    return import_module(f"isoexec.kernels.{op}.hopper.gate")


def on_rank(
    rank: int, size: int, group: ProcessGroup | None, op: str, module: str, name: str, *args: object
) -> Any:
    """A gate's worker in a rank, which has made the gate small for itself."""
    ready(op)
    return getattr(import_module(module), name)(rank, size, group, *args)


def on_ranks(
    launch: Callable[..., list[Any]], op: str, run: Run, size: int, worker: Callable[..., Any], *args: object
) -> list[Any]:
    """`sharing.on_ranks` for ranks that have to be made small first."""
    if size == 1:
        return launch(run, 1, worker, *args)
    return launch(run, size, on_rank, op, worker.__module__, worker.__name__, *args)


def main() -> None:
    """Print `{op: failures, elements, domain, lacking, seconds}`."""
    most, ops = int(sys.argv[1]) if len(sys.argv) > 1 else sharing.WORLD, sys.argv[2:] or [*SHARED, HEAD]
    results: dict[str, dict[str, Any]] = {}
    launch = sharing.on_ranks
    for name in ops:
        op = "linear" if name == HEAD else name
        gate, began = ready(op), time.monotonic()
        gated.replace(degrees, most_ranks=lambda _: most)
        for module in (gate, norms, import_module("isoexec.kernels.linear.hopper.gate")):
            if hasattr(module, "on_ranks"):
                gated.replace(module, on_ranks=partial(on_ranks, launch, op))
        try:
            check = gate.GATE.run("partition_invariance", CONSTANTS[name], full=False)
            results[name] = {
                "failures": check.failures(),
                "elements": check.elements,
                "domain": check.domain,
                "lacking": degrees.lacking(gate.GATE, check),
                "seconds": round(time.monotonic() - began, 1),
            }
        except Exception:  # noqa: BLE001 - reported to the test that asked
            results[name] = {"failures": [traceback.format_exc(limit=-6)]}
        print(name, results[name].get("seconds"), results[name]["failures"], file=sys.stderr)
    json.dump(results, sys.stdout)
