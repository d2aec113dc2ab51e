# SPDX-License-Identifier: Apache-2.0
"""What proves bias.add/1 on sm90: the CPU's specification, forward and gradient, at the widths of query, key and value."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from isoexec.kernels.bias import naive
from isoexec.kernels.bias.hopper.kernel import launch, launch_gradient
from isoexec.kernels.bias.hopper.ops import bias_add
from isoexec.kernels.gates import Gate, Run, rows
from isoexec.kernels.gates.degrees import wants
from isoexec.kernels.gates.forward import many
from isoexec.kernels.gates.inputs import DTYPES, odd_values
from isoexec.kernels.gates.recipes import gradients
from isoexec.kernels.gates.rows import Rows

GATE = Gate("bias.add/1", "sm90")
WIDTHS = (1152, 6144)  # Qwen2.5-0.5B's and MiMo-7B's query, key and value
DEGREES = (1, 2, 4, 8)
FREE = ((1, 128, 1), (4, 2048, 8), (8, 256, 4))  # rows, block, warps


def _written(x: Tensor, bias: Tensor, **free: int) -> Tensor:
    out = torch.full(x.shape, float("nan"), dtype=x.dtype, device=x.device)
    launch(x, bias, out, **free)
    return out


def _spec_gradients(g: Tensor, x: Tensor, bias: Tensor) -> list[Tensor]:
    return [g, naive.bias_grad(g).to(bias.dtype)]


def _over(run: Run, count: int) -> Iterator[Rows]:
    for dtype in run.over("dtype", DTYPES):
        for width in run.over("width", WIDTHS):
            x = many(run, count, width, salt=1, dtype=dtype, scale=4.0)
            bias = many(run, width, salt=2, dtype=dtype)
            free = [
                partial(_written, x, bias, rows_per_program=per, block=block, num_warps=warps)
                for per, block, warps in FREE
            ]
            yield Rows(
                op=bias_add,
                spec=naive.bias_add,
                by_row=(x,),
                shared=(bias,),
                free=free,
                spec_gradients=_spec_gradients,
                exact=torch.add,
                on_host=True,
            )


def _planted(run: Run) -> None:
    x, bias = (
        many(run, 40, 100, salt=3, dtype=torch.float32, scale=4.0),
        many(run, 100, salt=4, dtype=torch.float32),
    )
    folded = (x + bias).bfloat16()  # the bias added before the product was rounded
    run.control("bias_before_rounding", folded, bias_add(x.bfloat16(), bias.bfloat16()))
    run.control("another_feature", bias_add(x, bias.roll(1)), bias_add(x, bias))


rows.hang(GATE, _over, _planted)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """Features on several ranks, each with all tokens, as the linear before it gathers them (SP): nothing is exchanged."""
    for dtype in run.over("dtype", DTYPES):
        x, g = (many(run, rows.SOME, 768, salt=s, dtype=dtype, scale=4.0) for s in (1, 2))
        bias = many(run, 768, salt=3, dtype=dtype)
        whole = gradients(bias_add, [x, bias], g)
        for axis in ("TP", "SP"):
            for shards in run.over(axis, DEGREES):
                rows_of = x if axis == "TP" else torch.cat(x.tensor_split(shards))
                parts = zip(*(t.chunk(shards, -1) for t in (rows_of, bias, g)), strict=True)
                found = zip(*(gradients(bias_add, [a, b], c) for a, b, c in parts), strict=True)
                run.equal([torch.cat(one, -1) for one in found], whole)
        own = [gradients(bias_add, [a, bias], b)[2] for a, b in zip(x.chunk(2), g.chunk(2), strict=True)]
        run.control("gradient_added_over_ranks", own[0] + own[1], whole[2])
        run.control("the_next_feature", bias_add(x, bias.roll(1)), whole[0])


wants(GATE, "partition_invariance", TP=DEGREES, SP=DEGREES)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for shape in ((0, 5), (1, 1), (1, 3), (65, 1), (2, 3, 7), (130, 129)):
            run.covers(rows=shape[0], width=shape[-1])
            x, bias = many(run, *shape, salt=1, dtype=dtype), many(run, shape[-1], salt=2, dtype=dtype)
            found = gradients(bias_add, [x, bias], x)
            run.equal(found[0], naive.bias_add(x, bias))
            run.equal([t.cpu() for t in found[1:]], _spec_gradients(x.cpu(), x, bias))
        odd = odd_values(dtype).to(run.device)
        x = torch.stack([odd, odd.roll(3), -odd])
        run.equal(bias_add(x, odd), naive.bias_add(x, odd), any_nan=True)
        db = torch.full_like(odd, float("nan"))
        launch_gradient(x, db)
        run.equal(db.cpu(), naive.bias_grad(x.cpu()).to(dtype), any_nan=True)
        zeros = -torch.zeros(3, 8, dtype=dtype, device=run.device)
        run.equal(bias_add(zeros, zeros[0]), zeros)
        run.control("zero_loses_its_sign", zeros + 0.0, bias_add(zeros, zeros[0]))
        run.refuses(partial(bias_add, x, odd[:3]))
        run.refuses(partial(bias_add, x, odd.half()))
        run.refuses(partial(bias_add, x.half(), odd.half()))
