# SPDX-License-Identifier: Apache-2.0
"""The shared expert's gate on sm90 as an opaque torch op, with its gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.hopper.library import define
from isoexec.kernels.shared_gate.hopper.kernel import launch, launch_gradient, launch_logits, launch_weight
from isoexec.kernels.shared_gate.hopper.naive import STEP, TOKEN_BLOCK

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["shared_gate"]

WIDEST = 16384


def _check(y: Tensor, x: Tensor, w: Tensor) -> None:
    require(
        all(t.dtype == torch.bfloat16 and t.dim() == 2 and t.stride(1) == 1 for t in (y, x, w)),
        "sm90_shared_gate",
        f"{y.dtype} {list(y.shape)}, {x.dtype} {list(x.shape)}, {w.dtype} {list(w.shape)}",
        "bfloat16 matrices with unit stride in the last dimension",
    )
    require(
        y.shape == x.shape and w.shape == (1, x.shape[1]) and x.shape[1] % STEP == 0 and x.shape[1] <= WIDEST,
        "sm90_shared_gate",
        f"y {list(y.shape)}, x {list(x.shape)}, w {list(w.shape)}",
        f"y and x [tokens, width], w [1, width], whole {STEP}s and at most {WIDEST} wide",
    )


def _gate(y: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    _check(y, x, w)
    logit = torch.empty(len(x), dtype=torch.float32, device=x.device)
    launch_logits(x, w.contiguous(), logit)
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    launch(y, logit, out)
    return out, logit


def _fake(y: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), x.new_empty(x.shape[:1], dtype=torch.float32)


def _grad(grad: Tensor, y: Tensor, x: Tensor, w: Tensor, logit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dy, dx = (torch.empty(y.shape, dtype=y.dtype, device=y.device) for _ in range(2))
    d = torch.empty(len(x), dtype=torch.float32, device=x.device)
    launch_gradient(grad.contiguous(), y, w.contiguous(), logit, dy, dx, d)
    parts = torch.empty(-(-len(x) // TOKEN_BLOCK), x.shape[1], dtype=torch.float32, device=x.device)
    dw = torch.empty(w.shape, dtype=w.dtype, device=w.device)
    launch_weight(x, d, parts, dw, TOKEN_BLOCK)
    return dy, dx, dw


def _grad_fake(grad: Tensor, y: Tensor, x: Tensor, w: Tensor, logit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return y.new_empty(y.shape), x.new_empty(x.shape), w.new_empty(w.shape)


_grad_op = define(
    "sm90_shared_gate_grad(Tensor grad, Tensor y, Tensor x, Tensor w, Tensor logit) -> (Tensor, Tensor, Tensor)",
    _grad,
    _grad_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    out: tuple[Tensor, Tensor, Tensor] = _grad_op(grad, *ctx.saved_tensors)
    return out


_op = define(
    "sm90_shared_gate(Tensor y, Tensor x, Tensor w) -> (Tensor, Tensor)",
    _gate,
    _fake,
    backward=_backward,
    setup_context=_setup,
)


def shared_gate(y: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """A shared expert's output `y [T, H]` times the sigmoid of `x [T, H] @ w [1, H]^T`, all bf16; differentiable in all three.

    The logit and its sigmoid stay in fp32. Raises `DomainError` for other shapes and dtypes.
    """
    out: Tensor = _op(y, x, w)[0]
    return out
