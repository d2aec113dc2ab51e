# SPDX-License-Identifier: Apache-2.0
"""What proves l2_norm.pairs/1 on sm90: its specification on the GPU and on the CPU, for heads as they lie in a projection."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from isoexec.kernels.gates import Gate, Run, rows
from isoexec.kernels.gates.forward import many
from isoexec.kernels.gates.inputs import DTYPES, odd_values
from isoexec.kernels.gates.norms import EPS, free_settings
from isoexec.kernels.gates.recipes import gradients
from isoexec.kernels.gates.rows import Rows
from isoexec.kernels.l2_norm.hopper import naive
from isoexec.kernels.l2_norm.hopper.ops import l2_norm
from isoexec.kernels.rms_norm.hopper.kernel import BARE, launch

GATE = Gate("l2_norm.pairs/1", "sm90")
SHAPES = ((16, 128), (5, 96))  # key heads of Qwen3.5-35B-A3B and their width; none that is a power of two
PLANTED = (512, 1024)


def _formula(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def _spec_gradients(g: Tensor, x: Tensor, eps: float) -> list[Tensor]:
    return [naive.dx(g, x, eps)]


def _over(run: Run, count: int) -> Iterator[Rows]:
    for dtype in run.over("dtype", DTYPES):
        for heads, width in SHAPES:
            run.covers(shape=f"{heads}x{width}")
            x = many(run, count, heads + 2, width, salt=1, dtype=dtype, scale=3.0)[:, :heads]
            yield Rows(
                op=l2_norm,
                spec=naive.l2_norm,
                by_row=(x,),
                shared=(EPS,),
                free=free_settings(launch, x, None, scale=BARE, mean=False),
                spec_gradients=_spec_gradients,
                exact=_formula,
            )


def _planted(run: Run) -> None:
    x = many(run, *PLANTED, salt=4, dtype=torch.float32, scale=3.0)
    want = l2_norm(x, EPS)
    fused = torch.full_like(x, float("nan"))
    launch(x, None, None, fused, None, EPS, scale=BARE, mean=False, fused_multiply_add=True)
    run.control("fused_multiply_add", fused, want)
    run.control("another_order_of_the_sum", _formula(x, EPS), want)
    run.control("a_mean_for_the_sum", naive.l2_norm(x, EPS) * PLANTED[1] ** 0.5, want)


rows.hang(GATE, _over, _planted)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """Heads and rows on several ranks: nothing is exchanged."""
    for dtype in run.over("dtype", DTYPES):
        x = many(run, rows.SOME, 8, 128, salt=1, dtype=dtype, scale=3.0)
        whole = l2_norm(x, EPS)
        for shards in run.over("TP", (1, 2, 4, 8)):
            run.equal(torch.cat([l2_norm(part, EPS) for part in x.chunk(shards, 1)], 1), whole)
        run.control("the_next_heads", l2_norm(x.roll(1, 1), EPS), whole)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for width in run.over("width", (1, 3, 96)):
            for count in run.over("rows", (0, 1, 5)):
                x = many(run, count, width, salt=2, dtype=dtype, scale=3.0)
                run.equal(l2_norm(x, EPS), naive.l2_norm(x, EPS))
                run.equal(gradients(partial(l2_norm, eps=EPS), [x], x)[1], naive.dx(x, x, EPS))
        odd = many(run, len(odd_values(dtype)), 64, salt=2, dtype=dtype)
        plain = l2_norm(odd, EPS)
        odd[:, 7] = odd_values(dtype).to(odd.device)
        run.equal(l2_norm(odd, EPS), naive.l2_norm(odd, EPS), any_nan=True)
        run.control("odd_values", l2_norm(odd, EPS), plain)
        zeros = torch.zeros_like(odd)
        run.equal(l2_norm(zeros, EPS), zeros)
        run.refuses(partial(l2_norm, odd.half(), EPS))
        run.refuses(partial(l2_norm, odd[0], EPS))
        run.refuses(partial(l2_norm, odd.t(), EPS))
