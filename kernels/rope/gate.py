# SPDX-License-Identifier: Apache-2.0
"""The gate of rope.neox_fp32/1 on CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.gloo import DEGREES, on_ranks
from isoexec.kernels.gates.inputs import DTYPES, fill, ids, nudged, odd_values, wide
from isoexec.kernels.gates.recipes import close, company, gradients, reruns, trainer_forwards
from isoexec.kernels.rope import naive, rope, rope_grad

GATE = Gate("rope.neox_fp32/1", "cpu")
BASES = (1e4, 640000.0, 1e6)


def _x(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return fill(tokens, heads, head_dim, salt=7, dtype=dtype, scale=3.0)


def _fp32_table(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """The rotation by a table whose angles were rounded to fp32 first, as most models make it."""
    half = x.shape[-1] // 2
    inverse = base ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = (positions.float().unsqueeze(1) * inverse).unsqueeze(1)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def _exact(x: Tensor, positions: Tensor, base: float) -> Tensor:
    half = x.shape[-1] // 2
    angle = positions.double().unsqueeze(1) * base ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    length = int(run.constants["length"])
    for dtype in run.over("dtype", DTYPES):
        for base in run.pick(BASES[2:], BASES):
            for head_dim in run.over("head_dim", run.pick((2, 32, 128), (2, 6, 32, 64, 80, 128, 192))):
                for heads in run.over("heads", (1, 5)):
                    x, positions = _x(100, heads, head_dim, dtype), ids(100, length, 8)
                    run.equal(rope(x, positions, base), naive.rope(x, positions, base))
        run.control("table_of_fp32_angles", _fp32_table(x, positions, base), naive.rope(x, positions, base))
        run.control(
            "one_position_on", rope(x, (positions + 1) % length, base), naive.rope(x, positions, base)
        )
    every = torch.arange(0, length, run.pick(37, 1))
    x = _x(len(every), 1, 128, torch.float32)
    run.equal(rope(x, every, 1e6), naive.rope(x, every, 1e6))
    # interleaved pairs instead of halves: another convention of the same rotation
    run.control(
        "interleaved_pairs",
        rope(x.view(-1, 1, 64, 2).transpose(2, 3).reshape(x.shape), every, 1e6),
        rope(x, every, 1e6),
    )


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        x, positions = _x(60, 4, 64, dtype), torch.arange(60) + 1000
        qkv = torch.cat([x.view(60, 256), fill(60, 128, salt=1, dtype=dtype)], 1)
        prefill = rope(qkv[:, :256].view(60, 4, 64), positions, 1e6)
        run.covers(case=["engine_prefill", "engine_decode"])
        decode = [rope(row, positions[i : i + 1], 1e6) for i, row in enumerate(x.split(1))]
        run.equal(torch.cat(decode), prefill)
        for case, out in trainer_forwards(lambda x: rope_grad(x, positions, 1e6), x).items():
            run.covers(case=case)
            run.equal(out, prefill)
        run.control("positions_from_zero_in_one_case", rope(x, positions - 1000, 1e6), prefill)
        run.control("table_of_fp32_angles_in_one_case", _fp32_table(x, positions, 1e6), prefill)


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        rows = run.pick(65, 300)
        x, positions = _x(rows, 3, 64, dtype), ids(rows, 8192, 8)
        whole = rope(x, positions, 1e6)
        company(run, lambda at: rope(x[at], positions[at], 1e6), rows, whole)
        run.control("other_table_for_few_rows", _fp32_table(x[:4], positions[:4], 1e6), whole[:4])


def shards(
    rank: int, size: int, group: ProcessGroup | None, dtype: torch.dtype, sp: bool, offset: bool
) -> list[Tensor]:
    """Output and gradient of this rank's heads, or with `sp` of its rows; without `offset` its positions begin at 0."""
    x, positions, grad = _x(40, 8, 32, dtype), torch.arange(40) * 150, fill(40, 8, 32, salt=5, dtype=dtype)
    x, grad = (t.chunk(size, 0 if sp else 1)[rank] for t in (x, grad))
    if sp:
        positions = positions.chunk(size)[rank] if offset else positions[: 40 // size]
    return gradients(lambda x: rope_grad(x, positions, 1e6), [x], grad)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        whole = on_ranks(1, shards, dtype, False, True)[0]
        for axis, sp in (("TP", False), ("SP", True)):
            for size in run.over(axis, DEGREES):
                parts = on_ranks(size, shards, dtype, sp, True)
                run.equal([torch.cat(p, 0 if sp else 1) for p in zip(*parts, strict=True)], whole)
    parts = on_ranks(2, shards, dtype, True, False)
    run.control("positions_restart_on_each_rank", [torch.cat(p) for p in zip(*parts, strict=True)], whole)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    with run.poisoned():
        for dtype in run.over("dtype", DTYPES):
            for tokens in run.over("rows", (0, 1, 2, 3)):
                for heads, head_dim in ((1, 2), (3, 6), (1, 128)):
                    x, positions = _x(tokens, heads, head_dim, dtype), ids(tokens, 8192, 3)
                    run.equal(rope(x, positions, 1e6), naive.rope(x, positions, 1e6))
            ends = torch.tensor([0, 8191, 0, 8191])
            x = torch.stack([odd_values(dtype)[:20]] * 4).unsqueeze(1)
            run.equal(rope(x, ends, 1e6), naive.rope(x, ends, 1e6), any_nan=True)
            run.control(
                "ends_exchanged",
                rope(_x(4, 1, 64, dtype), ends.flip(0), 1e6),
                rope(_x(4, 1, 64, dtype), ends, 1e6),
            )
    for position in (8192, -1):
        run.refuses(lambda: rope(torch.zeros(2, 1, 32), torch.tensor([0, position]), 1e6))
    run.refuses(lambda: rope(torch.zeros(2, 1, 7), torch.tensor([0, 1]), 1e6))


@GATE.check("rerun_determinism")
def _reruns(run: Run) -> None:
    tokens = run.pick(64, 2048)
    for dtype in run.over("dtype", DTYPES):
        x, positions = wide(tokens, 32, 128, salt=7, dtype=dtype), ids(tokens, 8192, 8)
        run.covers(rows=tokens, heads=32, head_dim=128)
        (first,) = reruns(run, lambda: rope(x, positions, 1e6), 4)
        run.control("one_ulp_of_x", rope(nudged(x), positions, 1e6), first)


@GATE.check("backward")
def _backward(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        x, positions, grad = _x(60, 3, 64, dtype), ids(60, 8192, 8), fill(60, 3, 64, salt=5, dtype=dtype)
        _, dx = gradients(lambda x: rope_grad(x, positions, 1e6), [x], grad)
        run.equal(dx, naive.rope_backward(grad, positions, 1e6))
        for rows in run.over("rows", (1, 7, 33)):
            run.equal(
                gradients(lambda x: rope_grad(x, positions[:rows], 1e6), [x[:rows]], grad[:rows])[1],
                dx[:rows],
            )
        close(run, lambda x: rope_grad(x, positions, 1e6), lambda x: _exact(x, positions, 1e6), [x], grad)
        run.control("rotated_the_same_way_again", rope(grad, positions, 1e6), dx)
