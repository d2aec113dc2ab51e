# SPDX-License-Identifier: Apache-2.0
"""router.softmax_topk/1: the k experts of the highest logit, ties to the lowest expert, and their weights, all in fp32.

A softmax keeps the order of its logits, so the logits themselves are compared: rounding makes no ties of them. A weight is
exp(logit - best) over the sum of the chosen in routing order. exp is the written-out one, so any device gives the same bits;
what lies more than 87 below the best counts as zero. A NaN counts as the highest and makes its token's weights NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.hopper.spec import EXP_LOW, exp

if TYPE_CHECKING:
    from torch import Tensor


def best(scores: Tensor, k: int) -> Tensor:
    """int64 [T, k]: indices of the k highest, descending, NaN first, ties to the lowest index."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def in_order(terms: Tensor) -> Tensor:
    """[T, k] -> [T, 1]: the sum from the first to the last."""
    total = torch.zeros_like(terms[:, :1])
    for j in range(terms.shape[1]):
        total = total + terms[:, j : j + 1]
    return total


def softmax_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Logits fp32 [T, E] -> weights fp32 [T, k], experts int64 [T, k]."""
    experts = best(logits, k)
    chosen = logits.gather(1, experts)
    d = chosen - chosen[:, :1]
    e = torch.where(d < EXP_LOW, 0.0, exp(d))
    e = torch.where(d.isnan(), torch.nan, e)
    return e / in_order(e), experts


def softmax_topk_backward(grad: Tensor, weights: Tensor, experts: Tensor, width: int) -> Tensor:
    """D logit_i = w_i * (grad_i - sum_j grad_j w_j), in routing order; fp32 [T, width], zero where not chosen."""
    d = weights * (grad - in_order(grad * weights))
    return torch.zeros(len(d), width, dtype=torch.float32, device=d.device).scatter(1, experts, d)
