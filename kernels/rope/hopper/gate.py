# SPDX-License-Identifier: Apache-2.0
"""What proves rope.neox_fp32/1 on sm90: the CPU's specification, for heads as they lie in a projection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.forward import cases, every_batch, many, reruns_at_full_size, touched
from isoexec.kernels.gates.inputs import DTYPES, ids
from isoexec.kernels.rope import naive
from isoexec.kernels.rope.hopper.kernel import launch
from isoexec.kernels.rope.hopper.ops import rope, tables

if TYPE_CHECKING:
    from torch import Tensor

GATE = Gate("rope.neox_fp32/1", "sm90")
ROWS = 8192
SOME = 777
PLANTED = 256  # rows in which another rounding shows
# heads, width, base: Qwen3's query and key heads, and the rotated part of Qwen3.5's
SHAPES = ((32, 128, 1e6), (8, 128, 1e6), (16, 64, 1e7))

Call = Callable[[slice], "Tensor"]


def _over(run: Run, rows: int) -> Iterator[tuple[Call, Tensor, Tensor, float]]:
    """The op by rows, the heads it reads, their positions and the base."""
    for dtype in run.over("dtype", DTYPES):
        for heads, width, base in SHAPES:
            run.covers(shape=f"{heads}x{width}", base=int(base))
            x = many(run, rows, (heads + 2) * width, salt=1, dtype=dtype, scale=3.0)
            x = x.view(rows, heads + 2, width)[:, :heads]
            at = ids(rows, naive.LENGTH, 2).to(run.device)
            cos, sin = tables(width, base, run.device)
            yield _rows(x, at, cos, sin), x, at, base


def _rows(x: Tensor, at: Tensor, cos: Tensor, sin: Tensor) -> Call:
    return lambda cut: rope(x[cut], at[cut], cos, sin)


def _turned(run: Run, x: Tensor, at: Tensor, base: float, **free: int | bool) -> Tensor:
    out = torch.full(x.shape, float("nan"), dtype=x.dtype, device=run.device)
    launch(x, at, *tables(x.shape[-1], base, run.device), out, **free)  # type: ignore[arg-type]
    return out


def _other_rounding(run: Run) -> None:
    x, at = (
        many(run, PLANTED, 16, 128, salt=4, dtype=torch.float32),
        ids(PLANTED, naive.LENGTH, 5).to(run.device),
    )
    cos, sin = tables(128, 1e6, run.device)
    want = rope(x, at, cos, sin)
    run.control("fused_multiply_add", _turned(run, x, at, 1e6, fused_multiply_add=True), want)
    run.control("the_next_position", rope(x, (at + 1) % naive.LENGTH, cos, sin), want)


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    rows = run.pick(min(256, ROWS), ROWS)
    for call, x, at, base in _over(run, rows):
        whole = call(slice(0, rows))
        run.equal(whole.cpu(), naive.rope(x.cpu(), at.cpu(), base))
        for heads in (1, 8):
            for warps in (1, 4):
                run.equal(_turned(run, x, at, base, heads_per_program=heads, num_warps=warps), whole)
    _other_rounding(run)


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    rows = run.pick(min(256, ROWS), ROWS)
    for call, _, _, _ in _over(run, rows):
        every_batch(run, call, call(slice(0, rows)))
    _other_rounding(run)


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    for call, _, _, _ in _over(run, SOME):
        cases(run, call, SOME)
    _other_rounding(run)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """Heads on several ranks: nothing is exchanged."""
    for call, x, at, base in _over(run, SOME):
        whole = call(slice(0, SOME))
        cos, sin = tables(x.shape[-1], base, run.device)
        for shards in run.over("TP", (1, 2, 4, 8)):
            run.equal(torch.cat([rope(part, at, cos, sin) for part in x.chunk(shards, 1)], 1), whole)
        run.control("the_next_heads", rope(x.roll(1, 1), at, cos, sin), whole)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for heads, width in ((1, 2), (3, 24), (5, 96), (1, 256)):
            run.covers(shape=f"{heads}x{width}")
            cos, sin = tables(width, 1e4, run.device)
            for rows in run.over("rows", (0, 1, 5)):
                x, at = many(run, rows, heads, width, salt=1, dtype=dtype), ids(rows, naive.LENGTH, 3)
                run.equal(rope(x, at.to(run.device), cos, sin).cpu(), naive.rope(x.cpu(), at, 1e4))
        x, at = (
            many(run, 4, 2, 128, salt=2, dtype=dtype),
            torch.tensor([0, naive.LENGTH - 1, naive.LENGTH, -1]),
        )
        cos, sin = tables(128, 1e6, run.device)
        got = rope(x, at.to(run.device), cos, sin)
        run.equal(got[:2].cpu(), naive.rope(x[:2].cpu(), at[:2], 1e6))
        run.holds(got[2:].isnan())  # no table entry: no answer
        run.equal(rope(x[:2], at[:2].int().to(run.device), cos, sin), got[:2])
        odd = x.clone()
        odd[0, 0, 0], odd[1, 1, 3] = float("nan"), float("inf")
        turned = rope(odd[:2], at[:2].to(run.device), cos, sin)
        run.equal(turned.cpu(), naive.rope(odd[:2].cpu(), at[:2], 1e6), any_nan=True)
        run.control("odd_values", turned, got[:2])
        p = at[:4].to(run.device)
        run.refuses(partial(rope, x.half(), p, cos, sin))
        run.refuses(partial(rope, x, p[:2], cos, sin))
        run.refuses(partial(rope, x[..., :64], p, cos, sin))
        run.refuses(partial(rope, x, p.float(), cos, sin))


@GATE.check("rerun_determinism")
def _rerun(run: Run) -> None:
    for call, _, _, _ in _over(run, ROWS):
        first = reruns_at_full_size(run, partial(call, slice(0, ROWS)))
        run.control("the_last_bit_of_one_in_seven", touched(first), first)
