# SPDX-License-Identifier: Apache-2.0
"""The comparison of FlashAttention-3 as a provider, at tiny sizes in Triton's interpreter; prints `{case: failures}` as JSON.

Stand-ins are the library: ones that evaluate the specifications, and one whose last bits are others.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import emulation  # type: ignore[import-not-found]  # noqa: F401 - the interpreter is asked for before anything imports triton
import numpy as np
import torch
from gated import replace  # type: ignore[import-not-found]  # and the ops get CPU kernels
from gated_attention import either  # type: ignore[import-not-found]
from interpreted_latent import library as latent  # type: ignore[import-not-found]
from torch import Tensor

from isoexec.kernels.attention.hopper import fa3
from isoexec.kernels.attention.hopper import reference as attention
from isoexec.kernels.gates.forward import touched
from isoexec.kernels.latent_attention.hopper import ops, reference
from isoexec.kernels.providers import conformance, flash_attention
from isoexec.kernels.providers.catalogue import Call, Value

from attention_stand_in import stand_in  # type: ignore[import-not-found]  # isort: skip - once the ops have CPU kernels

S = {"attention.mma_segments/1": 32, "attention.latent_segments/1": 96}
BUILD = "a stand-in"


def wrong(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> list[Tensor]:
    """A library with other bits."""
    found = (latent if args[2] is not None else either)(q, k, v, *args)
    found[0].copy_(touched(found[0]))
    return list(found)


def compared(function: str, make: Any, by: Any) -> list[str]:
    constants: dict[str, Value] = {"kv_segment": S[function]}
    call: Call = make(constants)
    run = conformance.Watched(constants=constants, full=False, device=torch.device("cpu"))
    with stand_in(by=by), torch.no_grad(), flash_attention.held():
        conformance.conformance(run, function, call)
    check = run.result("conformance")
    return [*check.failures(), *run.examples, f"{check.elements} elements"]


def main() -> None:
    torch.set_num_threads(1)
    np.seterr(
        all="ignore"
    )  # a row that sees no key of a segment divides by zero there; the merge does not read it
    replace(conformance, _HEADS=((4, 2, 64),) * 3, _LATENT_HEADS=(2,), _ROWS=(1, 13), _PAGE=16)
    replace(conformance, _lengths=lambda _, size: [1, size + 6])
    replace(fa3, identity=lambda: SimpleNamespace(build=BUILD))
    replace(ops, HARDWARE=False)
    for of in (attention, reference):
        free: Any = of.reference.__kwdefaults__
        free["hardware"] = False
    results = {
        "segments": compared("attention.mma_segments/1", flash_attention.segments, either),
        "latent segments": compared("attention.latent_segments/1", flash_attention.latent_segments, latent),
        "other bits": compared("attention.latent_segments/1", flash_attention.latent_segments, wrong),
    }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
