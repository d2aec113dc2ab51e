# SPDX-License-Identifier: Apache-2.0
"""rms_norm.pairs_centred/1: x * (1 / sqrt(pairs(x * x) / width + eps)) * (1 + w) in fp32, rounded once.

As Qwen3-Next and Qwen3.5 scale (Hugging Face's `Qwen3NextRMSNorm`): 1 + w is rounded to fp32 before it multiplies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isoexec.kernels.rms_norm.hopper.naive import dgamma, input_gradient, inverse_root, residual_add

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["add_dx", "add_rms_norm", "dgamma", "dx", "inverse_root", "residual_add", "rms_norm"]


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    xf = x.float()
    return (xf * inverse_root(xf, eps) * (1.0 + w.float())).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of h, h), h = x + residual."""
    h = residual_add(x, residual)
    return rms_norm(h, w, eps), h


def dx(g: Tensor, x: Tensor, w: Tensor, eps: float) -> Tensor:
    return input_gradient(g.float() * (1.0 + w.float()), x.float(), eps).to(x.dtype)


def add_dx(g: Tensor, g_h: Tensor, h: Tensor, w: Tensor, eps: float) -> Tensor:
    return residual_add(dx(g, h, w, eps), g_h)
