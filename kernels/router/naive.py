# SPDX-License-Identifier: Apache-2.0
"""The routers: the k experts of the highest score, ties to the lowest expert, and their normalized weights, all in fp32.

router.softmax_topk/1 scores by the logit itself, whose order a softmax keeps, and weighs by exp(logit - best), divided by the
sum over the chosen in routing order. router.sigmoid_topk/1 scores by sigmoid(logit) + bias, within the groups whose two best
scores sum highest, and weighs by the sigmoid alone. exp is the written-out one, so any device gives the same bits. A NaN
counts as the highest score and makes every weight of its token NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.hopper.spec import EXP_HIGH, EXP_LOW, exp

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-20  # beside a sum of sigmoids, as DeepSeek-V3's router has it: 0 / 0 of a token that no expert wants is 0


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


def sigmoid(logits: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), fp32."""
    e = torch.where(-logits > EXP_HIGH, torch.inf, exp(-logits))
    return torch.where(logits.isnan(), torch.nan, 1.0 / (1.0 + e))


def sigmoid_topk(
    logits: Tensor, bias: Tensor, k: int, groups: int, groups_chosen: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Logits fp32 [T, E], bias fp32 [E] -> weights fp32 [T, k], experts int64 [T, k]."""
    s = sigmoid(logits)
    scores = s + bias
    if groups > 1:
        split = scores.view(len(scores), groups, -1)
        two = split.sort(dim=-1, descending=True, stable=True).values[..., :2]
        held = best(two[..., 0] + two[..., 1], groups_chosen)
        inside = torch.zeros(len(s), groups, dtype=torch.bool, device=s.device).scatter(1, held, True)
        scores = torch.where(inside.unsqueeze(-1), split, -torch.inf).view_as(scores)
    experts = best(scores, k)
    chosen = s.gather(1, experts)
    return chosen / (in_order(chosen) + EPSILON) * scale, experts


def sigmoid_topk_backward(grad: Tensor, logits: Tensor, experts: Tensor, scale: float) -> Tensor:
    """With s the chosen sigmoids, D their sum: d s_i = scale * ((grad_i - (sum_j grad_j s_j) / D) / D), times s_i (1 - s_i)."""
    s = sigmoid(logits.gather(1, experts))
    total = in_order(s) + EPSILON
    d = (grad - in_order(grad * s) / total) / total * scale
    d = d * (s * (1.0 - s))
    return torch.zeros_like(logits).scatter(1, experts, d)
