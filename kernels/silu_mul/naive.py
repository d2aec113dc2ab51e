# SPDX-License-Identifier: Apache-2.0
"""silu_mul.exp/1: gate / (1 + exp(-gate)) * up in fp32, rounded once.

Written with exp: torch's silu and sigmoid have other bits in the tail of a vector than in its body.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    g = gate.float()
    return (g / (1.0 + torch.exp(-g)) * up.float()).to(gate.dtype)


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """D silu(g) = s * (1 + g * (1 - s)) with s = 1 / (1 + exp(-g))."""
    d, g, u = grad.float(), gate.float(), up.float()
    s = 1.0 / (1.0 + torch.exp(-g))
    dgate = d * u * (s * (1.0 + g * (1.0 - s)))
    return dgate.to(gate.dtype), (d * (g * s)).to(up.dtype)
