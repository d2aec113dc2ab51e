# SPDX-License-Identifier: Apache-2.0
"""The gate of router.sigmoid_topk/1 on CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.inputs import fill, nudged, odd_values
from isoexec.kernels.gates.recipes import close, company, gradients, reruns, trainer_forwards
from isoexec.kernels.hopper.spec import sigmoid
from isoexec.kernels.router import sigmoid_topk
from isoexec.kernels.router.naive import best, in_order
from isoexec.kernels.router.sigmoid import naive

GATE = Gate("router.sigmoid_topk/1", "cpu")


class Shape(NamedTuple):
    """Experts, places, groups, groups chosen, scale."""

    width: int
    k: int
    groups: int
    chosen: int
    scale: float


# tiny; GLM-4.7-Flash; DeepSeek-V3; and groups that are no power of two
SHAPES = (Shape(16, 4, 1, 1, 1.0), Shape(64, 4, 1, 1, 1.8), Shape(256, 8, 8, 4, 2.5), Shape(60, 6, 5, 3, 1.0))


def _inputs(run: Run, rows: int, shape: Shape, *, tied: bool = False) -> tuple[Tensor, Tensor]:
    run.covers(dtype=torch.float32)
    logits, bias = fill(rows, shape.width, salt=shape.width, scale=4.0), fill(shape.width, salt=3, scale=0.3)
    return ((logits * 2).round() / 2, torch.zeros_like(bias)) if tied else (logits, bias)


def _call(logits: Tensor, bias: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    return sigmoid_topk(logits, bias, shape.k, shape.groups, shape.chosen, shape.scale)


def _both(logits: Tensor, bias: Tensor, shape: Shape) -> Tensor:
    weights, experts = _call(logits, bias, shape)
    return torch.cat([weights, experts.float()], 1)


def _by_hand(logits: Tensor, bias: Tensor, shape: Shape) -> Tensor:
    """Experts by sorts in Python over the same scores."""
    each = shape.width // shape.groups
    out = []
    for row in (sigmoid(logits) + bias).tolist():
        group = [sorted(row[g * each : (g + 1) * each], reverse=True)[:2] for g in range(shape.groups)]
        total = [float(torch.tensor(two[0]) + torch.tensor(two[1])) for two in group]
        held = sorted(range(shape.groups), key=lambda g: (-total[g], g))[: shape.chosen]
        inside = [e for e in range(shape.width) if e // each in held]
        out.append(sorted(inside, key=lambda e: (-row[e], e))[: shape.k])
    return torch.tensor(out)


def _exact(logits: Tensor, experts: Tensor, scale: float) -> Tensor:
    chosen = torch.sigmoid(logits).gather(1, experts)
    return chosen / chosen.sum(-1, keepdim=True) * scale


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    for shape in SHAPES:
        run.covers(experts=shape.width, places=shape.k, groups=shape.groups)
        for tied in (False, True):
            for rows in run.over("rows", (1, 7, 60)):
                logits, bias = _inputs(run, rows, shape, tied=tied)
                weights, experts = _call(logits, bias, shape)
                run.equal([weights, experts], naive.sigmoid_topk(logits, bias, *shape[1:]))
                run.equal(experts, _by_hand(logits, bias, shape))
                run.holds((weights.double() - _exact(logits.double(), experts, shape.scale)).abs() < 2e-6)
    shape = SHAPES[2]
    logits, bias = _inputs(run, 60, shape)
    weights, experts = _call(logits, bias, shape)
    run.control("no_groups", sigmoid_topk(logits, bias, 8)[1], experts)
    run.control("group_by_its_best_alone", _best_alone(logits, bias, shape), experts)
    run.control("bias_not_added", _call(logits, torch.zeros_like(bias), shape)[1], experts)
    biased = (sigmoid(logits) + bias).gather(1, experts)
    run.control("bias_in_the_weights", biased / in_order(biased) * shape.scale, weights)
    run.control("not_scaled", weights / shape.scale, weights)
    s = torch.sigmoid(logits).gather(1, experts)
    run.control("sigmoid_of_the_library", s / in_order(s) * shape.scale, weights)
    run.control("one_ulp_of_the_logits", _call(nudged(logits), bias, shape)[0], weights)
    level, bias = _inputs(run, 60, SHAPES[0], tied=True)
    last = 15 - _call(level.flip(1), bias, SHAPES[0])[1]
    run.control("ties_to_the_highest_expert", last, _call(level, bias, SHAPES[0])[1])


def _best_alone(logits: Tensor, bias: Tensor, shape: Shape) -> Tensor:
    scores = (sigmoid(logits) + bias).view(len(logits), shape.groups, -1)
    held = best(scores.max(-1).values, shape.chosen)
    inside = torch.zeros(len(logits), shape.groups, dtype=torch.bool).scatter(1, held, True)
    scores = torch.where(inside.unsqueeze(-1), scores, -torch.inf)
    return best(scores.view_as(logits), shape.k)


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    for shape in SHAPES:
        logits, bias = _inputs(run, 60, shape)
        prefill = _both(logits, bias, shape)
        run.covers(case=["engine_prefill", "engine_decode"])
        run.equal(torch.cat([_both(row, bias, shape) for row in logits.split(1)]), prefill)
        for case, out in trainer_forwards(lambda x: _both(x, bias, shape), logits).items():
            run.covers(case=case)
            run.equal(out, prefill)
        run.control("no_bias_in_one_case", _both(logits, torch.zeros_like(bias), shape), prefill)


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    for shape in SHAPES:
        logits, bias = _inputs(run, run.pick(65, 300), shape)
        company(run, lambda rows: _both(logits[rows], bias, shape), len(logits), _both(logits, bias, shape))


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    run.covers(dtype=torch.float32)
    with run.poisoned():
        for shape in (Shape(1, 1, 1, 1, 1.0), Shape(4, 4, 2, 2, 1.0), Shape(6, 2, 3, 1, 2.0)):
            for rows in run.over("rows", (0, 1, 3)):
                logits, bias = _inputs(run, rows, shape)
                run.equal(
                    list(_call(logits, bias, shape)), list(naive.sigmoid_topk(logits, bias, *shape[1:]))
                )
        shape = Shape(32, 4, 4, 2, 1.0)
        odd = odd_values(torch.float32)
        logits, bias = _inputs(run, len(odd), shape)
        clean = _both(logits, bias, shape)
        logits[:, 5] = odd
        got = _both(logits, bias, shape)
        want = torch.cat([t.float() for t in naive.sigmoid_topk(logits, bias, *shape[1:])], 1)
        run.equal(got, want, any_nan=True)
        run.holds(got[-1, :4].isnan())
        run.holds(got[:-1].isfinite())
        run.holds((_both(torch.full((1, 32), -300.0), bias, shape)[:, :4] == 0).all().view(1))
        run.control("a_nan_is_passed_over", _both(logits.nan_to_num(-100.0), bias, shape)[-1], got[-1])
        run.control("the_odd_expert", got, clean)
    for bad in ((17, 1, 1), (4, 5, 1), (4, 4, 0), (4, 32, 8), (9, 8, 2), (4, 2, 3)):
        run.refuses(lambda: sigmoid_topk(torch.zeros(3, 32), torch.zeros(32), *bad))
    run.refuses(lambda: sigmoid_topk(torch.zeros(3, 32), torch.zeros(31), 4))
    run.refuses(lambda: sigmoid_topk(torch.zeros(3, 32), torch.zeros(32).bfloat16(), 4))
    run.refuses(lambda: sigmoid_topk(torch.zeros(3, 32).bfloat16(), torch.zeros(32), 4))


@GATE.check("rerun_determinism")
def _reruns(run: Run) -> None:
    for shape in SHAPES:
        logits, bias = _inputs(run, run.pick(64, 2048), shape)
        first = reruns(run, lambda: list(_call(logits, bias, shape)), 4)
        run.control("logits_in_bfloat16", _call(logits.bfloat16().float(), bias, shape)[0], first[0])


@GATE.check("backward")
def _backward(run: Run) -> None:
    for shape in SHAPES:
        logits, bias = _inputs(run, 60, shape)
        grad = fill(60, shape.k, salt=9)
        whole = gradients(lambda x: _call(x, bias, shape)[0], [logits], grad)
        experts = _call(logits, bias, shape)[1]
        run.equal(whole[1], naive.sigmoid_topk_backward(grad, logits, experts, shape.scale))
        for rows in run.over("rows", (1, 7, 33)):
            part = gradients(lambda x: _call(x, bias, shape)[0], [logits[:rows]], grad[:rows])
            run.equal(part, [t[:rows] for t in whole])
        exact = [logits], grad
        close(run, lambda x: _call(x, bias, shape)[0], lambda x: _exact(x, experts, shape.scale), *exact)
        other = gradients(lambda x: _exact(x, experts, shape.scale), [logits], grad)
        run.control("gradient_by_the_library", other[1], whole[1])
