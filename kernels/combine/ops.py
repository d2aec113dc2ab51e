# SPDX-License-Identifier: Apache-2.0
"""Combine as a torch op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.combine import naive
from isoexec.kernels.domain import require, require_float
from isoexec.kernels.library import define
from isoexec.kernels.slices import row_slices

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check", "combine"]


def check(op: str, y: Tensor, weights: Tensor, shared: Tensor | None) -> None:
    """Raise `DomainError` unless y is `[T * k, H]`, weights fp32 `[T, k]` and shared, where given, `[T, H]` of y's dtype."""
    require_float(op, y)
    require(
        weights.dim() == 2 and weights.dtype == torch.float32 and weights.shape[1] >= 1,
        op,
        f"weights {list(weights.shape)} {weights.dtype}",
        "float32 [tokens, places]",
    )
    require(
        y.dim() == 2 and y.shape[0] == weights.numel(),
        op,
        f"rows {list(y.shape)} with weights {list(weights.shape)}",
        "[tokens * places, width]",
    )
    if shared is not None:
        require(
            shared.shape == (weights.shape[0], y.shape[1]) and shared.dtype == y.dtype,
            op,
            f"shared {list(shared.shape)} {shared.dtype}",
            f"[{weights.shape[0]}, {y.shape[1]}] {y.dtype}",
        )


def _combine(y: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
    check("moe.combine", y, weights, shared)
    T, k = weights.shape
    out = torch.empty(T, y.shape[1], dtype=y.dtype)
    rows = y.view(T, k, y.shape[1]) if y.is_contiguous() else y.reshape(T, k, y.shape[1])
    for at in row_slices(T, k * y.shape[1]):
        part = rows[at].reshape(-1, y.shape[1])
        out[at] = naive.combine(part, weights[at], None if shared is None else shared[at])
    return out


def _fake(y: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
    return y.new_empty((weights.shape[0], y.shape[1]))


def _grad(grad: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    T, k = weights.shape
    width = y.shape[1]
    dy, dw = torch.empty(T, k, width, dtype=y.dtype), torch.empty(T, k)
    rows = y.reshape(T, k, width)
    for at in row_slices(T, k * width):
        part, dw[at] = naive.combine_backward(grad[at], rows[at].reshape(-1, width), weights[at])
        dy[at] = part.view(-1, k, width)
    return dy.view(y.shape), dw


def _grad_fake(grad: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), weights.new_empty(weights.shape)


_grad_op = define(
    "moe_combine_grad(Tensor grad, Tensor y, Tensor weights) -> (Tensor, Tensor)", _grad, _grad_fake
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, weights, shared = inputs
    ctx.shared = shared is not None
    ctx.save_for_backward(y, weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    dy, dw = _grad_op(grad, *ctx.saved_tensors)
    return dy, dw, grad if ctx.shared else None


_op = define(
    "moe_combine(Tensor y, Tensor weights, Tensor? shared) -> Tensor",
    _combine,
    _fake,
    backward=_backward,
    setup_context=_setup,
)


def combine(y: Tensor, weights: Tensor, shared: Tensor | None = None) -> Tensor:
    """`y [T * k, H]` by slot, `weights` fp32 `[T, k]` -> `[T, H]` in y's dtype; differentiable in all three.

    `shared [T, H]` is a shared expert's output, added last before the one rounding. Raises `DomainError` for other shapes.
    """
    out: Tensor = _op(y, weights, shared)
    return out
