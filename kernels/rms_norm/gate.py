# SPDX-License-Identifier: Apache-2.0
"""The gate of rms_norm.tree/1 on CPU."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.gloo import DEGREES, on_ranks
from isoexec.kernels.gates.inputs import DTYPES, fill, nudged, odd_values, shuffled, wide
from isoexec.kernels.gates.recipes import close, company, gradients, reruns, trainer_forwards
from isoexec.kernels.rms_norm import add_rms_norm, naive, residual_add, rms_norm, rms_norm_grad

GATE = Gate("rms_norm.tree/1", "cpu")
EPS = 1e-6


def _inputs(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return fill(rows, width, salt=3, dtype=dtype, scale=3.0), fill(width, salt=4, dtype=dtype)


def _running(x: Tensor, w: Tensor) -> Tensor:
    """The norm with its squares added one after another, not by a tree."""
    xf = x.float()
    total = torch.zeros(xf.shape[:-1])
    for column in (xf * xf).unbind(-1):
        total = total + column
    r = naive.reciprocal_root(total.unsqueeze(-1) / x.shape[-1] + EPS)
    return (xf * r * w.float()).to(x.dtype)


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        widths = run.pick((1, 3, 17, 63, 128, 1024), (1, 2, 3, 17, 32, 63, 64, 100, 128, 1000, 1024, 4096))
        for width in run.over("width", widths):
            for rows in run.over("rows", (1, 7, 40)):
                x, w = _inputs(rows, width, dtype)
                residual = fill(rows, width, salt=5, dtype=dtype)
                run.equal(rms_norm(x, w, EPS), naive.rms_norm(x, w, EPS))
                run.equal(residual_add(x, residual), naive.residual_add(x, residual))
                h = naive.residual_add(x, residual)
                run.equal(add_rms_norm(x, residual, w, EPS), [naive.rms_norm(h, w, EPS), h])
    x, w = _inputs(400, 1000, torch.float32)
    want = naive.rms_norm(x, w, EPS)
    run.control("running_sum", _running(x, w), want)
    run.control("stock_norm", F.rms_norm(x, w.shape, w, EPS), want)
    run.control("one_ulp_of_x", rms_norm(nudged(x), w, EPS), want)
    x, w = x.bfloat16(), w.bfloat16()
    residual = fill(400, 1000, salt=5, dtype=torch.bfloat16)
    unrounded = naive.rms_norm(x.float() + residual.float(), w, EPS).bfloat16()
    run.control("residual_not_rounded", unrounded, add_rms_norm(x, residual, w, EPS)[0])


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for width in run.over("width", (128, 1000)):
            x, w = _inputs(60, width, dtype)
            residual = fill(60, width, salt=5, dtype=dtype)
            prefill, h = add_rms_norm(x, residual, w, EPS)  # an engine adds and norms in one call
            run.covers(case=["engine_prefill", "engine_decode"])
            for i in range(60):
                row = slice(i, i + 1)
                run.equal(add_rms_norm(x[row], residual[row], w, EPS), [prefill[row], h[row]])

            def trainer(x: Tensor, residual: Tensor, w: Tensor) -> Tensor:
                return rms_norm_grad(residual_add(x, residual), w, EPS)

            shape = (20, 3, width)
            for case, out in trainer_forwards(trainer, x.view(shape), residual.view(shape), w).items():
                run.covers(case=case)
                run.equal(out.view(60, width), prefill)
            heads = rms_norm(h.view(15, 4, width), w, EPS)  # a norm of query or key heads
            for out in trainer_forwards(partial(rms_norm_grad, eps=EPS), h.view(15, 1, 4, width), w).values():
                run.equal(out.view(heads.shape), heads)
        run.control("residual_left_out_of_one_case", rms_norm(x, w, EPS), prefill)
    x, residual, w = x.bfloat16(), residual.bfloat16(), w.bfloat16()
    unrounded = naive.rms_norm(x.float() + residual.float(), w, EPS).bfloat16()
    run.control("residual_not_rounded_in_one_case", unrounded, add_rms_norm(x, residual, w, EPS)[0])


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for width in run.over("width", run.pick((128,), (128, 1000, 4096))):
            x, w = _inputs(run.pick(65, 300), width, dtype)
            whole = rms_norm(x, w, EPS)
            company(run, lambda rows: rms_norm(x[rows], w, EPS), len(x), whole)
    few = slice(0, 16)
    run.control("running_sum_for_few_rows", _running(x[few], w), whole[few])


def shards(
    rank: int, size: int, group: ProcessGroup | None, dtype: torch.dtype, fault: str
) -> dict[str, list[Tensor]]:
    """Outputs and gradients: a hidden norm with the sequence shared, and a norm of heads with the heads shared.

    `fault` "" is right; "no_hand_over" sums on each rank alone, "reversed" gives the ranks their rows from the end.
    """
    x, g = fill(24, 3, 128, salt=1, dtype=dtype), fill(24, 3, 128, salt=9, dtype=dtype)
    heads, g_heads = fill(24, 3, 16, 32, salt=7, dtype=dtype), fill(24, 3, 16, 32, salt=12, dtype=dtype)
    w, w_heads = fill(128, salt=6, dtype=dtype), fill(32, salt=8, dtype=dtype)
    at = size - 1 - rank if fault == "reversed" else rank
    x, g = (t.chunk(size, 0)[at] for t in (x, g))
    heads, g_heads = (t.chunk(size, 2)[at] for t in (heads, g_heads))
    with_group = None if fault == "no_hand_over" else group
    return {
        "sequence": gradients(
            lambda x, w: rms_norm_grad(
                x, w, EPS, shard="sequence" if with_group else "none", group=with_group
            ),
            [x, w],
            g,
        ),
        "heads": gradients(
            lambda x, w: rms_norm_grad(x, w, EPS, shard="heads" if with_group else "none", group=with_group),
            [heads, w_heads],
            g_heads,
        ),
    }


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        whole = on_ranks(1, shards, dtype, "")[0]
        for axis, name, dim in (("SP", "sequence", 0), ("TP", "heads", 2)):
            for size in run.over(axis, DEGREES):
                y, dx, dw = zip(*(r[name] for r in on_ranks(size, shards, dtype, "")), strict=True)
                run.equal([torch.cat(y, dim), torch.cat(dx, dim), dw[0]], whole[name])
                for rest in dw[1:]:  # a sum over the group is then exact
                    run.equal(rest, torch.zeros_like(rest))
    for size in DEGREES[1:]:
        for fault in ("no_hand_over", "reversed"):
            ranks = on_ranks(size, shards, torch.float32, fault)
            for name in ("sequence", "heads"):
                total = torch.stack([r[name][2] for r in ranks]).sum(0)
                run.control(f"{fault}_{name}", total, whole[name][2])


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    with run.poisoned():
        for dtype in run.over("dtype", DTYPES):
            for rows in run.over("rows", (0, 1, 2)):
                for width in run.over("width", (1, 2, 3, 5, 127, 129)):
                    x, w = _inputs(rows, width, dtype)
                    run.equal(rms_norm(x, w, EPS), naive.rms_norm(x, w, EPS))
                    run.equal(add_rms_norm(x, x, w, EPS)[0], naive.rms_norm(naive.residual_add(x, x), w, EPS))
            odd = odd_values(dtype)
            x, w = _inputs(len(odd), 17, dtype)
            x[:, 3] = odd
            run.equal(rms_norm(x, w, EPS), naive.rms_norm(x, w, EPS), any_nan=True)
            run.equal(rms_norm(x, w, EPS)[:9], rms_norm(x[:9], w, EPS))
            run.equal(residual_add(odd, odd.roll(3)), naive.residual_add(odd, odd.roll(3)), any_nan=True)
            zeros = torch.zeros(3, 8, dtype=dtype)
            run.equal(rms_norm(zeros, torch.ones(8, dtype=dtype), EPS), zeros)
            run.control("another_epsilon", rms_norm(x[:8] * 1e-3, w, 1e-5), rms_norm(x[:8] * 1e-3, w, EPS))
    run.refuses(lambda: rms_norm(torch.zeros(2, 8), torch.zeros(9), EPS))
    run.refuses(lambda: rms_norm(torch.zeros(2, 8, dtype=torch.float16), torch.zeros(8), EPS))
    run.refuses(lambda: rms_norm_grad(torch.zeros(2, 1, 8), torch.zeros(8), EPS, shard="heads"))


@GATE.check("rerun_determinism")
def _reruns(run: Run) -> None:
    rows = run.pick(64, 512)
    for dtype in run.over("dtype", DTYPES):
        x, w = wide(rows, 4096, salt=3, dtype=dtype, scale=3.0), fill(4096, salt=4, dtype=dtype)
        residual, g = wide(rows, 4096, salt=5, dtype=dtype), wide(rows, 4096, salt=6, dtype=dtype)
        run.covers(rows=rows, width=4096)
        reruns(run, lambda: add_rms_norm(x, residual, w, EPS), 4)
        call = partial(rms_norm_grad, eps=EPS)
        shape = (rows, 1, 4096)
        first = reruns(run, lambda: gradients(call, [x.view(shape), w], g.view(shape)), 2)
    order = shuffled(rows)  # as atomics would add
    again = gradients(call, [x[order].view(shape), w], g[order].view(shape))
    run.control("rows_in_another_order", again[2], first[2])


@GATE.check("backward")
def _backward(run: Run) -> None:
    call = partial(rms_norm_grad, eps=EPS)
    for dtype in run.over("dtype", DTYPES):
        for shape in ((17, 3, 128), (9, 2, 4, 32), (1, 1, 100), (33, 2, 63)):
            run.covers(rows=shape[0], width=shape[-1])
            x, w = fill(*shape, salt=4, dtype=dtype), fill(shape[-1], salt=5, dtype=dtype)
            g = fill(*shape, salt=6, dtype=dtype)
            _, dx, dw = gradients(call, [x, w], g)
            by_heads = (x if x.dim() == 4 else x.unsqueeze(2)).shape
            run.equal(dx, naive.dx(g, x, w, EPS))
            run.equal(dw, naive.dgamma(g.view(by_heads), x.view(by_heads), EPS).to(dtype))
            padded = [torch.cat([t, torch.zeros(8, *shape[1:], dtype=dtype)]) for t in (x, g)]
            run.equal(gradients(call, [padded[0], w], padded[1])[2], dw)
            close(
                run, call, lambda x, w: x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * w, [x, w], g
            )
        residual = fill(*shape, salt=7, dtype=dtype)
        run.equal(gradients(residual_add, [x, residual], g)[1:], [g, g])
    plain = (g * x * naive.reciprocal_root(x.square().mean(-1, keepdim=True) + EPS)).flatten(0, 1)
    run.control("plain_sum_over_rows", plain.sum(0), dw)
    run.control("rows_in_another_order", gradients(call, [x.flip(0), w], g.flip(0))[2], dw)
    run.control("gradient_of_the_scale_left_out", g * w, dx)
