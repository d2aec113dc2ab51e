# SPDX-License-Identifier: Apache-2.0
"""What proves silu_mul.poly/1 on sm90: its specification on the GPU and on the CPU, over whole projections as they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.forward import cases, every_batch, many, reruns_at_full_size, touched
from isoexec.kernels.gates.inputs import DTYPES, odd_values
from isoexec.kernels.silu_mul.hopper import naive
from isoexec.kernels.silu_mul.hopper.kernel import launch
from isoexec.kernels.silu_mul.hopper.ops import silu_mul

if TYPE_CHECKING:
    from torch import Tensor

GATE = Gate("silu_mul.poly/1", "sm90")
ROWS = 8192
SOME = 777
PLANTED = (256, 2048)  # rows and twice the width where another exp shows
WIDTHS = (512, 3072, 12288)  # Qwen3.5-35B-A3B's experts, Qwen3-0.6B, Qwen3-8B

Call = Callable[[slice], "Tensor"]


def _over(run: Run, rows: int) -> Iterator[tuple[Call, Tensor, Tensor]]:
    """The op by rows, and the two halves of one projection that it reads."""
    for dtype in run.over("dtype", DTYPES):
        for width in run.over("width", WIDTHS):
            both = many(run, rows, 2 * width, salt=1, dtype=dtype, scale=30.0)
            gate, up = both.chunk(2, -1)
            yield _rows(gate, up), gate, up


def _rows(gate: Tensor, up: Tensor) -> Call:
    return lambda cut: silu_mul(gate[cut], up[cut])


def _other_exp(run: Run) -> None:
    x = many(run, *PLANTED, salt=3, dtype=torch.float32, scale=8.0)
    gate, up = x.chunk(2, -1)
    out = torch.full(gate.shape, float("nan"), device=run.device)
    launch(gate, up, out, hardware_exp=True)
    run.control("hardware_exp", out, naive.silu_mul(gate, up))


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    rows = run.pick(min(256, ROWS), ROWS)
    for call, gate, up in _over(run, rows):
        whole = call(slice(0, rows))
        run.equal(whole, naive.silu_mul(gate, up))
        run.equal(whole[:64].cpu(), naive.silu_mul(gate[:64].cpu(), up[:64].cpu()))
        for block in (128, 512, 2048):
            for warps in (1, 4, 8):
                out = torch.full(gate.shape, float("nan"), dtype=gate.dtype, device=run.device)
                launch(gate, up, out, block=block, num_warps=warps)
                run.equal(out, whole)
    _other_exp(run)


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    rows = run.pick(min(256, ROWS), ROWS)
    for call, _, _ in _over(run, rows):
        every_batch(run, call, call(slice(0, rows)))
    _other_exp(run)


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    for call, _, _ in _over(run, SOME):
        cases(run, call, SOME)
    _other_exp(run)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """Columns of gate and up on several ranks: nothing is exchanged."""
    for call, gate, up in _over(run, SOME):
        whole = call(slice(0, SOME))
        for shards in run.over("TP", (1, 2, 4, 8)):
            parts = zip(gate.chunk(shards, 1), up.chunk(shards, 1), strict=True)
            run.equal(torch.cat([silu_mul(g, u) for g, u in parts], 1), whole)
        run.control("the_next_column", silu_mul(gate.roll(1, 1), up), whole)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for width in run.over("width", (1, 3, 100, 1025)):
            for rows in run.over("rows", (0, 1, 5)):
                gate, up = (many(run, rows, width, salt=salt, dtype=dtype) for salt in (1, 2))
                run.equal(silu_mul(gate, up), naive.silu_mul(gate, up))
        values = odd_values(dtype).to(run.device)
        gate, up = (
            values[:, None].expand(-1, len(values)).contiguous(),
            values[None].expand(len(values), -1).contiguous(),
        )
        got = silu_mul(gate, up)
        run.equal(got, naive.silu_mul(gate, up), any_nan=True)
        run.control("arguments_swapped", silu_mul(up, gate), got)
        run.refuses(partial(silu_mul, gate, up[:, :3]))
        run.refuses(partial(silu_mul, gate.half(), up.half()))
        run.refuses(partial(silu_mul, gate.double(), up.double()))
        run.refuses(partial(silu_mul, gate.t(), up.t()))


@GATE.check("rerun_determinism")
def _rerun(run: Run) -> None:
    for call, _, _ in _over(run, ROWS):
        first = reruns_at_full_size(run, partial(call, slice(0, ROWS)))
        run.control("the_last_bit_of_one_in_seven", touched(first), first)
