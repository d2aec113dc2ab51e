# SPDX-License-Identifier: Apache-2.0
"""Runs every check of the experts' kernels in Triton's interpreter and prints `{check: what went wrong, or ""}` as JSON.

A process of its own: Triton decides when a kernel is decorated whether it is interpreted.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable

import emulation  # type: ignore[import-not-found]  # noqa: F401 - the interpreter is asked for before anything imports triton
import numpy as np
import torch
from torch import Tensor

from isoexec.kernels.combine import naive as combine_naive
from isoexec.kernels.combine.hopper import kernel as combine_kernel
from isoexec.kernels.dispatch import naive as dispatch_naive
from isoexec.kernels.dispatch.gate import by_hand, chosen
from isoexec.kernels.dispatch.hopper import kernel as dispatch_kernel
from isoexec.kernels.grouped_linear.hopper import kernel as grouped_kernel
from isoexec.kernels.grouped_linear.hopper import naive as grouped_naive
from isoexec.kernels.providers import fused_moe
from isoexec.kernels.router import naive as router_naive
from isoexec.kernels.router.hopper import kernel as router_kernel
from isoexec.kernels.router.sigmoid import naive as sigmoid_naive
from isoexec.kernels.shared_gate.hopper import kernel as shared_kernel
from isoexec.kernels.shared_gate.hopper import naive as shared_naive

CHECKS: dict[str, Callable[[], None]] = {}
VIEW = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.int64: torch.int64}
DTYPES = (torch.float32, torch.bfloat16)


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def differing(a: Tensor, b: Tensor) -> int:
    assert (a.shape, a.dtype) == (b.shape, b.dtype), (a.shape, a.dtype, b.shape, b.dtype)
    unlike = a.contiguous().view(VIEW[a.dtype]) != b.contiguous().view(VIEW[b.dtype])
    if a.is_floating_point():
        unlike &= ~(a.isnan() & b.isnan())  # no function defines a NaN's payload
    return int(unlike.sum())


def same(a: Tensor, b: Tensor, what: object = "") -> None:
    count = differing(a, b)
    assert count == 0, f"{what}: {count} of {a.numel()} elements differ"


def other(a: Tensor, b: Tensor, what: object = "") -> None:
    assert differing(a, b) > 0, f"{what}: a control that must differ is equal"


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def softmax(logits: Tensor, k: int, **free: int) -> tuple[Tensor, Tensor]:
    weights, experts = poisoned(len(logits), k), torch.full((len(logits), k), -7)
    router_kernel.launch_softmax(logits, weights, experts, **free)  # type: ignore[arg-type]
    return weights, experts


def tied(rows: int, width: int) -> Tensor:
    """Half of the rows on a coarse grid, with zeros of both signs."""
    x = torch.randn(rows, width) * 3
    x[::2] = (x[::2]).round()
    return x


@check
def the_softmax_router_has_its_specifications_bits() -> None:
    for width, k in ((16, 4), (20, 3), (60, 8), (128, 16), (1, 1), (5, 5)):
        logits = tied(9, width)
        for got, want in zip(softmax(logits, k), router_naive.softmax_topk(logits, k), strict=True):
            same(got, want, (width, k))


@check
def a_routers_odd_logits_are_as_specified() -> None:
    logits = torch.randn(8, 20)
    odd = (torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 1e-45, -0.0, 200.0)
    logits[torch.arange(8), torch.arange(8)] = torch.tensor(odd)
    logits[5:7] = torch.where(logits[5:7] > 0.5, 0.0, logits[5:7] * 0.0)
    for k in (1, 4, 20):
        for got, want in zip(softmax(logits, k), router_naive.softmax_topk(logits, k), strict=True):
            same(got, want, k)
    assert bool(softmax(logits, 4)[0][:2].isnan().all())


@check
def a_router_does_not_depend_on_rows_warps_or_strides() -> None:
    wide = tied(9, 40)
    logits = wide[:, 3:23]
    whole = softmax(logits.contiguous(), 4)
    for rows in (1, 2, 8):
        for got, want in zip(softmax(logits, 4, rows_per_program=rows, num_warps=2), whole, strict=True):
            same(got, want, rows)
    same(softmax(logits[4:5], 4)[0], whole[0][4:5], "alone")


@check
def a_router_differs_with_another_tie_rule() -> None:
    logits = tied(64, 16)
    other(15 - softmax(logits.flip(1).contiguous(), 4)[1], softmax(logits, 4)[1])


@check
def the_sigmoid_router_has_its_specifications_bits() -> None:
    for width, k, groups, held, scale in (
        (16, 4, 1, 1, 1.0),
        (60, 6, 5, 3, 2.5),
        (64, 8, 8, 4, 1.8),
        (6, 2, 3, 1, 1.0),
    ):
        logits, bias = tied(9, width), torch.randn(width).mul(0.2)
        logits[3, 2], logits[4, 1], logits[5] = torch.nan, torch.inf, -300.0
        for grid in (bias, torch.zeros(width)):
            weights, experts = poisoned(9, k), torch.full((9, k), -7)
            router_kernel.launch_sigmoid(logits, grid, weights, experts, groups, held, scale)
            want = sigmoid_naive.sigmoid_topk(logits, grid, k, groups, held, scale)
            same(weights, want[0], (width, k))
            same(experts, want[1], (width, k))


@check
def the_routers_gradients_have_their_specifications_bits() -> None:
    for width, k in ((16, 4), (20, 3), (60, 8)):
        logits, grad = tied(9, width), torch.randn(9, k)
        weights, experts = (t.contiguous() for t in router_naive.softmax_topk(logits, k))
        out = poisoned(9, width)
        router_kernel.launch_gradient(grad, weights, experts, out)
        same(out, router_naive.softmax_topk_backward(grad, weights, experts, width), (width, k))
        out = poisoned(9, width)
        router_kernel.launch_gradient(grad, logits, experts, out, 2.5, rows_per_program=2)
        same(out, sigmoid_naive.sigmoid_topk_backward(grad, logits, experts, 2.5), (width, k))


@check
def a_plan_is_by_expert_and_then_by_token() -> None:
    for tokens, experts, places in ((1, 16, 4), (60, 16, 4), (37, 5, 1), (50, 128, 8)):
        ids = chosen(tokens, experts, places).contiguous()
        for first, count in ((0, experts), (experts // 2, experts - experts // 2), (1, 2)):
            for block in (16, 128):
                slots, rows, offsets = dispatch_kernel.launch_plan(ids, first, count, slots_a_block=block)
                want, ends = by_hand(ids, first, count)
                filled = ends[-1]
                assert slots.tolist() == want + [-1] * (tokens * places - filled), (tokens, first, block)
                assert offsets.tolist() == ends, (tokens, first, block)
                back = [-1] * (tokens * places)
                for row, slot in enumerate(want):
                    back[slot] = row
                assert rows.tolist() == back, (tokens, first, block)


@check
def rows_move_as_they_are() -> None:
    for dtype in DTYPES:
        x, ids = torch.randn(20, 36).to(dtype), chosen(20, 16, 4).contiguous()
        x[:, 0], x[:, 1] = -0.0, torch.inf
        for first, count in ((0, 16), (8, 8)):
            slots, rows, offsets = dispatch_kernel.launch_plan(ids, first, count)
            filled = int(offsets[-1])
            out = poisoned(80, 36, dtype=dtype)
            dispatch_kernel.launch_rows(x, slots, out, 4, block=16)
            same(out[:filled], dispatch_naive.dispatch(x, slots[:filled], 4))
            assert bool(out[filled:].isnan().all()), "a row of no slot is written"
            back = poisoned(80, 36, dtype=dtype)
            dispatch_kernel.launch_rows(out, rows, back, 1, back=True)
            same(back, dispatch_naive.by_slot(out[:filled], slots[:filled], 80))
            total = poisoned(20, 36, dtype=dtype)
            combine_kernel.launch_sum(out, rows, None, None, total, 4)
            same(total, dispatch_naive.dispatch_backward(back, 4))


@check
def combine_has_its_specifications_bits() -> None:
    for dtype in DTYPES:
        for k, width in ((1, 5), (4, 36), (8, 100)):
            y, weights = torch.randn(9 * k, width).mul(3).to(dtype), torch.rand(9, k)
            shared = torch.randn(9, width).to(dtype)
            for block, warps in ((16, 1), (128, 4)):
                out = poisoned(9, width, dtype=dtype)
                combine_kernel.launch_sum(y, None, weights, None, out, k, block=block, num_warps=warps)
                same(out, combine_naive.combine(y, weights), (k, width, block))
            combine_kernel.launch_sum(y, None, weights, shared, out, k)
            same(out, combine_naive.combine(y, weights, shared), (k, width))
            rows = torch.randperm(9 * k)
            mapped = poisoned(9, width, dtype=dtype)
            moved = torch.empty_like(y)
            moved[rows] = y
            combine_kernel.launch_sum(moved, rows, weights, shared, mapped, k)
            same(mapped, out, "through a map")


@check
def combines_gradients_have_their_specifications_bits() -> None:
    for dtype in DTYPES:
        for k, width in ((1, 5), (4, 36), (8, 100)):
            y, weights = torch.randn(9 * k, width).mul(3).to(dtype), torch.rand(9, k)
            grad = torch.randn(9, width).to(dtype)
            want = combine_naive.combine_backward(grad, y, weights)
            dy, dw = poisoned(9 * k, width, dtype=dtype), poisoned(9, k)
            combine_kernel.launch_gradient(grad, y, None, weights, dy, dw)
            same(dy, want[0], (k, width))
            same(dw, want[1], (k, width))
            rows = torch.randperm(9 * k)
            moved, dy = torch.empty_like(y), poisoned(9 * k, width, dtype=dtype)
            moved[rows] = y
            combine_kernel.launch_gradient(grad, moved, rows, weights, dy, dw)
            same(dy[rows], want[0], "through a map")
            same(dw, want[1], "through a map")


@check
def combine_differs_from_another_order_and_from_fused_terms() -> None:
    y, weights = torch.randn(72, 100), torch.rand(9, 8)
    out = poisoned(9, 100)
    combine_kernel.launch_sum(y, None, weights, None, out, 8)
    turned = poisoned(9, 100)
    back = y.view(9, 8, 100).flip(1).reshape(72, 100)
    combine_kernel.launch_sum(back, None, weights.flip(1).contiguous(), None, turned, 8)
    other(turned, out)
    acc = torch.zeros(9, 100)
    for j in range(8):
        acc = (acc.double() + weights[:, j : j + 1].double() * y.view(9, 8, 100)[:, j].double()).float()
    other(acc, out)


LOADS = ((0, 1, 16, 17), (5, 0, 0, 33), (40, 0, 0), (0, 0))


def experts_of(load: tuple[int, ...], N: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows with some of no expert behind them, weights, offsets int32."""
    x = torch.randn(sum(load) + 3, K).bfloat16()
    offsets = torch.tensor([0, *load]).cumsum(0).int()
    return x, torch.randn(len(load), N, K).bfloat16(), offsets


@check
def every_tile_of_the_grouped_chain_has_the_specifications_bits() -> None:
    for load in LOADS:
        for N, K in ((32, 48), (48, 128)):
            x, w, offsets = experts_of(load, N, K)
            R = sum(load)
            want = grouped_naive.forward(x, w, offsets, out_dtype=torch.float32)
            dy = torch.randn(len(x), N).bfloat16()
            down = grouped_naive.input_gradient(dy, w, offsets, out_dtype=torch.float32)
            for rows, columns, depth in ((16, 16, 32), (32, 64, 64)):
                tile = grouped_kernel.Tile(rows=rows, columns=columns, depth=depth, warps=4, stages=2)
                out = poisoned(len(x), N)
                grouped_kernel.launch(x, w, offsets, None, out, tile)
                same(out[:R], want, (load, N, K, tile))
                assert bool(out[R:].isnan().all()), "a row of no expert is written"
                out = poisoned(len(x), K)
                grouped_kernel.launch(dy, w, offsets, None, out, tile, down=True)
                same(out[:R], down, ("down", load, N, K, tile))
            rounded = grouped_kernel.reference(x, w, offsets)
            same(rounded[:R], want.bfloat16(), "rounded")


@check
def a_grouped_chain_goes_on_where_another_ended() -> None:
    x, w, offsets = experts_of(LOADS[0], 32, 96)
    whole = grouped_kernel.reference(x, w, offsets, None, torch.float32)
    for cut in (16, 48):
        acc = grouped_kernel.reference(x[:, :cut], w[..., :cut], offsets, None, torch.float32)
        got = grouped_kernel.reference(x[:, cut:], w[..., cut:], offsets, acc, torch.float32)
        same(got[:34], whole[:34], cut)
    halves = [
        grouped_kernel.reference(
            x[:, i::2].contiguous(), w[..., i::2].contiguous(), offsets, None, torch.float32
        )
        for i in (0, 1)
    ]
    other((halves[0] + halves[1])[:34], whole[:34], "split-K")
    other(
        grouped_kernel.reference(x, w.roll(1, 0), offsets, None, torch.float32)[:34],
        whole[:34],
        "another expert",
    )


@check
def an_experts_gradient_is_a_chain_over_its_rows() -> None:
    for load in LOADS:
        x, _, offsets = experts_of(load, 32, 48)
        dy = torch.randn(len(x), 32).bfloat16()
        x[sum(load) :], dy[sum(load) :] = torch.nan, torch.nan  # of no expert
        want = grouped_naive.weight_gradient(dy, x, offsets, out_dtype=torch.float32)
        for rows, columns, depth in ((16, 16, 16), (32, 64, 64)):
            tile = grouped_kernel.Tile(rows=rows, columns=columns, depth=depth, warps=4, stages=2)
            out = poisoned(len(load), 32, 48)
            grouped_kernel.launch_weight(dy, x, offsets, out, tile)
            same(out, want, (load, tile))
        left = poisoned(len(load), 32, 48)
        grouped_kernel.launch_idle(left, offsets, block=256)
        for e, count in enumerate(load):
            assert bool((left[e] == 0).all() if count == 0 else left[e].isnan().all()), (load, e)


@check
def vllms_fused_moe_kernel_walks_k_in_order() -> None:
    for load in ((0, 1, 5, 17), (40, 0, 70)):
        x, w, offsets = experts_of(load, 64, 96)
        x = x[: sum(load)]
        want = grouped_naive.forward(x, w, offsets)
        same(fused_moe.grouped(x, w, offsets[1:]), want, load)
        other(fused_moe.grouped(x, w.roll(1, 0), offsets[1:]), want, "another expert")
    assert fused_moe.version().startswith("fused_moe_kernel sha256:")


@check
def a_shared_gate_has_its_specifications_bits() -> None:
    for tokens, width in ((5, 48), (70, 32)):
        y, x, grad = (torch.randn(tokens, width).bfloat16() for _ in range(3))
        w = torch.randn(1, width).bfloat16()
        logit = shared_naive.logits(x, w)
        for rows, depth in ((16, 16), (32, 64)):
            got = poisoned(tokens)
            shared_kernel.launch_logits(x, w, got, rows=rows, depth=depth)
            same(got, logit, (tokens, width, rows))
        out = poisoned(tokens, width, dtype=torch.bfloat16)
        shared_kernel.launch(y, logit, out, block=32)
        same(out, shared_naive.gated(y, logit))
        want = shared_naive.gradients(grad, y, x, w, logit)
        dy, dx = (poisoned(tokens, width, dtype=torch.bfloat16) for _ in range(2))
        d, dw = poisoned(tokens), poisoned(1, width, dtype=torch.bfloat16)
        shared_kernel.launch_gradient(grad, y, w, logit, dy, dx, d)
        parts = poisoned(-(-tokens // 64), width)
        shared_kernel.launch_weight(x, d, parts, dw, 64)
        for got, right in zip((dy, dx, dw), want, strict=True):
            same(got, right, (tokens, width))
    other(shared_naive.gated(y, shared_naive.logits(x, w).bfloat16().float()), out, "a rounded logit")


def main() -> None:
    torch.set_num_threads(1)
    np.seterr(all="ignore")  # infinities and NaN are among the inputs
    results = {}
    for name, function in CHECKS.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        torch.manual_seed(7)
        try:
            function()
            results[name] = ""
        except Exception:  # noqa: BLE001 - reported to the test that asked
            results[name] = traceback.format_exc(limit=4)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
