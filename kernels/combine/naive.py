# SPDX-License-Identifier: Apache-2.0
"""moe.combine/1: out = (((0 + w_0 y_0) + w_1 y_1) + ...) + shared in fp32, in routing order, rounded once.

Each product and each sum is rounded. The gradient of a weight is a pair tree over the width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.hopper.spec import pair_sum

if TYPE_CHECKING:
    from torch import Tensor


def combine(y: Tensor, weights: Tensor, shared: Tensor | None = None) -> Tensor:
    """Y [T * k, H] by slot, weights fp32 [T, k], shared [T, H] -> [T, H] in y's dtype."""
    T, k = weights.shape
    rows = y.view(T, k, y.shape[1])
    acc = torch.zeros(T, y.shape[1], dtype=torch.float32, device=y.device)
    for j in range(k):
        acc = acc + weights[:, j : j + 1] * rows[:, j].float()
    if shared is not None:
        acc = acc + shared.float()
    return acc.to(y.dtype)


def combine_backward(grad: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Grad [T, H] -> that of y, w * grad rounded once, and that of the weights: the sum over H of grad * y in fp32."""
    T, k = weights.shape
    g = grad.float().unsqueeze(1)
    dy = (weights.unsqueeze(-1) * g).to(y.dtype)
    dw = pair_sum(g * y.view(T, k, y.shape[1]).float())
    return dy.view(y.shape), dw
