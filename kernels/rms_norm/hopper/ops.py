# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of the sm90 function as opaque torch ops; forward only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.hopper.library import define, require_model_dtype
from isoexec.kernels.rms_norm.hopper.kernel import launch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["add_rms_norm", "rms_norm"]

WIDEST = 16384


def _check(x: Tensor, w: Tensor, dims: tuple[int, ...]) -> None:
    require_model_dtype("sm90_rms_norm", x, w)
    require(
        x.dim() in dims and w.shape == x.shape[-1:] and x.shape[-1] <= WIDEST,
        "sm90_rms_norm",
        f"x {list(x.shape)} with weight {list(w.shape)}",
        f"x of {' or '.join(map(str, dims))} dimensions, weight [x.shape[-1]], at most {WIDEST} wide",
    )


def _norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    _check(x, w, (2, 3))
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(x, None, w, y, None, eps)
    return y


def _norm_fake(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _add_norm(x: Tensor, residual: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check(x, w, (2,))
    require_model_dtype("sm90_add_rms_norm", residual)
    require(
        residual.shape == x.shape and residual.dtype == x.dtype,
        "sm90_add_rms_norm",
        f"residual {list(residual.shape)} {residual.dtype} with x {list(x.shape)} {x.dtype}",
        "a residual of x's shape and dtype",
    )
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = torch.empty_like(y)
    launch(x, residual, w, y, h, eps)
    return y, h


def _add_norm_fake(x: Tensor, residual: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


_norm_op = define("sm90_rms_norm(Tensor x, Tensor w, float eps) -> Tensor", _norm, _norm_fake)
_add_norm_op = define(
    "sm90_add_rms_norm(Tensor x, Tensor residual, Tensor w, float eps) -> (Tensor, Tensor)",
    _add_norm,
    _add_norm_fake,
)


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Norm over the last dimension of `x [tokens, width]` or `[tokens, heads, width]` (views welcome), in x.dtype."""
    out: Tensor = _norm_op(x, w, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of h, h) with h = x + residual rounded to the model dtype; `[tokens, width]` each."""
    y, h = _add_norm_op(x, residual, w, eps)
    return y, h
