# SPDX-License-Identifier: Apache-2.0
"""A product with a gate's sigmoid as an opaque torch op, differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.hopper.library import define, require_model_dtype
from isoexec.kernels.sigmoid_mul.hopper.kernel import launch, launch_gradient

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["sigmoid_mul"]


def _sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    require_model_dtype("sm90_sigmoid_mul", x, gate)
    require(
        x.dim() in (2, 3) and x.shape == gate.shape and x.dtype == gate.dtype,
        "sm90_sigmoid_mul",
        f"x {list(x.shape)} {x.dtype} with gate {list(gate.shape)} {gate.dtype}",
        "equal shapes, [tokens, width] or [tokens, heads, width], and dtypes",
    )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(x, gate, out)
    return out


def _fake(x: Tensor, gate: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _gradient(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = torch.empty_like(dx)
    launch_gradient(grad.contiguous(), x, gate, dx, dgate)
    return dx, dgate


def _gradient_fake(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    dx, dgate = _gradient_op(grad, *ctx.saved_tensors)
    return dx, dgate


_gradient_op = define(
    "sm90_sigmoid_mul_grad(Tensor grad, Tensor x, Tensor gate) -> (Tensor, Tensor)", _gradient, _gradient_fake
)
_op = define(
    "sm90_sigmoid_mul(Tensor x, Tensor gate) -> Tensor",
    _sigmoid_mul,
    _fake,
    backward=_backward,
    setup_context=_setup,
)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """X times the sigmoid of a gate, `[tokens, width]` or `[tokens, heads, width]`, in x.dtype; differentiable."""
    out: Tensor = _op(x, gate)
    return out
