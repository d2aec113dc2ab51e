# SPDX-License-Identifier: Apache-2.0
"""What proves moe.dispatch/1 on sm90: plans made on the device against plans by loops, rows moved, gradients added in order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.kernels.dispatch import naive
from isoexec.kernels.dispatch.gate import by_hand, chosen
from isoexec.kernels.dispatch.hopper.kernel import launch_plan
from isoexec.kernels.dispatch.hopper.ops import by_slot, dispatch, plan
from isoexec.kernels.gates import Gate, Run, rows
from isoexec.kernels.gates.degrees import degrees, wants
from isoexec.kernels.gates.forward import many
from isoexec.kernels.gates.inputs import DTYPES, fill, odd_values
from isoexec.kernels.gates.recipes import gradients
from isoexec.kernels.gates.rows import Rows
from isoexec.kernels.gates.sharing import on_ranks

GATE = Gate("moe.dispatch/1", "sm90")
SHAPES = ((128, 8, 2048), (256, 8, 2048), (512, 10, 768), (64, 4, 7168))  # experts, places, width
PLANS = ((1, 128, 8), (16, 256, 8), (1000, 128, 8), (8192, 256, 8), (300, 5, 1), (777, 512, 10))
DEGREES = (1, 2, 4, 8)
TOKENS = 64  # over ranks
PLANTED = (500, 16, 4, 96)


def _chosen(run: Run, count: int, experts: int, places: int) -> Tensor:
    """As the CPU's gate chooses, made on the device: only a pattern travels there."""
    scores = many(run, count, experts, salt=7, dtype=torch.float32)
    scores = scores + torch.linspace(0.0, 1.5, experts, device=run.device)
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :places].contiguous()


def _op(experts: int, x: Tensor, ids: Tensor) -> Tensor:
    made = plan(ids, 0, experts)
    return by_slot(dispatch(x, made), made).view(len(x), -1)


def _spec(places: int, x: Tensor, ids: Tensor) -> Tensor:
    return x.repeat_interleave(places, 0).view(len(x), -1)


def _spec_gradients(places: int, grad: Tensor, x: Tensor, ids: Tensor) -> list[Tensor]:
    return [naive.dispatch_backward(grad.view(-1, x.shape[1]), places)]


def _over(run: Run, count: int) -> Iterator[Rows]:
    for dtype in run.over("dtype", DTYPES):
        for experts, places, width in SHAPES:
            run.covers(experts=experts, places=places, width=width)
            yield Rows(
                op=partial(_op, experts),
                spec=partial(_spec, places),
                by_row=(many(run, count, width, salt=1, dtype=dtype), _chosen(run, count, experts, places)),
                spec_gradients=partial(_spec_gradients, places),
                exact=partial(_spec, places),
            )


def _planted(run: Run) -> None:
    count, experts, places, width = PLANTED
    x, ids = many(run, count, width, salt=1, dtype=torch.float32), _chosen(run, count, experts, places)
    made = plan(ids, 0, experts)
    want = dispatch(x, made)
    ends = made.offsets.tolist()
    down = torch.cat([made.slots[a:b].flip(0) for a, b in pairwise(ends)])
    run.control("tokens_descending", x[down // places], want)
    run.control("tokens_first", x.repeat_interleave(places, 0), want)
    run.control("each_row_one_place_on", x[made.slots.roll(1) // places], want)
    capped = want.clone()
    capped[ends[-2] - 1] = 0.0
    run.control("a_row_dropped", capped, want)


def _plans(run: Run) -> None:
    """Plans of any size against loops in Python, for all experts and for a rank's share, at any block."""
    for tokens, experts, places in run.pick(PLANS[:4:2], PLANS):
        run.covers(tokens=tokens)
        ids = _chosen(run, tokens, experts, places)
        for first, count in ((0, experts), (experts // 2, experts - experts // 2), (1, 2)):
            slots, ends = by_hand(ids.cpu(), first, count)
            want = torch.tensor(slots + [-1] * (tokens * places - len(slots)))
            for block in (32, 128):
                got, back, offsets = launch_plan(ids, first, count, slots_a_block=block)
                run.equal(got.cpu(), want)
                run.equal(offsets.cpu(), torch.tensor(ends, dtype=torch.int32))
                there = back.cpu().long()
                run.equal(there[want[: len(slots)]], torch.arange(len(slots)))
                run.holds((there >= 0).sum().view(1) == len(slots))


rows.hang(GATE, _over, _planted, more=_plans)


def ranks(
    rank: int, size: int, group: ProcessGroup | None, device: str, dtype: torch.dtype, axis: str
) -> list[Tensor]:
    """Rows by slot and their gradient, where ranks share experts (EP) or each has all of them (ETP)."""
    x, ids = fill(TOKENS, 96, salt=1, dtype=dtype).to(device), chosen(TOKENS, 16, 4).to(device)
    count, among = (16 // size, group) if axis == "EP" else (16, None)
    made = plan(ids, rank * count if axis == "EP" else 0, count)
    grad = fill(TOKENS * 4, 96, salt=2, dtype=dtype, scale=3.0).to(device)
    held = gradients(lambda y: by_slot(dispatch(y, made, among), made, among), [x], grad)
    return [t.cpu() for t in held]


wants(GATE, "partition_invariance", EP=DEGREES, ETP=DEGREES)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    device = run.device.type
    for dtype in run.over("dtype", DTYPES):
        whole = on_ranks(run, 1, ranks, device, dtype, "EP")[0]
        for axis in ("EP", "ETP"):
            for size in degrees(run, axis, DEGREES):
                for one in on_ranks(run, size, ranks, device, dtype, axis):
                    run.equal(one, whole)
        count, experts, places, width = PLANTED
        ids = _chosen(run, count, experts, places)
        grad = many(run, count * places, width, salt=2, dtype=dtype, scale=3.0)
        right = naive.dispatch_backward(grad, places)
        for shares in (2, 4):
            sums = []
            for share in range(shares):
                mine = (ids // (experts // shares) == share).view(-1, 1)
                sums.append(naive.dispatch_backward(grad * mine, places))
            run.control("partial_sums_exchanged", torch.stack(sums).sum(0).to(dtype), right)
            run.control("rows_not_exchanged", sums[0], right)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    with run.poisoned():
        for dtype in run.over("dtype", DTYPES):
            for count in run.over("rows", (0, 1, 3)):
                x, ids = many(run, count, 3, salt=1, dtype=dtype), _chosen(run, count, 4, 2)
                for first, share in ((0, 4), (3, 1), (0, 1)):
                    made = plan(ids, first, share)
                    slots, ends = by_hand(ids.cpu(), first, share)
                    run.equal(
                        dispatch(x, made)[: len(slots)].cpu(),
                        x.cpu()[torch.tensor(slots, dtype=torch.int64) // 2],
                    )
                    run.equal(made.offsets.cpu(), torch.tensor(ends, dtype=torch.int32))
            odd = odd_values(dtype).to(run.device)
            x, ids = odd.repeat(8, 1).t().contiguous(), _chosen(run, len(odd), 16, 4)
            run.equal(_op(16, x, ids), _spec(4, x, ids), any_nan=True)
            run.control("zero_loses_its_sign", _op(16, x + 0.0, ids)[:2], _op(16, x, ids)[:2])
    run.refuses(partial(plan, ids.int(), 0, 4))
    run.refuses(partial(plan, ids[0], 0, 4))
    run.refuses(partial(plan, ids, 0, 0))
    run.refuses(partial(plan, ids, 0, 513))
    made = plan(ids, 0, 16)
    run.refuses(partial(dispatch, x[1:], made))
    run.refuses(partial(dispatch, x.half(), made))
    run.refuses(partial(by_slot, x, made))
