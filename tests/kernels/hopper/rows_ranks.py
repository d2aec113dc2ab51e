# SPDX-License-Identifier: Apache-2.0
"""Real ranks over gloo run the sm90 row ops in Triton's interpreter, and print `{check: what went wrong, or ""}` as JSON.

What ranks exchange is code of the ops, not of their kernels; a GPU adds nothing to it but NCCL.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import on_cpu  # type: ignore[import-not-found]  # noqa: F401 - before any op is defined
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.kernels.embedding.hopper.ops import vocab_parallel_embedding
from isoexec.kernels.gates import ranks
from isoexec.kernels.gates.inputs import fill, ids
from isoexec.kernels.gates.recipes import gradients
from isoexec.kernels.grad_norm.hopper.ops import exact_sq_sum
from isoexec.kernels.rms_norm.hopper import backward, gradient
from isoexec.kernels.rms_norm.hopper.ops import Shard, rms_norm_grad

EPS = 1e-6
_launch: Any = backward.launch_gradient
_launch.__kwdefaults__["rows_per_program"] = 16
for module in (backward, gradient):  # so that a rank of a tiny sequence has whole trees
    setattr(module, "CHAINS", 2)  # noqa: B010


def norm(rank: int, size: int, group: ProcessGroup | None, shard: Shard, tokens: int) -> list[Tensor]:
    """Output and gradients of a norm whose tokens, or heads, ranks share."""
    heads = shard == "heads"
    shape = (tokens, 1, 4, 8) if heads else (tokens, 1, 24)
    x, g = (fill(*shape, salt=s, scale=0.7).chunk(size, 2 if heads else 0)[rank] for s in (1, 2))
    w = fill(shape[-1], salt=3)
    call = partial(rms_norm_grad, eps=EPS, shard=shard if group else "none", group=group)
    return gradients(call, [x, w], g)


def lookup(rank: int, size: int, group: ProcessGroup | None, sp: bool) -> list[Tensor]:
    """Output and gradient of a rank's part of the vocabulary."""
    w, which = fill(16, 8, salt=1), ids(12, 16, 2).view(6, 2)
    w[:, 0] = -0.0
    grad = fill(6, 2, 8, salt=5)
    call = partial(
        vocab_parallel_embedding, which, vocab_start=rank * 16 // size, group=group, sequence_parallel=sp
    )
    return gradients(call, [w.chunk(size)[rank]], grad.chunk(size)[rank] if sp and group else grad)


def squares(rank: int, size: int, group: ProcessGroup | None) -> Tensor:
    """The sum over ranks that share columns, of which the last has one part more."""
    layers = [fill(5, 8, salt=i, scale=2.0**-i) for i in range(3)]
    return exact_sq_sum([*(t.chunk(size, 1)[rank] for t in layers), torch.zeros(rank)], group)


def same(got: Tensor, want: Tensor) -> str:
    if got.shape != want.shape:
        return f"{list(got.shape)} for {list(want.shape)}"
    count = int((got.contiguous().view(torch.uint8) != want.contiguous().view(torch.uint8)).sum())
    return f"{count} bytes differ" if count else ""


def main() -> None:
    results: dict[str, str] = {}
    # 48 tokens on two ranks are chains and no whole trees of two, 64 are trees
    shared: tuple[tuple[Shard, int, int], ...] = (("sequence", 96, 0), ("sequence", 64, 0), ("heads", 20, 2))
    for shard, tokens, dim in shared:
        whole = norm(0, 1, None, shard, tokens)
        parts = ranks.launch(2, norm, (shard, tokens))
        name = f"norm {shard} {tokens}"
        for i, what in enumerate(("output", "gradient of x")):
            results[f"{name} {what}"] = same(torch.cat([p[i] for p in parts], dim), whole[i])
        results[f"{name} gradient of w"] = same(parts[0][2], whole[2])
        results[f"{name} rank 1 has none of it"] = same(parts[1][2], torch.zeros_like(whole[2]))
    for sp in (False, True):
        whole = lookup(0, 1, None, sp)
        parts = ranks.launch(2, lookup, (sp,))
        out = torch.cat([p[0] for p in parts]) if sp else parts[1][0]
        results[f"embedding sp={sp} output"] = same(out, whole[0])
        results[f"embedding sp={sp} gradient"] = same(torch.cat([p[1] for p in parts]), whole[1])
    whole_sum = squares(0, 1, None)
    for rank, got in enumerate(ranks.launch(2, squares, ())):
        results[f"grad_norm rank {rank}"] = same(got.view(1), whole_sum.view(1))
    try:
        ranks.launch(2, norm, ("sequence", 40))
        results["norm refuses a part of a chain"] = "it did not"
    except ranks.RankError as error:
        results["norm refuses a part of a chain"] = "" if "whole chains of 16" in str(error) else str(error)
    json.dump(results, sys.stdout)
