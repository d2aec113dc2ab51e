# SPDX-License-Identifier: Apache-2.0
"""logprobs.leaves: the engine's row of log-softmax is the trainer's token logprob, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from isoexec.kernels.canaries import fill
from isoexec.kernels.domain import DomainError
from isoexec.kernels.logprobs import log_softmax, naive, token_logprobs

Differing = Callable[[Tensor, Tensor], int]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 17, 63, 100])
@pytest.mark.parametrize("vocab", [512, 8 * 17, 8])
def test_both_entries_have_the_bits_of_the_specification(
    differing: Differing, rows: int, vocab: int, dtype: torch.dtype
) -> None:
    logits = fill(rows, vocab, salt=1, dtype=dtype, scale=9.0)
    target = torch.arange(rows) * 31 % vocab
    whole = log_softmax(logits, vocab_leaves=8)
    assert differing(whole, naive.log_softmax(logits, vocab_leaves=8)) == 0
    token = token_logprobs(logits, target, vocab_leaves=8)
    assert differing(token, whole.gather(1, target.unsqueeze(1)).squeeze(1)) == 0
    alone = torch.cat([log_softmax(logits[i : i + 1], vocab_leaves=8) for i in range(rows)])
    assert differing(alone, whole) == 0
    order = torch.arange(rows).flip(0)
    assert differing(log_softmax(logits[order], vocab_leaves=8), whole[order]) == 0


def test_the_gradient_has_the_bits_of_the_specification(differing: Differing) -> None:
    logits = fill(7, 9, 128, salt=1, scale=9.0).requires_grad_()
    target, g = (torch.arange(63) * 31 % 128).view(7, 9), fill(7, 9, salt=2)
    out = token_logprobs(logits, target, vocab_leaves=8)
    (d,) = torch.autograd.grad(out, logits, g)
    assert differing(d, naive.token_logprobs_backward(g, logits, target, vocab_leaves=8)) == 0


def test_other_leaves_stock_torch_and_one_unit_in_the_last_place_are_seen(differing: Differing) -> None:
    logits = fill(400, 512, salt=1, scale=4.0)
    out = log_softmax(logits, vocab_leaves=8)
    assert differing(torch.log_softmax(logits, -1), out) > 10
    nudged = logits.clone()
    nudged[5] = torch.nextafter(nudged[5], torch.tensor(90.0))
    seen = log_softmax(nudged, vocab_leaves=8)
    assert differing(seen[5], out[5]) > 0
    assert differing(seen[6:], out[6:]) == 0
    odd = fill(400, 8 * 27, salt=3, scale=4.0)
    assert differing(log_softmax(odd, vocab_leaves=1), log_softmax(odd, vocab_leaves=8)) > 10


def test_leaves_vocabulary_and_targets_outside_the_domain_are_refused() -> None:
    with pytest.raises(DomainError, match="100"):
        log_softmax(torch.zeros(2, 100), vocab_leaves=8)
    with pytest.raises(DomainError, match="6 leaves"):
        log_softmax(torch.zeros(2, 96), vocab_leaves=6)
    with pytest.raises(DomainError, match="outside the vocabulary"):
        token_logprobs(torch.zeros(2, 8), torch.tensor([0, 8]), vocab_leaves=8)
    with pytest.raises(DomainError, match="target"):
        token_logprobs(torch.zeros(2, 8), torch.zeros(3, dtype=torch.int64), vocab_leaves=8)
