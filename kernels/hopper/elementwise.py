# SPDX-License-Identifier: Apache-2.0
"""Element by element in Triton: the sum of two tensors, rounded once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["launch_add"]


@triton.jit(do_not_specialize=["count"])
def add_kernel(a: tl.tensor, b: tl.tensor, out: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    v = tl.load(a + at, mask=live, other=0.0).to(tl.float32)
    v = v + tl.load(b + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + at, v.to(out.dtype.element_ty), mask=live)


def launch_add(a: Tensor, b: Tensor, *, block: int = 1024, num_warps: int = 4) -> Tensor:
    """`a + b` of contiguous tensors of one shape, in a's dtype."""
    out = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    if a.numel():
        add_kernel[(-(-a.numel() // block),)](
            a,
            b,
            out,
            a.numel(),
            BLOCK=block,
            num_warps=num_warps,
            enable_fp_fusion=False,
        )
    return out
