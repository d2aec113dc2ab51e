# SPDX-License-Identifier: Apache-2.0
"""The reference of attention.latent_segments/1 in Triton, and of its gradients.

It walks one segment for 16 rows of a head at a time and adds every row's weights key by key: slow, and independent of the
library and the kernels whose bits it certifies. Rows a tile and warps are free. The gradients are the specification's own lines
with the chip's tensor-core steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from isoexec.kernels.attention.hopper.kernel import _unary, _weighed, lane_total, log_sum_exp
from isoexec.kernels.attention.hopper.naive import constants
from isoexec.kernels.attention.hopper.reference import chain, in_segments
from isoexec.kernels.latent_attention.hopper import naive
from isoexec.kernels.latent_attention.hopper.naive import BLOCK, LATENT, ROPE

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["gradients", "launch_segment", "reference"]


@triton.jit(do_not_specialize=["R", "n", "visible"])
def segment_kernel(
    q_rope: tl.tensor,
    q_latent: tl.tensor,
    k_rope: tl.tensor,
    latent: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    R: tl.tensor,
    n: tl.tensor,
    visible: tl.tensor,
    c: tl.tensor,
    c_ln2: tl.tensor,
    qr_row: tl.tensor,
    qr_head: tl.tensor,
    ql_row: tl.tensor,
    ql_head: tl.tensor,
    kr_row: tl.tensor,
    c_row: tl.tensor,
    o_row: tl.tensor,
    o_head: tl.tensor,
    l_head: tl.tensor,
    WIDTH: tl.constexpr,
    TURN: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    HARDWARE: tl.constexpr,
    ASCENDING: tl.constexpr,
    LATENT_FIRST: tl.constexpr,
) -> None:
    first = tl.program_id(0) * ROWS
    h = tl.program_id(1)
    row = first + tl.arange(0, ROWS)
    turn = tl.arange(0, TURN)
    d = tl.arange(0, WIDTH)
    col = tl.arange(0, KEYS)
    limit = tl.minimum(visible + row, n)
    at_row = row.to(tl.int64)[:, None]
    real_row = (row < R)[:, None]
    x = tl.load(q_rope + at_row * qr_row + h * qr_head + turn[None, :], mask=real_row, other=0.0)
    y = tl.load(q_latent + at_row * ql_row + h * ql_head + d[None, :], mask=real_row, other=0.0)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    o = tl.zeros([ROWS, WIDTH], tl.float32)
    lanes = tl.zeros([ROWS, 4], tl.float32)
    blocks = tl.cdiv(tl.minimum(visible + first + ROWS - 1, n), KEYS)
    for i in range(blocks):
        start = i * KEYS if ASCENDING else (blocks - 1 - i) * KEYS
        key = start + col
        real = key < n
        at = key.to(tl.int64)
        turned = tl.load(k_rope + at[None, :] * kr_row + turn[:, None], mask=real[None, :], other=0.0)
        rows = tl.load(latent + at[:, None] * c_row + d[None, :], mask=real[:, None], other=0.0)
        s = tl.zeros([ROWS, KEYS], tl.float32)
        if LATENT_FIRST:  # noqa: SIM108 - Triton compiles the branch that holds
            s = tl.dot(x, turned, tl.dot(y, rows.T, s))
        else:
            s = tl.dot(y, rows.T, tl.dot(x, turned, s))
        s = tl.where(key[None, :] < limit[:, None], s, float("-inf"))
        p, r, lanes, m = _weighed(s, m, lanes, c, ROWS, KEYS, KEYS, HARDWARE)
        o = tl.dot(p.to(tl.bfloat16), rows, o * r[:, None])
    total = lane_total(lanes)
    result = o * _unary(total, "rcp", HARDWARE)[:, None]
    tl.store(out + at_row * o_row + h * o_head + d[None, :], result.to(tl.bfloat16), mask=real_row)
    tl.store(lse + h * l_head + row, log_sum_exp(m, total, c_ln2, HARDWARE), mask=row < R)


def launch_segment(
    q_rope: Tensor,
    q_latent: Tensor,
    k_rope: Tensor,
    latent: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    visible: int,
    scale: float,
    rows: int = 16,
    num_warps: int = 4,
    hardware: bool = True,
    ascending: bool = False,
    latent_first: bool = False,
    keys: int = BLOCK,
) -> None:
    """One segment of one sequence: q_rope [R, H, 64], q_latent [R, H, 512], k_rope [n, 64], latent [n, 512] bf16.

    Row i sees min(n, visible + i) keys. Writes out [R, H, 512] and lse [H, R]. `ascending`, `latent_first` and another number of
    `keys` a block are other functions, for controls.
    """
    R, H, _ = q_latent.shape
    if not R:
        return
    c, c_ln2 = constants(scale)
    segment_kernel[(-(-R // rows), H)](
        q_rope,
        q_latent,
        k_rope,
        latent,
        out,
        lse,
        R,
        len(latent),
        visible,
        c,
        c_ln2,
        *(q_rope.stride(0), q_rope.stride(1), q_latent.stride(0), q_latent.stride(1)),
        *(k_rope.stride(0), latent.stride(0), out.stride(0), out.stride(1), lse.stride(0)),
        WIDTH=LATENT,
        TURN=ROPE,
        KEYS=keys,
        ROWS=rows,
        HARDWARE=hardware,
        ASCENDING=ascending,
        LATENT_FIRST=latent_first,
        num_warps=num_warps,
        num_stages=1,
        enable_fp_fusion=False,
    )


def reference(
    q_rope: Tensor,
    q_latent: Tensor,
    k_rope: Tensor,
    latent: Tensor,
    scale: float,
    *,
    kv_segment: int,
    hardware: bool = True,
    **other: bool | int,
) -> tuple[Tensor, Tensor]:
    """One sequence from position 0, by Triton alone: (bf16 [s, H, 512], lse [H, s]); `other` are `launch_segment`'s controls."""

    def one(rows: slice, keys: slice, out: Tensor, lse: Tensor) -> None:
        launch_segment(
            *(q_rope[rows], q_latent[rows], k_rope[keys], latent[keys], out, lse),
            visible=1,
            scale=scale,
            hardware=hardware,
            **other,  # type: ignore[arg-type]
        )

    return in_segments(one, q_latent, kv_segment=kv_segment, hardware=hardware)


def gradients(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`naive.gradients` with the chip's bits; a whole head's weights lie in memory, so for some thousand rows at most."""
    return naive.gradients(*given, chain=chain)
