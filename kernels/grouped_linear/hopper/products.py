# SPDX-License-Identifier: Apache-2.0
"""One rank's grouped products: the experts' linear and its two gradients, by the library or by own tiles with the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.grouped_linear.hopper import kernel, table
from isoexec.kernels.grouped_linear.hopper.naive import STEP

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["library", "library_input", "library_weight", "rows_product", "weight_product"]

BF16, FP32 = torch.bfloat16, torch.float32
_MOST_EXPERTS = 512


def _grouped(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    call: Callable[..., Tensor] = torch._grouped_mm
    return call(a, b, offs=ends)


def library(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """`x [R, K]` by `w [E, N, K]` in bf16."""
    return _grouped(x, w.transpose(1, 2), offsets[1:])


def library_input(dy: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """`dy [R, N]` by `w [E, N, K]` in bf16, a chain down N."""
    return _grouped(dy, w, offsets[1:])


def library_weight(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """`dy^T x` of each expert's rows in bf16; what the library leaves of experts without rows is made zero."""
    out = _grouped(dy.t(), x, offsets[1:])
    kernel.launch_idle(out, offsets)
    return out


def _check(a: Tensor, b: Tensor, offsets: Tensor, experts: int) -> None:
    require(
        all(t.dtype == BF16 and t.stride(-1) == 1 for t in (a, b)),
        "sm90_grouped_linear",
        f"{a.dtype} strides {a.stride()} and {b.dtype} strides {b.stride()}",
        "bfloat16 with unit stride in the last dimension",
    )
    require(
        offsets.dtype == torch.int32 and offsets.shape == (experts + 1,) and 1 <= experts <= _MOST_EXPERTS,
        "sm90_grouped_linear",
        f"offsets {list(offsets.shape)} {offsets.dtype} for {experts} experts",
        f"int32, one more than experts, of which there are 1 to {_MOST_EXPERTS}",
    )


def rows_product(
    a: Tensor,
    w: Tensor,
    offsets: Tensor,
    acc: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    *,
    down: bool = False,
) -> Tensor:
    """`kernel.launch` of bf16 operands, rounded once to bf16 or fp32, into contiguous `out` where given.

    By the library from zero to bf16 where the table has no tile for so many rows. Raises `DomainError` for what no provider is
    certified for.
    """
    _check(a, w, offsets, len(w))
    _, N, K = w.shape
    length, columns = (N, K) if down else (K, N)
    require(
        a.dim() == 2 and a.shape[1] == length and N % STEP == 0 and K % STEP == 0,
        "sm90_grouped_linear",
        f"rows {list(a.shape)} by weights {list(w.shape)}" + (", down their rows" if down else ""),
        f"rows of the weights' {'N' if down else 'K'}, both sides whole {STEP}s",
    )
    require(
        acc is None or (acc.dtype == FP32 and acc.shape == (len(a), columns) and acc.is_contiguous()),
        "sm90_grouped_linear",
        f"an accumulator {acc.dtype if acc is not None else None} {list(acc.shape) if acc is not None else None}",
        f"contiguous float32 [{len(a)}, {columns}]",
    )
    layout = "input" if down else "forward"
    tile = table.tile_for(layout, N, K, len(a))
    if acc is None and tile is None and out_dtype == BF16 and len(a) and table.library_serves(layout):
        y = (library_input if down else library)(a, w, offsets)
        return y if out is None else out.copy_(y)
    y = torch.empty(len(a), columns, dtype=out_dtype, device=a.device) if out is None else out
    kernel.launch(a, w, offsets, acc, y, tile or kernel.REFERENCE, down=down)
    return y


def weight_product(dy: Tensor, x: Tensor, offsets: Tensor, experts: int, out_dtype: torch.dtype) -> Tensor:
    """`dy [R, N]^T x [R, K]` of each expert's rows -> `[E, N, K]` in bf16 by the library, in fp32 by own tiles."""
    _check(dy, x, offsets, experts)
    N, K = dy.shape[1], x.shape[1]
    require(
        len(dy) == len(x) and N % STEP == 0 and K % STEP == 0,
        "sm90_grouped_linear",
        f"gradients {list(dy.shape)} of rows {list(x.shape)}",
        f"as many of each, sides of whole {STEP}s",
    )
    tile = table.tile_for("weight", N, K, len(x))
    if out_dtype == BF16 and tile is None and len(x) and table.library_serves("weight"):
        return library_weight(dy, x, offsets)
    out = torch.empty(experts, N, K, dtype=out_dtype, device=x.device)
    kernel.launch_weight(dy, x, offsets, out, tile or kernel.REFERENCE)
    return out
