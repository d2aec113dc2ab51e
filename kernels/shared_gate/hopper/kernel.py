# SPDX-License-Identifier: Apache-2.0
"""The shared expert's gate in Triton: logits on the tensor core, the product, and the gradients; blocks and warps are free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from isoexec.kernels.hopper.arithmetic import fold, fold_rows, power_of_two, sigmoid

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["launch", "launch_gradient", "launch_logits", "launch_weight"]

_COLUMNS = 16  # the narrowest product a tensor core has; one of them is real


@triton.jit
def logit_kernel(
    x: tl.tensor,
    w: tl.tensor,
    logit: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, width, DEPTH):
        real = start + k < width
        left = tl.load(
            x + row[:, None] * stride + start + k[None, :],
            mask=(row < rows)[:, None] & real[None, :],
            other=0.0,
        )
        right = tl.load(
            w + start + k[:, None] + col[None, :] * 0, mask=(col == 0)[None, :] & real[:, None], other=0.0
        )
        acc = tl.dot(left, right, acc)
    first = tl.sum(tl.where((col == 0)[None, :], acc, 0.0), axis=1)
    tl.store(logit + row, first, mask=row < rows)


@triton.jit
def gate_kernel(
    y: tl.tensor, logit: tl.tensor, out: tl.tensor, width: tl.tensor, stride: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = col < width
    s = sigmoid(tl.load(logit + row + tl.arange(0, 1)))
    v = tl.load(y + row * stride + col, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * width + col, (s * v).to(out.dtype.element_ty), mask=live)


@triton.jit
def gradient_kernel(
    grad: tl.tensor,
    y: tl.tensor,
    w: tl.tensor,
    logit: tl.tensor,
    dy: tl.tensor,
    dx: tl.tensor,
    d: tl.tensor,
    width: tl.tensor,
    y_row: tl.tensor,
    PADDED: tl.constexpr,
) -> None:
    """Of one token: of y, of x, and d of its logit."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, PADDED)
    live = col < width
    one = tl.arange(0, 1)
    s = sigmoid(tl.load(logit + row + one))
    g = tl.load(grad + row * width + col, mask=live, other=0.0).to(tl.float32)
    v = tl.load(y + row * y_row + col, mask=live, other=0.0).to(tl.float32)
    tl.store(dy + row * width + col, (s * g).to(dy.dtype.element_ty), mask=live)
    total = fold(tl.reshape(g * v, (1, PADDED)), 1, PADDED)
    own = total * (s * (1.0 - s))
    tl.store(d + row + one, own)
    scale = tl.load(w + col, mask=live, other=0.0).to(tl.float32)
    tl.store(dx + row * width + col, (own * scale).to(dx.dtype.element_ty), mask=live)


@triton.jit
def tree_kernel(
    x: tl.tensor,
    d: tl.tensor,
    parts: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One block of tokens: the pair tree of its terms, for some columns."""
    block = tl.program_id(0).to(tl.int64)
    row = block * TOKENS + tl.arange(0, TOKENS)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = (row < rows)[:, None] & (col < width)[None, :]
    v = tl.load(x + row[:, None] * stride + col[None, :], mask=real, other=0.0).to(tl.float32)
    own = tl.load(d + row, mask=row < rows, other=0.0)
    total = fold_rows(tl.where(real, own[:, None] * v, 0.0), TOKENS, COLUMNS)
    tl.store(parts + block * width + col, total, mask=col < width)


@triton.jit
def blocks_kernel(
    parts: tl.tensor, out: tl.tensor, blocks: tl.tensor, width: tl.tensor, COLUMNS: tl.constexpr
) -> None:
    """The blocks' sums in their order."""
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    live = col < width
    total = tl.zeros((COLUMNS,), tl.float32)
    at = parts + col
    for _ in range(blocks):
        total = total + tl.load(at, mask=live, other=0.0)
        at += width
    tl.store(out + col, total.to(out.dtype.element_ty), mask=live)


def launch_logits(
    x: Tensor, w: Tensor, logit: Tensor, *, rows: int = 16, depth: int = 128, num_warps: int = 4
) -> None:
    """Write fp32 logits `[T]` of `x [T, H]` and contiguous `w [1, H]`, bf16."""
    if not len(x):
        return
    logit_kernel[(-(-len(x) // rows),)](
        *(x, w, logit, len(x), x.shape[1], x.stride(0)),
        ROWS=rows,
        DEPTH=depth,
        COLUMNS=_COLUMNS,
        num_warps=num_warps,
        num_stages=4,
        enable_fp_fusion=False,
    )


def launch(y: Tensor, logit: Tensor, out: Tensor, *, block: int | None = None, num_warps: int = 4) -> None:
    """Write `sigmoid(logit) * y` to contiguous `out [T, H]`."""
    rows, width = y.shape
    if not out.numel():
        return
    block = block or min(2048, power_of_two(width))
    gate_kernel[(rows, -(-width // block))](
        y, logit, out, width, y.stride(0), BLOCK=block, num_warps=num_warps, enable_fp_fusion=False
    )


def launch_gradient(
    grad: Tensor, y: Tensor, w: Tensor, logit: Tensor, dy: Tensor, dx: Tensor, d: Tensor
) -> None:
    """Write the gradients of y and x `[T, H]` and of the logits fp32 `[T]`; all but y contiguous."""
    rows, width = grad.shape
    if not grad.numel():
        return
    padded = power_of_two(width)
    gradient_kernel[(rows,)](
        *(grad, y, w, logit, dy, dx, d, width, y.stride(0)),
        PADDED=padded,
        num_warps=max(1, min(8, padded // 512)),
        enable_fp_fusion=False,
    )


def launch_weight(
    x: Tensor, d: Tensor, parts: Tensor, out: Tensor, tokens: int, *, columns: int = 32
) -> None:
    """Write the gradient of w `[1, H]`; `parts` is fp32 `[blocks of tokens, H]`."""
    rows, width = x.shape
    blocks = len(parts)
    if blocks:
        tree_kernel[(blocks, -(-width // columns))](
            *(x, d, parts, rows, width, x.stride(0)),
            TOKENS=tokens,
            COLUMNS=columns,
            num_warps=4,
            enable_fp_fusion=False,
        )
    blocks_kernel[(-(-width // 128),)](
        parts, out, blocks, width, COLUMNS=128, num_warps=4, enable_fp_fusion=False
    )
