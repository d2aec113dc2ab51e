# SPDX-License-Identifier: Apache-2.0
"""rope.neox_fp32/1: halves rotated by a table made in float64 and rounded to fp32; multiplies and adds are separate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

LENGTH = 8192


def table(head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cos and sin, fp32 [LENGTH, head_dim / 2]."""
    inverse = float(base) ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(LENGTH, dtype=torch.float64), inverse)
    return angle.cos().float(), angle.sin().float()


def rope(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """X [tokens, heads, head_dim], positions [tokens]."""
    cos, sin = (t[positions].unsqueeze(1) for t in table(x.shape[-1], base))
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def rope_backward(g: Tensor, positions: Tensor, base: float) -> Tensor:
    """The rotation by the opposite angle."""
    cos, sin = (t[positions].unsqueeze(1) for t in table(g.shape[-1], base))
    a, b = g.float().chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1).to(g.dtype)
