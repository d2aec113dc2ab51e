# SPDX-License-Identifier: Apache-2.0
"""What proves router.sigmoid_topk/1 on sm90: its specification on the GPU and on the CPU, with groups, ties and a bias."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from isoexec.kernels.gates import Gate, Run, rows
from isoexec.kernels.gates.forward import many
from isoexec.kernels.gates.inputs import odd_values
from isoexec.kernels.gates.rows import Rows
from isoexec.kernels.router.hopper.gate import logits_of
from isoexec.kernels.router.hopper.kernel import launch_sigmoid
from isoexec.kernels.router.sigmoid import naive
from isoexec.kernels.router.sigmoid.gate import Shape
from isoexec.kernels.router.sigmoid.hopper.ops import sigmoid_topk

GATE = Gate("router.sigmoid_topk/1", "sm90")
# tiny; GLM-4.7-Flash; DeepSeek-V3; groups that are no power of two
SHAPES = (Shape(16, 4, 1, 1, 1.0), Shape(64, 4, 1, 1, 1.8), Shape(256, 8, 8, 4, 2.5), Shape(60, 6, 5, 3, 1.0))
FREE = ((1, 1), (4, 4))  # rows a program, warps
PLANTED = (4096, Shape(256, 8, 8, 4, 2.5))


def _bias(run: Run, width: int) -> Tensor:
    return many(run, width, salt=3, dtype=torch.float32, scale=0.3)


def _op(shape: Shape, logits: Tensor, bias: Tensor) -> list[Tensor]:
    weights, experts = sigmoid_topk(logits, bias, *shape[1:])
    return [weights, experts.float()]


def _spec(shape: Shape, logits: Tensor, bias: Tensor) -> list[Tensor]:
    weights, experts = naive.sigmoid_topk(logits, bias, *shape[1:])
    return [weights, experts.float()]


Call = Callable[[Shape, Tensor, Tensor], list[Tensor]]


def _with(call: Call, shape: Shape, bias: Tensor, logits: Tensor) -> list[Tensor]:
    """As a function of the logits: a bias has no gradient."""
    return call(shape, logits, bias.to(logits.device))


def _spec_gradients(shape: Shape, bias: Tensor, grad: Tensor, logits: Tensor) -> list[Tensor]:
    experts = naive.sigmoid_topk(logits, bias.to(logits.device), *shape[1:])[1]
    return [naive.sigmoid_topk_backward(grad[:, : shape.k], logits, experts, shape.scale)]


def _exact(shape: Shape, bias: Tensor, logits: Tensor) -> list[Tensor]:
    experts = naive.sigmoid_topk(logits.float(), bias, *shape[1:])[1]
    chosen = torch.sigmoid(logits).gather(1, experts)
    return [chosen / chosen.sum(-1, keepdim=True) * shape.scale, experts.double()]


def _written(logits: Tensor, bias: Tensor, shape: Shape, **free: int) -> Tensor:
    weights = torch.full((len(logits), shape.k), float("nan"), device=logits.device)
    experts = torch.full((len(logits), shape.k), -1, device=logits.device)
    launch_sigmoid(logits, bias, weights, experts, shape.groups, shape.chosen, shape.scale, **free)
    return torch.cat([weights, experts.float()], 1)


def _over(run: Run, count: int) -> Iterator[Rows]:
    for shape in SHAPES:
        run.covers(experts=shape.width, places=shape.k, groups=shape.groups)
        logits, bias = logits_of(run, count, shape.width), _bias(run, shape.width)
        yield Rows(
            op=partial(_with, _op, shape, bias),
            spec=partial(_with, _spec, shape, bias),
            by_row=(logits,),
            free=[
                partial(_written, logits, bias, shape, rows_per_program=per, num_warps=warps)
                for per, warps in FREE
            ],
            spec_gradients=partial(_spec_gradients, shape, bias),
            exact=partial(_exact, shape, bias),
        )


def _planted(run: Run) -> None:
    count, shape = PLANTED
    logits, bias = logits_of(run, count, shape.width, salt=4), _bias(run, shape.width)
    weights, experts = sigmoid_topk(logits, bias, *shape[1:])
    run.control("no_groups", sigmoid_topk(logits, bias, shape.k)[1], experts)
    run.control("bias_not_added", sigmoid_topk(logits, torch.zeros_like(bias), *shape[1:])[1], experts)
    run.control("not_scaled", weights / shape.scale, weights)
    biased = (torch.sigmoid(logits) + bias).gather(1, experts)
    run.control("bias_in_the_weights", biased / biased.sum(-1, keepdim=True) * shape.scale, weights)


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
        for shape in (Shape(1, 1, 1, 1, 1.0), Shape(4, 4, 2, 2, 1.0), Shape(6, 2, 3, 1, 2.0)):
            for count in run.over("rows", (0, 1, 3)):
                logits, bias = logits_of(run, count, shape.width), _bias(run, shape.width)
                run.equal(_op(shape, logits, bias), _spec(shape, logits, bias))
        shape = Shape(32, 4, 4, 2, 1.0)
        odd = odd_values(torch.float32).to(run.device)
        logits, bias = logits_of(run, len(odd), 32), _bias(run, 32)
        clean = torch.cat(_op(shape, logits, bias), 1)
        logits[:, 5] = odd
        got = torch.cat(_op(shape, logits, bias), 1)
        run.equal(got, torch.cat(_spec(shape, logits, bias), 1), any_nan=True)
        run.holds(got[-1, :4].isnan())
        run.control("the_odd_expert", got, clean)
    zeros = torch.zeros(3, 32, device=run.device)
    for bad in ((17, 1, 1), (4, 5, 1), (4, 4, 0), (4, 32, 8), (9, 8, 2), (4, 2, 3)):
        run.refuses(partial(sigmoid_topk, zeros, zeros[0], *bad))
    run.refuses(partial(sigmoid_topk, zeros, zeros[0, :-1], 4))
    run.refuses(partial(sigmoid_topk, zeros.bfloat16(), zeros[0], 4))
