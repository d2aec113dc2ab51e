# SPDX-License-Identifier: Apache-2.0
"""The bias of a linear as torch ops, with a gradient whose bits do not depend on padding or on how features are sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from isoexec.kernels.bias.naive import TOKEN_BLOCK
from isoexec.kernels.domain import DomainError, require_float
from isoexec.kernels.library import define
from isoexec.kernels.slices import row_slices, rows_of
from isoexec.kernels.sums import halving_tree

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["bias_add"]


def _add(x: Tensor, bias: Tensor) -> Tensor:
    require_float("bias_add", x, bias)
    if bias.shape != x.shape[-1:] or bias.dtype != x.dtype:
        raise DomainError(
            "bias_add",
            f"x {list(x.shape)} {x.dtype} with bias {list(bias.shape)} {bias.dtype}",
            "a bias [x.shape[-1]] of x's dtype",
        )
    rows, wide = rows_of(x), bias.to(torch.float32)
    out = torch.empty(rows.shape, dtype=x.dtype)
    for at in row_slices(*rows.shape):
        out[at] = rows[at].to(torch.float32) + wide
    return out.view(x.shape)


def _add_fake(x: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _grad(grad: Tensor) -> Tensor:
    rows = rows_of(grad)
    total = torch.zeros(rows.shape[1], dtype=torch.float32)
    for first in range(0, rows.shape[0], TOKEN_BLOCK):
        block = rows[first : first + TOKEN_BLOCK].to(torch.float32)
        total.add_(halving_tree(F.pad(block, (0, 0, 0, TOKEN_BLOCK - block.shape[0])), 0))
    return total


def _grad_fake(grad: Tensor) -> Tensor:
    return grad.new_empty((grad.shape[-1],), dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtype = inputs[1].dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    dx = grad if ctx.needs_input_grad[0] else None
    return dx, _grad_op(grad).to(ctx.dtype) if ctx.needs_input_grad[1] else None


_grad_op = define("bias_grad(Tensor grad) -> Tensor", _grad, _grad_fake)
_op = define(
    "bias_add(Tensor x, Tensor bias) -> Tensor", _add, _add_fake, backward=_backward, setup_context=_setup
)


def bias_add(x: Tensor, bias: Tensor) -> Tensor:
    """`x [..., N]` plus `bias [N]` in fp32, rounded once to x.dtype; differentiable.

    The bias's gradient takes tokens in row-major order: a trainer gives `[s, b, N]`, so that padding at the end of `s` is zeros
    at the end. Every rank that holds a part of N must hold all tokens. Raises `DomainError` for another dtype or shape of bias.
    """
    out: Tensor = _op(x, bias)
    return out
