# SPDX-License-Identifier: Apache-2.0
"""The gate of moe.combine/1 on CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.kernels.combine import combine, naive
from isoexec.kernels.dispatch import by_slot, plan
from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.gloo import DEGREES, on_ranks
from isoexec.kernels.gates.inputs import DTYPES, fill, nudged, odd_values, wide
from isoexec.kernels.gates.recipes import close, company, gradients, reruns, trainer_forwards
from isoexec.kernels.groups import all_reduce, name_of

GATE = Gate("moe.combine/1", "cpu")
EXPERTS = 16
TOKENS = 72  # which ranks share


def _inputs(rows: int, k: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Expert outputs by slot, weights that sum to one, a shared expert's output."""
    weights = fill(rows, k, salt=2).abs() + 0.01
    return (
        fill(rows * k, width, salt=1, dtype=dtype, scale=3.0),
        weights / weights.sum(1, keepdim=True),
        fill(rows, width, salt=3, dtype=dtype),
    )


def _fused(y: Tensor, weights: Tensor) -> Tensor:
    """One rounding a term, as a compiler that fuses would have it."""
    T, k = weights.shape
    acc = torch.zeros(T, y.shape[1], dtype=torch.float32)
    for j in range(k):
        acc = (acc.double() + weights[:, j : j + 1].double() * y.view(T, k, -1)[:, j].double()).float()
    return acc.to(y.dtype)


def _in_model_dtype(y: Tensor, weights: Tensor) -> Tensor:
    """Terms rounded to the model's dtype before they are added."""
    T, k = weights.shape
    terms = (weights.unsqueeze(-1) * y.view(T, k, -1)).to(y.dtype)
    return terms.float().sum(1).to(y.dtype)


def _exact(y: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
    return (weights.unsqueeze(-1) * y.view(*weights.shape, -1)).sum(1) + shared


def _turned(y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The same terms from the last place to the first."""
    T, k = weights.shape
    return y.view(T, k, -1).flip(1).reshape(y.shape), weights.flip(1)


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for k in run.over("places", (1, 2, 6, 8, 16)):
            for width in run.over("width", (1, 36, 1000)):
                for rows in run.over("rows", (1, 7, 60)):
                    y, weights, shared = _inputs(rows, k, width, dtype)
                    run.equal(combine(y, weights), naive.combine(y, weights))
                    run.equal(combine(y, weights, shared), naive.combine(y, weights, shared))
        y, weights, shared = _inputs(60, 8, 1000, dtype)
        want = combine(y, weights)
        run.control("from_the_last_place", combine(*_turned(y, weights)), want)
        run.control("multiply_and_add_fused", _fused(y, weights), want)
        run.control("one_ulp_of_the_weights", combine(y, nudged(weights)), want)
        run.control("another_expert", combine(y.roll(1, 0), weights), want)
        first = torch.cat([shared.view(60, 1, -1), y.view(60, 8, -1)], 1).view(540, -1)
        ones = torch.cat([torch.ones(60, 1), weights], 1)
        run.control("shared_added_first", combine(first, ones), combine(y, weights, shared))
    y, weights, shared = _inputs(60, 8, 1000, torch.bfloat16)
    want = combine(y, weights, shared)
    run.control("shared_added_after_rounding", combine(y, weights) + shared, want)
    run.control("terms_rounded_to_the_model", _in_model_dtype(y, weights), combine(y, weights))


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        y, weights, shared = _inputs(60, 8, 100, dtype)
        prefill = combine(y, weights, shared)
        run.covers(case=["engine_prefill", "engine_decode"])
        rows = [combine(y[8 * t : 8 * t + 8], weights[t : t + 1], shared[t : t + 1]) for t in range(60)]
        run.equal(torch.cat(rows), prefill)
        for case, out in trainer_forwards(combine, y, weights, shared).items():
            run.covers(case=case)
            run.equal(out, prefill)
        run.control("fused_in_one_case", _fused(y, weights), combine(y, weights))
        run.control("another_order_in_one_case", combine(*_turned(y, weights)), combine(y, weights))


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        y, weights, shared = _inputs(run.pick(65, 300), 8, 100, dtype)
        rows_of = y.view(len(weights), 8, -1)
        whole = combine(y, weights, shared)
        company(
            run,
            lambda rows: combine(rows_of[rows].reshape(-1, 100), weights[rows], shared[rows]),
            len(weights),
            whole,
        )
        for first in (1, 3, 8, 33, 99):
            run.equal(combine(y[:, first:], weights, shared[:, first:]), whole[:, first:])
    run.control("fused_for_few_rows", _fused(y[:32], weights[:4]), combine(y[:32], weights[:4]))


def ranks(rank: int, size: int, group: ProcessGroup | None, dtype: torch.dtype, axis: str) -> list[Tensor]:
    """A token's experts shared out (EP), or computed alike on every rank (TP, ETP), or its rank's tokens alone (SP)."""
    y, weights, shared = _inputs(TOKENS, 4, 36, dtype)
    grad = fill(TOKENS, 36, salt=5, dtype=dtype)
    if axis == "SP":
        own = [t.chunk(size)[rank] for t in (y, weights, shared)]
        return gradients(combine, own, grad.chunk(size)[rank])
    scores = fill(TOKENS, EXPERTS, salt=7)
    ids = scores.sort(dim=1, descending=True, stable=True).indices[:, :4]
    count = EXPERTS // size if axis == "EP" else EXPERTS
    made = plan(ids, rank * count if axis == "EP" else 0, count)
    among = group if axis == "EP" else None
    out = gradients(
        lambda own, w, s: combine(by_slot(own, made, among), w, s), [y[made.slots], weights, shared], grad
    )
    rows = by_slot(out[1], made, among)
    return [out[0], rows, out[2], out[3]]


def faults(rank: int, size: int, group: ProcessGroup | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Each rank's own experts combined, and the sums added up over ranks; or not even that."""
    y, weights, _ = _inputs(TOKENS, 4, 36, dtype)
    mine = torch.arange(4) % size == rank
    part = combine(y, weights * mine)
    return {"partial_sums_exchanged": all_reduce(part.clone(), name_of(group)), "rows_not_exchanged": part}


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        whole = on_ranks(1, ranks, dtype, "EP")[0]
        for axis in ("TP", "EP", "ETP"):
            for size in run.over(axis, DEGREES):
                for one in on_ranks(size, ranks, dtype, axis):
                    run.equal(one, whole)
        for size in run.over("SP", DEGREES):
            parts = zip(*on_ranks(size, ranks, dtype, "SP"), strict=True)
            run.equal([torch.cat(part) for part in parts], whole)
        y, weights, _ = _inputs(TOKENS, 4, 36, dtype)
        for size in DEGREES[1:]:
            for name, wrong in on_ranks(size, faults, dtype)[0].items():
                run.control(name, wrong, combine(y, weights))


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    with run.poisoned():
        for dtype in run.over("dtype", DTYPES):
            for rows in run.over("rows", (0, 1, 3)):
                for k, width in ((1, 1), (3, 5), (16, 131073)):
                    y, weights, shared = _inputs(rows, k, width, dtype)
                    run.equal(combine(y, weights, shared), naive.combine(y, weights, shared))
            odd = odd_values(dtype)
            y, weights, shared = _inputs(len(odd), 2, 8, dtype)
            clean = combine(y, weights, shared)
            y[::2, 3] = odd
            got = combine(y, weights, shared)
            run.equal(got, naive.combine(y, weights, shared), any_nan=True)
            run.holds(got[:, [0, 1, 2, 4, 5, 6, 7]] == clean[:, [0, 1, 2, 4, 5, 6, 7]])
            run.control(
                "non_finite_taken_for_zero", combine(y.nan_to_num(0.0, 0.0, 0.0), weights, shared), got
            )
            zero = torch.full((4, 3), -0.0, dtype=dtype)
            run.equal(combine(zero, torch.ones(4, 1)), torch.zeros(4, 3, dtype=dtype))  # sums begin at +0
    run.refuses(lambda: combine(torch.zeros(6, 4), torch.zeros(4, 2)))
    run.refuses(lambda: combine(torch.zeros(8, 4), torch.zeros(4, 2).bfloat16()))
    run.refuses(lambda: combine(torch.zeros(8, 4).half(), torch.zeros(4, 2)))
    run.refuses(lambda: combine(torch.zeros(8, 4), torch.zeros(4, 2), torch.zeros(8, 4)))
    run.refuses(lambda: combine(torch.zeros(8, 4), torch.zeros(4, 2), torch.zeros(4, 4).bfloat16()))
    run.refuses(lambda: combine(torch.zeros(8, 4), torch.zeros(8)))


@GATE.check("rerun_determinism")
def _reruns(run: Run) -> None:
    rows = run.pick(64, 1024)
    for dtype in run.over("dtype", DTYPES):
        weights = _inputs(rows, 8, 1, dtype)[1]
        y, grad = wide(rows * 8, 2048, salt=1, dtype=dtype), wide(rows, 2048, salt=4, dtype=dtype)
        first = reruns(run, lambda: gradients(combine, [y, weights], grad), 2)
        run.control("terms_in_another_order", combine(*_turned(y, weights)), first[0])


@GATE.check("backward")
def _backward(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for rows in run.over("rows", (1, 7, 60)):
            y, weights, shared = _inputs(rows, 8, 100, dtype)
            grad = fill(rows, 100, salt=5, dtype=dtype)
            whole = gradients(combine, [y, weights, shared], grad)
            run.equal(whole[1:3], list(naive.combine_backward(grad, y, weights)))
            run.equal(whole[3], grad)
            run.equal(gradients(combine, [y, weights], grad)[1:], whole[1:3])
        alone = gradients(combine, [y[:8], weights[:1], shared[:1]], grad[:1])
        run.equal(alone[1:], [whole[1][:8], whole[2][:1], whole[3][:1]])
        close(run, combine, _exact, [y, weights, shared], grad)
        products = grad.float().unsqueeze(1) * y.view(60, 8, -1).float()
        run.control("weights_gradient_from_left_to_right", products.cumsum(-1)[..., -1], whole[2])
        run.control("weights_gradient_by_the_library", products.double().sum(-1).float(), whole[2])
