# SPDX-License-Identifier: Apache-2.0
"""Runs every check of the sm90 gates in Triton's interpreter at tiny sizes; prints what failed, and what was covered, as JSON.

The ops get CPU kernels here, the chain's table a few small weights; the library and its switches are CPU's torch.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import on_cpu  # type: ignore[import-not-found]  # noqa: F401 - before any op is defined
import torch
from torch import Tensor

from isoexec.kernels.gates import Run, degrees, forward, inputs, norms, ropes, rows
from isoexec.kernels.gates.forward import many
from isoexec.kernels.grouped_linear.hopper import kernel as grouped
from isoexec.kernels.grouped_linear.hopper import products
from isoexec.kernels.grouped_linear.hopper import table as grouped_table
from isoexec.kernels.linear.hopper import cublaslt, kernel, table
from isoexec.kernels.linear_logprobs.hopper.kernel import Tile as Fused
from isoexec.kernels.linear_logprobs.hopper.plan import Chunks
from isoexec.kernels.logprobs.hopper import kernel as logprobs
from isoexec.kernels.rms_norm.hopper import gradient
from isoexec.kernels.router.sigmoid.gate import Shape


def kernel_tile(rows: int, columns: int, depth: int) -> grouped.Tile:
    return grouped.Tile(rows=rows, columns=columns, depth=depth, warps=4, stages=2)


TILE = kernel.Tile(kind="pointers", rows=16, columns=32, depth=64, warps=4, stages=2)
MAPS = kernel.Tile(kind="maps", rows=32, columns=128, depth=64, warps=4, stages=2)
SWAPPED = kernel.Tile(kind="swapped", rows=16, columns=64, depth=32, warps=4, stages=2)
MANY_BLOCKS = logprobs.Cut(blocks=4, join=2, rows=64, warps=4)
FEW_BLOCKS = logprobs.Cut(blocks=2, join=1, rows=32, warps=2)
HEAD = (768, 64)
HEAD_TILE = kernel.Tile(kind="pointers", rows=64, columns=256, depth=64, warps=4, stages=2)
FUSED = Fused(rows=64, columns=128, depth=64, warps=4, stages=2)
WEIGHTS = ((32, 64), (64, 128))
SMALL: dict[str, dict[str, Any]] = {
    "rms_norm": {},
    "rms_norm_centred": {},
    "rms_norm_gated": {"SHAPES": ((3, 24),), "PLANTED": (16, 256), "SHARED": 32, "DEGREES": (1, 2)},
    "l2_norm": {"SHAPES": ((3, 24),), "PLANTED": (16, 256)},
    "silu_mul": {"WIDTHS": (40,), "PLANTED": (16, 512)},
    "sigmoid_mul": {"SHAPES": ((3, 24),), "PLANTED": (16, 256)},
    "rope": {"SECTIONED": 5},
    "rope_interleaved": {},
    "rope_yarn": {},
    # a token is a program, and so are 32 features
    "embedding": {"TABLES": ((64, 40),), "TERMS": 2, "ids": lambda n, *of: inputs.ids(min(n, 48), *of)},
    "bias": {"WIDTHS": (40,), "many": lambda run, *of, **how: many(run, *(min(n, 192) for n in of), **how)},
    "grad_norm": {"CUTS": (100, 300), "LARGE": (16, 64), "SCALES": (1e-20, 1e-3, 1e12)},
    "router": {"SHAPES": ((20, 3),), "FREE": ((8, 2),), "PLANTED": (64, 16, 4)},
    "router.sigmoid": {"SHAPES": (Shape(12, 3, 3, 2, 1.8),), "PLANTED": (64, Shape(16, 4, 4, 2, 2.5))},
    "combine": {"SHAPES": ((3, 24),), "FREE": ((16, 1),), "PLANTED": (8, 8, 64), "TOKENS": 4},
    "shared_gate": {"WIDTHS": (64,), "FREE": ((16, 32, 4),), "PLANTED": (32, 64)},
    "grouped_linear": {
        "SHAPES": ((4, 32, 64), (4, 64, 32)),
        "TOKENS": 20,
        "TOP": 2,
        "SOME": 9,
        "PLANTED": (4, 32, 128),
        "FEW": 48,
        "TINY": (3, 32, 64),
        "SHARED": (4, 64, 48, 32),
        "TILES": (kernel_tile(16, 32, 32), kernel_tile(32, 16, 64)),
    },
    "dispatch": {"SHAPES": ((6, 2, 24),), "PLANS": ((7, 6, 2),) * 3, "PLANTED": (12, 8, 4, 24), "TOKENS": 4},
    # each program costs the interpreter some 50 ms here, whatever it computes
    "logprobs": {
        "VOCABULARIES": (600,),
        "PLANTED": 128,
        "ROWS": 5,
        "SOME": 9,
        "CUTS": (FEW_BLOCKS,),
        "WIDE": {"rows_per_program": 16, "columns_per_program": 512, "num_warps": 4},
    },
    "linear_logprobs": {
        "ROWS": 5,
        "SOME": 20,
        "FEW": 20,
        "PLANTED": 64,
        "QUICK_HEADS": (HEAD,),
        "SHARED_HEAD": HEAD,
        "SHARED": 4,
        "TILES": FUSED,
        "CHUNKS": Chunks(rows=4, leaves=1),
        "PLANS": (
            FUSED,
            Fused(rows=16, columns=256, depth=32, warps=4, stages=2, group=1),
            Chunks(rows=3, leaves=2),
        ),
    },
    "linear": {
        "ROWS": (1, 2, 16, 17),
        "MOST": 20,
        "SOME": 9,
        "PLANTED": (16, 32, 256),
        "TILED": (64, 128),
        "GRADIENT_ROWS": (1, 3, 7, 17, 20),
        "PADDED": 5,
        "SHARED_WEIGHTS": ((64, 128),),
        "SHARED_ROWS": (1, 4, 6),
        "WEIGHT_ROWS": 4,
    },
}
# a program more costs the interpreter far more than a row more
WIDE: dict[str, dict[str, int]] = {
    "rms_norm.hopper.kernel.launch": {"rows_per_program": 32},
    "rms_norm.hopper.backward.launch_gradient": {"rows_per_program": 16},
    "rms_norm.hopper.backward.launch_trees": {"columns": 1024},
    "silu_mul.hopper.kernel.launch": {"rows_per_program": 32},
    "silu_mul.hopper.kernel.launch_gradient": {"rows_per_program": 32},
    "sigmoid_mul.hopper.kernel.launch": {"rows_per_program": 32},
    "sigmoid_mul.hopper.kernel.launch_gradient": {"rows_per_program": 32},
    "rope.hopper.kernel.launch": {"tokens_per_program": 8, "heads_per_program": 32},
    "router.hopper.kernel.launch_softmax": {"rows_per_program": 32},
    "router.hopper.kernel.launch_sigmoid": {"rows_per_program": 32},
    "router.hopper.kernel.launch_gradient": {"rows_per_program": 32},
    "logprobs.hopper.kernel.launch_merge": {"rows_per_program": 64},
    "logprobs.hopper.kernel.launch_gradient": {"rows_per_program": 64, "columns_per_program": 1024},
    "bias.hopper.kernel.launch": {"rows_per_program": 32},
    "bias.hopper.kernel.launch_gradient": {"columns": 1024},
}
PLANTED_ALIKE = {
    "linear": ("chain_controls",),
    "logprobs": ("_other_sums",),
    "linear_logprobs": ("_planted",),
    "grouped_linear": ("_controls",),
}
STEPS = {"step": 16, "accumulate": "float32"}
ROUTER = {"accumulate": "float32", "ties": "lowest_expert", "normalize": "chosen"}
PAIRS = {"reduce": "pair_tree", "accumulate": "float32"}
TABLE = {"table": "float64_to_float32", "length": 8192}
CONSTANTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("rms_norm", "rms_norm_centred", "rms_norm_gated", "l2_norm"), PAIRS),
    **{op: {} for op in ("silu_mul", "sigmoid_mul", "embedding", "bias")},
    **dict.fromkeys(("rope", "rope_interleaved", "rope_yarn"), TABLE),
    "grad_norm": {"bits": 62},
    "router": ROUTER,
    "router.sigmoid": {**ROUTER, "bias": "selection_only", "group_score": "sum_of_two_best"},
    "combine": {"order": "routing", "accumulate": "float32"},
    **dict.fromkeys(("grouped_linear", "shared_gate"), STEPS),
    "dispatch": {"order": "expert_then_token"},
    "logprobs": {"block": 128, "vocab_leaves": 2},
    "linear_logprobs": {"step": 16, "accumulate": "float32", "block": 128, "vocab_leaves": 2},
    "linear": {"step": 16, "accumulate": "float32", "boundary": "model"},
}


def own_tiles(a: Tensor, w: Tensor, offsets: Tensor, *, down: bool = False) -> Tensor:
    """In the place of torch's grouped product, which is CPU's here."""
    out = torch.empty(len(a), w.shape[2 if down else 1], dtype=torch.bfloat16)
    grouped.launch(a, w, offsets, None, out, kernel_tile(16, 16, 32), down=down)
    return out


def own_weight(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    out = torch.empty(len(offsets) - 1, dy.shape[1], x.shape[1], dtype=torch.bfloat16)
    grouped.launch_weight(dy, x, offsets, out, kernel_tile(16, 32, 16))
    return out


def replace(module: ModuleType, **values: Any) -> None:
    for name, value in values.items():
        assert hasattr(module, name), (module.__name__, name)
        setattr(module, name, value)


def once(plant: Callable[[Run], None]) -> Callable[[Run], None]:
    """Faults that several families of a gate plant alike are computed by the first of them, and seen by each."""
    planted: list[tuple[str, Tensor | Sequence[Tensor], Tensor | Sequence[Tensor]]] = []

    def planting(run: Run) -> None:
        if planted:
            for fault in planted:
                run.control(*fault)
            return
        seen = run.control

        def control(name: str, got: Tensor | Sequence[Tensor], want: Tensor | Sequence[Tensor]) -> None:
            planted.append((name, got, want))
            seen(name, got, want)

        setattr(run, "control", control)  # noqa: B010
        plant(run)
        del run.control

    return planting


def smaller() -> None:
    """Tiny sizes everywhere, and CPU's torch for the libraries; before the ops are imported."""
    torch.set_num_threads(1)
    np.seterr(all="ignore")  # infinities and NaN are among the inputs
    replace(forward, QUICK=(1, 3, 9))
    replace(rows, ROWS=5, SOME=5, FEW=5)
    replace(norms, SHAPES=(("hidden", 1, 96), ("heads", 3, 16)), FREE=((1, 1, 1, 1), (4, 2, 2, 2)))
    replace(norms, PLANTED=(16, 256), SHARED=32, DEGREES=(1, 2), DTYPES=(torch.bfloat16,))
    replace(ropes, PLANTED=4, FREE=((1, 1, 1), (2, 4, 2)))
    replace(gradient, WIDEST=300)
    replace(logprobs, cut_for=lambda *_: MANY_BLOCKS)  # before the ops that take it are imported
    for name, free in WIDE.items():
        import_module(f"isoexec.kernels.{name.rpartition('.')[0]}").__dict__[
            name.rpartition(".")[2]
        ].__kwdefaults__.update(free)
    replace(
        table,
        UNTUNED=dict.fromkeys(table.PRODUCTS, ((2, SWAPPED), (table.ANY, MAPS))),
    )
    replace(degrees, most_ranks=lambda _: 1)  # ranks would not share this interpreter
    replace(grouped, REFERENCE=kernel_tile(32, 64, 32))
    replace(
        products, library=own_tiles, library_input=partial(own_tiles, down=True), library_weight=own_weight
    )
    replace(grouped_table, weights=lambda: ((32, 64), (64, 32), (64, 48), (48, 32)))
    state = [cublaslt.SHIPPED]
    replace(
        cublaslt,
        switches=lambda: state[0],
        restore=lambda wanted: state.__setitem__(0, wanted),
        PROBES=((64, 64, 1024),),
    )


def small(op: str) -> ModuleType:
    """The gate of an op, at its tiny sizes."""
    gate = import_module(f"isoexec.kernels.{op}.hopper.gate")
    listed = (
        {HEAD: ((8192, HEAD_TILE),)}
        if op == "linear_logprobs"
        else dict.fromkeys(WEIGHTS, ((1, TILE), (8192, TILE)))
    )
    replace(table, tiles=lambda: listed)
    replace(gate, **SMALL[op])
    return gate


def main() -> None:
    smaller()
    results = {}
    for op in sys.argv[1:] or SMALL:
        gate = small(op)
        for name in PLANTED_ALIKE.get(op, ()):
            replace(gate, **{name: once(getattr(gate, name))})
        for family in gate.GATE.families:
            try:
                check = gate.GATE.run(family, CONSTANTS[op], full=False)
                # the interpreter fuses nothing, so that control is blind here
                blind = [why for why in check.failures() if "fused_multiply_add" not in why]
                results[f"{op} {family}"] = {
                    "failures": blind,
                    "elements": check.elements,
                    "domain": check.domain,
                }
            except Exception:  # noqa: BLE001 - reported to the test that asked
                results[f"{op} {family}"] = {"failures": [traceback.format_exc(limit=6)]}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
