# SPDX-License-Identifier: Apache-2.0
"""The ``logprobs`` region of a model whose head gives logits."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.adapters.base import Binding
from isoexec.adapters.megatron.layers import solo
from isoexec.kernels import logprobs as logprob_kernel

__all__ = ["TokenLogprobs"]


class TokenLogprobs:
    """The ``logprobs`` region of a model: ``logprobs.leaves`` over vocabulary-parallel logits."""

    region = "logprobs"

    def __init__(self, binding: Binding, group: ProcessGroup | None) -> None:
        self.binding = binding
        self.tp_group = group

    def compute(self, logits: Tensor, target: Tensor, group: ProcessGroup | None) -> Tensor:
        """fp32 logits [..., V/t] and target [...] (ids of the whole vocabulary) -> fp32 log p(target), [...]."""
        return logprob_kernel.token_logprobs(
            logits, target, group, vocab_leaves=self.binding.constants["vocab_leaves"]
        )

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.compute(logits, target, solo(self.tp_group))
