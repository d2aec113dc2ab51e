# SPDX-License-Identifier: Apache-2.0
"""Runs what `attention_hopper.py --parts walks layouts` and `attention_backward.py --tune` time, tiny and in the interpreter.

Prints as JSON what each said. Nothing is timed: a captured call is one call. The library is a stand-in.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import gated  # type: ignore[import-not-found]  # first: it asks for the interpreter, and gives the ops CPU kernels
import torch
from gated import replace
from gated_attention import either  # type: ignore[import-not-found]
from torch import Tensor
from torch.overrides import TorchFunctionMode

from isoexec.kernels.attention.hopper import backward, kernel, naive, ops, split

from attention_stand_in import quickly, specified_merge, stand_in  # type: ignore[import-not-found]  # isort: skip

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
tuning: Any = import_module("attention_tuning")
hopper: Any = import_module("attention_hopper")
gradients: Any = import_module("attention_backward")

MODEL = (2, 1, 64)
ROWS = 40
SAID: dict[str, list[str]] = {}


class OnCPU(TorchFunctionMode):
    """What is made on the GPU is made here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = "cpu"
        return func(*args, **given)


def made(T: int, H: int, KV: int, D: int) -> Any:
    q, g = (torch.randn(T, H, D).bfloat16() for _ in range(2))
    k, v = (torch.randn(T, KV, D).bfloat16() for _ in range(2))
    out, lse = naive.attention(q, k, v, D**-0.5, kv_segment=T)
    random = (torch.zeros(1), torch.zeros(1))
    whole = {
        name: x[None] for name, x in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse), ("g", g))
    }
    return gradients.Case(**whole, random=random, scale=D**-0.5)


def inline(compile_one: Any, jobs: Any) -> float:
    """In the place of `ahead`: the first job, here."""
    compile_one(*next(iter(jobs)))
    return 0.0


def native(q: Tensor, *rest: Any, **given: Any) -> Tensor:
    return torch.zeros_like(q)


def told(part: str) -> Any:
    return lambda *words: SAID.setdefault(part, []).append(" ".join(str(word) for word in words))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    free: tuple[Any, ...] = (
        *(kernel.launch_merge, specified_merge),
        *(split.launch_split, backward.launch_gradients),
    )
    for function in free:
        function.__kwdefaults__["hardware"] = False
    replace(ops, HARDWARE=False)
    replace(torch.cuda, synchronize=lambda: None)
    for of in (hopper, gradients):
        replace(of, MODELS=(MODEL,), ahead=inline, capture=lambda call, _: call(0), replay_times=one_each)
    some = {name: tuning.SPLITS[name] for name in ("split", "64 columns")}
    replace(hopper, SPLITS=some, WALKED=64, WALKED_SEGMENTS=(32,), native=native, say=told("walks"))
    replace(hopper, LAYOUTS={"4096": (16, 16), "growing": (8, 8, 16)}, note=told("troubles"))
    walk = {"key 64x64 w4 s2": {"key": backward.Walk(hold=64, step=64, warps=4, stages=2)}}
    replace(gradients, made=made, TUNED=ROWS, SMALL=ROWS, AGAIN=1, say=told("tune"), walks_of=lambda _: walk)
    with OnCPU(), torch.no_grad(), quickly():
        with stand_in(by=either):
            hopper.walks()
            replace(hopper, say=told("layouts"))
            hopper.layouts()
        rows = gradients.tune(1e9)
    for D, kinds in tuning.WALKS.items():
        for kind, shapes in kinds.items():
            assert len(set(shapes)) == len(shapes), (D, kind)
        assert len(tuning.walks_of(D)) > 10
    print(json.dumps({"said": SAID, "rows": rows}))


def one_each(graphs: Any, copies: int, replays: int = 1) -> list[float]:
    return [1.0 for _ in graphs]


if __name__ == "__main__":
    assert gated
    main()
