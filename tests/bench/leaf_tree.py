# SPDX-License-Identifier: Apache-2.0
"""A linear as a balanced tree over eight leaves of K, the published way to one result for any tensor parallelism: a peer to time.

Each leaf is a chain of tensor-core steps over K / 8; leaves are added in fp32 as ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) and
rounded once. Few rows take a program a leaf and a second kernel for the tree; many rows one persistent program a tile, which
keeps a pair of leaves in registers and finished subtrees in a scratch tile that stays in the L2. Both give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LEAVES", "leaf_tree", "reference"]

LEAVES = 8
FEW_ROWS = 128  # up to which every leaf has programs of its own


@triton.jit
def _leaf(
    x: tl.tensor,
    w: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    K: tl.tensor,
    first: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    LEAF: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    k = first + tl.arange(0, DEPTH)
    x_at = x + row.to(tl.int64)[:, None] * K + k[None, :]
    w_at = w + col.to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(LEAF // DEPTH):
        a = tl.load(x_at, mask=(row < M)[:, None], other=0.0)
        b = tl.load(w_at, mask=(col < N)[None, :], other=0.0)
        acc = tl.dot(a, b, acc)
        x_at += DEPTH
        w_at += DEPTH
    return acc


@triton.jit(do_not_specialize=["M"])
def leaf_kernel(
    x: tl.tensor,
    w: tl.tensor,
    parts: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    LEAF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    leaf = tl.program_id(2)
    acc = _leaf(x, w, row, col, K, leaf * LEAF, M, N, LEAF, DEPTH, ROWS, COLUMNS)
    at = parts + (leaf.to(tl.int64) * M + row[:, None]) * N + col[None, :]
    tl.store(at, acc, mask=(row < M)[:, None] & (col < N)[None, :])


@triton.jit(do_not_specialize=["size"])
def tree_kernel(parts: tl.tensor, out: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = i < size
    p = parts + i
    a = tl.load(p, mask=real) + tl.load(p + size, mask=real)
    b = tl.load(p + 2 * size, mask=real) + tl.load(p + 3 * size, mask=real)
    c = tl.load(p + 4 * size, mask=real) + tl.load(p + 5 * size, mask=real)
    d = tl.load(p + 6 * size, mask=real) + tl.load(p + 7 * size, mask=real)
    tl.store(out + i, ((a + b) + (c + d)).to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["M"])
def whole_kernel(
    x: tl.tensor,
    w: tl.tensor,
    out: tl.tensor,
    scratch: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    LEAF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
) -> None:
    down, across = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    mine = scratch + tl.program_id(0).to(tl.int64) * (2 * ROWS * COLUMNS)
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    for tile in range(tl.program_id(0), down * across, tl.num_programs(0)):
        band = tile // (BAND * across)
        high = tl.minimum(down - band * BAND, BAND)
        row = (band * BAND + tile % (BAND * across) % high) * ROWS + tl.arange(0, ROWS)
        col = (tile % (BAND * across) // high) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for pair in tl.static_range(4):
            total = _leaf(x, w, row, col, K, 2 * pair * LEAF, M, N, LEAF, DEPTH, ROWS, COLUMNS)
            total += _leaf(x, w, row, col, K, (2 * pair + 1) * LEAF, M, N, LEAF, DEPTH, ROWS, COLUMNS)
            if pair % 2 == 0:
                tl.store(mine + at, total)
            else:
                total = tl.load(mine + at) + total
                if pair == 1:
                    tl.store(mine + ROWS * COLUMNS + at, total)
                else:
                    total = tl.load(mine + ROWS * COLUMNS + at) + total
        to = out + row.to(tl.int64)[:, None] * N + col[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=(row < M)[:, None] & (col < N)[None, :])


def leaf_tree(x: Tensor, w: Tensor, *, programs: int = 132) -> Tensor:
    """`x [M, K] @ w [N, K]^T` in bf16, K a multiple of 512, by eight leaves; `programs` as the GPU has multiprocessors."""
    M, K = x.shape
    N, leaf = len(w), K // LEAVES
    assert K % (LEAVES * 64) == 0, "leaves of whole loads"
    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if M <= FEW_ROWS:
        rows = max(16, triton.next_power_of_2(min(M, 64)))
        parts = torch.empty(LEAVES, M, N, dtype=torch.float32, device=x.device)
        grid = (triton.cdiv(N, 64), triton.cdiv(M, rows), LEAVES)
        leaf_kernel[grid](
            x, w, parts, M, N, K, LEAF=leaf, ROWS=rows, COLUMNS=64, DEPTH=64, num_warps=4, num_stages=4
        )
        tree_kernel[(triton.cdiv(M * N, 1024),)](parts, out, M * N, BLOCK=1024)
        return out
    scratch = torch.empty(programs, 2, 128, 128, dtype=torch.float32, device=x.device)
    whole_kernel[(programs,)](
        x,
        w,
        out,
        scratch,
        *(M, N, K),
        LEAF=leaf,
        ROWS=128,
        COLUMNS=128,
        DEPTH=64,
        BAND=8,
        num_warps=8,
        num_stages=3,
    )
    return out


def reference(x: Tensor, w: Tensor) -> Tensor:
    """The same expression in plain torch, each leaf an exact product rounded to fp32."""
    leaves = [
        (a.double() @ b.double().t()).float() for a, b in zip(x.chunk(8, 1), w.chunk(8, 1), strict=True)
    ]
    pairs = [leaves[i] + leaves[i + 1] for i in range(0, 8, 2)]
    return ((pairs[0] + pairs[1]) + (pairs[2] + pairs[3])).to(x.dtype)
