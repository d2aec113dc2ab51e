# SPDX-License-Identifier: Apache-2.0
"""What proves gate.sigmoid_mul/1 on sm90: its specification on the GPU and on the CPU, for gates beside the queries."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from isoexec.kernels.gates import Gate, Run, rows
from isoexec.kernels.gates.forward import many
from isoexec.kernels.gates.inputs import DTYPES, odd_values
from isoexec.kernels.gates.recipes import gradients
from isoexec.kernels.gates.rows import Rows
from isoexec.kernels.sigmoid_mul.hopper import naive
from isoexec.kernels.sigmoid_mul.hopper.kernel import launch
from isoexec.kernels.sigmoid_mul.hopper.ops import sigmoid_mul

GATE = Gate("gate.sigmoid_mul/1", "sm90")
PLANTED = (256, 1024)
SHAPES = ((16, 256), (5, 96))  # query heads of Qwen3.5-35B-A3B and their width; none that is a power of two
FREE = ((1, 128, 1), (4, 256, 4), (16, 64, 8))  # rows, block, warps


def _formula(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


def _written(x: Tensor, gate: Tensor, **free: int) -> Tensor:
    out = torch.full(x.shape, float("nan"), dtype=x.dtype, device=x.device)
    launch(x, gate, out, **free)  # type: ignore[arg-type]
    return out


def _over(run: Run, count: int) -> Iterator[Rows]:
    for dtype in run.over("dtype", DTYPES):
        for heads, width in SHAPES:
            run.covers(shape=f"{heads}x{width}")
            x = many(run, count, heads, width, salt=1, dtype=dtype, scale=3.0)
            both = many(run, count, heads, 2 * width, salt=2, dtype=dtype, scale=20.0)
            gate = both.chunk(2, -1)[1]
            free = [
                partial(_written, x, gate, rows_per_program=per, block=block, num_warps=warps)
                for per, block, warps in FREE
            ]
            flat = x.view(count, heads * width), gate.reshape(count, heads * width)
            for subject, settings in (((x, gate), free), (flat, [])):
                yield Rows(
                    op=sigmoid_mul,
                    spec=naive.sigmoid_mul,
                    by_row=subject,
                    free=settings,
                    spec_gradients=naive.sigmoid_mul_backward,
                    exact=_formula,
                )


def _planted(run: Run) -> None:
    x, gate = (many(run, *PLANTED, salt=s, dtype=torch.float32, scale=8.0) for s in (3, 4))
    want = sigmoid_mul(x, gate)
    run.control("stock_sigmoid", _formula(x, gate), want)
    run.control("sigmoid_rounded_first", (x * torch.sigmoid(gate).bfloat16().float()), want)
    run.control("silu_for_the_sigmoid", x * gate * torch.sigmoid(gate), want)


rows.hang(GATE, _over, _planted)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """Heads on several ranks: nothing is exchanged."""
    for dtype in run.over("dtype", DTYPES):
        x, gate, g = (many(run, rows.SOME, 16, 96, salt=s, dtype=dtype, scale=5.0) for s in (1, 2, 3))
        whole = gradients(sigmoid_mul, [x, gate], g)
        for shards in run.over("TP", (1, 2, 4, 8)):
            parts = zip(*(t.chunk(shards, 1) for t in (x, gate, g)), strict=True)
            found = zip(*(gradients(sigmoid_mul, [a, b], c) for a, b, c in parts), strict=True)
            run.equal([torch.cat(one, 1) for one in found], whole)
        run.control("the_next_gate", sigmoid_mul(x, gate.roll(1, 1)), whole[0])


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for width in run.over("width", (1, 3, 100, 1025)):
            for count in run.over("rows", (0, 1, 5)):
                x, gate = (many(run, count, width, salt=salt, dtype=dtype) for salt in (1, 2))
                found = gradients(sigmoid_mul, [x, gate], gate)
                run.equal(found[0], naive.sigmoid_mul(x, gate))
                run.equal(found[1:], list(naive.sigmoid_mul_backward(gate, x, gate)))
        values = odd_values(dtype).to(run.device)
        x, gate = values[:, None].repeat(1, len(values)), values[None].repeat(len(values), 1)
        got = sigmoid_mul(x, gate)
        run.equal(got, naive.sigmoid_mul(x, gate), any_nan=True)
        run.control("arguments_swapped", sigmoid_mul(gate, x), got)
        found = gradients(sigmoid_mul, [x, gate], x.flip(0))[1:]
        run.equal(found, list(naive.sigmoid_mul_backward(x.flip(0), x, gate)), any_nan=True)
        run.refuses(partial(sigmoid_mul, x, gate[:, :3]))
        run.refuses(partial(sigmoid_mul, x.half(), gate.half()))
        run.refuses(partial(sigmoid_mul, x[0], gate[0]))
        run.refuses(partial(sigmoid_mul, x.t(), gate))
