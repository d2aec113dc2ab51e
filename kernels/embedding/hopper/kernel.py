# SPDX-License-Identifier: Apache-2.0
"""Embedding rows in Triton, and their gradient: each row's terms in token order from zero, found by a stable sort of the ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from isoexec.kernels.hopper.arithmetic import power_of_two

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["launch", "launch_gradient"]

_AHEAD = 8  # terms that are read before they are added


@triton.jit
def lookup_kernel(
    ids: tl.tensor,
    w: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    rows: tl.tensor,
    vocab: tl.tensor,
    w_row: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wanted = tl.load(ids + token).to(tl.int64) + tl.zeros((BLOCK,), tl.int64)
    row = wanted - first
    own = (row >= 0) & (row < rows) & (col < width)
    v = tl.load(w + row * w_row + col, mask=own, other=0.0).to(tl.float32)
    # an id that no rank holds gives NaN: refusing it here would need the host to wait for the GPU
    v = tl.where((wanted >= 0) & (wanted < vocab), v + 0.0, float("nan"))
    tl.store(out + token * width + col, v.to(out.dtype.element_ty), mask=col < width)


@triton.jit
def gradient_kernel(
    grad: tl.tensor,
    sorted_rows: tl.tensor,
    order: tl.tensor,
    dw: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0)
    row = tl.load(sorted_rows + place)
    before = tl.load(sorted_rows + place - 1, mask=place > 0, other=-1)
    if (row != before) & (row < rows):  # the first term of a row that this rank holds
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        more = 1
        while more > 0:
            for i in tl.static_range(AHEAD):
                found = tl.load(sorted_rows + place + i) + tl.zeros((BLOCK,), tl.int64)
                token = tl.load(order + place + i)
                ours = (found == row) & (col < width)
                total += tl.load(grad + token * width + col, mask=ours, other=0.0).to(tl.float32)
            place += AHEAD
            more = (tl.load(sorted_rows + place) == row).to(tl.int32)
        tl.store(dw + row * width + col, total.to(dw.dtype.element_ty), mask=col < width)


def launch(
    ids: Tensor,
    w: Tensor,
    out: Tensor,
    *,
    first: int,
    vocab: int,
    block: int | None = None,
    num_warps: int = 4,
) -> None:
    """Write rows of `w [rows, width]`, ids `first ...` of `vocab`, to contiguous `out [tokens, width]`; zeros for others' ids."""
    tokens, width = out.shape
    if not tokens or not width:
        return
    cut = block or min(2048, power_of_two(width))
    lookup_kernel[(tokens, -(-width // cut))](
        ids,
        w,
        out,
        first,
        len(w),
        vocab,
        w.stride(0),
        width,
        BLOCK=cut,
        num_warps=num_warps,
        enable_fp_fusion=False,
    )


def launch_gradient(
    grad: Tensor, ids: Tensor, dw: Tensor, *, first: int, block: int | None = None, num_warps: int = 4
) -> None:
    """Write the gradient of a table to zeroed `dw [rows, width]` from contiguous `grad [tokens, width]`, rounded once."""
    tokens, width = grad.shape
    if not tokens or not width:
        return
    rows = len(dw)
    local = ids.to(torch.int64) - first
    local = torch.where((local >= 0) & (local < rows), local, rows)  # the others' tokens come last
    sorted_rows, order = torch.sort(local, stable=True)
    # what is read ahead of the last token belongs to no row
    sorted_rows, order = F.pad(sorted_rows, (0, _AHEAD), value=-1), F.pad(order, (0, _AHEAD))
    cut = block or min(512, power_of_two(width))
    gradient_kernel[(tokens, -(-width // cut))](
        grad,
        sorted_rows,
        order,
        dw,
        rows,
        width,
        AHEAD=_AHEAD,
        BLOCK=cut,
        num_warps=num_warps,
        enable_fp_fusion=False,
    )
