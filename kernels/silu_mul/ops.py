# SPDX-License-Identifier: Apache-2.0
"""SiLU times up as torch ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.domain import DomainError, require_float
from isoexec.kernels.library import define
from isoexec.kernels.silu_mul import naive
from isoexec.kernels.slices import row_slices, rows_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["silu_mul"]


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    require_float("silu_mul", gate, up)
    if gate.shape != up.shape:
        raise DomainError("silu_mul", f"gate {list(gate.shape)} with up {list(up.shape)}", "equal shapes")
    gates, ups = rows_of(gate), rows_of(up)
    out = torch.empty(gates.shape, dtype=gate.dtype)
    for at in row_slices(*gates.shape):
        g = gates[at].to(torch.float32)
        e = torch.neg(g).exp_().add_(1.0)
        out[at] = torch.div(g, e, out=e).mul_(ups[at])
    return out.view(gate.shape)


def _silu_mul_grad(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grads, gates, ups = (rows_of(t) for t in (grad, gate, up))
    dgate, dup = torch.empty(gates.shape, dtype=gate.dtype), torch.empty(ups.shape, dtype=up.dtype)
    for at in row_slices(*gates.shape):
        dgate[at], dup[at] = naive.silu_mul_backward(grads[at], gates[at], ups[at])
    return dgate.view(gate.shape), dup.view(up.shape)


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
    _silu_mul_grad,
    _grad_fake,
)
_op = define(
    "silu_mul(Tensor gate, Tensor up) -> Tensor", _silu_mul, _fake, backward=_backward, setup_context=_setup
)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, element by element, in gate.dtype; views (halves of one projection) are welcome; differentiable."""
    out: Tensor = _op(gate, up)
    return out
