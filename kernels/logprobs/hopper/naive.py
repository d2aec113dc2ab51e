# SPDX-License-Identifier: Apache-2.0
"""logprobs.blocks/1 on sm90: one pass over the logits, a maximum and a sum a block, trees over blocks and leaves.

The vocabulary is cut into `vocab_leaves` equal leaves, a leaf into blocks of BLOCK columns (a short one is filled up with
-inf). Block b gives m_b = max x and s_b = pairs(exp(x - m_b)). With M = max m_b, a leaf is pairs(s_b * exp(m_b - M)) over its
blocks, the total is pairs over the leaves, and log p = (x_target - M) - log(total). Ranks that own whole leaves make the same
additions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from isoexec.kernels.hopper.spec import exp, log, pair_sum

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 4096


def partials(logits: Tensor, *, leaves: int, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """(m, s), fp32 [rows, leaves, blocks a leaf], of the leaves that `logits [rows, V]` holds."""
    m, s = [], []
    for leaf in logits.float().chunk(leaves, -1):
        width = leaf.shape[-1]
        for start in range(0, width, block):
            part = F.pad(leaf[:, start : start + block], (0, max(0, start + block - width)), value=-torch.inf)
            top = part.amax(-1)
            m.append(top)
            s.append(pair_sum(exp(part - torch.where(top == -torch.inf, 0.0, top).unsqueeze(-1))))
    shape = (len(logits), leaves, -1)
    return torch.stack(m, -1).view(shape), torch.stack(s, -1).view(shape)


def merge(picked: Tensor, m: Tensor, s: Tensor) -> Tensor:
    """fp32 [rows] from the target's logit and every leaf's partials."""
    top = m.amax((1, 2))
    total = pair_sum(pair_sum(s * exp(m - top.view(-1, 1, 1))))
    return (picked.float() - top) - log(total)


def token_logprobs(logits: Tensor, target: Tensor, *, vocab_leaves: int, block: int = BLOCK) -> Tensor:
    picked = logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return merge(picked, *partials(logits, leaves=vocab_leaves, block=block))
