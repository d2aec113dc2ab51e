# SPDX-License-Identifier: Apache-2.0
"""The softmax router on sm90 as an opaque torch op, with its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.hopper.library import define
from isoexec.kernels.router.hopper.kernel import launch_gradient, launch_softmax
from isoexec.kernels.router.ops import check_logits, fake

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["softmax_topk"]


def _softmax(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    check_logits("sm90_router_softmax_topk", logits, k)
    require(
        logits.stride(1) == 1,
        "sm90_router_softmax_topk",
        f"logits with strides {logits.stride()}",
        "unit stride in the last dimension",
    )
    weights = torch.empty(len(logits), k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(len(logits), k, dtype=torch.int64, device=logits.device)
    launch_softmax(logits, weights, experts)
    return weights, experts


def _grad(grad: Tensor, weights: Tensor, experts: Tensor, width: int) -> Tensor:
    out = torch.empty(len(grad), width, dtype=torch.float32, device=grad.device)
    launch_gradient(grad.contiguous(), weights.contiguous(), experts.contiguous(), out)
    return out


def _grad_fake(grad: Tensor, weights: Tensor, experts: Tensor, width: int) -> Tensor:
    return weights.new_empty((weights.shape[0], width))


_grad_op = define(
    "sm90_router_softmax_topk_grad(Tensor grad, Tensor weights, Tensor experts, int width) -> Tensor",
    _grad,
    _grad_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.width = inputs[0].shape[1]
    ctx.save_for_backward(*output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    return _grad_op(grad, *ctx.saved_tensors, ctx.width), None


_op = define(
    "sm90_router_softmax_topk(Tensor logits, int k) -> (Tensor, Tensor)",
    _softmax,
    fake,
    backward=_backward,
    setup_context=_setup,
)


def softmax_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """fp32 `logits [T, E]` -> weights fp32 `[T, k]` that sum to one, experts int64 `[T, k]` by descending logit.

    Differentiable in the logits. Raises `DomainError` for another dtype, more than 512 experts or a k over 16.
    """
    out: tuple[Tensor, Tensor] = _op(logits, k)
    return out
