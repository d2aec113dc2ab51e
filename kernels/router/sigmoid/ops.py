# SPDX-License-Identifier: Apache-2.0
"""The sigmoid router as a torch op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.library import define
from isoexec.kernels.router.ops import check_logits, fake
from isoexec.kernels.router.sigmoid import naive

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check_sigmoid", "sigmoid_topk"]


def check_sigmoid(op: str, logits: Tensor, bias: Tensor, k: int, groups: int, groups_chosen: int) -> None:
    """Raise `DomainError` unless `check_logits` holds, bias is fp32 `[E]` and the groups are equal and hold k experts."""
    check_logits(op, logits, k)
    E = logits.shape[1]
    require(
        bias.shape == (E,) and bias.dtype == torch.float32,
        op,
        f"bias {list(bias.shape)} {bias.dtype}",
        f"float32 [{E}]",
    )
    each = E // groups if groups > 0 and E % groups == 0 else 0
    require(
        each > 0 and (groups == 1 or each > 1) and 1 <= groups_chosen <= groups and k <= groups_chosen * each,
        op,
        f"{E} experts in {groups} groups, {groups_chosen} of them chosen, k {k}",
        "equal groups of at least 2 experts, of which enough are chosen for k experts",
    )


def _sigmoid(
    logits: Tensor, bias: Tensor, k: int, groups: int, groups_chosen: int, scale: float
) -> tuple[Tensor, Tensor]:
    check_sigmoid("router.sigmoid_topk", logits, bias, k, groups, groups_chosen)
    weights, experts = naive.sigmoid_topk(logits, bias, k, groups, groups_chosen, scale)
    return weights, experts.contiguous()


def _sigmoid_fake(
    logits: Tensor, bias: Tensor, k: int, groups: int, groups_chosen: int, scale: float
) -> tuple[Tensor, Tensor]:
    return fake(logits, k)


def _sigmoid_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.scale = inputs[5]
    ctx.save_for_backward(inputs[0], output[1])
    ctx.mark_non_differentiable(output[1])


def _sigmoid_backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return _sigmoid_grad_op(grad, *ctx.saved_tensors, ctx.scale), None, None, None, None, None


def _sigmoid_grad_fake(grad: Tensor, logits: Tensor, experts: Tensor, scale: float) -> Tensor:
    return logits.new_empty(logits.shape)


_sigmoid_grad_op = define(
    "router_sigmoid_topk_grad(Tensor grad, Tensor logits, Tensor experts, float scale) -> Tensor",
    naive.sigmoid_topk_backward,
    _sigmoid_grad_fake,
)
_sigmoid_op = define(
    "router_sigmoid_topk(Tensor logits, Tensor bias, int k, int groups, int groups_chosen, float scale) "
    "-> (Tensor, Tensor)",
    _sigmoid,
    _sigmoid_fake,
    backward=_sigmoid_backward,
    setup_context=_sigmoid_setup,
)


def sigmoid_topk(
    logits: Tensor, bias: Tensor, k: int, groups: int = 1, groups_chosen: int = 1, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """fp32 `logits [T, E]` -> weights fp32 `[T, k]` that sum to `scale`, experts int64 `[T, k]` by descending score.

    `bias [E]` moves the choice and no weight. Differentiable in the logits. Raises `DomainError` as `softmax_topk`, and for
    groups that are not equal or too few.
    """
    out: tuple[Tensor, Tensor] = _sigmoid_op(logits, bias, k, groups, groups_chosen, scale)
    return out
