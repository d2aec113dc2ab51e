# SPDX-License-Identifier: Apache-2.0
"""The gate of moe.dispatch/1 on CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.kernels.dispatch import DispatchPlan, by_slot, dispatch, naive, plan
from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.gloo import DEGREES, on_ranks
from isoexec.kernels.gates.inputs import DTYPES, fill, odd_values, shuffled, wide
from isoexec.kernels.gates.recipes import close, company, gradients, reruns, trainer_forwards
from isoexec.kernels.groups import all_reduce, name_of

GATE = Gate("moe.dispatch/1", "cpu")
EXPERTS = 16
PLACES = 4


def chosen(rows: int, experts: int, places: int, *, salt: int = 7) -> Tensor:
    """int64 [rows, places]: different experts a token, in an order of its own, loads unequal and some experts idle."""
    scores = fill(rows, experts, salt=salt) + torch.linspace(0.0, 1.5, experts)
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :places]


def by_hand(experts: Tensor, first: int, count: int) -> tuple[list[int], list[int]]:
    """Slots and offsets from loops in Python: by expert, then by token."""
    slots, offsets = [], [0]
    rows = experts.tolist()
    for e in range(first, first + count):
        slots += [t * len(row) + row.index(e) for t, row in enumerate(rows) if e in row]
        offsets.append(len(slots))
    return slots, offsets


def _rows(x: Tensor, experts: Tensor) -> Tensor:
    """Out to the experts' order and back: every slot's row."""
    made = plan(experts, 0, EXPERTS)
    return by_slot(dispatch(x, made), made)


def _order(of: Tensor) -> Tensor:
    return of.repeat_interleave(PLACES) * PLACES + torch.arange(PLACES).repeat(len(of))


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for experts, places in ((16, 4), (128, 8), (5, 1), (512, 16)):
            run.covers(experts=experts, places=places)
            for rows in run.over("rows", (1, 7, 60)):
                x, ids = fill(rows, 36, salt=1, dtype=dtype), chosen(rows, experts, places)
                for first, count in ((0, experts), (experts // 2, experts - experts // 2), (1, 2)):
                    made = plan(ids, first, count)
                    slots, offsets = by_hand(ids, first, count)
                    run.equal(made.slots, torch.tensor(slots, dtype=torch.int64))
                    run.equal(made.offsets, torch.tensor(offsets))
                    run.equal(dispatch(x, made), x[made.slots // places])
                    back = by_slot(dispatch(x, made), made)
                    run.equal(back, naive.by_slot(x[made.slots // places], made.slots, rows * places))
    x, ids = fill(60, 36, salt=1, dtype=dtype), chosen(60, EXPERTS, PLACES)
    made = plan(ids, 0, EXPERTS)
    want = dispatch(x, made)
    cuts = [made.slots[a:b] for a, b in zip(made.offsets, made.offsets[1:], strict=False)]
    run.control("tokens_descending", x[torch.cat([cut.flip(0) for cut in cuts]) // PLACES], want)
    run.control("experts_descending", x[torch.cat(cuts[::-1]) // PLACES], want)
    run.control("tokens_first", x.repeat_interleave(PLACES, 0), want)
    dropped = DispatchPlan(**{**vars(made), "slots": made.slots.roll(1)})
    run.control("each_row_one_place_on", dispatch(x, dropped), want)


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        x, ids = fill(60, 36, salt=1, dtype=dtype), chosen(60, EXPERTS, PLACES)
        prefill = _rows(x, ids)
        run.covers(case=["engine_prefill", "engine_decode"])
        alone = [_rows(x[t : t + 1], ids[t : t + 1]) for t in range(60)]
        run.equal(torch.cat(alone), prefill)
        for case, out in trainer_forwards(lambda y: _rows(y, ids), x).items():
            run.covers(case=case)
            run.equal(out, prefill)
        made = plan(ids, 0, EXPERTS)
        capped = dispatch(x, made)
        capped[made.offsets[-2] - 1] = 0.0  # what a capacity does to an expert's last row
        run.control("a_row_dropped_in_one_case", by_slot(capped, made), prefill)


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        x = fill(run.pick(65, 300), 36, salt=1, dtype=dtype)
        ids = chosen(len(x), EXPERTS, PLACES)
        whole = _rows(x, ids).view(len(x), -1)
        company(run, lambda rows: _rows(x[rows], ids[rows]).view(len(rows), -1), len(x), whole)


def ranks(
    rank: int, size: int, group: ProcessGroup | None, dtype: torch.dtype, axis: str
) -> dict[str, list[Tensor]]:
    """Rows by slot and their gradient, where ranks share experts (EP) or each has all of them (ETP)."""
    x, ids = fill(60, 36, salt=1, dtype=dtype), chosen(60, EXPERTS, PLACES)
    count, among = (EXPERTS // size, group) if axis == "EP" else (EXPERTS, None)
    made = plan(ids, rank * count if axis == "EP" else 0, count)
    grad = fill(60 * PLACES, 36, salt=2, dtype=dtype, scale=3.0)
    held = gradients(lambda y: by_slot(dispatch(y, made, among), made, among), [x], grad)
    return {"rows": held, "slots": [made.slots]}


def faults(rank: int, size: int, group: ProcessGroup | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradients done wrongly over ranks: sums exchanged instead of rows, nothing exchanged."""
    made = plan(chosen(60, EXPERTS, PLACES), rank * (EXPERTS // size), EXPERTS // size)
    grad = fill(60 * PLACES, 36, salt=2, dtype=dtype, scale=3.0)
    local = naive.dispatch_backward(naive.by_slot(grad[made.slots], made.slots, len(grad)), PLACES)
    return {"rows_not_exchanged": local, "partial_sums_exchanged": all_reduce(local.clone(), name_of(group))}


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        whole = on_ranks(1, ranks, dtype, "EP")[0]
        for axis in ("EP", "ETP"):
            for size in run.over(axis, DEGREES):
                found = on_ranks(size, ranks, dtype, axis)
                for one in found:
                    run.equal(one["rows"], whole["rows"])
                own = [one["slots"][0] for one in found]
                run.equal(torch.cat(own) if axis == "EP" else own[-1], whole["slots"][0])
        for size in DEGREES[1:]:
            for name, wrong in on_ranks(size, faults, dtype)[0].items():
                run.control(name, wrong, whole["rows"][1])


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    with run.poisoned():
        for dtype in run.over("dtype", DTYPES):
            for rows in run.over("rows", (0, 1, 3)):
                x, ids = fill(rows, 3, salt=1, dtype=dtype), chosen(rows, 4, 2)
                for first, count in ((0, 4), (3, 1), (0, 1)):
                    made = plan(ids, first, count)
                    run.equal(dispatch(x, made), x[made.slots // 2])
                    run.equal(made.offsets, torch.tensor(by_hand(ids, first, count)[1]))
                    back = gradients(
                        lambda y: dispatch(y, made), [x], fill(len(made.slots), 3, salt=2, dtype=dtype)
                    )
                    run.holds(back[1].isfinite())
            odd = odd_values(dtype)
            x, ids = odd.repeat(8, 1).t().contiguous(), chosen(len(odd), EXPERTS, PLACES)
            run.equal(_rows(x, ids), x.repeat_interleave(PLACES, 0), any_nan=True)  # rows move as they are
            run.control("zero_loses_its_sign", _rows(x + 0.0, ids)[: 2 * PLACES], _rows(x, ids)[: 2 * PLACES])
    ids = chosen(3, 4, 2)
    run.refuses(lambda: plan(ids.int(), 0, 4))
    run.refuses(lambda: plan(ids[0], 0, 4))
    run.refuses(lambda: plan(ids, 0, 0))
    run.refuses(lambda: plan(torch.zeros(3, 2, dtype=torch.int64), 0, 4))
    run.refuses(lambda: dispatch(torch.zeros(4, 8), plan(ids, 0, 4)))
    run.refuses(lambda: dispatch(torch.zeros(3, 8, dtype=torch.float16), plan(ids, 0, 4)))
    run.refuses(lambda: by_slot(torch.zeros(5, 8), plan(ids, 0, 4)))


@GATE.check("rerun_determinism")
def _reruns(run: Run) -> None:
    rows = run.pick(64, 1024)
    for dtype in run.over("dtype", DTYPES):
        x, ids = wide(rows, 2048, salt=1, dtype=dtype), chosen(rows, 128, 8)
        made = plan(ids, 0, 128)
        grad = wide(rows * 8, 2048, salt=2, dtype=dtype)
        (_, dx) = reruns(run, lambda: gradients(lambda y: dispatch(y, made), [x], grad), 2)
    slots = grad[
        made.slots.argsort()
    ]  # in float32 now: sums of a few bfloat16 numbers are exact in any order
    scattered = slots.view(rows, 8, -1)[:, shuffled(8)].reshape(slots.shape)  # as atomics add
    run.control("slots_in_another_order", naive.dispatch_backward(scattered, 8), dx)


@GATE.check("backward")
def _backward(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for rows in run.over("rows", (1, 7, 60)):
            x, ids = fill(rows, 36, salt=1, dtype=dtype), chosen(rows, EXPERTS, PLACES)
            grad = fill(rows * PLACES, 36, salt=2, dtype=dtype, scale=3.0)
            made = plan(ids, 0, EXPERTS)
            whole = gradients(lambda y: dispatch(y, made), [x], grad)
            slots = torch.empty_like(grad)
            slots[made.slots] = grad
            run.equal(whole[1], naive.dispatch_backward(slots, PLACES))
            some = gradients(lambda y: by_slot(dispatch(y, made), made), [x], slots)
            run.equal(some[1], whole[1])
        close(run, lambda y: dispatch(y, made), lambda y: y[made.slots // PLACES], [x], grad)
        in_bf16 = slots.view(rows, PLACES, -1)
        kept = sum(in_bf16[:, j] for j in range(1, PLACES)) + in_bf16[:, 0]
        run.control("another_order", kept, whole[1])
