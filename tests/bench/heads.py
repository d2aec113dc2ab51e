# SPDX-License-Identifier: Apache-2.0
"""The sm90 logprobs for `kernels.py`: from logits, and from hidden states without logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from subjects import BF16, DEVICE, FP32, Model, Subject, rand, vllm  # type: ignore[import-not-found]
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from isoexec.kernels.linear_logprobs.hopper.ops import linear_logprobs
from isoexec.kernels.linear_logprobs.hopper.plan import Chunks, plan_for
from isoexec.kernels.logprobs.hopper.ops import token_logprobs

__all__ = ["FUNCTIONS", "subjects"]

FUNCTIONS = ("logprobs.blocks/2", "linear_logprobs.mma_blocks/1")
LEAVES = 8


def _native(z: Tensor, t: Tensor) -> Tensor:
    return torch.log_softmax(z, -1, dtype=FP32).gather(-1, t.unsqueeze(-1)).squeeze(-1)


def _invariant(z: Tensor, t: Tensor) -> Any:
    return vllm("log_softmax")(z.float(), -1).gather(-1, t.unsqueeze(-1)).squeeze(-1)


def _ours(z: Tensor, t: Tensor) -> Tensor:
    return token_logprobs(z, t, vocab_leaves=LEAVES)


def _product(x: Tensor, w: Tensor, _: Tensor) -> Tensor:
    return F.linear(x, w)


def _apart(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return _native(F.linear(x, w), t)


def _fused(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return linear_logprobs(x, w, t, vocab_leaves=LEAVES)


def _targets(M: int, vocab: int) -> tuple[Tensor]:
    return (torch.arange(M, device=DEVICE) % vocab,)


def _logits(M: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor]:
    return (rand(M, vocab, dtype=dtype, scale=4.0),)


def _hidden(M: int, K: int, vocab: int) -> tuple[Tensor, Tensor]:
    return rand(M, K), rand(vocab, K, scale=3.0 / K**0.5)


def subjects(model: Model, M: int) -> Iterator[Subject]:
    """Both functions at a model's head and M rows; the fused one next to the product alone, and trained next to both in turn."""
    V, K = model.vocab, model.hidden
    for dtype in (BF16, FP32):
        size = M * V * dtype.itemsize
        yield from Subject(
            op="logprobs",
            shape=f"{model.name} {V} {str(dtype)[6:]}",
            rows=M,
            function=FUNCTIONS[0],
            nbytes=size,
            make=partial(_logits, M, V, dtype),
            shared=partial(_targets, M, V),
            native=_native,
            ours=_ours,
            peers={"vllm": _invariant},
            learned=(0,),
            back_bytes=2 * size,
        ).both_ways()
    plan = plan_for(M)
    flops = 2.0 * M * V * K
    one = Subject(
        op="linear_logprobs",
        shape=f"{model.name} {V}x{K}",
        rows=M,
        function=FUNCTIONS[1],
        nbytes=2.0 * (V * K + M * K),
        flops=flops,
        make=partial(_hidden, M, K, V),
        shared=partial(_targets, M, V),
        native=_product,
        ours=_fused,
        provider="chunks" if isinstance(plan, Chunks) else "own tiles",
        learned=(0, 1),
        back_bytes=4.0 * (V * K + M * K),
        back_flops=2 * flops,
        most=2,
    )
    yield one
    # what the product alone gives has no loss: a training step is compared with a training step
    _, *trained = replace(one, native=_apart).both_ways()
    yield from trained
