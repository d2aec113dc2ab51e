# SPDX-License-Identifier: Apache-2.0
"""Runs every check of the sm90 attention's gates in Triton's interpreter at tiny sizes; prints `{gate family: failures}` as JSON.

The library is a stand-in that has the specification's bits where it is called as the function wants it, and others elsewhere.
"""

from __future__ import annotations

import json
import sys
import traceback
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import emulation  # type: ignore[import-not-found]  # noqa: F401 - the interpreter is asked for before anything imports triton
import numpy as np
import torch
from gated import replace  # type: ignore[import-not-found]  # and the ops get CPU kernels
from torch import Tensor

from isoexec.kernels.attention.hopper import backward, fa3, naive, ops, split
from isoexec.kernels.attention_cudnn.hopper import frontend
from isoexec.kernels.gates import attentions

from attention_stand_in import library, quickly, specified_rows, specified_segment, stand_in  # type: ignore[import-not-found]  # isort: skip

S = 16
OPS: dict[str, dict[str, Any]] = {
    "attention": {},
    "window_attention": {"window": 11},
    "attention_cudnn": {"gradient": "cudnn_deterministic"},
}
# a segment is shorter than a block here, and two heads of a few rows make no order
BLIND = ("blocks_of_64", "blocks_upwards", "heads_of_a_group_in_the_other_order")
SAID = tuple(f"control {name} passed" for name in BLIND)
FEW = 65  # query rows claimed below which the library takes other blocks at head dim 64


def either(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> list[Tensor]:
    """The library, by its own schedule too: blocks of another size, over all keys of a sequence."""
    cu_q, cu_k, used_q, used_k, most_rows, pages = (args[i] for i in (4, 5, 7, 8, 9, 11))
    if used_q is not None and most_rows >= FEW:
        return library(q, k, v, *args)
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], len(q))
    for e in range(len(cu_q) - 1):
        at, rows = int(cu_q[e]), int((cu_q[e + 1] - cu_q[e]) if used_q is None else used_q[e])
        if not rows:
            continue
        if pages is None:
            first = int(cu_k[e])
            keys = slice(first, int(cu_k[e + 1]) if used_k is None else first + int(used_k[e]))
            own_k, own_v = k[keys], v[keys]
        else:
            of = pages[e].clamp(min=0).long()
            own_k, own_v = (x[of].flatten(0, 1)[: int(used_k[e])] for x in (k, v))
        limit = len(own_k) - rows + 1 + torch.arange(rows)
        here = slice(at, at + rows)
        out[here], lse[:, here] = specified_rows(
            q[here], own_k, own_v, limit, args[20], 16 if len(own_k) > 16 else 8
        )
    return [out, lse]


def by_other_steps(x: Tensor, w: Tensor, acc: Tensor) -> Tensor:
    """A chain in steps of 32: another gradient's."""
    for k in range(0, x.shape[1], 32):
        acc = (acc.double() + x[:, k : k + 32].double() @ w[:, k : k + 32].double().t()).float()
    return acc


class Graph:
    """cuDNN's graph of one shape by the own gradient's expressions, in another order."""

    workspace = 16

    def __init__(self, device: int, thread: int, rows: int, H: int, KV: int, D: int, scale: float) -> None:
        assert device == 0
        assert thread
        self.heads, self.scale = {"q": H, "k": KV, "v": KV, "o": H, "dO": H}, scale
        self.rows, self.width = rows, D

    def run(self, given: dict[str, Tensor], stats: Tensor, to: tuple[Tensor, ...], room: Tensor) -> None:
        for name, x in given.items():
            assert x.shape == (1, self.rows, self.heads[name], self.width)
            assert x.is_contiguous()
            assert bool(x.isfinite().all())
        assert stats.shape == (1, self.heads["q"], self.rows)
        assert len(room) == self.workspace
        q, k, v, o, g = (given[name][0] for name in self.heads)
        found = naive.gradients(g, q, k, v, o, stats[0], self.scale, chain=by_other_steps)
        for x, y in zip(to, found[:3], strict=True):
            assert y is not None
            assert x.is_contiguous()
            x.copy_(y[None])


def main() -> None:
    torch.set_num_threads(1)
    np.seterr(
        all="ignore"
    )  # a row that sees no key of a segment divides by zero there; the merge does not read it
    replace(attentions, MORE=6, SHORT=7, PAGES=(8,), DRAFTS=(3,), TRAINED=((40, 1, 17), ()), PADDING=9)
    replace(attentions, REQUESTS=(2, 5), OTHER_WALK=walk(), APART=walk(apart=True))
    replace(fa3, identity=lambda: SimpleNamespace(build="a stand-in"))
    replace(frontend, identity=lambda: "a stand-in", UNIT=32, _graph=Graph)
    for D, tuning in ops.SPLIT.items():
        ops.SPLIT[D] = split.Tuning(**{**vars(tuning), "score_blocks": 1, "ahead": 1})
    results = {}
    for op in sys.argv[1:] or OPS:
        gate = import_module(f"isoexec.kernels.{op}.hopper.gate")
        kind = gate.KIND
        if op == "attention":
            replace(gate, REPEATED=1, launch_segment=specified_segment)
        if op == "attention_cudnn":
            replace(gate, LENGTHS=((40, 1, 17), ()), PADDINGS=(9, 50))
        for family in gate.GATE.families:
            # a KV group more costs as much again; ranks need two
            kind.heads, kind.trained = ((4, 2, 64) if family == "partition_invariance" else (2, 1, 64),), 1
            with quickly(), stand_in(by=either):
                try:
                    check = gate.GATE.run(family, {"kv_segment": S, **OPS[op]}, full=False)
                    seen = [why for why in check.failures() if not why.startswith(SAID)]
                    results[f"{op} {family}"] = [*seen, f"{check.elements} elements"]
                except Exception:  # noqa: BLE001 - reported to the test that asked
                    results[f"{op} {family}"] = [traceback.format_exc(limit=-6)]
    json.dump(results, sys.stdout)


def walk(*, apart: bool = False) -> backward.Walk:
    return backward.Walk(hold=64, step=64, warps=4, stages=2, apart=apart)


if __name__ == "__main__":
    main()
