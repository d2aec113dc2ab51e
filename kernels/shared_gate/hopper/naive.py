# SPDX-License-Identifier: Apache-2.0
"""moe.shared_gate/1 on sm90: out = sigmoid(x @ w^T) * y, the logit a chain of tensor-core steps in fp32, rounded once.

The logit is linear.mma_chain/1 with one column and is not rounded to the model's dtype. Its gradient is a pair tree over the
width; that of w adds tokens in blocks of 64, a pair tree in each and the blocks in their order, so padding at the end changes no
bit. As in `linear/hopper/naive.py`, a step's last bit is the tensor core's: everything after the logit is compared exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from isoexec.kernels.hopper.spec import pair_sum, sigmoid
from isoexec.kernels.linear.hopper.naive import STEP, chain

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["STEP", "TOKEN_BLOCK", "gated", "gradients", "logits", "shared_gate"]

TOKEN_BLOCK = 64


def logits(x: Tensor, w: Tensor) -> Tensor:
    """X [T, H], w [1, H] bf16 -> fp32 [T]."""
    return chain(x, w)[:, 0]


def gated(y: Tensor, logit: Tensor) -> Tensor:
    """Y [T, H] and fp32 logits [T] -> [T, H] in y's dtype."""
    return (sigmoid(logit).unsqueeze(1) * y.float()).to(y.dtype)


def shared_gate(y: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return gated(y, logits(x, w))


def gradients(grad: Tensor, y: Tensor, x: Tensor, w: Tensor, logit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of y, x and w, each in its dtype; d logit = (sum over H of grad * y) * (s (1 - s))."""
    s = sigmoid(logit)
    dy = (s.unsqueeze(1) * grad.float()).to(y.dtype)
    d = pair_sum(grad.float() * y.float()) * (s * (1.0 - s))
    dx = (d.unsqueeze(1) * w.float()).to(x.dtype)
    terms = F.pad(d.unsqueeze(1) * x.float(), (0, 0, 0, -len(x) % TOKEN_BLOCK))
    total = torch.zeros_like(terms[0]) if len(terms) else torch.zeros(x.shape[1], device=x.device)
    for block in terms.split(TOKEN_BLOCK):
        total = total + pair_sum(block.t())
    return dy, dx, total.unsqueeze(0).to(w.dtype)
