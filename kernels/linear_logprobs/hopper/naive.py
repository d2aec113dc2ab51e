# SPDX-License-Identifier: Apache-2.0
"""linear_logprobs.mma_blocks/1 on sm90: linear.mma_chain/1 to fp32 logits, then logprobs.blocks/2, and no logit is kept.

The bits are those of the two functions one after the other; as plain torch states the chain but not a tensor core's last bit
(`linear/hopper/naive.py`), the specification on a GPU takes the logits from the chain's reference kernel.

Gradient: the logits are made again, d = `logprobs` gradient of fp32 logits rounded once to bf16, and from there the linear's:
the input's is one chain over the vocabulary in its order, handed on from rank to rank; the weight's one chain over tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.linear.hopper import naive as linear
from isoexec.kernels.logprobs.hopper import naive as logprobs

if TYPE_CHECKING:
    from torch import Tensor


def everything(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    temperature: Tensor | None = None,
    *,
    vocab_leaves: int,
    logits: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """`logprobs.everything` of `x [T, K] @ w [V, K]^T`; `logits` are used where a kernel has made them."""
    z = linear.linear(x, w, out_dtype=torch.float32) if logits is None else logits
    return logprobs.everything(z, target, temperature, vocab_leaves=vocab_leaves)


def gradient(
    grad: Tensor,
    grad_entropy: Tensor | None,
    x: Tensor,
    w: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    stats: tuple[Tensor, ...],
    *,
    logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of x and w in bf16, from what the forward pass made after log p."""
    z = linear.linear(x, w, out_dtype=torch.float32) if logits is None else logits
    d = logprobs.gradient(grad, grad_entropy, z, target, temperature, stats).bfloat16()
    return linear.input_gradient(d, w), linear.weight_gradient(d, x)
