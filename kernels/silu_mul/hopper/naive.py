# SPDX-License-Identifier: Apache-2.0
"""silu_mul.poly/1 on sm90: gate / (1 + exp(-gate)) * up in fp32, rounded once; exp is the written-out one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.hopper.spec import EXP_HIGH, exp, sigmoid

if TYPE_CHECKING:
    from torch import Tensor


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    g = gate.float()
    e = torch.where(-g > EXP_HIGH, torch.inf, exp(-g))
    return (g / (1.0 + e) * up.float()).to(gate.dtype)


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Of gate: d * u * (s * (1 + g * (1 - s))); of up: d * (g * s), with s = 1 / (1 + exp(-g)), as the CPU function."""
    d, g, u = grad.float(), gate.float(), up.float()
    s = sigmoid(g)
    dgate = d * u * (s * (1.0 + g * (1.0 - s)))
    return dgate.to(gate.dtype), (d * (g * s)).to(up.dtype)
