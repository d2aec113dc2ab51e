# SPDX-License-Identifier: Apache-2.0
"""What proves router.softmax_topk/1 on sm90: its specification on the GPU and on the CPU, with ties and without."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from isoexec.kernels.gates import Gate, Run, rows
from isoexec.kernels.gates.forward import many
from isoexec.kernels.gates.inputs import odd_values
from isoexec.kernels.gates.rows import Rows
from isoexec.kernels.router import naive
from isoexec.kernels.router.hopper.kernel import launch_softmax
from isoexec.kernels.router.hopper.ops import softmax_topk

GATE = Gate("router.softmax_topk/1", "sm90")
SHAPES = ((16, 4), (128, 8), (256, 8), (512, 10), (100, 16))  # experts, places: with Qwen3's and Qwen3-Next's
FREE = ((1, 1), (4, 4), (8, 8))  # rows a program, warps
PLANTED = (4096, 128, 8)


def logits_of(run: Run, count: int, width: int, *, salt: int = 1) -> Tensor:
    """fp32 logits, every other row on a coarse grid so that many are equal."""
    run.covers(dtype=torch.float32)
    x = many(run, count, width, salt=salt, dtype=torch.float32, scale=6.0)
    x[::2] = x[::2].round()
    return x


def _op(k: int, logits: Tensor) -> list[Tensor]:
    weights, experts = softmax_topk(logits, k)
    return [weights, experts.float()]


def _spec(k: int, logits: Tensor) -> list[Tensor]:
    weights, experts = naive.softmax_topk(logits, k)
    return [weights, experts.float()]


def _spec_gradients(k: int, grad: Tensor, logits: Tensor) -> list[Tensor]:
    weights, experts = naive.softmax_topk(logits, k)
    return [naive.softmax_topk_backward(grad[:, :k], weights, experts, logits.shape[1])]


def _exact(k: int, logits: Tensor) -> list[Tensor]:
    experts = naive.best(logits, k)
    chosen = torch.softmax(logits, -1).gather(1, experts)
    return [chosen / chosen.sum(-1, keepdim=True), experts.double()]


def _written(logits: Tensor, k: int, **free: int | bool) -> Tensor:
    weights = torch.full((len(logits), k), float("nan"), device=logits.device)
    experts = torch.full((len(logits), k), -1, device=logits.device)
    launch_softmax(logits, weights, experts, **free)  # type: ignore[arg-type]
    return torch.cat([weights, experts.float()], 1)


def _over(run: Run, count: int) -> Iterator[Rows]:
    for width, k in SHAPES:
        run.covers(experts=width, places=k)
        logits = logits_of(run, count, width)
        yield Rows(
            op=partial(_op, k),
            spec=partial(_spec, k),
            by_row=(logits,),
            free=[partial(_written, logits, k, rows_per_program=per, num_warps=warps) for per, warps in FREE],
            spec_gradients=partial(_spec_gradients, k),
            exact=partial(_exact, k),
        )


def _planted(run: Run) -> None:
    count, width, k = PLANTED
    logits = logits_of(run, count, width, salt=3)
    weights, experts = softmax_topk(logits, k)
    last = width - 1 - softmax_topk(logits.flip(1).contiguous(), k)[1]
    run.control("ties_to_the_highest_expert", last, experts)
    run.control("experts_by_number", experts.sort(1).values, experts)
    run.control("hardware_exp", _written(logits, k, hardware_exp=True)[:, :k], weights)
    run.control("not_normalized", torch.softmax(logits, -1).gather(1, experts), weights)


rows.hang(GATE, _over, _planted)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """Tokens on several ranks: nothing is exchanged."""
    for one in _over(run, rows.SOME):
        whole = one.call(slice(0, rows.SOME))
        for shares in run.over("token_shares", (1, 2, 4, 8)):
            per = -(-rows.SOME // shares)
            parts = [one.call(slice(at, at + per)) for at in range(0, rows.SOME, per)]
            run.equal(torch.cat(parts), whole)
        run.control("the_next_token", one.call(slice(0, rows.SOME)).roll(1, 0), whole)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    run.covers(dtype=torch.float32)
    with run.poisoned():
        for width, k in ((1, 1), (5, 5), (17, 3), (512, 16)):
            for count in run.over("rows", (0, 1, 3)):
                logits = logits_of(run, count, width)
                run.equal(list(softmax_topk(logits, k)), list(naive.softmax_topk(logits, k)))
        odd = odd_values(torch.float32).to(run.device)
        logits = logits_of(run, len(odd), 32)
        clean = torch.cat(_op(4, logits), 1)
        logits[:, 5] = odd
        got = torch.cat(_op(4, logits), 1)
        run.equal(got, torch.cat(_spec(4, logits), 1), any_nan=True)
        run.holds(got[-1, :4].isnan())
        run.control("the_odd_expert", got, clean)
    for bad, k in ((torch.bfloat16, 4), (torch.float32, 0), (torch.float32, 17)):
        run.refuses(partial(softmax_topk, torch.zeros(3, 32, device=run.device, dtype=bad), k))
    run.refuses(partial(softmax_topk, torch.zeros(3, 513, device=run.device), 4))
    run.refuses(partial(softmax_topk, torch.zeros(32, 3, device=run.device).t(), 4))
