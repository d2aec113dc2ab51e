# SPDX-License-Identifier: Apache-2.0
"""l2_norm.pairs/1: x * (1 / sqrt(pairs(x * x) + eps)) in fp32, rounded once; Gated DeltaNet's query and key heads.

Flash Linear Attention's `l2norm` has the same formula and another order of its sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isoexec.kernels.rms_norm.hopper.naive import input_gradient, inverse_root

if TYPE_CHECKING:
    from torch import Tensor


def l2_norm(x: Tensor, eps: float) -> Tensor:
    xf = x.float()
    return (xf * inverse_root(xf, eps, mean=False)).to(x.dtype)


def dx(g: Tensor, x: Tensor, eps: float) -> Tensor:
    return input_gradient(g.float(), x.float(), eps, mean=False).to(x.dtype)
