# SPDX-License-Identifier: Apache-2.0
"""router.sigmoid_topk/1: scores are sigmoid(logit) + bias, weights are the sigmoids, normalized and scaled, all in fp32.

Of equal groups of experts, those whose two best scores have the highest sum are searched, ties to the lowest group; in them
the k experts of the highest score are chosen, ties to the lowest expert. The bias moves the choice and no weight. exp is the
written-out one. A NaN counts as the highest score and makes its token's weights NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.hopper.spec import sigmoid
from isoexec.kernels.router.naive import best, in_order

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-20  # beside the sum of sigmoids, as DeepSeek-V3's router has it: of a token that no expert wants, 0 / 0 is 0


def sigmoid_topk(
    logits: Tensor, bias: Tensor, k: int, groups: int, groups_chosen: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Logits fp32 [T, E], bias fp32 [E] -> weights fp32 [T, k], experts int64 [T, k]."""
    s = sigmoid(logits)
    scores = s + bias
    if groups > 1:
        split = scores.view(len(scores), groups, scores.shape[1] // groups)
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
