# SPDX-License-Identifier: Apache-2.0
"""bias.add/1: x + bias in fp32, rounded once; x is what the linear before it has rounded already.

The bias is not folded into the linear's accumulator, so that the linear keeps one function with and without a bias, and what
a linear hands from rank to rank has no owner of the bias to agree on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.sums import halving_tree

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_BLOCK = 64  # tokens of one tree of the gradient; part of the function


def bias_add(x: Tensor, bias: Tensor) -> Tensor:
    return (x.float() + bias.float()).to(x.dtype)


def bias_grad(grad: Tensor) -> Tensor:
    """fp32 [N]: a halving tree over each 64 tokens, padded with zeros; the trees are added in token order from zero."""
    g = grad.reshape(-1, grad.shape[-1]).float()
    total = torch.zeros(g.shape[1], dtype=torch.float32)
    for start in range(0, len(g), TOKEN_BLOCK):
        block = torch.zeros(TOKEN_BLOCK, g.shape[1], dtype=torch.float32)
        block[: len(g) - start] = g[start : start + TOKEN_BLOCK]
        total = total + halving_tree(block, 0)
    return total
