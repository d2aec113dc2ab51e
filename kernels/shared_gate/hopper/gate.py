# SPDX-License-Identifier: Apache-2.0
"""What proves moe.shared_gate/1 on sm90: the logit against the dense chain's kernel, the rest against the specification."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from isoexec.kernels.gates import Gate, Run, rows
from isoexec.kernels.gates.forward import many
from isoexec.kernels.gates.recipes import gradients
from isoexec.kernels.gates.rows import Rows
from isoexec.kernels.linear.hopper.kernel import reference
from isoexec.kernels.shared_gate.hopper import naive
from isoexec.kernels.shared_gate.hopper.kernel import launch, launch_logits
from isoexec.kernels.shared_gate.hopper.ops import shared_gate

GATE = Gate("moe.shared_gate/1", "sm90")
WIDTHS = (2048,)  # Qwen3.5-35B-A3B and Qwen3-Next
FREE = ((16, 64, 4), (32, 128, 4), (64, 64, 8))  # rows and depth of the logit's tile, warps
PLANTED = (4096, 2048)
BF16, FP32 = torch.bfloat16, torch.float32


def _logits(x: Tensor, w: Tensor) -> Tensor:
    """By the dense linear's reference, whose tile has other columns beside this one."""
    wide = torch.cat([w, torch.zeros(15, w.shape[1], dtype=w.dtype, device=w.device)])
    return reference(x.contiguous(), wide, FP32)[:, 0].contiguous()


def _spec(y: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return naive.gated(y, _logits(x, w))


def _host(w: Tensor, logit: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """On the CPU there is no tensor core: what follows the logit is compared there."""
    return naive.gated(y, logit[: len(y)].to(y.device))


def _spec_gradients(grad: Tensor, y: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    return list(naive.gradients(grad, y, x, w, _logits(x, w)))


def _exact(y: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(x @ w.t()) * y


def _written(y: Tensor, x: Tensor, w: Tensor, row: int, depth: int, warps: int) -> Tensor:
    logit = torch.full((len(x),), float("nan"), device=x.device)
    out = torch.full_like(y, float("nan"))
    launch_logits(x, w, logit, rows=row, depth=depth, num_warps=warps)
    launch(y, logit, out, block=1024)
    return out


def _inputs(run: Run, count: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    run.covers(dtype=BF16, width=width)
    w = many(run, 1, width, salt=3, scale=(12 / width) ** 0.5)
    return many(run, count, width, salt=1), many(run, count, width, salt=2), w


def _over(run: Run, count: int) -> Iterator[Rows]:
    for width in WIDTHS:
        y, x, w = _inputs(run, count, width)
        logit = _logits(x, w)

        def spec(y: Tensor, x: Tensor, w: Tensor) -> Tensor:
            return _spec(y, x, w) if x.is_cuda == logit.is_cuda else _host(w, logit, y, x)

        yield Rows(
            op=shared_gate,
            spec=spec,
            by_row=(y, x),
            shared=(w,),
            free=[partial(_written, y, x, w, *free) for free in FREE],
            spec_gradients=_spec_gradients,
            exact=_exact,
        )


def _planted(run: Run) -> None:
    y, x, w = _inputs(run, *PLANTED)
    want = shared_gate(y, x, w)
    logit = _logits(x, w)
    run.control("logit_in_the_models_dtype", naive.gated(y, logit.bfloat16().float()), want)
    run.control("sigmoid_in_the_models_dtype", torch.sigmoid(logit).bfloat16().unsqueeze(1) * y, want)
    run.control("another_tokens_gate", naive.gated(y, logit.roll(1, 0)), want)


rows.hang(GATE, _over, _planted)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """Every rank has all of the weight; tokens lie on any of them. Padding at the end moves no gradient of it."""
    for width in WIDTHS:
        y, x, w = _inputs(run, rows.SOME, width)
        whole = shared_gate(y, x, w)
        for axis in ("TP", "SP"):
            for shares in run.over(axis, (1, 2, 4, 8)):
                per = rows.SOME if axis == "TP" else -(-rows.SOME // shares)
                parts = [
                    shared_gate(y[at : at + per], x[at : at + per], w) for at in range(0, rows.SOME, per)
                ]
                run.equal(torch.cat(parts), whole)
        run.control("the_next_token", whole.roll(1, 0), whole)
        grad = many(run, rows.SOME, width, salt=5)
        held = gradients(shared_gate, [y, x, w], grad)
        zeros = [torch.cat([t, torch.zeros_like(t[:50])]) for t in (y, x, grad)]
        run.equal(gradients(shared_gate, [*zeros[:2], w], zeros[2])[3], held[3])


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    with run.poisoned():
        for count in run.over("rows", (0, 1, 3, 17)):
            y, x, w = _inputs(run, count, WIDTHS[0])
            run.equal(shared_gate(y, x, w), _spec(y, x, w))
        odd = x.clone()
        odd[3, 5], odd[9, 7] = float("nan"), float("inf")
        got = shared_gate(y, odd, w)
        run.equal(got, _spec(y, odd, w), any_nan=True)
        run.control("the_odd_rows", got[[3, 9]], shared_gate(y, x, w)[[3, 9]])
    for wrong in (
        (y.float(), x.float(), w.float()),
        (y[1:], x, w),
        (y, x, w.repeat(2, 1)),
        (y[:, :-8], x[:, :-8], w[:, :-8]),
    ):
        run.refuses(partial(shared_gate, *wrong))
