# SPDX-License-Identifier: Apache-2.0
"""Other blocks of the sm90 attention's kernels, all free of bits, and what compiles them on many cores before they are timed.

`attention_backward.py --tune` times the walks of gradients, `attention_hopper.py --parts walks` the splits of decode. A walk
that needs more shared memory or registers than there are says so and costs nothing. `python attention_tuning.py` compiles every
walk for sm_90 without a GPU and prints registers, stack, shared memory and tensor-core steps of each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from isoexec.kernels.attention.hopper.backward import KEY, QUERY, STORED, UNIT, Walk

__all__ = ["KINDS", "SPLITS", "WALKS", "ahead", "walks_of"]

Shape = tuple[int, int, int, int, bool]  # held, step, warps, stages, keys and values apart
KINDS = {"key": KEY, "query": QUERY, "stored": STORED}
# What a walk may gain. A step of 16 or 32 rows gives the tensor cores columns of 16 or 32 where they take up to 256; a hold of
# 128 reads every operand half as often as one of 64; more than 8 warps make room for sums of 128 x 256. All are bounded by 255
# registers a thread (128 with 16 warps) and 227 KiB of shared memory.
WALKS: dict[int, dict[str, tuple[Shape, ...]]] = {
    64: {
        "key": (
            (64, 128, 4, 1, False),
            (64, 128, 4, 3, False),
            (32, 128, 4, 2, False),
            (32, 128, 4, 1, False),
            (64, 64, 4, 4, False),
            (64, 64, 4, 1, False),
            (128, 128, 8, 1, False),
            (64, 128, 8, 2, False),
            (32, 64, 4, 2, False),
            (64, 128, 4, 2, True),
        ),
        "query": (
            (64, 64, 4, 4, False),
            (64, 64, 4, 2, False),
            (64, 128, 4, 3, False),
            (64, 32, 4, 4, False),
            (128, 64, 4, 3, False),
            (128, 128, 8, 3, False),
            (32, 128, 4, 3, False),
            (32, 64, 4, 3, False),
        ),
        "stored": (
            (128, 128, 8, 3, False),
            (64, 64, 4, 4, False),
        ),
    },
    128: {
        "key": (
            (64, 64, 4, 1, False),
            (64, 32, 4, 1, False),
            (64, 32, 4, 2, False),
            (64, 128, 4, 1, False),
            (64, 128, 8, 1, False),
            (128, 128, 8, 1, False),
            (128, 32, 8, 1, False),
            (32, 64, 4, 1, False),
            (32, 64, 4, 2, False),
            (32, 128, 4, 1, False),
            (32, 128, 4, 2, False),
            (32, 32, 4, 2, False),
        ),
        "query": (
            (128, 64, 8, 2, False),
            (128, 64, 8, 4, False),
            (64, 64, 4, 2, False),
            (64, 64, 4, 4, False),
            (64, 32, 4, 3, False),
            (64, 32, 4, 4, False),
            (32, 128, 4, 2, False),
            (32, 64, 4, 2, False),
            (128, 128, 8, 2, False),
        ),
        "stored": (
            (128, 64, 8, 4, False),
            (64, 64, 4, 4, False),
            (64, 128, 4, 3, False),
        ),
    },
    256: {
        "key": (
            (32, 32, 4, 1, False),
            (32, 32, 4, 2, False),
            (32, 64, 4, 2, False),
            (32, 128, 4, 1, False),
            (32, 128, 8, 1, False),
            (32, 64, 8, 1, False),
            (16, 64, 4, 1, False),
            (16, 128, 4, 1, False),
            (64, 64, 8, 1, False),
            (64, 128, 8, 1, False),
            (64, 64, 4, 1, True),
            (128, 64, 8, 1, True),
            (128, 128, 8, 1, True),
            (32, 64, 4, 1, True),
            (64, 128, 4, 1, True),
        ),
        "query": (
            (128, 64, 8, 1, False),
            (128, 64, 8, 2, False),
            (128, 16, 8, 3, False),
            (64, 32, 8, 2, False),
            (64, 64, 8, 2, False),
            (64, 128, 8, 1, False),
            (32, 64, 4, 1, False),
            (32, 128, 4, 1, False),
            (64, 32, 4, 2, False),
            (32, 64, 4, 2, False),
        ),
        "stored": (
            (64, 64, 8, 3, False),
            (128, 128, 8, 1, False),
            (64, 64, 4, 3, False),
        ),
    },
}
SPLITS: dict[str, dict[str, int]] = {
    "split": {},
    "2 warps": {"warps": 2},
    "64 columns": {"columns": 64, "stages": 6},
    "scores by 1": {"score_blocks": 1, "score_stages": 1},
    "scores by 2": {"score_blocks": 2, "score_stages": 3},
}


def walk(shape: Shape) -> Walk:
    """A table's entry."""
    hold, step, warps, stages, apart = shape
    return Walk(hold=hold, step=step, warps=warps, stages=stages, apart=apart)


def walks_of(D: int) -> dict[str, dict[str, Walk]]:
    """Every walk of a head dim by its name, as `launch_gradients` takes it; first the one that serves."""
    found: dict[str, dict[str, Walk]] = {"as it is": {}}
    for kind, shapes in WALKS[D].items():
        for shape in shapes:
            if (one := walk(shape)) != KINDS[kind][D]:
                hold, step, warps, stages, apart = shape
                found[f"{kind} {hold}x{step} w{warps} s{stages}{' apart' if apart else ''}"] = {kind: one}
    return found


def ahead(compile_one: Callable[..., None], jobs: Iterable[tuple[Any, ...]], *, workers: int = 12) -> float:
    """Run `compile_one(*job)` of each job in processes of their own, so that a cache of kernels is full; seconds it took.

    What breaks breaks again where it is timed, and is said there.
    """
    begun, jobs = time.monotonic(), list(jobs)
    most = max(1, min(workers, len(jobs), (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(most, mp_context=get_context("spawn")) as pool:
        for one in as_completed([pool.submit(compile_one, *job) for job in jobs]):
            one.exception()
    return time.monotonic() - begun


def _offline() -> None:
    """What each walk compiles to, as JSON lines."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels" / "hopper"))
    from compiled_attention import gradient  # type: ignore[import-not-found]

    for D, kinds in WALKS.items():
        if sys.argv[1:] and str(D) not in sys.argv[1:]:
            continue
        for kind in kinds:
            for one in dict.fromkeys((KINDS[kind][D], *(walk(shape) for shape in kinds[kind]))):
                assert UNIT % one.hold == 0
                for want in (1, 2) if one.apart else (0,):
                    try:
                        found = gradient(kind, D, one, want)
                    except Exception as error:  # noqa: BLE001 - said
                        found = {"why": f"{type(error).__name__}: {error!s:.80}"}
                    print(
                        json.dumps({"D": D, "kind": kind, "walk": str(one)[5:-1], "want": want, **found}),
                        flush=True,
                    )


if __name__ == "__main__":
    _offline()
