# SPDX-License-Identifier: Apache-2.0
"""What proves attention.mma_segments_cudnn/1 on sm90: attention.mma_segments/1's result, and one gradient however it is made.

The gradient has no specification but itself (`frontend` says why), so it is compared with what the same library gave at first:
again, alone, padded beyond the size of its graph, with the heads of a rank. The build that is here is admitted for as long as the
gate runs, and stands in the domain of every check.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.attention.hopper import fa3
from isoexec.kernels.attention_cudnn.hopper import frontend
from isoexec.kernels.attention_cudnn.hopper.ops import Plan, attention, plan
from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.attentions import (
    PADDING,
    Kind,
    batches,
    hang,
    near_float64,
    padded_at_the_end,
    partition_of_results,
    trained_batches,
)
from isoexec.kernels.gates.forward import many, touched
from isoexec.kernels.gates.sequences import Batch

if TYPE_CHECKING:
    from torch import Tensor

GATE = Gate("attention.mma_segments_cudnn/1", "sm90")
HEADS = ((32, 8, 128), (16, 2, 256), (32, 8, 64), (8, 8, 128))  # query heads, KV heads, head dim
LENGTHS = ((300, 1, 129), (700, 1, 129, 64, 2048, 3000))
ROUNDED = 2.0**-12  # of the result's gradient: what rounding may leave of a gradient that is nothing
PADDINGS = (PADDING, 1500)  # within the size of a graph, and beyond


class Sequences(Batch):
    """Sequences under this function."""

    def of(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Sequences:
        """Other sequences under the same function and sizes of pages."""
        return Sequences(q, k, v, lengths, kv_segment=self.S, page=self.page, tail=self.tail)

    def plan(self, **sizes: Any) -> Plan:
        """An empty plan of this function."""
        return plan(device=self.q.device, **{"kv_segment": self.S, **sizes})


class Cudnn(Kind):
    """Batches of this function."""

    def batch(
        self,
        run: Run,
        heads: Any,
        lengths: Sequence[int],
        page: int,
        of: type[Batch] = Sequences,
        q: float = 3.0,
    ) -> Batch:
        """Sequences of these lengths, queries of the size `q`."""
        return super().batch(run, heads, lengths, page, of, q)


def _others(run: Run, batch: Batch, want: Tensor) -> None:
    run.control("another_segment", batch.packed(kv_segment=2 * batch.S), want)


def _covered() -> dict[str, str]:
    build = frontend.identity()
    frontend.admit(build)
    return {"gradient": build, "library": fa3.identity().build}


KIND = Cudnn(
    heads=HEADS,
    trained=len(HEADS),
    providers=("fa3", "triton"),
    decodings={},
    others=_others,
    covered=_covered,
)
hang(GATE, KIND, keyed=False)


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    """The result is attention.mma_segments/1's, by each provider; the gradient is float64's within the own gradient's bound."""
    for batch, want, _ in batches(run, KIND):
        exact, _ = batch.reference()
        for provider in run.over("provider", KIND.providers):
            run.equal(batch.packed(provider=provider), exact)
        _others(run, batch, want)
    for batch, g, _ in trained_batches(run, KIND, LENGTHS):
        near_float64(run, batch, g, batch.gradients(g))


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """A rank owns whole KV groups: its heads' bits and gradients are theirs among all."""
    partition_of_results(run, KIND)
    for batch, g, _ in trained_batches(run, KIND, LENGTHS):
        out, dq, dk, dv = batch.gradients(g)
        for ranks in run.over("heads_in_parts", [n for n in (2, 4, 8) if batch.k.shape[1] % n == 0]):
            for rank in range(ranks):
                own, queries, groups = batch.heads(rank, ranks)
                theirs = out[:, queries], dq[:, queries], dk[:, groups], dv[:, groups]
                run.equal(own.gradients(g[:, queries]), theirs)
        run.control("the_next_heads_gradient", dq.roll(1, 1), dq)


@GATE.check("backward")
def _backward(run: Run) -> None:
    """One gradient: whoever computed the result, again, alone, in any order of sequences, with padding; and not the own one."""
    for batch, g, _ in trained_batches(run, KIND, LENGTHS):
        found = batch.gradients(g)
        run.holds(torch.cat([x.isfinite().flatten() for x in found]))
        for provider in run.over("provider", KIND.providers):
            run.equal(batch.gradients(g, provider=provider), found)
        times = run.pick(2, 10)
        run.covers(runs=times)
        for _ in range(times):
            run.equal(batch.gradients(g), found)
        for b in range(len(batch.lengths)):
            at = batch.sequence(b)
            run.equal(batch.alone(b).gradients(g[at]), [x[at] for x in found])
        order = list(reversed(range(len(batch.lengths))))
        turns = [batch.sequence(b) for b in order]
        q, k, v, turned = (torch.cat([x[a] for a in turns]) for x in (batch.q, batch.k, batch.v, g))
        back = batch.of(q, k, v, [batch.lengths[b] for b in order])
        run.equal(back.gradients(turned), [torch.cat([x[a] for a in turns]) for x in found])
        for padding in PADDINGS:
            padded_at_the_end(run, batch, g, found, padding)
        run.control("the_own_gradient", batch.walked(g)[1], found[2])
        run.control("the_last_bit_of_one_in_seven", touched(found[2]), found[2])
        run.control("the_gradient_of_another_result", batch.gradients(touched(g))[1:], found[1:])


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    """One row, no row, what is refused."""
    for batch, want, _ in batches(run, KIND, 1):
        H, D = batch.q.shape[1:]
        got, index = batch.rows([(4, 0, 1), (1, 3, 3), (0, 0, 1)])
        run.equal(got, want[index])
        run.control("the_next_row", want[1:2], got[1:])
        one = batch.alone(4)
        g = many(run, 1, H, D, salt=60)
        # a softmax over one key has no gradient but its value's; two sums of the same products may round apart
        _, dq, dk, dv = one.gradients(g)
        group = H // batch.k.shape[1]
        for x in (dq, dk):
            run.holds((x.double().norm() < ROUNDED * g.double().norm()).view(1))
        total = g.view(1, -1, group, D).double().sum(2)
        run.holds(((dv.double() - total).norm() < 2.0**-7 * total.norm()).view(1))
        sinks = torch.zeros(H, device=run.device)
        run.refuses(partial(one.gradients, g, sinks))
        run.refuses(
            partial(plan, requests=1, tokens=4, most_rows=4, most_keys=33 * batch.S, kv_segment=batch.S)
        )
        few = batch.of(batch.q[:40], batch.k[:40], batch.v[:40], [40])
        step = few.plan(requests=1, tokens=39, most_rows=39, most_keys=40, gradients=True)
        step.fill(few.ints([0, 39]), few.ints([40]), k_start=few.ints([0]))
        q = few.q[:39].detach().requires_grad_()

        def unfinished(step: Plan = step, q: Tensor = q, few: Batch = few) -> None:
            with torch.enable_grad():
                out = attention(q, few.k, few.v, few.position[1:], step, scale=few.scale)
                torch.autograd.grad(out, [q], torch.ones_like(out))

        run.refuses(unfinished)
