# SPDX-License-Identifier: Apache-2.0
"""Temperature and entropy beside the CPU's token logprobs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from isoexec.kernels.canaries import fill
from isoexec.kernels.domain import DomainError
from isoexec.kernels.gates import ranks
from isoexec.kernels.gates.recipes import gradients
from isoexec.kernels.logprobs import entropy, temper, token_logprobs
from isoexec.kernels.logprobs.gate import spreads

Differing = Callable[[Tensor, Tensor], int]


def _spread(z: Tensor) -> Tensor:
    every = torch.log_softmax(z, -1)
    return -(every.exp() * every).sum(-1)


def test_entropy_and_its_gradient_are_the_formulas() -> None:
    z, g = fill(9, 512, salt=1, scale=6.0), fill(9, salt=2)
    z[0, 1:400] = -torch.inf
    found = gradients(lambda z: entropy(z, vocab_leaves=8), [z], g)
    want = gradients(_spread, [z[1:].double()], g[1:].double())
    for got, exact in zip(found, want, strict=True):
        assert float((got[1:].double() - exact).abs().max()) < 4e-6 * float(exact.abs().max())
    assert bool(found[0].isfinite().all())
    assert bool((found[1][0, 1:400] == 0).all())
    assert bool((found[1][0, 400:] != 0).any())


def test_a_row_alone_has_the_bits_it_has_in_company_and_other_leaves_have_not(differing: Differing) -> None:
    z = fill(400, 8 * 27, salt=3, scale=4.0)
    whole = entropy(z, vocab_leaves=8)
    assert differing(torch.cat([entropy(row, vocab_leaves=8) for row in z.split(1)]), whole) == 0
    assert differing(entropy(z, vocab_leaves=1), whole) > 10


def test_a_trainers_temperature_is_the_engines_division(differing: Differing) -> None:
    z, heat = fill(60, 512, salt=1, dtype=torch.bfloat16, scale=9.0), 0.5 + fill(60, salt=4).abs()
    target = torch.arange(60)
    trainer = token_logprobs(temper(z, heat), target, vocab_leaves=8)
    engine = token_logprobs(z.float().div_(heat.unsqueeze(1)), target, vocab_leaves=8)
    assert differing(trainer, engine) == 0
    times = token_logprobs(z.float() * (1 / heat).unsqueeze(1), target, vocab_leaves=8)
    assert differing(times, engine) > 5
    g = fill(60, salt=5)
    d = gradients(lambda z: token_logprobs(temper(z, heat), target, vocab_leaves=8), [z], g)[1]
    exact = gradients(
        lambda z: torch.log_softmax(z / heat.unsqueeze(1), -1).gather(1, target.unsqueeze(1)).squeeze(1),
        [z.double()],
        g.double(),
    )[1]
    assert d.dtype == torch.bfloat16
    assert float((d.double() - exact).abs().max()) < 2**-8 * float(exact.abs().max())


def test_a_temperature_of_another_shape_is_refused() -> None:
    with pytest.raises(DomainError, match="temper"):
        temper(torch.zeros(2, 8), torch.ones(3))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_whole_leaves_have_the_bits_of_one(size: int, differing: Differing) -> None:
    whole = spreads(0, 1, None, torch.bfloat16, 8)
    found = ranks.launch(size, spreads, (torch.bfloat16, 8))
    for mine in found:
        assert differing(mine[0], whole[0]) == 0
    assert differing(torch.cat([mine[1] for mine in found], -1), whole[1]) == 0
