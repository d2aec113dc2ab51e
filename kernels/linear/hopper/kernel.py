# SPDX-License-Identifier: Apache-2.0
"""The K chain in Triton for few rows: plain loads, or tensor-map loads with weights or rows as the left operand.

Every tile walks K once from zero in order, so tiles, warps, stages and the operands' sides change no bit on Hopper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["REFERENCE", "Tile", "launch", "reference"]

Kind = Literal["pointers", "maps", "swapped"]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How a product is cut: free of bits, tuned for time. `rows` is the row block and the most rows it is meant for."""

    kind: Kind
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


REFERENCE = Tile(kind="pointers", rows=128, columns=128, depth=64, warps=8, stages=3)


@triton.jit(do_not_specialize=["M"])
def pointer_kernel(
    x: tl.tensor,
    w: tl.tensor,
    out: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    k = tl.arange(0, DEPTH)
    x_at = x + row[:, None] * K + k[None, :]
    w_at = w + col[None, :] * K + k[:, None]
    real_row = (row < M)[:, None]
    real_col = (col < N)[None, :]
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, DEPTH):
        a = tl.load(x_at + start, mask=real_row, other=0.0)
        b = tl.load(w_at + start, mask=real_col, other=0.0)
        acc = tl.dot(a, b, acc)
    tl.store(out + row[:, None] * N + col[None, :], acc.to(out.dtype.element_ty), mask=real_row & real_col)


@triton.jit(do_not_specialize=["M"])
def map_kernel(
    x: tl.tensor,
    w: tl.tensor,
    out: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWAP: tl.constexpr,
) -> None:
    first_row = tl.program_id(1) * ROWS
    first_col = tl.program_id(0) * COLUMNS
    row = (first_row + tl.arange(0, ROWS)).to(tl.int64)
    col = (first_col + tl.arange(0, COLUMNS)).to(tl.int64)
    if SWAP:
        acc = tl.zeros((COLUMNS, ROWS), tl.float32)
        for start in range(0, K, DEPTH):
            acc = tl.dot(w.load([first_col, start]), x.load([first_row, start]).T, acc)
        at = out + row[None, :] * N + col[:, None]
        tl.store(at, acc.to(out.dtype.element_ty), mask=(row < M)[None, :] & (col < N)[:, None])
    else:
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, K, DEPTH):
            acc = tl.dot(x.load([first_row, start]), w.load([first_col, start]).T, acc)
        at = out + row[:, None] * N + col[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=(row < M)[:, None] & (col < N)[None, :])


def launch(x: Tensor, w: Tensor, out: Tensor, tile: Tile) -> None:
    """Write `x [M, K] @ w [N, K]^T` to contiguous `out [M, N]` (bf16 or fp32); K a multiple of the tile's depth."""
    M, K = x.shape
    N = w.shape[0]
    if not M:
        return
    grid = (-(-N // tile.columns), -(-M // tile.rows))
    cut = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
    tuning = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    if tile.kind == "pointers":
        pointer_kernel[grid](x, w, out, M, N, K, **cut, **tuning)
        return
    x_map = TensorDescriptor.from_tensor(x, [tile.rows, tile.depth])
    w_map = TensorDescriptor.from_tensor(w, [tile.columns, tile.depth])
    map_kernel[grid](x_map, w_map, out, M, N, K, **cut, SWAP=tile.kind == "swapped", **tuning)


def reference(x: Tensor, w: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The chain by one tile for every shape: what providers are certified against."""
    out = torch.empty(len(x), len(w), dtype=out_dtype, device=x.device)
    launch(x, w, out, REFERENCE)
    return out
