# SPDX-License-Identifier: Apache-2.0
"""SiLU times up as torch ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.domain import DomainError, require_float
from isoexec.kernels.library import define
from isoexec.kernels.silu_mul import naive

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["silu_mul"]


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    require_float("silu_mul", gate, up)
    if gate.shape != up.shape:
        raise DomainError("silu_mul", f"gate {list(gate.shape)} with up {list(up.shape)}", "equal shapes")
    g = gate.to(torch.float32)
    return (g / torch.exp(-g).add_(1.0)).mul_(up.to(torch.float32)).to(gate.dtype)


def _fake(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def _grad_fake(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _fake(gate, up), _fake(up, gate)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = _grad_op(grad, *ctx.saved_tensors)
    return out


_grad_op = define(
    "silu_mul_grad(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    naive.silu_mul_backward,
    _grad_fake,
)
_op = define(
    "silu_mul(Tensor gate, Tensor up) -> Tensor", _silu_mul, _fake, backward=_backward, setup_context=_setup
)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, element by element, in gate.dtype; views (halves of one projection) are welcome; differentiable."""
    out: Tensor = _op(gate, up)
    return out
