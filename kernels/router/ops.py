# SPDX-License-Identifier: Apache-2.0
"""The softmax router as a torch op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.library import define
from isoexec.kernels.router import naive

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check_logits", "fake", "softmax_topk"]

MOST = 16  # experts a token may go to
WIDEST = 512  # experts a layer may have


def check_logits(op: str, logits: Tensor, k: int) -> None:
    """Raise `DomainError` unless logits are fp32 `[T, E]` with 1 <= k <= E, k up to 16 and E up to 512."""
    require(
        logits.dim() == 2 and logits.dtype == torch.float32 and logits.shape[1] <= WIDEST,
        op,
        f"logits {list(logits.shape)} {logits.dtype}",
        f"float32 [tokens, experts] with at most {WIDEST} experts",
    )
    require(
        1 <= k <= min(MOST, logits.shape[1]),
        op,
        f"k {k} of {logits.shape[1]} experts",
        f"1 to {MOST} of them",
    )


def _softmax(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    check_logits("router.softmax_topk", logits, k)
    weights, experts = naive.softmax_topk(logits, k)
    return weights, experts.contiguous()


def fake(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], k)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


def _softmax_grad_fake(grad: Tensor, weights: Tensor, experts: Tensor, width: int) -> Tensor:
    return weights.new_empty((weights.shape[0], width))


def _softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.width = inputs[0].shape[1]
    ctx.save_for_backward(*output)
    ctx.mark_non_differentiable(output[1])


def _softmax_backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    return _softmax_grad_op(grad, *ctx.saved_tensors, ctx.width), None


_softmax_grad_op = define(
    "router_softmax_topk_grad(Tensor grad, Tensor weights, Tensor experts, int width) -> Tensor",
    naive.softmax_topk_backward,
    _softmax_grad_fake,
)
_softmax_op = define(
    "router_softmax_topk(Tensor logits, int k) -> (Tensor, Tensor)",
    _softmax,
    fake,
    backward=_softmax_backward,
    setup_context=_softmax_setup,
)


def softmax_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """fp32 `logits [T, E]` -> weights fp32 `[T, k]` that sum to one, experts int64 `[T, k]` by descending logit.

    Differentiable in the logits. Raises `DomainError` for another dtype, more than 512 experts or a k over 16.
    """
    out: tuple[Tensor, Tensor] = _softmax_op(logits, k)
    return out
