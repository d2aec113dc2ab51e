# SPDX-License-Identifier: Apache-2.0
"""The sigmoid router on sm90 as an opaque torch op, with its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.hopper.library import define
from isoexec.kernels.router.hopper.kernel import launch_gradient, launch_sigmoid
from isoexec.kernels.router.ops import fake
from isoexec.kernels.router.sigmoid.ops import check_sigmoid

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["sigmoid_topk"]


def _sigmoid(
    logits: Tensor, bias: Tensor, k: int, groups: int, groups_chosen: int, scale: float
) -> tuple[Tensor, Tensor]:
    check_sigmoid("sm90_router_sigmoid_topk", logits, bias, k, groups, groups_chosen)
    require(
        logits.stride(1) == 1,
        "sm90_router_sigmoid_topk",
        f"logits with strides {logits.stride()}",
        "unit stride in the last dimension",
    )
    weights = torch.empty(len(logits), k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(len(logits), k, dtype=torch.int64, device=logits.device)
    launch_sigmoid(logits, bias.contiguous(), weights, experts, groups, groups_chosen, scale)
    return weights, experts


def _fake(
    logits: Tensor, bias: Tensor, k: int, groups: int, groups_chosen: int, scale: float
) -> tuple[Tensor, Tensor]:
    return fake(logits, k)


def _grad(grad: Tensor, logits: Tensor, experts: Tensor, scale: float) -> Tensor:
    out = torch.empty(logits.shape, dtype=torch.float32, device=grad.device)
    launch_gradient(grad.contiguous(), logits, experts.contiguous(), out, scale)
    return out


def _grad_fake(grad: Tensor, logits: Tensor, experts: Tensor, scale: float) -> Tensor:
    return logits.new_empty(logits.shape)


_grad_op = define(
    "sm90_router_sigmoid_topk_grad(Tensor grad, Tensor logits, Tensor experts, float scale) -> Tensor",
    _grad,
    _grad_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.scale = inputs[5]
    ctx.save_for_backward(inputs[0], output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return _grad_op(grad, *ctx.saved_tensors, ctx.scale), None, None, None, None, None


_op = define(
    "sm90_router_sigmoid_topk(Tensor logits, Tensor bias, int k, int groups, int groups_chosen, float scale) "
    "-> (Tensor, Tensor)",
    _sigmoid,
    _fake,
    backward=_backward,
    setup_context=_setup,
)


def sigmoid_topk(
    logits: Tensor, bias: Tensor, k: int, groups: int = 1, groups_chosen: int = 1, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """fp32 `logits [T, E]` -> weights fp32 `[T, k]` that sum to `scale`, experts int64 `[T, k]` by descending score.

    `bias [E]` moves the choice and no weight. Differentiable in the logits. Raises `DomainError` as `softmax_topk`, and for
    groups that are not equal or too few.
    """
    out: tuple[Tensor, Tensor] = _op(logits, bias, k, groups, groups_chosen, scale)
    return out
