# SPDX-License-Identifier: Apache-2.0
"""The bias of a linear on sm90 as opaque torch ops: the CPU function's bits, forward and gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.bias.hopper.kernel import launch, launch_gradient
from isoexec.kernels.domain import require
from isoexec.kernels.hopper.library import define, require_model_dtype

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["bias_add"]


def _add(x: Tensor, bias: Tensor) -> Tensor:
    require_model_dtype("sm90_bias_add", x, bias)
    require(
        x.dim() >= 1 and bias.shape == x.shape[-1:] and bias.dtype == x.dtype,
        "sm90_bias_add",
        f"x {list(x.shape)} {x.dtype} with bias {list(bias.shape)} {bias.dtype}",
        "a bias [x.shape[-1]] of x's dtype",
    )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    wide = x.shape[-1]
    launch(x.reshape(x.shape[:-1].numel(), wide), bias, out.view(-1, wide) if wide else out)
    return out


def _add_fake(x: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _gradient(grad: Tensor, bias: Tensor) -> Tensor:
    out = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    launch_gradient(grad.reshape(grad.shape[:-1].numel(), grad.shape[-1]).contiguous(), out)
    return out


def _gradient_fake(grad: Tensor, bias: Tensor) -> Tensor:
    return bias.new_empty(bias.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    (bias,) = ctx.saved_tensors
    dx = grad if ctx.needs_input_grad[0] else None
    return dx, _gradient_op(grad, bias) if ctx.needs_input_grad[1] else None


_gradient_op = define("sm90_bias_grad(Tensor grad, Tensor bias) -> Tensor", _gradient, _gradient_fake)
_op = define(
    "sm90_bias_add(Tensor x, Tensor bias) -> Tensor",
    _add,
    _add_fake,
    backward=_backward,
    setup_context=_setup,
)


def bias_add(x: Tensor, bias: Tensor) -> Tensor:
    """`x [..., N]` plus `bias [N]` in fp32, rounded once to x.dtype; differentiable.

    The bias's gradient takes tokens in row-major order: a trainer gives `[s, b, N]`, so that padding at the end of `s` is zeros
    at the end. Every rank that holds a part of N must hold all tokens.
    """
    out: Tensor = _op(x, bias)
    return out
