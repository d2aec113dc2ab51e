# SPDX-License-Identifier: Apache-2.0
"""The L2 norm on sm90 as an opaque torch op, by the kernels of `rms_norm`; differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.hopper.library import define, require_model_dtype
from isoexec.kernels.rms_norm.hopper.gradient import WIDEST, gradients
from isoexec.kernels.rms_norm.hopper.kernel import BARE, launch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["l2_norm"]


def _norm(x: Tensor, eps: float) -> Tensor:
    require_model_dtype("sm90_l2_norm", x)
    require(
        x.dim() in (2, 3) and x.shape[-1] <= WIDEST,
        "sm90_l2_norm",
        f"x {list(x.shape)}",
        f"x of 2 or 3 dimensions, at most {WIDEST} wide",
    )
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(x, None, None, y, None, eps, scale=BARE, mean=False)
    return y


def _fake(x: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.eps = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    dx, _, _ = gradients(g, x, None, None, None, ctx.eps, BARE, False, "none", "")
    return dx, None


_op = define(
    "sm90_l2_norm(Tensor x, float eps) -> Tensor", _norm, _fake, backward=_backward, setup_context=_setup
)


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """Rows of `x [tokens, width]` or `[tokens, heads, width]` (views welcome) divided by their length, in x.dtype.

    `eps` is added to the sum of squares; differentiable.
    """
    out: Tensor = _op(x, eps)
    return out
