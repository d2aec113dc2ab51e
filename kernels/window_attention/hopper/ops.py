# SPDX-License-Identifier: Apache-2.0
"""Sliding-window attention on sm90 by the own kernel of `attention`, whose specification states this function too.

No library serves it: FlashAttention-3 starts its blocks at the window of a tile's first row, so a row's bits would be its
neighbours'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isoexec.kernels.attention.hopper import ops
from isoexec.kernels.attention.hopper.ops import Plan, attention
from isoexec.kernels.domain import require

if TYPE_CHECKING:
    import torch

__all__ = ["Plan", "attention", "plan"]


def plan(
    *,
    requests: int,
    tokens: int,
    most_rows: int,
    most_keys: int,
    kv_segment: int,
    window: int,
    page: int = 0,
    gradients: bool = False,
    device: torch.device | str = "cuda",
) -> Plan:
    """An empty plan in which a row sees its last `window` keys, its own included; the rest as `attention.hopper.ops.plan`.

    Raises `DomainError` for a window below 1.
    """
    require(
        window > 0,
        "sm90_attention",
        f"a window of {window}",
        "at least the row's own key: a window from 1 on",
    )
    return ops.plan(
        requests=requests,
        tokens=tokens,
        most_rows=most_rows,
        most_keys=most_keys,
        kv_segment=kv_segment,
        page=page,
        provider="triton",
        window=window,
        gradients=gradients,
        device=device,
    )
