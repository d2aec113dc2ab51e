# SPDX-License-Identifier: Apache-2.0
"""One rank's products: the linear, its two gradients, and a chain that goes on from an accumulator, by tile or by library."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.linear.hopper import chains, cublaslt
from isoexec.kernels.linear.hopper.kernel import launch
from isoexec.kernels.linear.hopper.naive import STEP
from isoexec.kernels.linear.hopper.table import chain_tile, tile_for

if TYPE_CHECKING:
    from torch import Tensor

    from isoexec.kernels.linear.hopper.chains import Layout

__all__ = ["product"]

_OUT = (torch.bfloat16, torch.float32)
_ALIGNED = 8  # elements: rows of other lengths are no multiple of 16 bytes


def product(
    layout: Layout,
    a: Tensor,
    b: Tensor,
    acc: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """`chains.Layout` of bf16 operands, going on from fp32 `acc`, rounded once to bf16 or fp32, into `out` if given.

    Raises `DomainError` for what no provider is certified for.
    """
    require(
        a.dtype == b.dtype == torch.bfloat16
        and a.dim() == b.dim() == 2
        and a.stride(-1) == b.stride(-1) == 1
        and out_dtype in _OUT,
        "sm90_linear",
        f"{layout} of {a.dtype} {list(a.shape)} strides {a.stride()} and {b.dtype} {list(b.shape)} strides {b.stride()}, "
        f"to {out_dtype}",
        "two bfloat16 matrices with rows of unit stride, and a result of bfloat16 or float32",
    )
    M, N, K = chains.sizes(layout, a, b)
    shared = {"forward": b.shape[1] == K, "input": len(b) == K, "weight": len(b) == K}[layout]
    steps = layout == "weight" or K % STEP == 0  # tokens are padded with zeros
    require(
        shared and steps and N % _ALIGNED == 0,
        "sm90_linear",
        f"{layout} of {list(a.shape)} and {list(b.shape)}",
        "x [M, K] and w [N, K] (forward), dy [M, N] and w [N, K] (input), dy [M, N] and x [M, K] (weight), sides of whole "
        f"{STEP}s",
    )
    require(
        acc is None or (acc.dtype == torch.float32 and acc.shape == (M, N)),
        "sm90_linear",
        f"an accumulator {acc.dtype if acc is not None else None} {list(acc.shape) if acc is not None else None}",
        f"float32 [{M}, {N}]",
    )
    weight = (a.shape[1], b.shape[1]) if layout == "weight" else (len(b), b.shape[1])
    rows = len(a)
    if acc is not None:
        tile = chain_tile("continue", *weight, rows)
    elif layout != "forward":
        tile = chain_tile(layout, *weight, rows)
    else:
        few = tile_for(*weight, rows)
        if few is not None and a.is_contiguous() and b.is_contiguous():
            y = torch.empty(M, N, dtype=out_dtype, device=a.device) if out is None else out
            launch(a, b, y, few)
            return y
        # a part of wider rows is read where it lies
        tile = None if few is None else chain_tile("continue", *weight, rows)
    if tile is None and rows:
        y = _library(layout, a, b, out_dtype)
        return y if out is None else out.copy_(y)
    y = torch.empty(M, N, dtype=out_dtype, device=a.device) if out is None else out
    chains.launch(layout, a, b, acc, y, tile or chains.REFERENCE)
    return y


def _library(layout: Layout, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    if layout == "forward":
        return cublaslt.linear(a, b, out_dtype)
    return (cublaslt.input_gradient if layout == "input" else cublaslt.weight_gradient)(a, b, out_dtype)
