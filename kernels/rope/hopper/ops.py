# SPDX-License-Identifier: Apache-2.0
"""NeoX rotary embedding as an opaque torch op over one table; forward only."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from isoexec.contracts.digests import digest_bytes
from isoexec.kernels.domain import require
from isoexec.kernels.hopper.library import define, require_model_dtype
from isoexec.kernels.rope.hopper.kernel import launch
from isoexec.kernels.rope.naive import table

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rope", "table_digest", "tables"]


@lru_cache(maxsize=16)
def tables(head_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cos and sin, fp32 `[8192, head_dim / 2]`, made on the host and copied: a GPU's float64 cosine has other bits.

    Call it once before a CUDA graph is captured; a copy from the host cannot be captured.
    """
    cos, sin = table(head_dim, base)
    return cos.to(device), sin.to(device)


def table_digest(head_dim: int, base: float, device: torch.device) -> str:
    """`sha256:...` of the table as it lies on the device, for attestation."""
    both = torch.stack(tables(head_dim, base, device)).cpu()
    return digest_bytes(both.view(torch.uint8).numpy().tobytes())


def _rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    require_model_dtype("sm90_rope", x)
    require(
        x.dim() == 3
        and x.shape[-1] == 2 * cos.shape[-1]
        and positions.shape == x.shape[:1]
        and positions.dtype in (torch.int32, torch.int64)
        and cos.shape == sin.shape
        and cos.dtype == sin.dtype == torch.float32
        and all(t.is_contiguous() for t in (positions, cos, sin)),
        "sm90_rope",
        f"x {list(x.shape)}, positions {list(positions.shape)} {positions.dtype}, table {list(cos.shape)} {cos.dtype}",
        "x [tokens, heads, head_dim], integer positions [tokens], contiguous fp32 tables [length, head_dim / 2]",
    )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(x, positions, cos, sin, out)
    return out


def _fake(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x.new_empty(x.shape)


_op = define("sm90_rope(Tensor x, Tensor positions, Tensor cos, Tensor sin) -> Tensor", _rope, _fake)


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x [tokens, heads, head_dim]` (views welcome) rotated at `positions [tokens]` by `tables`; NaN outside the table."""
    out: Tensor = _op(x, positions, cos, sin)
    return out
