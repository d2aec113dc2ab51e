# SPDX-License-Identifier: Apache-2.0
"""The gate of silu_mul.exp/1 on CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.gloo import DEGREES, on_ranks
from isoexec.kernels.gates.inputs import DTYPES, fill, nudged, odd_values, wide
from isoexec.kernels.gates.recipes import close, company, gradients, reruns, trainer_forwards
from isoexec.kernels.silu_mul import naive, silu_mul

GATE = Gate("silu_mul.exp/1", "cpu")


def _inputs(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return fill(rows, width, salt=3, dtype=dtype, scale=9.0), fill(rows, width, salt=4, dtype=dtype)


def _stock(gate: Tensor, up: Tensor) -> Tensor:
    """Torch's own, which rounds where it likes."""
    return (F.silu(gate) if gate.dtype == torch.bfloat16 else torch.sigmoid(gate) * gate) * up


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for width in run.over(
            "width", run.pick((1, 3, 17, 63, 100, 1536), (1, 2, 3, 17, 63, 100, 1536, 11008, 12288))
        ):
            for rows in run.over("rows", (1, 7, 40)):
                gate, up = _inputs(rows, width, dtype)
                run.equal(silu_mul(gate, up), naive.silu_mul(gate, up))
        gate, up = _inputs(40, 1536, dtype)
        want = naive.silu_mul(gate, up)
        run.control("stock_silu", _stock(gate, up), want)
        run.control("one_ulp_of_the_gate", silu_mul(nudged(gate), up), want)


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        gate, up = _inputs(35, 384, dtype)
        both = torch.cat([gate, up], 1)  # an engine's halves are views of one projection
        prefill = silu_mul(both[:, :384], both[:, 384:])
        run.covers(case="engine_prefill")
        run.covers(case="engine_decode")
        decode = [silu_mul(row[:, :384], row[:, 384:]) for row in both.split(1)]
        run.equal(torch.cat(decode), prefill)
        shape = (7, 5, 384)
        for case, out in trainer_forwards(silu_mul, gate.view(shape), up.view(shape)).items():
            run.covers(case=case)
            run.equal(out.view(35, 384), prefill)
        run.control("halves_exchanged", silu_mul(both[:, 384:], both[:, :384]), prefill)
        run.control("stock_silu_in_one_case", _stock(gate, up), prefill)


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        gate, up = _inputs(run.pick(65, 300), 1000, dtype)
        whole = silu_mul(gate, up)
        company(run, lambda rows: silu_mul(gate[rows], up[rows]), len(gate), whole)
        for start in (1, 3, 8, 333, 999):
            run.equal(silu_mul(gate[:, start:], up[:, start:]), whole[:, start:])
        run.control("stock_silu_for_few_rows", _stock(gate[:4], up[:4]), whole[:4])


def shards(
    rank: int, size: int, group: ProcessGroup | None, dtype: torch.dtype, mixed: bool, dim: int = 1
) -> list[Tensor]:
    """Output and gradients of this rank's columns (dim 1) or rows; `mixed` slices [gate; up] plainly, as a wrong layout would."""
    gate, up = _inputs(24, 512, dtype)
    grad = fill(24, 512, salt=5, dtype=dtype)
    if mixed:
        gate, up = torch.cat([gate, up], 1).chunk(size, 1)[rank].chunk(2, 1)
    else:
        gate, up = (t.chunk(size, dim)[rank] for t in (gate, up))
    return gradients(silu_mul, [gate, up], grad.chunk(size, dim)[rank])


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        whole = on_ranks(1, shards, dtype, False)[0]
        for axis in ("TP", "ETP", "EP"):  # columns of a layer, columns of experts, rows of experts
            for size in run.over(axis, DEGREES):
                parts = zip(*on_ranks(size, shards, dtype, False, int(axis != "EP")), strict=True)
                run.equal([torch.cat(part, int(axis != "EP")) for part in parts], whole)
        mixed = [torch.cat(p, 1) for p in zip(*on_ranks(2, shards, dtype, True), strict=True)]
        run.control("halves_cut_across", mixed, whole)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    with run.poisoned():
        for dtype in run.over("dtype", DTYPES):
            for shape in ((1, 1), (1, 3), (3, 1), (1, 1, 7), (2, 0, 5), (1, 131071), (1, 131073)):
                run.covers(rows=shape[0])
                gate, up = fill(*shape, salt=3, dtype=dtype, scale=9.0), fill(*shape, salt=4, dtype=dtype)
                run.equal(silu_mul(gate, up), naive.silu_mul(gate, up))
            gate = odd_values(dtype)
            for up in (gate, torch.ones_like(gate), gate.flip(0)):
                pair = torch.stack([gate, gate]), torch.stack([up, up])
                run.equal(silu_mul(*pair), naive.silu_mul(*pair), any_nan=True)
            finite = gate[gate.isfinite()]
            run.holds(silu_mul(finite, torch.ones_like(finite)).isfinite())
            run.control(
                "zero_loses_its_sign", silu_mul(gate + 0.0, gate) + 0.0, silu_mul(gate, gate.abs()) - 0.0
            )
    run.refuses(lambda: silu_mul(torch.zeros(2, 3), torch.zeros(2, 4)))
    run.refuses(
        lambda: silu_mul(torch.zeros(2, 3, dtype=torch.float16), torch.zeros(2, 3, dtype=torch.float16))
    )


@GATE.check("rerun_determinism")
def _reruns(run: Run) -> None:
    rows = run.pick(64, 1024)
    for dtype in run.over("dtype", DTYPES):
        for width in run.over("width", run.pick((12288,), (11008, 12288))):
            gate, up = (
                wide(rows, width, salt=3, dtype=dtype, scale=9.0),
                wide(rows, width, salt=4, dtype=dtype),
            )
            (first,) = reruns(run, lambda: silu_mul(gate, up), 4)
            run.covers(rows=rows)
            run.control("one_ulp_of_the_gate", silu_mul(nudged(gate), up), first)


@GATE.check("backward")
def _backward(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        gate, up = _inputs(60, 100, dtype)
        grad = fill(60, 100, salt=5, dtype=dtype)
        _, dgate, dup = whole = gradients(silu_mul, [gate, up], grad)
        run.equal([dgate, dup], naive.silu_mul_backward(grad, gate, up))
        run.equal(gradients(silu_mul, [gate, up], grad), whole)
        for rows in run.over("rows", (1, 7, 33)):
            cut = slice(60 - rows, 60)
            part = gradients(silu_mul, [gate[cut], up[cut]], grad[cut])
            run.equal(part, [t[cut] for t in whole])
        close(run, silu_mul, lambda g, u: F.silu(g) * u, (gate, up), grad)
    other = gradients(lambda gate, up: torch.sigmoid(gate) * gate * up, [gate, up], grad)
    run.control("gradient_of_another_formula", other[1:], [dgate, dup])
