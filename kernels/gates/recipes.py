# SPDX-License-Identifier: Apache-2.0
"""What the checks of several ops have in common: company, the trainer's forwards, gradients against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import checkpoint

from isoexec.kernels.gates.inputs import shuffled

if TYPE_CHECKING:
    from torch import Tensor

    from isoexec.kernels.gates.checking import Run

__all__ = ["BATCHES", "close", "company", "gradients", "reruns", "trainer_forwards"]

BATCHES = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 300)
# of the greatest entry: a few roundings of fp32 in a sum, two roundings of bf16 (the output and the gradient)
ACCURACY = {torch.float32: 4e-6, torch.bfloat16: 2.0**-7}


def company(run: Run, call: Callable[[Tensor], Tensor], rows: int, whole: Tensor) -> None:
    """`call(index)` computes those rows of one batch; each has the bits it has in `whole`, alone and in any company.

    Batches of every size up to `rows`, at the start, at the end and scattered; rows alone; all rows in another order.
    """
    places = torch.arange(rows)
    order = shuffled(rows)
    for size in run.over("rows", [b for b in BATCHES if b <= rows]):
        for some in (places[:size], places[rows - size :], order[:size]):
            run.equal(call(some), whole[some])
    for row in places[:: run.pick(max(1, rows // 8), max(1, rows // 64))]:
        one = row.view(1)
        run.equal(call(one), whole[one])
    run.equal(call(order), whole[order])
    run.control("another_row", call(places.roll(1)), whole)


def trainer_forwards(call: Callable[..., Tensor], *inputs: Tensor) -> dict[str, Tensor]:
    """The outputs of a trainer's forward with gradients, of its recomputation in a backward pass, and of its scoring."""
    grown = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    with torch.enable_grad():
        forward = call(*grown)
        seen: list[Tensor] = []

        def again(*args: Tensor) -> Tensor:
            seen.append(call(*args))
            return seen[-1]

        out = checkpoint(again, *grown, use_reentrant=True)
        torch.autograd.backward(out, torch.ones_like(out))
    assert len(seen) == 2, "the backward pass did not recompute"
    with torch.no_grad():
        score = call(*inputs)
    return {
        "trainer_fwd": forward.detach(),
        "trainer_recompute": seen[1].detach(),
        "trainer_score": score.detach(),
    }


def gradients(call: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """The output, and the gradient of each input."""
    grown = [t.detach().clone().requires_grad_() for t in inputs]
    with torch.enable_grad():
        out = call(*grown)
        return [out.detach(), *torch.autograd.grad(out, grown, grad)]


def close(
    run: Run,
    call: Callable[..., Tensor],
    exact: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    grad: Tensor,
) -> None:
    """Output and gradients are those of the plain formula in float64, each to the accuracy of its dtype; none is zero.

    The bound is a fraction of the greatest entry, with its reason beside it in `ACCURACY`: it proves that what is compared
    bit by bit elsewhere is the gradient, not only the same numbers twice.
    """
    bound = ACCURACY[inputs[0].dtype]
    got = gradients(call, inputs, grad)
    want = gradients(exact, [t.double() for t in inputs], grad.double())
    for a, b in zip(got, want, strict=True):
        run.holds((a.double() - b).abs() <= bound * b.abs().max())
        run.holds((a != 0).any().view(1))
    run.control("no_gradient", [torch.zeros_like(t) for t in got[1:]], got[1:])


def reruns(run: Run, call: Callable[[], Tensor | Sequence[Tensor]], times: int) -> list[Tensor]:
    """Run a call again and again, with other values left in the memory it will be given; returns the first results."""
    first = call()
    first = [first] if isinstance(first, torch.Tensor) else list(first)
    for i in range(run.pick(2, times)):
        junk = [torch.full_like(t, float(i) + 0.5) for t in first]
        del junk
        again = call()
        run.equal([again] if isinstance(again, torch.Tensor) else list(again), first)
    run.covers(threads=torch.get_num_threads(), runs=run.pick(2, times) + 1)
    return first
