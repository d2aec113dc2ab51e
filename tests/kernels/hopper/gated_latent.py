# SPDX-License-Identifier: Apache-2.0
"""Runs the checks of the sm90 latent attention's gate in Triton's interpreter at tiny sizes; prints `{family: failures}` as JSON.

The library is a stand-in that evaluates the specification, admitted as if it were certified.
"""

from __future__ import annotations

import json
import sys
import traceback
from types import SimpleNamespace
from typing import Any

import emulation  # type: ignore[import-not-found]  # noqa: F401 - the interpreter is asked for before anything imports triton
import numpy as np
import torch
from gated import replace  # type: ignore[import-not-found]  # and the ops get CPU kernels
from interpreted_latent import library  # type: ignore[import-not-found]  # its exp2 and log2 are rounded from fp64

from isoexec.kernels.attention.hopper import fa3
from isoexec.kernels.attention.hopper.tiles import Tile
from isoexec.kernels.gates import degrees
from isoexec.kernels.latent_attention.hopper import gate, ops, reference

S = 96  # a block and a half, in whole pages by halves too
BUILD = "a stand-in"


def main() -> None:
    torch.set_num_threads(1)
    np.seterr(
        all="ignore"
    )  # a row that sees no key of a segment divides by zero there; the merge does not read it
    replace(
        gate, HEADS=(2,), MANY=66, MORE=6, SHORT=20, PAGES=(16,), DRAFTS=(2, 5), PADDING=9, REQUESTS=(2, 7)
    )
    replace(gate, TRAINED=((40, 1, 17), ()), TILES=(Tile(rows=32, warps=4, stages=1),))
    replace(degrees, most_ranks=lambda _: 1)  # ranks would not share this interpreter
    replace(fa3, identity=lambda: SimpleNamespace(build=BUILD), load=lambda: library)
    replace(ops, BUILDS=frozenset({BUILD}), HARDWARE=False)
    free: Any = reference.launch_segment.__kwdefaults__  # a program costs the interpreter more than rows do
    free["rows"] = 64
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
