# SPDX-License-Identifier: Apache-2.0
"""The sm90 attention for `kernels.py`: whole sequences and decode steps, next to the library's own schedule and to one split.

What a schedule is made of, other segments and gradients are in `attention_hopper.py` and `attention_backward.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from subjects import DEVICE, Model, Subject, rand  # type: ignore[import-not-found]  # beside this script
from torch import Tensor

from isoexec.kernels.attention.hopper import fa3
from isoexec.kernels.attention.hopper.gate import native
from isoexec.kernels.attention.hopper.ops import Plan, attention, plan

__all__ = ["FUNCTIONS", "missing", "subjects"]

FUNCTIONS = ("attention.mma_segments/1",)
SEGMENT, PAGE, CONTEXT = 4096, 16, 32768
LENGTHS = {1024: (2048, 4096), 8192: (8192, 16384, 32768)}  # sequences that are timed among so many rows
BATCHES = {1: (1,), 16: (16,), 64: (64,), 128: (128, 256)}  # and requests that decode
ONE_COPY = 8  # requests from which the keys are far more than the L2


def missing() -> str:
    """Why the library is not here, or nothing."""
    try:
        fa3.load()
    except (fa3.LibraryMissingError, fa3.UncertifiedLibraryError) as why:
        return str(why)
    return ""


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _whole(n: int) -> tuple[Tensor, Tensor, Plan]:
    """Bounds, positions and a filled plan of one sequence."""
    step = plan(requests=1, tokens=n, most_rows=n, most_keys=n, kv_segment=SEGMENT, device=DEVICE)
    step.fill(_ints(0, n), _ints(n), k_start=_ints(0))
    return _ints(0, n), torch.arange(n, dtype=torch.int32, device=DEVICE), step


def _one(n: int, H: int, KV: int, D: int) -> tuple[Tensor, ...]:
    return rand(n, H, D), rand(n, KV, D), rand(n, KV, D)


def _prefill(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, *_: Any, splits: int = 0) -> Tensor:
    return native(q, k, v, cu, len(q), len(q), cu_k=cu, splits=splits)


def _ours(q: Tensor, k: Tensor, v: Tensor, _: Tensor, position: Tensor, step: Plan) -> Tensor:
    return attention(q, k, v, position, step, scale=q.shape[-1] ** -0.5)


def _requests(B: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds, lengths and positions of requests that decode one token each."""
    used = torch.full((B,), CONTEXT, dtype=torch.int32, device=DEVICE)
    return torch.arange(B + 1, dtype=torch.int32, device=DEVICE), used, used - 1


def _cache(B: int, H: int, KV: int, D: int) -> tuple[Any, ...]:
    """Queries, pages of keys and values, which page is whose, and the step's filled plan."""
    width = CONTEXT // PAGE
    blocks = torch.randperm(B * width, device=DEVICE).int().view(B, width)
    step = plan(
        requests=B,
        tokens=B,
        most_rows=1,
        most_keys=CONTEXT,
        kv_segment=SEGMENT,
        page=PAGE,
        device=DEVICE,
    )
    bounds, used, _ = _requests(B)
    step.fill(bounds, used, blocks=blocks)
    return rand(B, H, D), rand(B * width, PAGE, KV, D), rand(B * width, PAGE, KV, D), blocks, step


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    _: Plan,
    cu: Tensor,
    used: Tensor,
    *__: Any,
    splits: int = 0,
) -> Tensor:
    return native(q, k, v, cu, 1, CONTEXT, used=used, pages=blocks, splits=splits)


def _own_step(q: Tensor, k: Tensor, v: Tensor, _: Tensor, step: Plan, *rest: Tensor) -> Tensor:
    return attention(q, k, v, rest[-1], step, scale=q.shape[-1] ** -0.5)


def subjects(model: Model, M: int) -> Iterator[Subject]:
    """Sequences and decode steps of a model that are timed among M rows."""
    (H, KV), D = model.heads, model.width
    name = f"{model.name} {H}/{KV}x{D}"
    for n in LENGTHS.get(M, ()):
        yield Subject(
            op="attention",
            shape=name,
            rows=n,
            function=FUNCTIONS[0],
            nbytes=4.0 * n * (H + KV) * D,
            flops=2.0 * n * n * H * D,
            make=partial(_one, n, H, KV, D),
            shared=partial(_whole, n),
            native=_prefill,
            ours=_ours,
            peers={"vllm": partial(_prefill, splits=1)},
            most=4,
        )
    for B in BATCHES.get(M, ()):
        yield Subject(
            op="attention_decode",
            shape=f"{name}, {CONTEXT} keys",
            rows=B,
            function=FUNCTIONS[0],
            nbytes=4.0 * B * CONTEXT * KV * D,
            make=partial(_cache, B, H, KV, D),
            shared=partial(_requests, B),
            native=_step,
            ours=_own_step,
            peers={"vllm": partial(_step, splits=1)},
            most=1 if B >= ONE_COPY else 64,
        )
