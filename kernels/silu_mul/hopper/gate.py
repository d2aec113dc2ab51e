# SPDX-License-Identifier: Apache-2.0
"""What proves silu_mul.poly/1 on sm90: its specification on the GPU and on the CPU, over whole projections as they lie."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from isoexec.kernels.gates import Gate, Run, rows
from isoexec.kernels.gates.degrees import wants
from isoexec.kernels.gates.forward import many
from isoexec.kernels.gates.inputs import DTYPES, odd_values
from isoexec.kernels.gates.recipes import gradients
from isoexec.kernels.gates.rows import Rows
from isoexec.kernels.silu_mul.hopper import naive
from isoexec.kernels.silu_mul.hopper.kernel import launch, launch_gradient
from isoexec.kernels.silu_mul.hopper.ops import silu_mul, silu_mul_halves

GATE = Gate("silu_mul.poly/1", "sm90")
PLANTED = (256, 2048)  # rows and twice the width where another exp shows
WIDTHS = (512, 3072, 12288)  # Qwen3.5-35B-A3B's experts, Qwen3-0.6B, Qwen3-8B
DEGREES = (1, 2, 4, 8)
FREE = ((1, 128, 1), (1, 2048, 8), (4, 512, 4))  # rows, block, warps


def _formula(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _written(gate: Tensor, up: Tensor, **free: int | bool) -> Tensor:
    out = torch.full(gate.shape, float("nan"), dtype=gate.dtype, device=gate.device)
    launch(gate, up, out, **free)  # type: ignore[arg-type]
    return out


def _over(run: Run, count: int) -> Iterator[Rows]:
    for dtype in run.over("dtype", DTYPES):
        for width in run.over("width", WIDTHS):
            both = many(run, count, 2 * width, salt=1, dtype=dtype, scale=30.0)
            gate, up = both.chunk(2, -1)
            free = [
                partial(_written, gate, up, rows_per_program=per, block=block, num_warps=warps)
                for per, block, warps in FREE
            ]
            yield Rows(
                op=silu_mul,
                spec=naive.silu_mul,
                by_row=(gate, up),
                free=free,
                spec_gradients=naive.silu_mul_backward,
                exact=_formula,
            )
            run.covers(projection=True)
            yield Rows(
                op=silu_mul_halves,
                spec=lambda both: naive.silu_mul(*both.chunk(2, -1)),
                by_row=(both,),
                spec_gradients=lambda g, both: [
                    torch.cat(naive.silu_mul_backward(g, *both.chunk(2, -1)), -1)
                ],
                exact=lambda both: _formula(*both.chunk(2, -1)),
            )


def _planted(run: Run) -> None:
    x = many(run, *PLANTED, salt=3, dtype=torch.float32, scale=8.0)
    gate, up = x.chunk(2, -1)
    run.control("hardware_exp", _written(gate, up, hardware_exp=True), naive.silu_mul(gate, up))


rows.hang(GATE, _over, _planted)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """Columns of gate and up on several ranks (TP, ETP), or the rows of each rank's experts (EP): nothing is exchanged."""
    for dtype in run.over("dtype", DTYPES):
        for width in run.over("width", WIDTHS):
            gate, up, g = (many(run, rows.SOME, width, salt=s, dtype=dtype, scale=9.0) for s in (1, 2, 3))
            whole = gradients(silu_mul, [gate, up], g)
            for axis, dim in (("TP", 1), ("ETP", 1), ("EP", 0)):
                for shards in run.over(axis, DEGREES):
                    parts = zip(*(t.tensor_split(shards, dim) for t in (gate, up, g)), strict=True)
                    found = zip(*(gradients(silu_mul, [a, b], c) for a, b, c in parts), strict=True)
                    run.equal([torch.cat(one, dim) for one in found], whole)
            run.control("the_next_column", silu_mul(gate.roll(1, 1), up), whole[0])


wants(GATE, "partition_invariance", TP=DEGREES, EP=DEGREES, ETP=DEGREES)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for width in run.over("width", (1, 3, 100, 1025)):
            for count in run.over("rows", (0, 1, 5)):
                gate, up = (many(run, count, width, salt=salt, dtype=dtype) for salt in (1, 2))
                found = gradients(silu_mul, [gate, up], up)
                run.equal(found[0], naive.silu_mul(gate, up))
                run.equal(found[1:], list(naive.silu_mul_backward(up, gate, up)))
        values = odd_values(dtype).to(run.device)
        gate, up = (
            values[:, None].expand(-1, len(values)).contiguous(),
            values[None].expand(len(values), -1).contiguous(),
        )
        got = silu_mul(gate, up)
        run.equal(got, naive.silu_mul(gate, up), any_nan=True)
        run.control("arguments_swapped", silu_mul(up, gate), got)
        back = [torch.full_like(gate, float("nan")) for _ in range(2)]
        launch_gradient(gate.flip(0), gate, up, *back)
        run.equal(back, list(naive.silu_mul_backward(gate.flip(0), gate, up)), any_nan=True)
        run.refuses(partial(silu_mul, gate, up[:, :3]))
        run.refuses(partial(silu_mul, gate.half(), up.half()))
        run.refuses(partial(silu_mul, gate.double(), up.double()))
        run.refuses(partial(silu_mul, gate.t(), up.t()))
        run.refuses(partial(silu_mul_halves, gate[:, :3]))
