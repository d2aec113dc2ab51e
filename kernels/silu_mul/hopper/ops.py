# SPDX-License-Identifier: Apache-2.0
"""SiLU times up of the sm90 function as opaque torch ops, differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.hopper.library import define, require_model_dtype
from isoexec.kernels.silu_mul.hopper.kernel import launch, launch_gradient

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["silu_mul", "silu_mul_halves"]


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    require_model_dtype("sm90_silu_mul", gate, up)
    require(
        gate.dim() == 2 and gate.shape == up.shape and gate.dtype == up.dtype,
        "sm90_silu_mul",
        f"gate {list(gate.shape)} {gate.dtype} with up {list(up.shape)} {up.dtype}",
        "equal shapes [rows, width] and dtypes",
    )
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    launch(gate, up, out)
    return out


def _fake(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def _gradient(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dup = torch.empty_like(dgate)
    launch_gradient(grad.contiguous(), gate, up, dgate, dup)
    return dgate, dup


def _gradient_fake(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = _gradient_op(grad, *ctx.saved_tensors)
    return dgate, dup


def _halves(both: Tensor) -> Tensor:
    require(
        both.dim() == 2 and both.shape[1] % 2 == 0,
        "sm90_silu_mul",
        f"a projection {list(both.shape)}",
        "[rows, gate and up]",
    )
    return _silu_mul(*both.chunk(2, -1))


def _halves_fake(both: Tensor) -> Tensor:
    return both.new_empty((both.shape[0], both.shape[1] // 2))


def _halves_gradient(grad: Tensor, both: Tensor) -> Tensor:
    out = torch.empty(both.shape, dtype=both.dtype, device=both.device)
    launch_gradient(grad.contiguous(), *both.chunk(2, -1), *out.chunk(2, -1))
    return out


def _halves_gradient_fake(grad: Tensor, both: Tensor) -> Tensor:
    return both.new_empty(both.shape)


def _halves_backward(ctx: Any, grad: Tensor) -> Tensor:
    out: Tensor = _halves_gradient_op(grad, *ctx.saved_tensors)
    return out


_gradient_op = define(
    "sm90_silu_mul_grad(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)", _gradient, _gradient_fake
)
_op = define(
    "sm90_silu_mul(Tensor gate, Tensor up) -> Tensor",
    _silu_mul,
    _fake,
    backward=_backward,
    setup_context=_setup,
)
_halves_gradient_op = define(
    "sm90_silu_mul_halves_grad(Tensor grad, Tensor both) -> Tensor", _halves_gradient, _halves_gradient_fake
)
_halves_op = define(
    "sm90_silu_mul_halves(Tensor both) -> Tensor",
    _halves,
    _halves_fake,
    backward=_halves_backward,
    setup_context=_setup,
)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of `[rows, width]`, in gate.dtype; halves of one projection are welcome as they lie; differentiable."""
    out: Tensor = _op(gate, up)
    return out


def silu_mul_halves(both: Tensor) -> Tensor:
    """`silu_mul` of a projection `[rows, 2 * width]`, gate first; its gradient is written where the projection lies."""
    out: Tensor = _halves_op(both)
    return out
