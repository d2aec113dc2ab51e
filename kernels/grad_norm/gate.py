# SPDX-License-Identifier: Apache-2.0
"""The gate of grad_norm.exact/1 on CPU."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.gloo import DEGREES, on_ranks
from isoexec.kernels.gates.inputs import DTYPES, fill, nudged, shuffled, wide
from isoexec.kernels.gates.recipes import reruns
from isoexec.kernels.grad_norm import exact_sq_sum, naive

GATE = Gate("grad_norm.exact/1", "cpu")
SCALES = (1e-20, 1e-12, 1e-3, 1.0, 1e12)


def _float(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _plain(tensors: list[Tensor]) -> Tensor:
    """Sums of each tensor in float64, added up: exact to a rounding, and another rounding for another cut."""
    total = _float(0.0)
    for t in tensors:
        total = total + t.double().square().sum()
    return total


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for scale in SCALES:
            for rows in run.over("rows", run.pick((1, 17, 100), (1, 2, 3, 17, 100, 333))):
                for width in (1, 17, 63):
                    tensors = [
                        fill(rows, width, salt=16, dtype=dtype, scale=scale),
                        fill(width, salt=17, dtype=dtype, scale=1e-3),
                    ]
                    run.equal(exact_sq_sum(tensors), _float(naive.exact_sq_sum(tensors)))
    tensors = [fill(333, 63, salt=16), fill(63, salt=17, scale=1e-3)]
    want = exact_sq_sum(tensors)
    run.control("one_ulp_of_the_gradient", exact_sq_sum([nudged(tensors[0]), tensors[1]]), want)
    run.control("plain_float32_sum", sum((t.square().sum() for t in tensors), torch.zeros(())).double(), want)
    run.control("squares_in_float32", exact_sq_sum([t.square().sqrt() for t in tensors[:1]]), want)


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    run.covers(case=["trainer_fwd", "trainer_recompute"])
    for dtype in run.over("dtype", DTYPES):
        tensors = [fill(100, 63, salt=16, dtype=dtype), fill(200, salt=17, dtype=dtype)]
        want = exact_sq_sum(tensors)
        # gradients as a plain backward leaves them, and as a buffer holds them flat
        flat = torch.cat([t.view(-1) for t in tensors])
        run.equal(exact_sq_sum([flat]), want)
        run.equal(exact_sq_sum(list(flat.split(999))), want)
        run.equal(exact_sq_sum(tensors[::-1]), want)
        run.control("one_ulp_in_one_case", exact_sq_sum([nudged(flat)]), want)
        run.control("a_tensor_left_out", exact_sq_sum(tensors[:1]), want)


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        x = fill(300, 63, salt=16, dtype=dtype)
        want = exact_sq_sum([x])
        for rows in run.over("rows", (1, 2, 3, 17, 64, 100, 300)):
            run.equal(exact_sq_sum(list(x.split(rows))), want)
            run.equal(exact_sq_sum(list(x.split(rows))[::-1]), want)
        run.equal(exact_sq_sum([x[shuffled(300)]]), want)
        run.equal(exact_sq_sum(list(x.flip(0).t().split(3))), want)
        run.control("a_part_twice", exact_sq_sum([x, x[:1]]), want)
    x = fill(4001, 63, salt=16)
    cuts = [_plain(list(x.split(rows))) for rows in (1, 7, 64, 1000)]
    run.control("plain_sums_over_other_cuts", torch.stack(cuts[1:]), cuts[0].expand(3))


def shards(
    rank: int, size: int, group: ProcessGroup | None, axes: str, dtype: torch.dtype, fault: str
) -> Tensor:
    """The sum over ranks that share the elements by one axis, or by TP 2 and PP 4.

    `fault`: "replicas" counts an unsharded tensor on every rank, "axis_left_out" reduces over one of the two axes.
    """
    layers = [fill(40, 64, salt=i, dtype=dtype, scale=2.0**-i) for i in range(8)]
    if size == 1:
        return exact_sq_sum(layers)
    if axes == "both":
        rows = [dist.new_group([first, first + 1]) for first in (0, 2, 4, 6)]  # TP
        columns = [dist.new_group([first, first + 2, first + 4, first + 6]) for first in (0, 1)]  # PP
        tp, pp = rank % 2, rank // 2
        own = [t.chunk(2, 1)[tp] for t in layers[2 * pp : 2 * pp + 2]]
        groups = [rows[pp], columns[tp]]
        return exact_sq_sum(own, groups[:1] if fault == "axis_left_out" else groups)
    if axes == "PP":
        per = len(layers) // size
        return exact_sq_sum(layers[rank * per : (rank + 1) * per], group)
    if axes == "uneven":
        flat = torch.cat([t.view(-1) for t in layers])
        return exact_sq_sum([flat.tensor_split([100 + 31 * r for r in range(size - 1)])[rank]], group)
    own = [t.chunk(size, 1)[rank] for t in layers]
    return exact_sq_sum([*own, *(layers[:1] if fault == "replicas" else [])], group)


def plain(rank: int, size: int, group: ProcessGroup | None) -> Tensor:
    """Float64 sums of each rank's columns of several tensors, added up over ranks."""
    total = torch.stack([_plain([fill(1000, 63, salt=s).tensor_split(size, 1)[rank]]) for s in range(8)])
    dist.all_reduce(total, group=group)
    return total


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        whole = on_ranks(1, shards, "TP", dtype, "")[0]
        # TP and SP, EP and the others cut tensors; PP gives whole layers to ranks
        for axis, cut in (
            ("TP", "TP"),
            ("SP", "uneven"),
            ("PP", "PP"),
            ("DP", "uneven"),
            ("EP", "TP"),
            ("ETP", "TP"),
            ("CP", "uneven"),
        ):
            for size in run.over(axis, DEGREES):
                for got in on_ranks(size, shards, cut, dtype, ""):
                    run.equal(got, whole)
        for got in on_ranks(8, shards, "both", dtype, ""):
            run.equal(got, whole)
        run.control("replicas_counted_on_every_rank", on_ranks(2, shards, "TP", dtype, "replicas")[0], whole)
        run.control("an_axis_left_out", on_ranks(8, shards, "both", dtype, "axis_left_out")[0], whole)
    for size in DEGREES[1:]:
        right = torch.stack([_plain([fill(1000, 63, salt=s)]) for s in range(8)])
        run.control("plain_float64_sums", on_ranks(size, plain)[0], right)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    with run.poisoned():
        run.equal(exact_sq_sum([]), _float(0.0))
        for dtype in run.over("dtype", DTYPES):
            zeros = [torch.zeros(5, dtype=dtype), torch.zeros(0, dtype=dtype), -torch.zeros(3, dtype=dtype)]
            run.covers(rows=[0, 1, 5])
            run.equal(exact_sq_sum(zeros), _float(0.0))
            for value in (1e-45, 1e-38, 3e38, -3e38, 1.0):
                one = torch.tensor([value], dtype=dtype)
                run.equal(exact_sq_sum([one]), one.double()[0].square())
                run.equal(exact_sq_sum([one, *zeros]), one.double()[0].square())
            huge, tiny = torch.tensor([3e38], dtype=dtype), torch.tensor([1e-45], dtype=dtype)
            run.equal(exact_sq_sum([huge, tiny]), huge.double()[0].square())
            for broken in (math.inf, -math.inf, math.nan):
                run.holds(exact_sq_sum([torch.tensor([1.0, broken], dtype=dtype)]).isnan().view(1))
            run.control(
                "nan_ignored", exact_sq_sum([torch.ones(2)]), exact_sq_sum([torch.tensor([1.0, math.nan])])
            )
    for greatest, count in ((1.0, 1), (3.9, 1000), (1e-300, 2**40)):
        room = math.log2(greatest) + math.log2(count) + naive.exponent(greatest, count)
        run.holds(torch.tensor([room <= int(run.constants["bits"]), room >= int(run.constants["bits"]) - 4]))
    run.refuses(lambda: exact_sq_sum([torch.zeros(3, dtype=torch.float16)]))


@GATE.check("rerun_determinism")
def _reruns(run: Run) -> None:
    rows = run.pick(256, 4096)
    for dtype in run.over("dtype", DTYPES):
        x = wide(rows, 4096, salt=16, dtype=dtype, scale=1e-3)
        run.covers(rows=rows, width=4096)
        (first,) = reruns(run, lambda: exact_sq_sum([x]), 2)
        run.equal(exact_sq_sum([x[shuffled(rows)]]), first)  # in whatever order
        run.control("one_ulp_of_the_gradient", exact_sq_sum([nudged(x)]), first)


@GATE.check("backward")
def _backward(run: Run) -> None:
    """The sum is of gradients, and changes none: what a backward pass left is what the optimizer finds."""
    for dtype in run.over("dtype", DTYPES):
        w, x = fill(63, 32, salt=1, dtype=dtype).requires_grad_(), fill(40, 32, salt=2, dtype=dtype)
        with torch.enable_grad():
            torch.autograd.backward((x @ w.t()).float().square().sum())
        assert w.grad is not None
        kept = w.grad.clone()
        got = exact_sq_sum([w.grad])
        run.equal(got, _float(naive.exact_sq_sum([kept])))
        run.equal(w.grad, kept)
        run.holds(torch.tensor([not got.requires_grad, bool(got > 0)]))
        run.control("one_ulp_of_the_gradient", exact_sq_sum([nudged(kept)]), got)
