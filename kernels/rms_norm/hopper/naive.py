# SPDX-License-Identifier: Apache-2.0
"""rms_norm.pairs/1 on sm90: x * (1 / sqrt(pairs(x * x) / width + eps)) * w in fp32, rounded once.

`pairs` adds neighbours (the CPU function adds halves): neighbours lie in one thread, then one warp, so the same sum is cheap
on a GPU. The residual is added in fp32 and rounded to the model dtype first; the norm reads the rounded sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.hopper.spec import pair_sum

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    xf = x.float()
    total = pair_sum(xf * xf).unsqueeze(-1)
    mean = total / torch.full_like(total, x.shape[-1])  # a Python divisor would become a reciprocal on CUDA
    root = torch.sqrt(
        (mean + eps).double()
    ).float()  # fp32 square roots of a CPU library need not be the nearest
    r = torch.ones_like(root) / root
    return (xf * r * w.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of h, h), h = x + residual."""
    h = (x.float() + residual.float()).to(residual.dtype)
    return rms_norm(h, w, eps), h
