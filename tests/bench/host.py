# SPDX-License-Identifier: Apache-2.0
"""What a layer of the trainer costs the host: few tokens, so that a GPU waits for it, natively and under the contract.

    python tests/bench/host.py --model qwen3-0.6b         # an H200
    python tests/bench/host.py --tiny                     # here, on the CPU's adapters: it tries this script

Models of two depths, rows of a few tokens, forward and backward in the process's one thread; the difference over the layers
between them is a layer's, in milliseconds, each a median, with Python's garbage collector as it starts, after `gc.freeze` and
without it. Then the deeper one under cProfile, whose tables go to $OUT (or `--out`) as host-SIDE-TURN.txt.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

if importlib.util.find_spec("isoexec") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".src"))

import torch
from sampled import MODELS, TINY  # type: ignore[import-not-found]  # beside this script
from torch import Tensor

from isoexec.adapters.megatron import cpu

if not torch.cuda.is_available():
    cpu.install()  # before megatron-core is imported

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from isoexec.adapters.demo.profiling import profiled
from isoexec.adapters.demo.tiny import write_config
from isoexec.adapters.demo.trainer import draw
from isoexec.adapters.megatron.kinds import kinds_of
from isoexec.adapters.megatron.logprobs import model_inputs, output_processor
from isoexec.adapters.megatron.model import build
from isoexec.contracts.schema import Contract, library

SIDES = ("native", "contract")
GARBAGE: tuple[tuple[str, Callable[[], Any], Callable[[], Any]], ...] = (
    ("as it starts", gc.enable, gc.enable),
    ("frozen", gc.freeze, gc.unfreeze),
    ("not collected", gc.disable, gc.enable),
)
"""What Python's garbage collector does, and how to begin and end it."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def _join(folder: Path) -> None:
    if DEVICE.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl" if DEVICE.type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=0,
        world_size=1,
    )
    parallel_state.initialize_model_parallel(1, 1, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)


def _model(args: argparse.Namespace, side: str, layers: int, folder: Path) -> Any:
    sizes, stem = (TINY, "qwen3-dense") if args.tiny else MODELS[args.model]
    dtype = torch.float32 if args.tiny else torch.bfloat16
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, **{**sizes, "layers": layers}, dtype=dtype)
    contract = Contract.load(library(f"{stem}-{'cpu' if args.tiny else 'sm90'}"))
    model = build(
        folder,
        dtype=dtype,
        contract=contract if side == "contract" else None,
        load=False,
        fused_attention=not args.tiny,
    )
    draw(model)
    return model


def _turns(model: Any, tokens: Tensor) -> dict[str, Callable[[], None]]:
    process = output_processor(model)

    def forward() -> Tensor:
        values: Tensor = model(**model_inputs(tokens), output_processor=process)
        return values

    def score() -> None:
        with torch.no_grad():
            forward()

    def train() -> None:
        values = forward()
        values.backward(torch.ones_like(values))

    return {"score": score, "train": train}


def _host(call: Callable[[], None], times: int) -> float:
    """Median milliseconds until a call has been handed to the device."""
    spans = []
    for turn in range(times + 3):
        _wait()
        began = time.perf_counter()
        call()
        if turn >= 3:  # the first ones compile
            spans.append((time.perf_counter() - began) * 1e3)
    _wait()
    return median(spans)


def _repeat(call: Callable[[], None], times: int) -> None:
    for _ in range(times):
        call()


def _side(args: argparse.Namespace, side: str, folder: Path, out: Path) -> dict[str, Any]:
    if side == "contract":
        kinds_of("cpu" if args.tiny else "sm90").begin()
    generator = torch.Generator().manual_seed(5)
    vocab = TINY["vocab"] if args.tiny else MODELS[args.model][0]["vocab"]
    tokens = torch.randint(3, vocab, (args.rows, args.length), generator=generator).to(DEVICE)
    took: dict[str, list[float]] = {}
    for layers in args.layers:
        model = _model(args, side, layers, folder / f"{side}{layers}")
        for garbage, begin, end in GARBAGE:
            for name, call in _turns(model, tokens).items():
                begin()
                took.setdefault(f"{name}, {garbage}", []).append(_host(call, args.times))
                end()
        if layers == args.layers[-1]:
            for name, call in _turns(model, tokens).items():
                to = out / f"host-{side}-{name}.txt"
                profiled("python", to, partial(_repeat, call, args.times))
        del model, call
        gc.collect()
    few, many = args.layers
    return {
        name: {"whole": spans, "layer": (spans[1] - spans[0]) / (many - few)} for name, spans in took.items()
    }


def main() -> int:
    """Time the sides; a table is printed, and written with all numbers as host.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3-0.6b")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU's adapters")
    parser.add_argument("--layers", type=int, nargs=2, default=(2, 10), metavar=("FEW", "MANY"))
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--times", type=int, default=20, help="turns of which the median is taken")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "host-report")))
    args = parser.parse_args()
    torch.autograd.set_multithreading_enabled(False)
    args.out.mkdir(parents=True, exist_ok=True)
    found = {}
    with tempfile.TemporaryDirectory(prefix="isoexec-host-") as folder:
        _join(Path(folder))
        for side in SIDES:
            found[side] = _side(args, side, Path(folder), args.out)
            for name, entry in found[side].items():
                print(f"{side}, {name}: {entry['layer']:.3f} ms a layer, whole {entry['whole']}", flush=True)
        dist.destroy_process_group()
    (args.out / "host.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
