# SPDX-License-Identifier: Apache-2.0
"""The gate of bias.add/1 on CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.kernels.bias import bias_add, naive
from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.gloo import DEGREES, on_ranks
from isoexec.kernels.gates.inputs import DTYPES, fill, nudged, odd_values, shuffled, wide
from isoexec.kernels.gates.recipes import close, company, gradients, reruns, trainer_forwards
from isoexec.kernels.groups import gather_rows, name_of

GATE = Gate("bias.add/1", "cpu")


def _inputs(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return fill(rows, width, salt=18, dtype=dtype, scale=4.0), fill(width, salt=19, dtype=dtype)


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for width in run.over("width", run.pick((1, 3, 17, 100, 6144), (1, 2, 3, 17, 63, 100, 4096, 6144))):
            for rows in run.over("rows", (1, 7, 40)):
                x, bias = _inputs(rows, width, dtype)
                run.equal(bias_add(x, bias), naive.bias_add(x, bias))
        x, bias = _inputs(40, 100, dtype)
        run.control("one_ulp_of_the_bias", bias_add(x, nudged(bias)), bias_add(x, bias))
        run.control("a_feature_without_bias", bias_add(x, bias.roll(1)), bias_add(x, bias))
    x, bias = _inputs(40, 100, torch.float32)
    folded = (x + bias).bfloat16()  # the bias added before the product was rounded
    run.control("bias_before_rounding", folded, bias_add(x.bfloat16(), bias.bfloat16()))


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        x, bias = _inputs(35, 384, dtype)
        prefill = bias_add(x, bias)
        run.covers(case=["engine_prefill", "engine_decode"])
        run.equal(torch.cat([bias_add(row, bias) for row in x.split(1)]), prefill)
        for case, out in trainer_forwards(bias_add, x.view(7, 5, 384), bias).items():
            run.covers(case=case)
            run.equal(out.view(35, 384), prefill)
        run.control("one_case_without_bias", x, prefill)
        run.control("one_ulp_in_one_case", bias_add(nudged(x), bias), prefill)


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        x, bias = _inputs(run.pick(65, 300), 1000, dtype)
        whole = bias_add(x, bias)
        company(run, lambda rows: bias_add(x[rows], bias), len(x), whole)
    fused = torch.addcmul(bias.expand(4, -1), x[:4], torch.tensor(1.0 + 2.0**-23))
    run.control("another_sum_for_few_rows", fused, whole[:4])


def shards(
    rank: int, size: int, group: ProcessGroup | None, dtype: torch.dtype, sp: bool, own_rows: bool
) -> list[Tensor]:
    """Output and gradients of this rank's features; with `sp` its rows are gathered first, as a column-parallel linear does.

    `own_rows` is the fault: the gradient over this rank's rows alone, added up over ranks.
    """
    x, bias = fill(80, 2, 128, salt=18, dtype=dtype, scale=4.0), fill(128, salt=19, dtype=dtype)
    grad = fill(80, 2, 128, salt=5, dtype=dtype)
    if own_rows:
        x, grad = (t.chunk(size, 0)[rank] for t in (x, grad))
        return gradients(bias_add, [x, bias], grad)
    if sp:
        x = gather_rows(x.chunk(size, 0)[rank], name_of(group))
    return gradients(bias_add, [x.chunk(size, 2)[rank], bias.chunk(size, 0)[rank]], grad.chunk(size, 2)[rank])


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        whole = on_ranks(1, shards, dtype, False, False)[0]
        for axis, sp in (("TP", False), ("SP", True)):
            for size in run.over(axis, DEGREES):
                parts = on_ranks(size, shards, dtype, sp, False)
                run.equal([torch.cat(p, -1) for p in zip(*parts, strict=True)], whole)
    parts = on_ranks(4, shards, torch.float32, False, True)
    run.control("gradient_added_over_ranks", sum(p[2] for p in parts), whole[2])


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    with run.poisoned():
        for dtype in run.over("dtype", DTYPES):
            for shape in ((0, 5), (1, 1), (1, 3), (3, 1), (2, 1, 7), (1, 131071), (1, 131073)):
                run.covers(rows=shape[0])
                x, bias = fill(*shape, salt=18, dtype=dtype), fill(shape[-1], salt=19, dtype=dtype)
                run.equal(bias_add(x, bias), naive.bias_add(x, bias))
            odd = odd_values(dtype)
            for bias in (odd, torch.zeros_like(odd), -torch.zeros_like(odd), odd.flip(0)):
                x = torch.stack([odd, odd.roll(3), -odd])
                run.equal(bias_add(x, bias), naive.bias_add(x, bias), any_nan=True)
            zeros = -torch.zeros(3, 8, dtype=dtype)
            run.equal(bias_add(zeros, zeros[0]), zeros)
            run.control("zero_loses_its_sign", zeros + 0.0, bias_add(zeros, zeros[0]))
    run.refuses(lambda: bias_add(torch.zeros(2, 3), torch.zeros(4)))
    run.refuses(lambda: bias_add(torch.zeros(2, 3), torch.zeros(3, dtype=torch.bfloat16)))


@GATE.check("rerun_determinism")
def _reruns(run: Run) -> None:
    rows = run.pick(64, 1024)
    for dtype in run.over("dtype", DTYPES):
        x, bias = wide(rows, 6144, salt=18, dtype=dtype), fill(6144, salt=19, dtype=dtype)
        run.covers(rows=rows, width=6144)
        grad = wide(rows, 6144, salt=5, dtype=dtype)
        first = reruns(run, lambda: gradients(bias_add, [x, bias], grad), 4)
        run.control("one_ulp_of_the_bias", bias_add(x, nudged(bias)), first[0])
    order = shuffled(rows)  # as atomics would add
    run.control("tokens_in_another_order", gradients(bias_add, [x, bias], grad[order])[2], first[2])


@GATE.check("backward")
def _backward(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for rows in run.over("rows", (1, 7, 63, 64, 65, 200)):
            x, bias = _inputs(rows, 100, dtype)
            grad = fill(rows, 100, salt=5, dtype=dtype)
            _, dx, db = gradients(bias_add, [x, bias], grad)
            run.equal([dx, db], [grad, naive.bias_grad(grad).to(dtype)])
            padded = [torch.cat([t, torch.zeros(70, 100, dtype=dtype)]) for t in (x, grad)]
            run.equal(gradients(bias_add, [padded[0], bias], padded[1])[2], db)
        close(run, bias_add, torch.add, (x, bias), grad)
    run.control("tokens_in_another_order", gradients(bias_add, [x, bias], grad[shuffled(200)])[2], db)
    run.control("plain_sum", grad.sum(0), db)
