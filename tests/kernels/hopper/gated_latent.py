# SPDX-License-Identifier: Apache-2.0
"""Runs the checks of the sm90 latent attention's gate in Triton's interpreter at tiny sizes; prints `{family: failures}` as JSON.

The library is a stand-in that evaluates the specification, admitted as if it were certified. Kernels of many small operations,
which have checks of their own, are taken by their specification: the interpreter pays for each operation.
"""

from __future__ import annotations

import json
import sys
import traceback
from types import ModuleType, SimpleNamespace
from typing import Any

import emulation  # type: ignore[import-not-found]  # noqa: F401 - the interpreter is asked for before anything imports triton
import numpy as np
import torch
from gated import replace  # type: ignore[import-not-found]  # and the ops get CPU kernels
from interpreted_latent import library, specified  # type: ignore[import-not-found]  # exp2 and log2 rounded from fp64
from torch import Tensor

from isoexec.kernels.attention.hopper import fa3, segments
from isoexec.kernels.attention.hopper import reference as attention
from isoexec.kernels.attention.hopper import tiles as shared
from isoexec.kernels.attention.hopper.naive import _chain
from isoexec.kernels.attention.hopper.tiles import Tile
from isoexec.kernels.gates import attentions, degrees
from isoexec.kernels.latent_attention.hopper import gate, ops, reference

from attention_stand_in import added_in_order, specified_merge  # type: ignore[import-not-found]  # isort: skip

S = 96  # a block and a half, in whole pages by halves too
BUILD = "a stand-in"
launch_segment: Any = reference.launch_segment


def segment(*x: Tensor, visible: int, scale: float, hardware: bool, **other: Any) -> None:
    """`reference.launch_segment` by the specification, which has no controls."""
    if other:
        launch_segment(*x, visible=visible, scale=scale, hardware=hardware, rows=64, **other)
        return
    limit = (visible + torch.arange(len(x[0]))).clamp(max=len(x[2]))
    x[4][:], x[5][:] = specified(x[:4], limit, scale)


def smaller() -> ModuleType:
    """The gate at tiny sizes, with what stands in for the library."""
    torch.set_num_threads(1)
    np.seterr(
        all="ignore"
    )  # a row that sees no key of a segment divides by zero there; the merge does not read it
    replace(gate, HEADS=(2,), MANY=66, TILES=(Tile(rows=32, warps=4, stages=1),))
    replace(attentions, MORE=6, SHORT=20, PAGES=(16,), DRAFTS=(2, 5), PADDING=9, REQUESTS=(2, 7))
    replace(attentions, TRAINED=((40, 1, 17), ()))
    gate.KIND.heads, gate.KIND.trained, gate.KIND.providers = (2,), 1, ("triton", "fa3")
    replace(degrees, most_ranks=lambda _: 1)  # ranks would not share this interpreter
    replace(fa3, identity=lambda: SimpleNamespace(build=BUILD), load=lambda: library)
    replace(ops, BUILDS=frozenset({BUILD}), HARDWARE=False)
    replace(shared, in_order=added_in_order)
    replace(segments, launch_merge=specified_merge)
    replace(attention, launch_merge=specified_merge)
    replace(reference, launch_segment=segment, chain=_chain)
    found: ModuleType = gate
    return found


def main() -> None:
    smaller()
    results = {}
    for family in sys.argv[1:] or gate.GATE.families:
        try:
            check = gate.GATE.run(family, {"kv_segment": S}, full=False)
            results[family] = [*check.failures(), f"{check.elements} elements"]
        except Exception:  # noqa: BLE001 - reported to the test that asked
            results[family] = [traceback.format_exc(limit=-6)]
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
