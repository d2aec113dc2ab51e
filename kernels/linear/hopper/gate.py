# SPDX-License-Identifier: Apache-2.0
"""What proves linear.mma_chain/1 on sm90: every weight and number of rows against one tile, and against the exact product."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.forward import cases, every_batch, many, reruns_at_full_size, touched
from isoexec.kernels.linear.hopper import cublaslt, table
from isoexec.kernels.linear.hopper.kernel import launch, reference
from isoexec.kernels.linear.hopper.ops import linear

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GATE", "ROWS", "chain_controls", "claimed", "operands", "out_dtype", "weights"]

GATE = Gate("linear.mma_chain/1", "sm90")
# around every size at which a tile or the library's choice may change
ROWS = (
    *(
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        12,
        15,
        16,
        17,
        24,
        31,
        32,
        33,
        40,
        48,
        63,
        64,
        65,
        80,
        96,
        112,
        127,
        128,
        129,
    ),
    *(
        160,
        192,
        200,
        255,
        256,
        257,
        300,
        384,
        500,
        512,
        513,
        640,
        777,
        1000,
        1024,
        1025,
        1500,
        2000,
        2048,
        3000,
    ),
    *(4096, 5000, 6144, 8191, 8192),
)
MOST = 8192
SOME = 777
PLANTED = (64, 512, 4096)  # M, N, K where another chain shows
TOO_FAR = (
    4e-3  # relative error of a bf16 result against float64; one rounding to bf16 makes 1.7e-3 on average
)
TILED = (4096, 4096)  # the weight that every tile in use computes
QUICK_WEIGHTS = ((1024, 3072), (4096, 4096))


@contextlib.contextmanager
def claimed() -> Iterator[None]:
    """The library's switches as the chain needs them, and afterwards as they were."""
    before = cublaslt.claim()
    try:
        yield
    finally:
        cublaslt.restore(before)


@contextlib.contextmanager
def _shipped() -> Iterator[None]:
    before = cublaslt.switches()
    cublaslt.restore(cublaslt.SHIPPED)
    try:
        yield
    finally:
        cublaslt.restore(before)


def weights(run: Run) -> Sequence[tuple[int, int]]:
    """The weights [N, K] of a run: all that the table lists."""
    every = table.shapes()
    return run.pick([w for w in every if w in QUICK_WEIGHTS] or every[:2], every)


def operands(run: Run, rows: int, N: int, K: int) -> tuple[Tensor, Tensor]:
    """Rows [rows, K] and a weight [N, K], bf16."""
    run.covers(dtype=torch.bfloat16, weight=f"{N}x{K}")
    return many(run, rows, K, salt=1), many(run, N, K, salt=2, scale=(3 / K) ** 0.5)


def out_dtype(run: Run) -> torch.dtype:
    """What the accumulator is rounded to under the run's constants."""
    return torch.float32 if run.constants["boundary"] == "float32" else torch.bfloat16


def _op(run: Run, x: Tensor, w: Tensor) -> Tensor:
    return linear(x, w, fp32_out=out_dtype(run) == torch.float32)


def _rows(run: Run, x: Tensor, w: Tensor) -> Callable[[slice], Tensor]:
    return lambda cut: _op(run, x[cut], w)


def chain_controls(run: Run) -> None:
    """Products that are not the chain: K in two halves, K from its other end, and the library as it is shipped."""
    M, N, K = PLANTED
    x, w = many(run, M, K, salt=3), many(run, N, K, salt=4, scale=(3 / K) ** 0.5)
    want = reference(x, w, torch.float32)
    halves = [reference(x[:, i::2].contiguous(), w[:, i::2].contiguous(), torch.float32) for i in (0, 1)]
    run.control("k_in_two_sums", halves[0] + halves[1], want)
    run.control("k_from_the_other_end", reference(x.flip(1), w.flip(1), torch.float32), want)
    with _shipped():
        pairs = []
        for M, N, K in cublaslt.PROBES:
            x, w = operands(run, M, N, K)
            pairs.append((F.linear(x, w), reference(x, w)))
    run.control("split_k_allowed", [got for got, _ in pairs], [want for _, want in pairs])


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    dtype = out_dtype(run)
    with claimed():
        for N, K in weights(run):
            x, w = operands(run, MOST, N, K)
            want = reference(x, w, dtype)
            for M in run.over("rows", run.pick(ROWS[::5], ROWS)):
                run.equal(_op(run, x[:M], w), want[:M])
            few, columns = x[:64].double(), w[:2048].double()
            exact = few @ columns.t()
            error = (want[:64, :2048].double() - exact).norm() / exact.norm()
            run.holds((error < TOO_FAR).view(1))  # equal bits of a wrong product prove nothing
            del x, w, want
        x, w = operands(run, PLANTED[0], *TILED)
        want = reference(x, w, dtype)
        for tile in sorted({t for steps in table.tiles().values() for _, t in steps if t}, key=str):
            out = torch.full_like(want, float("nan"))
            launch(x, w, out, tile)
            run.equal(out, want)
    chain_controls(run)


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    with claimed():
        for N, K in weights(run):
            x, w = operands(run, MOST, N, K)
            every_batch(run, _rows(run, x, w), _op(run, x, w))
    chain_controls(run)


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    with claimed():
        for N, K in weights(run):
            x, w = operands(run, SOME, N, K)
            cases(run, _rows(run, x, w), len(x))
    chain_controls(run)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """Columns of the weight on several ranks; rows of it (K) are not cut: the op takes no accumulator."""
    dtype = out_dtype(run)
    with claimed():
        for N, K in weights(run):
            x, w = operands(run, SOME, N, K)
            for M in run.over("rows", [M for M in (1, 16, 64, SOME) if M <= SOME]):
                whole = _op(run, x[:M], w)
                tile = table.tile_for(N, K, M)
                for shards in run.over("n_shards", (1, 2, 4, 8)):
                    parts = []
                    for part in w.chunk(shards):
                        if tile is None:
                            parts.append(cublaslt.linear(x[:M], part, dtype))
                        else:
                            parts.append(
                                torch.full((M, len(part)), float("nan"), dtype=dtype, device=x.device)
                            )
                            launch(x[:M], part, parts[-1], tile)
                    run.equal(torch.cat(parts, 1), whole)
    x, w = operands(run, *PLANTED)
    parts = [
        reference(a.contiguous(), b.contiguous(), torch.float32)
        for a, b in zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)
    ]
    run.control("k_shards_summed", parts[0] + parts[1], reference(x, w, torch.float32))


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    N, K = weights(run)[0]
    x, w = operands(run, 16, N, K)
    with claimed():
        run.holds(torch.tensor([_op(run, x[:0], w).shape == (0, N)]))
        whole = _op(run, x, w)
        for row, value in ((3, float("nan")), (0, float("inf")), (15, float("-inf"))):
            odd = x.clone()
            odd[row, 5] = value
            got = _op(run, odd, w)
            others = [i for i in range(16) if i != row]
            run.equal(got[others], whole[others])
            run.holds(~got[row].isfinite())
            run.equal(got, reference(odd, w, out_dtype(run)), any_nan=True)
            run.control("the_odd_row", got[row], whole[row])
        for wrong_x, wrong_w in (
            (x.float(), w.float()),
            (x[:, : K // 2], w),
            (x, w[: N - 8]),  # a weight no one has certified
            (x, w.t().contiguous().t()),
        ):
            run.refuses(partial(_op, run, wrong_x, wrong_w))
    with _shipped():  # the library is asked for, and its switches are not the chain's
        refused = False
        try:
            cublaslt.linear(x, w)
        except cublaslt.SwitchError:
            refused = True
    run.holds(torch.tensor([refused]))


@GATE.check("rerun_determinism")
def _rerun(run: Run) -> None:
    with claimed():
        for N, K in weights(run):
            x, w = operands(run, MOST, N, K)
            for M in run.over("rows", (1, 16, MOST)):
                first = reruns_at_full_size(run, partial(_op, run, x[:M], w))
            run.control("the_last_bit_of_one_in_seven", touched(first[:64]), first[:64])
