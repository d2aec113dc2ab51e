# SPDX-License-Identifier: Apache-2.0
"""logprobs.leaves/1: z - log(sum exp z), z = logits - max, the sum over fixed vocabulary leaves.

A halving tree in each leaf, a pair tree over the leaves: ranks that own whole subtrees make the same additions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.sums import halving_tree, pair_tree

if TYPE_CHECKING:
    from torch import Tensor


def log_softmax(logits: Tensor, *, vocab_leaves: int) -> Tensor:
    z = logits.float()
    z = z - z.amax(-1, keepdim=True)
    leaves = torch.exp(z).chunk(vocab_leaves, -1)
    total = pair_tree([halving_tree(leaf) for leaf in leaves])
    return z - torch.log(total).unsqueeze(-1)


def token_logprobs(logits: Tensor, target: Tensor, *, vocab_leaves: int) -> Tensor:
    return log_softmax(logits, vocab_leaves=vocab_leaves).gather(-1, target.unsqueeze(-1)).squeeze(-1)


def token_logprobs_backward(grad: Tensor, logits: Tensor, target: Tensor, *, vocab_leaves: int) -> Tensor:
    """Grad * (one_hot(target) - exp(z) / sum)."""
    z = logits.float()
    e = torch.exp(z - z.amax(-1, keepdim=True))
    total = pair_tree([halving_tree(leaf) for leaf in e.chunk(vocab_leaves, -1)]).unsqueeze(-1)
    one_hot = torch.zeros_like(e).scatter_(-1, target.unsqueeze(-1), 1.0)
    return (grad.unsqueeze(-1) * (one_hot - e / total)).to(logits.dtype)
