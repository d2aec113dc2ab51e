# SPDX-License-Identifier: Apache-2.0
"""A trial of the free settings of the sm90 row kernels: `python tests/bench/rows_tuning.py [--only WORD ...] [--rows N ...]`.

It times every candidate (rows, tiles, stages, warps, eviction) of every kernel at shapes of Qwen3-8B, Qwen3-0.6B and
Qwen3.5-35B-A3B, in turns with the setting that the launch chooses and with a copy that moves as many bytes. Each candidate must
have the bits of that setting. It prints a table and writes `rows-tuning.json` to $OUT or the working directory. Compilation goes
first, in processes beside one another; about two minutes on one H200.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rows import BASE, EPS  # type: ignore[import-not-found]  # beside this script
from subjects import DEVICE, rand  # type: ignore[import-not-found]
from torch import Tensor

from isoexec.kernels.hopper.timing import capture, copies_for, replay_times
from isoexec.kernels.rms_norm.hopper import backward, kernel
from isoexec.kernels.rope.hopper import kernel as rope_kernel
from isoexec.kernels.rope.hopper.ops import tables
from isoexec.kernels.sigmoid_mul.hopper import kernel as sigmoid_kernel
from isoexec.kernels.silu_mul.hopper import kernel as silu_kernel


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A kernel at one shape: `make()` gives what `write(*made, **settings)` needs; `candidates` change no bit."""

    name: str
    nbytes: int
    make: Callable[[], tuple[Any, ...]]
    write: Callable[..., Any]
    candidates: tuple[dict[str, Any], ...]
    outputs: tuple[int, ...] = field(default=(-1,))  # places in `make()` of what is written


def grid(**choices: tuple[Any, ...]) -> tuple[dict[str, Any], ...]:
    return tuple(dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values()))


def trials(M: int) -> Iterator[Trial]:
    few = M < 1024
    for model, hidden in (("0.6B", 1024), ("35B", 2048), ("8B", 4096)):
        per = (1, 2) if few else (1, 2, 4)
        settings = [
            c
            for c in grid(
                rows_per_program=per,
                tiles=(1,) if few else (1, 2, 4, 8),
                stages=(1,) if few else (1, 2),
                num_warps=(2, 4, 8, 16),
                evict=("",) if few else ("", "evict_first"),
            )
            if 4 <= c["rows_per_program"] * hidden // (32 * c["num_warps"]) <= 32
            and (c["stages"] == 1 or c["tiles"] > 1)
        ]
        shape = (M, hidden)
        yield Trial(
            name=f"rms_norm {model} {hidden}",
            nbytes=4 * M * hidden,
            make=partial(_like, shape, 2, hidden),
            write=lambda x, y, w, **free: kernel.launch(x, None, w, y, None, EPS, **free),
            candidates=tuple(settings),
            outputs=(1,),
        )
        yield Trial(
            name=f"add_rms_norm {model} {hidden}",
            nbytes=8 * M * hidden,
            make=partial(_like, shape, 4, hidden),
            write=lambda x, r, y, h, w, **free: kernel.launch(x, r, w, y, h, EPS, **free),
            candidates=tuple(settings),
            outputs=(2, 3),
        )
        yield Trial(
            name=f"rms_norm gradient {model} {hidden}",
            nbytes=8 * M * hidden,
            make=partial(_like, shape, 4, hidden),
            write=_gradient,
            candidates=grid(rows_per_program=(1, 2), stages=(1, 2, 3), num_warps=(4, 8, 16)),
            outputs=(3,),
        )
    for model, heads, width in (("8B", 32, 128), ("8B k", 8, 128), ("35B", 16, 256)):
        three = (M, heads, width)
        yield Trial(
            name=f"q norm {model} {heads}x{width}",
            nbytes=4 * M * heads * width,
            make=partial(_like, three, 2, width),
            write=lambda x, y, w, **free: kernel.launch(x, None, w, y, None, EPS, **free),
            candidates=grid(rows_per_program=(4, 8, 16, 32), num_warps=(2, 4, 8)),
            outputs=(1,),
        )
        yield Trial(
            name=f"q norm gradient {model} {heads}x{width}",
            nbytes=6 * M * heads * width,
            make=partial(_like, three, 3, width),
            write=lambda g, x, dx, w, **free: backward.launch_gradient(g, x, w, dx, EPS, **free),
            candidates=grid(rows_per_program=(8, 16, 32), stages=(1, 2), num_warps=(4, 8)),
            outputs=(2,),
        )
    at = torch.arange(M, device=DEVICE) % 8192
    for model, heads, width, turned in (("8B", 32, 128, 128), ("8B k", 8, 128, 128), ("35B", 16, 256, 64)):
        table = tables(turned, BASE, DEVICE)
        yield Trial(
            name=f"rope {model} {heads}x{width} of {turned}",
            nbytes=4 * M * heads * width,
            make=partial(_like, (M, heads, width), 2),
            write=partial(_rotate, at, table),
            candidates=grid(
                tokens_per_program=(1, 2, 4),
                heads_per_program=tuple(h for h in (8, 16, 32) if h <= heads),
                num_warps=(2, 4, 8),
            ),
            outputs=(1,),
        )
    for model, ffn in (("8B", 12288), ("0.6B", 3072), ("35B", 512)):
        several = grid(
            rows_per_program=(1, 2),
            block=tuple(b for b in (512, 1024, 2048, 4096) if b <= max(512, ffn)),
            num_warps=(2, 4, 8),
            evict=("", "evict_first"),
        )
        fit = tuple(
            c for c in several if 8 <= c["rows_per_program"] * c["block"] // (32 * c["num_warps"]) <= 32
        )
        yield Trial(
            name=f"silu_mul {model} {ffn}",
            nbytes=6 * M * ffn,
            make=partial(_like, (M, ffn), 3),
            write=silu_kernel.launch,
            candidates=fit,
            outputs=(2,),
        )
        yield Trial(
            name=f"silu_mul gradient {model} {ffn}",
            nbytes=10 * M * ffn,
            make=partial(_like, (M, ffn), 5),
            write=silu_kernel.launch_gradient,
            candidates=tuple(c for c in fit if c["rows_per_program"] * c["block"] <= 4096),
            outputs=(3, 4),
        )
    yield Trial(
        name="sigmoid_mul 35B 16x256",
        nbytes=6 * M * 4096,
        make=partial(_like, (M, 4096), 3),
        write=sigmoid_kernel.launch,
        candidates=grid(rows_per_program=(1, 2), block=(512, 1024, 2048), num_warps=(2, 4, 8)),
        outputs=(2,),
    )


def _like(shape: tuple[int, ...], count: int, width: int = 0) -> tuple[Tensor, ...]:
    return (*(rand(*shape) for _ in range(count)), *((rand(width),) if width else ()))


def _rotate(at: Tensor, table: tuple[Tensor, Tensor], x: Tensor, out: Tensor, **free: Any) -> None:
    cos, sin = table
    rope_kernel.launch(x, at, cos, sin, out, **free)


def _gradient(g: Tensor, x: Tensor, more: Tensor, dx: Tensor, w: Tensor, **free: Any) -> None:
    backward.launch_gradient(g, x, w, dx, EPS, g_sum=more, **free)


def _warm(trial: Trial) -> None:
    for settings in ({}, *trial.candidates):
        trial.write(*trial.make(), **settings)
    torch.cuda.synchronize()


def _write(trial: Trial, inputs: list[tuple[Any, ...]], settings: dict[str, Any], i: int) -> None:
    trial.write(*inputs[i], **settings)


def _timed(trial: Trial) -> dict[str, Any]:
    copies = copies_for(trial.nbytes)
    inputs = [trial.make() for _ in range(copies)]
    trial.write(*inputs[0])
    want = [inputs[0][i].clone() for i in trial.outputs]
    half = [
        torch.empty(trial.nbytes // 2, dtype=torch.uint8, device=DEVICE) for _ in range(2 * min(copies, 8))
    ]

    def copied(i: int) -> None:
        at = 2 * (i % (len(half) // 2))
        half[at].copy_(half[at + 1])

    graphs, kept = [capture(copied, copies), capture(lambda i: trial.write(*inputs[i]), copies)], []
    for settings in trial.candidates:
        for i in trial.outputs:
            inputs[0][i].fill_(float("nan"))
        trial.write(*inputs[0], **settings)
        found = [inputs[0][i] for i in trial.outputs]
        if not all(
            torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(found, want, strict=True)
        ):
            raise SystemExit(f"{trial.name} {settings}: other bits than the default's")
        graphs.append(capture(partial(_write, trial, inputs, settings), copies))
        kept.append(settings)
    copy, default, *others = replay_times(graphs, copies, replays=5)
    ranked = sorted(zip(others, kept, strict=True), key=lambda pair: pair[0])
    best, settings = ranked[0]
    return {
        "name": trial.name,
        "copy": copy,
        "default": default,
        "best": best,
        "of_copy": copy / best,
        "settings": settings,
        "next": [[us, s] for us, s in ranked[1:4]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="trials whose names contain one of these words")
    parser.add_argument("--rows", nargs="*", type=int, default=[64, 8192])
    parser.add_argument("--warm", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("needs a GPU of compute capability 9.0", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    chosen = [
        (M, trial)
        for M in arguments.rows
        for trial in trials(M)
        if not arguments.only or any(word in trial.name for word in arguments.only)
    ]
    beside = max(1, min(12, (os.cpu_count() or 2) - 2))
    if arguments.warm is not None:
        for _, trial in chosen[arguments.warm :: beside]:
            _warm(trial)
        return 0
    start = time.monotonic()
    words = ["--rows", *map(str, arguments.rows), *(["--only", *arguments.only] if arguments.only else [])]
    children = [subprocess.Popen([sys.executable, __file__, *words, "--warm", str(i)]) for i in range(beside)]
    if sum(child.wait() != 0 for child in children):
        return 1
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    print(
        "| kernel | rows | copy us | default us | best us | copy / best | settings |\n|---|---|---|---|---|---|---|"
    )
    found = []
    with torch.no_grad():
        for M, trial in chosen:
            row = {"rows": M, **_timed(trial)}
            found.append(row)
            cells = (f"{row[k]:.2f}" for k in ("copy", "default", "best", "of_copy"))
            print(f"| {row['name']} | {M} | {' | '.join(cells)} | {row['settings']} |", flush=True)
            torch.cuda.empty_cache()
    out = Path(os.environ.get("OUT", ".")) / "rows-tuning.json"
    out.write_text(json.dumps({"seconds": round(time.monotonic() - start), "trials": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
