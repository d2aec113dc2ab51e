# SPDX-License-Identifier: Apache-2.0
"""The reference of attention.mma_segments/1 and attention.mma_window/1 in Triton, and of their gradients.

It walks one segment for 16 rows at a time and adds every row's weights key by key: slow, and independent of the library and
the kernels whose bits it certifies. Rows a tile and warps are free. The gradients are the specification's own lines with the
chip's tensor-core steps and exp2 in the places where plain torch cannot state a last bit.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from isoexec.kernels.attention.hopper import naive
from isoexec.kernels.attention.hopper.kernel import _unary, _weighed, lane_total, launch_merge, log_sum_exp
from isoexec.kernels.attention.hopper.naive import BLOCK, WINDOW_BLOCK, constants
from isoexec.kernels.hopper.arithmetic import power_of_two

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["chain", "exp2", "gradients", "in_segments", "launch_segment", "reference"]


@triton.jit(do_not_specialize=["R", "n", "visible", "window"])
def segment_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    R: tl.tensor,
    n: tl.tensor,
    visible: tl.tensor,
    window: tl.tensor,
    c: tl.tensor,
    c_ln2: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    o_row: tl.tensor,
    o_head: tl.tensor,
    l_head: tl.tensor,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    HARDWARE: tl.constexpr,
    ASCENDING: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> None:
    first = tl.program_id(0) * ROWS
    h = tl.program_id(1)
    row = first + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    col = tl.arange(0, WIDTH)
    limit = tl.minimum(visible + row, n)
    x = tl.load(
        q + row.to(tl.int64)[:, None] * q_row + h * q_head + d[None, :], mask=(row < R)[:, None], other=0.0
    )
    m = tl.full([ROWS], float("-inf"), tl.float32)
    o = tl.zeros([ROWS, D], tl.float32)
    lanes = tl.zeros([ROWS, 4], tl.float32)
    blocks = tl.cdiv(tl.minimum(visible + first + ROWS - 1, n), KEYS)
    for i in range(blocks):
        start = i * KEYS if ASCENDING else (blocks - 1 - i) * KEYS
        key = start + col
        real = (col < KEYS) & (key < n)
        at = key.to(tl.int64)
        kx = tl.load(
            k + at[None, :] * k_row + (h // GROUP) * k_head + d[:, None], mask=real[None, :], other=0.0
        )
        s = tl.dot(x, kx, tl.zeros([ROWS, WIDTH], tl.float32))
        seen = (col < KEYS)[None, :] & (key[None, :] < limit[:, None])
        if WINDOWED:
            seen = seen & (key[None, :] >= (visible + row - window)[:, None])
        s = tl.where(seen, s, float("-inf"))
        p, r, lanes, m = _weighed(s, m, lanes, c, ROWS, WIDTH, KEYS, HARDWARE)
        vx = tl.load(
            v + at[:, None] * v_row + (h // GROUP) * v_head + d[None, :], mask=real[:, None], other=0.0
        )
        o = tl.dot(p.to(tl.bfloat16), vx, o * r[:, None])
    total = lane_total(lanes)
    y = o * _unary(total, "rcp", HARDWARE)[:, None]
    at = row.to(tl.int64)[:, None] * o_row + h * o_head + d[None, :]
    tl.store(out + at, y.to(tl.bfloat16), mask=(row < R)[:, None])
    tl.store(lse + h * l_head + row, log_sum_exp(m, total, c_ln2, HARDWARE), mask=row < R)


def launch_segment(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    visible: int,
    scale: float,
    rows: int = 16,
    num_warps: int = 4,
    hardware: bool = True,
    ascending: bool = False,
    keys: int | None = None,
    window: int = 0,
) -> None:
    """One segment of one sequence: q [R, H, D], k and v [n, KV, D]; row i sees min(n, visible + i) keys.

    With a `window` it does not see the first visible + i - window of them, nor gets a number where that leaves none.
    Writes out [R, H, D] and lse [H, R]. `ascending` and another number of `keys` a block are other functions, for controls.
    """
    R, H, D = q.shape
    if not R:
        return
    c, c_ln2 = constants(scale)
    block = keys or (WINDOW_BLOCK if window else BLOCK)[D]
    segment_kernel[(-(-R // rows), H)](
        q,
        k,
        v,
        out,
        lse,
        R,
        len(k),
        visible,
        window,
        c,
        c_ln2,
        *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *(out.stride(0), out.stride(1), lse.stride(0)),
        GROUP=H // k.shape[1],
        D=D,
        KEYS=block,
        WIDTH=power_of_two(block),
        ROWS=rows,
        HARDWARE=hardware,
        ASCENDING=ascending,
        WINDOWED=window > 0,
        num_warps=num_warps,
        num_stages=2,
        enable_fp_fusion=False,
    )


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    kv_segment: int,
    sinks: Tensor | None = None,
    window: int = 0,
    hardware: bool = True,
    num_warps: int = 4,
) -> tuple[Tensor, Tensor]:
    """By Triton alone, a sequence from position 0: q [s, H, D], k, v [s, KV, D], sinks [H]; ([s, H, D], lse [H, s]).

    With a `window`, attention.mma_window/1.
    """

    def one(rows: slice, keys: slice, out: Tensor, lse: Tensor) -> None:
        launch_segment(
            *(q[rows], k[keys], v[keys], out, lse),
            visible=1,
            scale=scale,
            window=window,
            num_warps=num_warps,
            hardware=hardware,
        )

    return in_segments(one, q, kv_segment=kv_segment, sinks=sinks, window=window, hardware=hardware)


def in_segments(
    one: Callable[[slice, slice, Tensor, Tensor], None],
    like: Tensor,
    *,
    kv_segment: int,
    sinks: Tensor | None = None,
    window: int = 0,
    hardware: bool = True,
) -> tuple[Tensor, Tensor]:
    """A sequence's segments, merged: (bf16 as `like` [s, H, V], lse [H, s]).

    `one(rows, keys, out, lse)` writes those rows over those keys, the first row being the first that sees the first key.
    """
    s, H, V = like.shape
    count = -(-s // kv_segment)
    parts = torch.zeros(count, s, H, V, dtype=like.dtype, device=like.device)
    lse = torch.zeros(count, H, s, dtype=torch.float32, device=like.device)
    for j in range(count):
        first, end = j * kv_segment, min(s, (j + 1) * kv_segment)
        rows = slice(first, min(s, end + window - 1) if window else s)  # that see a key of it
        one(rows, slice(first, end), parts[j, rows], lse[j, :, rows])
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    position = torch.arange(s, dtype=torch.int32, device=like.device)
    whole = torch.empty(H, s, dtype=torch.float32, device=like.device)
    launch_merge(
        *(None, None, parts, lse, position, sinks, out),
        kv_segment=kv_segment,
        window=window,
        whole_lse=whole,
        hardware=hardware,
    )
    return out, whole


@triton.jit(do_not_specialize=["M", "N", "K"])
def chain_kernel(
    x: tl.tensor,
    w: tl.tensor,
    acc: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_row: tl.tensor,
    x_column: tl.tensor,
    w_row: tl.tensor,
    w_column: tl.tensor,
    out: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[:, None] * N + column[None, :]
    real = (row < M)[:, None] & (column < N)[None, :]
    total = tl.load(acc + at, mask=real, other=0.0)
    for first in range(0, K, STEP):
        k = first + tl.arange(0, STEP)
        a = tl.load(
            x + row.to(tl.int64)[:, None] * x_row + k[None, :] * x_column,
            mask=(row < M)[:, None] & (k < K)[None, :],
            other=0.0,
        )
        b = tl.load(
            w + column.to(tl.int64)[None, :] * w_row + k[:, None] * w_column,
            mask=(column < N)[None, :] & (k < K)[:, None],
            other=0.0,
        )
        total = tl.dot(a, b, total)
    tl.store(out + at, total, mask=real)


def chain(x: Tensor, w: Tensor, acc: Tensor) -> Tensor:
    """Contiguous fp32 acc [M, N] + bf16 x [M, K] @ w [N, K]^T in the chip's steps of 16; operands may be views."""
    (M, K), N = x.shape, len(w)
    out = torch.empty_like(acc)
    rows = columns = 64
    chain_kernel[(-(-M // rows), -(-N // columns))](
        *(x, w, acc, M, N, K, x.stride(0), x.stride(1), w.stride(0), w.stride(1), out),
        ROWS=rows,
        COLUMNS=columns,
        STEP=naive.STEP,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


@triton.jit(do_not_specialize=["count"])
def exp2_kernel(
    x: tl.tensor, y: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr, HARDWARE: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, _unary(tl.load(x + at, mask=at < count, other=0.0), "ex2", HARDWARE), mask=at < count)


def exp2(x: Tensor, hardware: bool = True) -> Tensor:
    """The chip's exp2 of contiguous fp32 numbers."""
    y = torch.empty_like(x)
    block = 4096
    exp2_kernel[(-(-x.numel() // block),)](x, y, x.numel(), BLOCK=block, HARDWARE=hardware, num_warps=4)
    return y


def gradients(
    *given: Any, hardware: bool = True, **more: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`naive.gradients` with the chip's bits; a whole head's weights lie in memory, so for some thousand rows at most."""
    return naive.gradients(*given, **more, chain=chain, exp2=partial(exp2, hardware=hardware))
