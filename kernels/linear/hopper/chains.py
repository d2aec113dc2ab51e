# SPDX-License-Identifier: Apache-2.0
"""The chain in all three layouts of a linear and its gradients, from zero or from an accumulator, for any number of rows.

One persistent kernel: programs take tiles in turn, read both operands through tensor maps where they lie (no operand is
transposed in memory), start from zero or from fp32 tiles, and round once. What a map reads beyond an edge is zero, and a
step of zeros changes no accumulator. Tiles, warps, stages, the operands' sides and the order of tiles change no bit.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from isoexec.kernels.domain import require
from isoexec.kernels.linear.hopper.kernel import Tile

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LAYOUTS", "REFERENCE", "Layout", "launch", "reference", "sizes"]

# forward: x [M, K], w [N, K] -> [M, N]; input: dy [M, N], w [N, K] -> [M, K]; weight: dy [M, N], x [M, K] -> [N, K]
Layout = Literal["forward", "input", "weight"]
LAYOUTS: tuple[Layout, ...] = ("forward", "input", "weight")
REFERENCE = Tile(kind="maps", rows=128, columns=128, depth=64, warps=8, stages=3)
_GROUP = 8  # row tiles that take turns over the columns, so that both operands stay in the L2
_CHUNK = 64  # columns of an accumulator or a result that pass through shared memory at a time


@triton.jit
def _take(
    acc: tl.tensor,
    m0: tl.tensor,
    n0: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """A tile of the accumulator, chunk by chunk: only one of them lies in shared memory."""
    if COLUMNS == CHUNK:
        return acc.load([m0, n0])
    else:  # noqa: RET505 - Triton compiles both branches unless the condition decides
        left = _take(acc, m0, n0, ROWS, COLUMNS // 2, CHUNK)
        right = _take(acc, m0, n0 + COLUMNS // 2, ROWS, COLUMNS // 2, CHUNK)
        return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (ROWS, COLUMNS))


@triton.jit
def _put(
    out: tl.tensor,
    total: tl.tensor,
    m0: tl.tensor,
    n0: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    if COLUMNS == CHUNK:
        out.store([m0, n0], total.to(out.dtype))
    else:
        left, right = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        _put(out, left, m0, n0, ROWS, COLUMNS // 2, CHUNK)
        _put(out, right, m0, n0 + COLUMNS // 2, ROWS, COLUMNS // 2, CHUNK)


@triton.jit(do_not_specialize=["M", "N", "K"])
def chain_kernel(
    a: tl.tensor,
    b: tl.tensor,
    acc: tl.tensor,
    out: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
    A_DOWN: tl.constexpr,
    B_DOWN: tl.constexpr,
    SWAP: tl.constexpr,
    CONTINUE: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """`out [M, N] = acc + sum over k`; an operand lies with k along its rows, or DOWN its columns."""
    tall = tl.cdiv(M, ROWS)
    wide = tl.cdiv(N, COLUMNS)
    for tile in range(tl.program_id(0), tall * wide, tl.num_programs(0)):
        first = tile // (GROUP * wide) * GROUP
        many = min(tall - first, GROUP)
        m0 = (first + tile % (GROUP * wide) % many) * ROWS
        n0 = tile % (GROUP * wide) // many * COLUMNS
        if CONTINUE:
            total = _take(acc, m0, n0, ROWS, COLUMNS, CHUNK)
            if SWAP:
                total = total.T
        elif SWAP:
            total = tl.zeros((COLUMNS, ROWS), tl.float32)
        else:
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, K, DEPTH):
            left = a.load([k, m0]).T if A_DOWN else a.load([m0, k])
            right = b.load([k, n0]) if B_DOWN else b.load([n0, k]).T
            total = tl.dot(right.T, left.T, total) if SWAP else tl.dot(left, right, total)
        if SWAP:
            total = total.T
        _put(out, total, m0, n0, ROWS, COLUMNS, CHUNK)


@cache
def _programs(device: torch.device) -> int:
    """Programs that run at the same time: one a multiprocessor."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def sizes(layout: Layout, a: Tensor, b: Tensor) -> tuple[int, int, int]:
    """Rows, columns of the result, and the length of the chain."""
    if layout == "forward":
        return len(a), len(b), a.shape[1]
    if layout == "input":
        return len(a), b.shape[1], a.shape[1]
    return a.shape[1], b.shape[1], len(a)


def launch(layout: Layout, a: Tensor, b: Tensor, acc: Tensor | None, out: Tensor, tile: Tile) -> None:
    """Write the product to `out` (bf16 or fp32, rows of unit stride), going on from `acc` (fp32, same shape) if given.

    `acc` may be `out`. Operands are bf16 with rows of unit stride, 16 bytes aligned; a chain of length 0 gives `acc` or zero.
    """
    M, N, K = sizes(layout, a, b)
    if not M or not N:
        return
    if not K:
        out.zero_() if acc is None else out.copy_(acc)
        return
    given = {"left": a, "right": b, "result": out} | ({} if acc is None else {"accumulator": acc})
    for name, x in given.items():
        require(
            x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0,
            "sm90_linear",
            f"{name} {list(x.shape)} with strides {x.stride()}, {x.data_ptr() % 16} bytes past an alignment",
            "rows of unit stride that each begin at a multiple of 16 bytes",
        )
    chunk = min(tile.columns, _CHUNK)
    a_down, b_down = layout == "weight", layout != "forward"
    grid = (min(_programs(out.device), -(-M // tile.rows) * -(-N // tile.columns)),)
    end = TensorDescriptor.from_tensor(out, [tile.rows, chunk])
    chain_kernel[grid](
        TensorDescriptor.from_tensor(a, [tile.depth, tile.rows] if a_down else [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(b, [tile.depth, tile.columns] if b_down else [tile.columns, tile.depth]),
        end if acc is None else TensorDescriptor.from_tensor(acc, [tile.rows, chunk]),
        end,
        *(M, N, K),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        CHUNK=chunk,
        A_DOWN=a_down,
        B_DOWN=b_down,
        SWAP=tile.kind == "swapped",
        CONTINUE=acc is not None,
        GROUP=_GROUP,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )


def reference(
    layout: Layout, a: Tensor, b: Tensor, acc: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The product by one tile for every shape: what providers of that layout are certified against."""
    M, N, _ = sizes(layout, a, b)
    out = torch.empty(M, N, dtype=out_dtype, device=a.device)
    launch(layout, a, b, acc, out, REFERENCE)
    return out
