# SPDX-License-Identifier: Apache-2.0
"""Combine on sm90 as opaque torch ops: of rows by slot, or where they lie in the experts' order; with gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.combine.hopper.kernel import launch_gradient, launch_sum
from isoexec.kernels.domain import require
from isoexec.kernels.hopper.library import define, require_model_dtype

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["combine", "combine_rows"]

WIDEST = 16384
MOST = 16


def _check(op: str, y: Tensor, rows: Tensor | None, weights: Tensor, shared: Tensor | None) -> None:
    require_model_dtype(op, y, *(() if shared is None else (shared,)))
    require(
        weights.dim() == 2 and weights.dtype == torch.float32 and 1 <= weights.shape[1] <= MOST,
        op,
        f"weights {list(weights.shape)} {weights.dtype}",
        f"float32 [tokens, places] with at most {MOST} places",
    )
    require(
        y.dim() == 2 and y.shape[1] <= WIDEST and (rows is not None or y.shape[0] == weights.numel()),
        op,
        f"rows {list(y.shape)} with weights {list(weights.shape)}",
        f"[tokens * places, width] at most {WIDEST} wide",
    )
    if rows is not None:
        require(
            rows.shape == (weights.numel(),) and rows.dtype in (torch.int32, torch.int64),
            op,
            f"a map {list(rows.shape)} {rows.dtype}",
            f"integers [{weights.numel()}], a row a slot",
        )
    if shared is not None:
        require(
            shared.shape == (weights.shape[0], y.shape[1]) and shared.dtype == y.dtype,
            op,
            f"shared {list(shared.shape)} {shared.dtype}",
            f"[{weights.shape[0]}, {y.shape[1]}] {y.dtype}",
        )


def _combine(y: Tensor, rows: Tensor | None, weights: Tensor, shared: Tensor | None) -> Tensor:
    _check("sm90_moe_combine", y, rows, weights, shared)
    out = torch.empty(weights.shape[0], y.shape[1], dtype=y.dtype, device=y.device)
    whole = None if shared is None else shared.contiguous()
    launch_sum(y.contiguous(), rows, weights.contiguous(), whole, out, weights.shape[1])
    return out


def _fake(y: Tensor, rows: Tensor | None, weights: Tensor, shared: Tensor | None) -> Tensor:
    return y.new_empty((weights.shape[0], y.shape[1]))


def _grad(grad: Tensor, y: Tensor, rows: Tensor | None, weights: Tensor) -> tuple[Tensor, Tensor]:
    dy = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    dw = torch.empty(weights.shape, dtype=torch.float32, device=y.device)
    launch_gradient(grad.contiguous(), y.contiguous(), rows, weights.contiguous(), dy, dw)
    return dy, dw


def _grad_fake(grad: Tensor, y: Tensor, rows: Tensor | None, weights: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), weights.new_empty(weights.shape)


_grad_op = define(
    "sm90_moe_combine_grad(Tensor grad, Tensor y, Tensor? rows, Tensor weights) -> (Tensor, Tensor)",
    _grad,
    _grad_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, rows, weights, shared = inputs
    ctx.shared, ctx.mapped = shared is not None, rows is not None
    ctx.save_for_backward(y, weights, *((rows,) if ctx.mapped else ()))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    y, weights, *rows = ctx.saved_tensors
    dy, dw = _grad_op(grad, y, rows[0] if rows else None, weights)
    return dy, None, dw, grad if ctx.shared else None


_op = define(
    "sm90_moe_combine(Tensor y, Tensor? rows, Tensor weights, Tensor? shared) -> Tensor",
    _combine,
    _fake,
    backward=_backward,
    setup_context=_setup,
)


def combine(y: Tensor, weights: Tensor, shared: Tensor | None = None) -> Tensor:
    """`y [T * k, H]` by slot, `weights` fp32 `[T, k]` -> `[T, H]` in y's dtype; differentiable in all three.

    `shared [T, H]` is a shared expert's output, added last before the one rounding. Raises `DomainError` for other shapes.
    """
    out: Tensor = _op(y, None, weights, shared)
    return out


def combine_rows(y: Tensor, rows: Tensor, weights: Tensor, shared: Tensor | None = None) -> Tensor:
    """`combine` of `y [R, H]` where it lies: slot s has row `rows[s]`; the same bits, and no copy by slot.

    A slot at -1 adds nothing. Rows of no slot get no gradient written: they are of no expert, and nobody reads them.
    """
    out: Tensor = _op(y, rows, weights, shared)
    return out
