# SPDX-License-Identifier: Apache-2.0
"""YaRN on sm90: the rotation of `rope_interleaved` by another table."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from isoexec.contracts.digests import digest_bytes
from isoexec.kernels.rope.hopper.ops import rotate
from isoexec.kernels.rope_yarn.hopper.naive import Yarn, table

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Yarn", "rope", "table_digest", "tables"]


@lru_cache(maxsize=16)
def tables(head_dim: int, base: float, yarn: Yarn, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cos and sin times the attention factor, fp32 `[8192, head_dim / 2]`, made on the host; once before a CUDA graph."""
    cos, sin = table(head_dim, base, yarn)
    return cos.to(device), sin.to(device)


def table_digest(head_dim: int, base: float, yarn: Yarn, device: torch.device) -> str:
    """`sha256:...` of the table as it lies on the device, for attestation."""
    both = torch.stack(tables(head_dim, base, yarn, device)).cpu()
    return digest_bytes(both.view(torch.uint8).numpy().tobytes())


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x [tokens, heads, head_dim]` (views welcome), columns 2i and 2i + 1 rotated at `positions [tokens]`; differentiable.

    As `rope_interleaved`'s, by a table that carries the attention factor.
    """
    return rotate(x, positions, cos, sin, interleaved=True)
