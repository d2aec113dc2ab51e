# SPDX-License-Identifier: Apache-2.0
"""rope.yarn_interleaved_fp32/1: columns 2i and 2i + 1 are rotated by frequency i of a YaRN table, and stay where they are.

YaRN (Peng et al. 2023, arXiv 2309.00071) as DeepSeek-V3 computes it, in float64: frequencies that turn often within the
trained length stay, those that turn seldom are divided by `factor`, a linear ramp lies between, and cos and sin carry the
attention factor before they are rounded to fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from isoexec.kernels.rope.hopper.rotation import rotate
from isoexec.kernels.rope.naive import LENGTH

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """A model's `rope_scaling`: `original` is the length it was trained for, `truncate` rounds the ramp's ends outwards."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by; 1 where both scales are equal, as in DeepSeek-V3."""
        if self.mscale and self.mscale_all_dim:
            return self._scale(self.mscale) / self._scale(self.mscale_all_dim)
        return self._scale(1.0)

    def _scale(self, by: float) -> float:
        return 1.0 if self.factor <= 1.0 else 0.1 * by * math.log(self.factor) + 1.0


def table(head_dim: int, base: float, yarn: Yarn) -> tuple[Tensor, Tensor]:
    """Cos and sin times the attention factor, fp32 [LENGTH, head_dim / 2]."""
    place = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    kept = float(base) ** -place

    def turning(turns: float) -> float:
        """The frequency, by its place, that turns so often within the trained length."""
        return head_dim * math.log(yarn.original / (turns * 2.0 * math.pi)) / (2.0 * math.log(base))

    low, high = turning(yarn.beta_fast), turning(yarn.beta_slow)
    if yarn.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0.0, 1.0)
    inverse = kept / yarn.factor * ramp + kept * (1.0 - ramp)
    angle = torch.outer(torch.arange(LENGTH, dtype=torch.float64), inverse)
    return (angle.cos() * yarn.attention_factor).float(), (angle.sin() * yarn.attention_factor).float()


def rope(x: Tensor, positions: Tensor, base: float, yarn: Yarn) -> Tensor:
    """X [tokens, heads, head_dim], positions [tokens]."""
    return rotate(x, positions, table(x.shape[-1], base, yarn), interleaved=True)


def rope_backward(g: Tensor, positions: Tensor, base: float, yarn: Yarn) -> Tensor:
    """The gradient carries the attention factor, as the rotation does."""
    return rotate(g, positions, table(g.shape[-1], base, yarn), interleaved=True, reverse=True)
