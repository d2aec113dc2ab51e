# SPDX-License-Identifier: Apache-2.0
"""What proves rms_norm.pairs/1 on sm90: its specification on the GPU and on the CPU, hidden rows, residuals and heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.forward import cases, every_batch, many, reruns_at_full_size, touched
from isoexec.kernels.gates.inputs import DTYPES, odd_values
from isoexec.kernels.rms_norm import naive as halving
from isoexec.kernels.rms_norm.hopper import naive
from isoexec.kernels.rms_norm.hopper.kernel import launch
from isoexec.kernels.rms_norm.hopper.ops import WIDEST, add_rms_norm, rms_norm

if TYPE_CHECKING:
    from torch import Tensor

GATE = Gate("rms_norm.pairs/1", "sm90")
EPS = 1e-6
ROWS = 8192
SOME = 777
PLANTED = (512, 4096)  # rows and width where another sum shows
# hidden sizes and, by heads of the projection they lie in, head widths: Qwen3-0.6B, Qwen3.5-35B-A3B, Qwen3-8B
SHAPES = (("hidden", 1, 1024), ("hidden", 1, 2048), ("hidden", 1, 4096), ("heads", 9, 128), ("heads", 5, 256))
FREE = [(rows, warps) for rows in (1, 4, 8) for warps in (1, 2, 4, 8)]

Call = Callable[[slice], "Tensor"]


def _over(run: Run, rows: int) -> Iterator[tuple[Call, Call, Tensor, Tensor]]:
    """Kernel and specification by rows, the input, the weight: plain, with a residual, and heads as they lie in a projection."""
    for dtype in run.over("dtype", DTYPES):
        for kind, heads, width in SHAPES:
            run.covers(shape=f"{kind} {width}")
            w = many(run, width, salt=1, dtype=dtype)
            x = many(run, rows, heads * width, salt=2, dtype=dtype, scale=3.0)
            if heads > 1:
                x = x.view(rows, heads, width)[:, : heads - 1]
            yield _plain(x, w), _plain_spec(x, w), x, w
            if heads == 1:
                r = many(run, rows, width, salt=3, dtype=dtype)
                run.covers(residual=[False, True])
                yield _added(x, r, w), _added_spec(x, r, w), x, w


def _plain(x: Tensor, w: Tensor) -> Call:
    return lambda cut: rms_norm(x[cut], w, EPS)


def _plain_spec(x: Tensor, w: Tensor) -> Call:
    return lambda cut: naive.rms_norm(x[cut], w, EPS)


def _added(x: Tensor, r: Tensor, w: Tensor) -> Call:
    return lambda cut: torch.cat(add_rms_norm(x[cut], r[cut], w, EPS), -1)


def _added_spec(x: Tensor, r: Tensor, w: Tensor) -> Call:
    return lambda cut: torch.cat(naive.add_rms_norm(x[cut], r[cut], w, EPS), -1)


def _other_sums(run: Run) -> None:
    x, w = (
        many(run, *PLANTED, salt=4, dtype=torch.float32, scale=3.0),
        many(run, PLANTED[1], salt=5, dtype=torch.float32),
    )
    want = naive.rms_norm(x, w, EPS)
    fused = torch.full_like(x, float("nan"))
    launch(x, None, w, fused, None, EPS, fused_multiply_add=True)
    run.control("fused_multiply_add", fused, want)
    run.control("halving_tree", halving.rms_norm(x.cpu(), w.cpu(), EPS), want.cpu())


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    rows = run.pick(min(256, ROWS), ROWS)
    for call, spec, x, w in _over(run, rows):
        whole = call(slice(0, rows))
        run.equal(whole, spec(slice(0, rows)))
        some = slice(0, 64)
        if x.dim() == 2 and whole.shape == x.shape:
            run.equal(whole[some].cpu(), naive.rms_norm(x[some].cpu(), w.cpu(), EPS))
            for per, warps in FREE:
                if per * x.shape[-1] <= max(4096, x.shape[-1]):
                    out = torch.full_like(x, float("nan"))
                    launch(x, None, w, out, None, EPS, rows_per_program=per, num_warps=warps)
                    run.equal(out, whole)
    _other_sums(run)


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    rows = run.pick(min(256, ROWS), ROWS)
    for call, _, _, _ in _over(run, rows):
        every_batch(run, call, call(slice(0, rows)))
    _other_sums(run)


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    for call, _, _, _ in _over(run, SOME):
        cases(run, call, SOME)
    _other_sums(run)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """Heads on several ranks, and rows on several: nothing is exchanged."""
    for dtype in run.over("dtype", DTYPES):
        for width in (128, 256):
            w = many(run, width, salt=1, dtype=dtype)
            x = many(run, SOME, 17 * width, salt=2, dtype=dtype, scale=3.0).view(SOME, 17, width)[:, :16]
            whole = rms_norm(x, w, EPS)
            for shards in run.over("TP", (1, 2, 4, 8)):
                run.equal(torch.cat([rms_norm(part, w, EPS) for part in x.chunk(shards, 1)], 1), whole)
            for shards in run.over("SP", (1, 2, 4, 8)):
                run.equal(torch.cat([rms_norm(part, w, EPS) for part in x.chunk(shards)]), whole)
            run.control("the_next_heads", rms_norm(x.roll(1, 1), w, EPS), whole)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for width in run.over("width", (1, 3, 96, WIDEST)):
            w = many(run, width, salt=1, dtype=dtype)
            for rows in run.over("rows", (0, 1, 5)):
                x = many(run, rows, width, salt=2, dtype=dtype, scale=3.0)
                run.equal(rms_norm(x, w, EPS), naive.rms_norm(x, w, EPS))
                run.equal(add_rms_norm(x, x, w, EPS), naive.add_rms_norm(x, x, w, EPS))
        w = many(run, 64, salt=1, dtype=dtype)
        odd = many(run, len(odd_values(dtype)), 64, salt=2, dtype=dtype)
        odd[:, 7] = odd_values(dtype).to(odd.device)
        run.equal(rms_norm(odd, w, EPS), naive.rms_norm(odd, w, EPS), any_nan=True)
        zeros = torch.zeros_like(odd)
        run.equal(rms_norm(zeros, w, EPS), naive.rms_norm(zeros, w, EPS))
        run.control("zeros_for_odd_values", rms_norm(zeros, w, EPS), rms_norm(odd, w, EPS))
        x = many(run, 4, WIDEST + 1, salt=2, dtype=dtype)
        run.refuses(partial(rms_norm, x, x[0], EPS))
        run.refuses(partial(rms_norm, odd, w[:32], EPS))
        run.refuses(partial(rms_norm, odd.half(), w, EPS))
        run.refuses(partial(add_rms_norm, odd, odd[:1], w, EPS))
        run.refuses(partial(rms_norm, x[:, :64].t(), x[0, :4], EPS))


@GATE.check("rerun_determinism")
def _rerun(run: Run) -> None:
    for call, _, _, _ in _over(run, ROWS):
        first = reruns_at_full_size(run, partial(call, slice(0, ROWS)))
        run.control("the_last_bit_of_one_in_seven", touched(first), first)
