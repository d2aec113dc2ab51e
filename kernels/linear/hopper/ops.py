# SPDX-License-Identifier: Apache-2.0
"""The sm90 linear and its gradients as opaque torch ops: one rank's products, and parallel linears over a process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.hopper.library import define
from isoexec.kernels.linear.hopper import products
from isoexec.kernels.linear.hopper.parallel import column_linear, row_linear
from isoexec.kernels.linear.hopper.plain import outputs_shard

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "chain",
    "column_linear",
    "input_gradient",
    "linear",
    "outputs_shard",
    "row_linear",
    "weight_gradient",
]

BF16, FP32 = torch.bfloat16, torch.float32


def _linear(x: Tensor, w: Tensor, fp32_out: bool) -> Tensor:
    return products.product("forward", x, w, None, FP32 if fp32_out else BF16)


def _linear_fake(x: Tensor, w: Tensor, fp32_out: bool) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[0]), dtype=FP32 if fp32_out else BF16)


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _linear_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    dy = dy.contiguous()
    dx = input_gradient(dy, w) if ctx.needs_input_grad[0] else None
    dw = weight_gradient(dy, x) if ctx.needs_input_grad[1] else None
    return dx, dw, None


_op = define(
    "sm90_linear(Tensor x, Tensor w, bool fp32_out) -> Tensor",
    _linear,
    _linear_fake,
    backward=_linear_backward,
    setup_context=_linear_setup,
)


def linear(x: Tensor, w: Tensor, *, fp32_out: bool = False) -> Tensor:
    """`x [M, K] @ w [N, K]^T`, bf16 in, bf16 or fp32 out, bits independent of M; differentiable, gradients in bf16.

    Raises `DomainError` for a weight that is not in the table and `SwitchError` where cuBLASLt's switches are not claimed.
    """
    out: Tensor = _op(x, w, fp32_out)
    return out


def _chain(x: Tensor, w: Tensor, acc: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    return products.product("forward", x, w, acc, out_dtype)


def _chain_fake(x: Tensor, w: Tensor, acc: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[0]), dtype=out_dtype)


_chain_op = define(
    "sm90_linear_chain(Tensor x, Tensor w, Tensor? acc, ScalarType out_dtype) -> Tensor", _chain, _chain_fake
)


def chain(x: Tensor, w: Tensor, acc: Tensor | None = None, *, out_dtype: torch.dtype = FP32) -> Tensor:
    """`x [M, K] @ w [N, K]^T` going on from `acc [M, N]` (fp32), rounded once to `out_dtype`; no gradient."""
    out: Tensor = _chain_op(x, w, acc, out_dtype)
    return out


def _input(dy: Tensor, w: Tensor, acc: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    return products.product("input", dy, w, acc, out_dtype)


def _input_fake(dy: Tensor, w: Tensor, acc: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    return dy.new_empty((dy.shape[0], w.shape[1]), dtype=out_dtype)


_input_op = define(
    "sm90_linear_input_gradient(Tensor dy, Tensor w, Tensor? acc, ScalarType out_dtype) -> Tensor",
    _input,
    _input_fake,
)


def input_gradient(
    dy: Tensor, w: Tensor, acc: Tensor | None = None, *, out_dtype: torch.dtype = BF16
) -> Tensor:
    """`dy [M, N] @ w [N, K]`, one chain over N, going on from `acc [M, K]`; an fp32 `dy` is rounded to bf16 first."""
    out: Tensor = _input_op(dy.to(BF16), w, acc, out_dtype)
    return out


def _weight(dy: Tensor, x: Tensor, out_dtype: torch.dtype) -> Tensor:
    return products.product("weight", dy, x, None, out_dtype)


def _weight_fake(dy: Tensor, x: Tensor, out_dtype: torch.dtype) -> Tensor:
    return dy.new_empty((dy.shape[1], x.shape[1]), dtype=out_dtype)


_weight_op = define(
    "sm90_linear_weight_gradient(Tensor dy, Tensor x, ScalarType out_dtype) -> Tensor", _weight, _weight_fake
)


def weight_gradient(dy: Tensor, x: Tensor, *, out_dtype: torch.dtype = BF16) -> Tensor:
    """`dy [M, N]^T @ x [M, K]`, one chain over the M tokens, any number of them; an fp32 `dy` is rounded to bf16 first.

    For gradients accumulated in fp32, take fp32 and add it to the buffer: each micro-batch is a chain of its own.
    """
    out: Tensor = _weight_op(dy.to(BF16), x, out_dtype)
    return out
