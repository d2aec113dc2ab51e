# SPDX-License-Identifier: Apache-2.0
"""Both routers in Triton: a few tokens a program, all experts of each at hand; rows a program and warps are free.

A score and its expert are one integer: the score's bits in an order that integers have too, over the expert counted down. Its
maximum is the highest score, ties to the lowest expert, in any order of comparing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from isoexec.kernels.hopper import spec
from isoexec.kernels.hopper.arithmetic import exp, power_of_two, sigmoid

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["launch_gradient", "launch_sigmoid", "launch_softmax"]

_EXP_LOW = tl.constexpr(spec.EXP_LOW)
_EPSILON = tl.constexpr(1e-20)
_NAN = tl.constexpr(0x7FFFFFFF)  # above every number's key
_NONE = tl.constexpr(-(2**63))


@triton.jit
def _key(x: tl.tensor, col: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """int64: the score's order, then the lowest index."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # zeros of both signs are one score
    order = tl.where(bits >= 0, bits, bits ^ _NAN)
    order = tl.where(x == x, order, _NAN)
    return order.to(tl.int64) * 4294967296 + (WIDTH - 1 - col).to(tl.int64)


@triton.jit
def _index(key: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    return WIDTH - 1 - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _score(key: tl.tensor) -> tl.tensor:
    order = (key >> 32).to(tl.int32)
    return tl.where(order >= 0, order, order ^ _NAN).to(tl.float32, bitcast=True)


@triton.jit
def _in_order(terms: tl.tensor, place: tl.tensor, K: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """[ROWS, PLACES] -> [ROWS]: from the first place to the last."""
    total = tl.zeros((ROWS,), tl.float32)
    for j in tl.static_range(K):
        total = total + tl.sum(tl.where(place == j, terms, 0.0), axis=1)
    return total


@triton.jit(do_not_specialize=["rows"])
def softmax_kernel(
    logits: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    HARDWARE_EXP: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.arange(0, WIDTH)[None, :]
    place = tl.arange(0, PLACES)[None, :]
    real = (row < rows)[:, None] & (col < width)
    key = _key(tl.load(logits + row[:, None] * stride + col, mask=real, other=0.0), col, WIDTH)
    key = tl.where(col < width, key, _NONE)
    chosen = tl.zeros((ROWS, PLACES), tl.float32)
    ids = tl.zeros((ROWS, PLACES), tl.int32)
    first = tl.zeros((ROWS,), tl.float32)
    for j in tl.static_range(K):
        best = tl.max(key, axis=1)
        key = tl.where(key == best[:, None], _NONE, key)
        if j == 0:
            first = _score(best)
        chosen = tl.where(place == j, _score(best)[:, None], chosen)
        ids = tl.where(place == j, _index(best, WIDTH)[:, None], ids)
    d = chosen - first[:, None]
    e = tl.exp(d) if HARDWARE_EXP else exp(d)
    e = tl.where(d < _EXP_LOW, 0.0, e)
    e = tl.where(d == d, e, d)
    total = _in_order(e, place, K, ROWS)
    at = row[:, None] * K + place
    live = (row < rows)[:, None] & (place < K)
    tl.store(weights + at, tl.div_rn(e, tl.broadcast_to(total[:, None], (ROWS, PLACES))), mask=live)
    tl.store(experts + at, ids.to(tl.int64), mask=live)


@triton.jit(do_not_specialize=["rows"])
def sigmoid_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.arange(0, WIDTH)[None, :]
    place = tl.arange(0, PLACES)[None, :]
    real = (row < rows)[:, None] & (col < width)
    s = sigmoid(tl.load(logits + row[:, None] * stride + col, mask=real, other=0.0))
    scores = s + tl.load(bias + col, mask=col < width, other=0.0)
    key = _key(scores, col, WIDTH)
    if GROUPS > 1:
        group = col // (width // GROUPS)
        number = tl.arange(0, PADDED_GROUPS)[None, :]
        sums = tl.full((ROWS, PADDED_GROUPS), _NONE, tl.int64)
        for g in tl.static_range(GROUPS):
            inside = tl.where((group == g) & (col < width), key, _NONE)
            best = tl.max(inside, axis=1)
            second = tl.max(tl.where(inside == best[:, None], _NONE, inside), axis=1)
            two = tl.broadcast_to((_score(best) + _score(second))[:, None], (ROWS, PADDED_GROUPS))
            sums = tl.where(number == g, _key(two, number, PADDED_GROUPS), sums)
        held = tl.zeros((ROWS, WIDTH), tl.int32)
        for _ in tl.static_range(CHOSEN):
            best = tl.max(sums, axis=1)
            sums = tl.where(sums == best[:, None], _NONE, sums)
            held = tl.where(group == _index(best, PADDED_GROUPS)[:, None], 1, held)
        key = tl.where(held == 1, key, _key(tl.full((ROWS, WIDTH), float("-inf"), tl.float32), col, WIDTH))
    key = tl.where(col < width, key, _NONE)
    chosen = tl.zeros((ROWS, PLACES), tl.float32)
    ids = tl.zeros((ROWS, PLACES), tl.int32)
    for j in tl.static_range(K):
        best = tl.max(key, axis=1)
        key = tl.where(key == best[:, None], _NONE, key)
        expert = _index(best, WIDTH)
        own = tl.sum(tl.where(col == expert[:, None], s, 0.0), axis=1)
        chosen = tl.where(place == j, own[:, None], chosen)
        ids = tl.where(place == j, expert[:, None], ids)
    total = _in_order(chosen, place, K, ROWS) + _EPSILON
    weight = tl.div_rn(chosen, tl.broadcast_to(total[:, None], (ROWS, PLACES))) * scale
    at = row[:, None] * K + place
    live = (row < rows)[:, None] & (place < K)
    tl.store(weights + at, weight, mask=live)
    tl.store(experts + at, ids.to(tl.int64), mask=live)


@triton.jit(do_not_specialize=["rows"])
def gradient_kernel(
    grad: tl.tensor,
    given: tl.tensor,
    experts: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SIGMOID: tl.constexpr,
) -> None:
    """`given` are the weights of a softmax, [rows, K], or the logits of sigmoids, [rows, width]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.arange(0, WIDTH)[None, :]
    place = tl.arange(0, PLACES)[None, :]
    at = row[:, None] * K + place
    live = (row < rows)[:, None] & (place < K)
    g = tl.load(grad + at, mask=live, other=0.0)
    ids = tl.load(experts + at, mask=live, other=-1).to(tl.int32)
    if SIGMOID:
        s = sigmoid(tl.load(given + row[:, None] * stride + ids, mask=live, other=0.0))
        total = tl.broadcast_to((_in_order(s, place, K, ROWS) + _EPSILON)[:, None], (ROWS, PLACES))
        common = tl.broadcast_to(_in_order(g * s, place, K, ROWS)[:, None], (ROWS, PLACES))
        d = tl.div_rn(g - tl.div_rn(common, total), total) * scale
        d = d * (s * (1.0 - s))
    else:
        w = tl.load(given + at, mask=live, other=0.0)
        d = w * (g - _in_order(g * w, place, K, ROWS)[:, None])
    dense = tl.zeros((ROWS, WIDTH), tl.float32)
    for j in tl.static_range(K):
        own = tl.sum(tl.where(place == j, d, 0.0), axis=1)
        expert = tl.sum(tl.where(place == j, ids, 0), axis=1)
        dense = tl.where(col == expert[:, None], own[:, None], dense)
    tl.store(out + row[:, None] * width + col, dense, mask=(row < rows)[:, None] & (col < width))


def _cut(
    rows: int, width: int, k: int, rows_per_program: int | None, num_warps: int | None
) -> dict[str, int]:
    padded = power_of_two(width)
    per = rows_per_program or max(1, min(4, 512 // padded))
    return {
        "K": k,
        "PLACES": power_of_two(k),
        "WIDTH": padded,
        "ROWS": per,
        "num_warps": num_warps or max(1, min(8, per * padded // 128)),
    }


def launch_softmax(
    logits: Tensor,
    weights: Tensor,
    experts: Tensor,
    *,
    rows_per_program: int | None = None,
    num_warps: int | None = None,
    hardware_exp: bool = False,
) -> None:
    """Write weights fp32 and experts int64 `[T, k]` of fp32 logits `[T, E]`.

    `hardware_exp=True` is another function: the gates use it to see that they can fail.
    """
    rows, k = weights.shape
    if not rows:
        return
    cut = _cut(rows, logits.shape[1], k, rows_per_program, num_warps)
    softmax_kernel[(-(-rows // cut["ROWS"]),)](
        *(logits, weights, experts, rows, logits.stride(0), logits.shape[1]),
        **cut,
        HARDWARE_EXP=hardware_exp,
        enable_fp_fusion=False,
    )


def launch_sigmoid(
    logits: Tensor,
    bias: Tensor,
    weights: Tensor,
    experts: Tensor,
    groups: int,
    groups_chosen: int,
    scale: float,
    *,
    rows_per_program: int | None = None,
    num_warps: int | None = None,
) -> None:
    """Write weights fp32 and experts int64 `[T, k]` of fp32 logits `[T, E]` and a bias `[E]`."""
    rows, k = weights.shape
    if not rows:
        return
    cut = _cut(rows, logits.shape[1], k, rows_per_program, num_warps)
    sigmoid_kernel[(-(-rows // cut["ROWS"]),)](
        *(logits, bias, weights, experts, rows, logits.stride(0), logits.shape[1], scale),
        **cut,
        GROUPS=groups,
        CHOSEN=groups_chosen,
        PADDED_GROUPS=power_of_two(groups),
        enable_fp_fusion=False,
    )


def launch_gradient(
    grad: Tensor,
    given: Tensor,
    experts: Tensor,
    out: Tensor,
    scale: float | None = None,
    *,
    rows_per_program: int | None = None,
    num_warps: int | None = None,
) -> None:
    """Write the logits' gradient `[T, E]`: of a softmax's weights, or, with a `scale`, of the sigmoids of the logits given."""
    rows, k = grad.shape
    if not rows:
        return
    cut = _cut(rows, out.shape[1], k, rows_per_program, num_warps)
    gradient_kernel[(-(-rows // cut["ROWS"]),)](
        *(grad, given, experts, out, rows, given.stride(0), out.shape[1], 1.0 if scale is None else scale),
        **cut,
        SIGMOID=scale is not None,
        enable_fp_fusion=False,
    )
