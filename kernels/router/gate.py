# SPDX-License-Identifier: Apache-2.0
"""The gate of router.softmax_topk/1 on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.inputs import fill, nudged, odd_values
from isoexec.kernels.gates.recipes import close, company, gradients, reruns, trainer_forwards
from isoexec.kernels.hopper.spec import exp
from isoexec.kernels.router import naive, softmax_topk

GATE = Gate("router.softmax_topk/1", "cpu")
WIDTHS = ((16, 4), (100, 1), (128, 8), (512, 16))  # experts, and how many a token goes to


def _logits(run: Run, rows: int, width: int, *, tied: bool = False) -> Tensor:
    """Logits as a router makes them; `tied` ones lie on a coarse grid, so that many are equal."""
    run.covers(dtype=torch.float32)
    x = fill(rows, width, salt=width, scale=6.0)
    return (x * 2).round() / 2 if tied else x


def _both(logits: Tensor, k: int) -> Tensor:
    """Weights, then the experts, as one tensor."""
    weights, experts = softmax_topk(logits, k)
    return torch.cat([weights, experts.float()], 1)


def _stock(logits: Tensor, k: int) -> Tensor:
    weights, experts = torch.softmax(logits, -1).topk(k)
    return torch.cat([weights / weights.sum(-1, keepdim=True), experts.float()], 1)


def _by_hand(logits: Tensor, k: int) -> Tensor:
    """Experts by a sort in Python: by descending logit, then by ascending expert."""
    rows = [sorted(range(len(row)), key=lambda e: (-row[e], e))[:k] for row in logits.tolist()]
    return torch.tensor(rows)


def _exact(logits: Tensor, k: int) -> Tensor:
    chosen = torch.softmax(logits, -1).topk(k).values
    return chosen / chosen.sum(-1, keepdim=True)


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    for width, k in WIDTHS:
        run.covers(experts=width, places=k)
        for tied in (False, True):
            for rows in run.over("rows", (1, 7, 60)):
                logits = _logits(run, rows, width, tied=tied)
                weights, experts = softmax_topk(logits, k)
                run.equal([weights, experts], naive.softmax_topk(logits, k))
                run.equal(experts, _by_hand(logits, k))
                run.holds((weights.double() - _exact(logits.double(), k)).abs() < 1e-6)
    level = _logits(run, 60, 128, tied=True)
    _, experts = naive.softmax_topk(level, 8)
    run.control("ties_to_the_highest_expert", 127 - naive.best(level.flip(1), 8), experts)
    logits = _logits(run, 60, 128)
    weights, experts = naive.softmax_topk(logits, 8)
    run.control("experts_by_number", experts.sort(1).values, experts)
    run.control("not_normalized", torch.softmax(logits, -1).gather(1, experts), weights)
    run.control("one_ulp_of_the_logits", softmax_topk(nudged(logits), 8)[0], weights)
    chosen = logits.gather(1, experts)
    e = torch.exp(chosen - chosen[:, :1])
    run.control("exp_of_the_library", e / naive.in_order(e), weights)
    own = exp(chosen - chosen[:, :1])
    run.control("summed_from_the_last", own / naive.in_order(own.flip(1)), weights)


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    for width, k in WIDTHS:
        logits = _logits(run, 60, width)
        prefill = _both(logits, k)
        run.covers(case=["engine_prefill", "engine_decode"])
        run.equal(torch.cat([_both(row, k) for row in logits.split(1)]), prefill)
        for case, out in trainer_forwards(lambda x: _both(x, k), logits).items():
            run.covers(case=case)
            run.equal(out, prefill)
    logits = _logits(run, 60, 128)
    run.control("stock_router_in_one_case", _stock(logits, 8), _both(logits, 8))


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    for width, k in WIDTHS:
        logits = _logits(run, run.pick(65, 300), width)
        company(run, lambda rows: _both(logits[rows], k), len(logits), _both(logits, k))
    wide = torch.cat([logits, logits], 1)[:, 3 : 3 + width]
    run.equal(_both(wide, k), _both(wide.contiguous(), k))
    run.control("stock_router_for_few_rows", _stock(logits[:4], k), _both(logits[:4], k))


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    run.covers(dtype=torch.float32)
    with run.poisoned():
        for width, k in ((1, 1), (2, 2), (16, 16), (17, 3)):
            for rows in run.over("rows", (0, 1, 3)):
                logits = fill(rows, width, salt=2, scale=6.0)
                run.equal(list(softmax_topk(logits, k)), list(naive.softmax_topk(logits, k)))
        flat = torch.zeros(3, 20)
        flat[1, ::2] = -0.0
        weights, experts = softmax_topk(flat, 4)
        run.equal(experts, torch.arange(4).expand(3, 4))  # zeros of both signs are one score
        run.equal(weights, torch.full((3, 4), 0.25))
        odd = odd_values(torch.float32)
        logits = fill(len(odd), 32, salt=4)
        clean = _both(logits, 4)
        logits[:, 5] = odd
        got = _both(logits, 4)
        run.equal(got, torch.cat([t.float() for t in naive.softmax_topk(logits, 4)], 1), any_nan=True)
        run.holds(got[:11].isfinite() & (got[:11, :4] >= 0).all())
        run.holds(got[-1, :4].isnan())  # a NaN is chosen, and shows
        run.holds(got[-3, :4].isnan())  # so does +inf, of which no weight is defined
        run.holds(got[-2, :4].isfinite())  # an expert at -inf is left out
        run.control("a_nan_is_passed_over", _both(logits.nan_to_num(-100.0), 4)[-1], got[-1])
        run.control("the_odd_expert", got, clean)
    run.refuses(lambda: softmax_topk(torch.zeros(3, 16, dtype=torch.bfloat16), 4))
    run.refuses(lambda: softmax_topk(torch.zeros(3, 16), 17))
    run.refuses(lambda: softmax_topk(torch.zeros(3, 16), 0))
    run.refuses(lambda: softmax_topk(torch.zeros(3, 128), 17))
    run.refuses(lambda: softmax_topk(torch.zeros(3, 513), 4))
    run.refuses(lambda: softmax_topk(torch.zeros(16), 4))


@GATE.check("rerun_determinism")
def _reruns(run: Run) -> None:
    for width, k in WIDTHS:
        logits = _logits(run, run.pick(64, 2048), width)
        first = reruns(run, lambda: list(softmax_topk(logits, k)), 4)
    run.control("one_ulp_of_the_logits", softmax_topk(nudged(logits), k)[0], first[0])


@GATE.check("backward")
def _backward(run: Run) -> None:
    for width, k in WIDTHS:
        if k == 1:
            continue  # one weight is 1 whatever its logit
        logits, grad = _logits(run, 60, width), fill(60, k, salt=9)
        whole = gradients(lambda x: softmax_topk(x, k)[0], [logits], grad)
        weights, experts = naive.softmax_topk(logits, k)
        run.equal(whole[1], naive.softmax_topk_backward(grad, weights, experts, width))
        for rows in run.over("rows", (1, 7, 33)):
            part = gradients(lambda x: softmax_topk(x, k)[0], [logits[:rows]], grad[:rows])
            run.equal(part, [t[:rows] for t in whole])
        close(run, lambda x: softmax_topk(x, k)[0], lambda x: _exact(x, k), [logits], grad)
    alone = (grad * weights).sum(1, keepdim=True)
    wrong = torch.zeros(60, width).scatter(1, experts, weights * grad - weights * alone)
    run.control("another_order_of_the_same_formula", wrong, whole[1])
    run.control("no_common_term", torch.zeros(60, width).scatter(1, experts, weights * grad), whole[1])
