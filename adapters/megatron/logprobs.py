# SPDX-License-Identifier: Apache-2.0
"""Token logprobs from a GPTModel, through its ``output_processor`` hook, and scoring of whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.adapters.base import Binding
from isoexec.adapters.megatron.layers import solo
from isoexec.adapters.megatron.weights import unwrap
from isoexec.contracts.errors import InstallError
from isoexec.kernels import logprobs as logprob_kernel

__all__ = [
    "TokenLogprobs",
    "from_last_stage",
    "model_inputs",
    "native_token_logprobs",
    "output_processor",
    "score",
]


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


def native_token_logprobs(logits: Tensor, target: Tensor, group: ProcessGroup) -> Tensor:
    """Megatron's own: the negated vocabulary-parallel cross entropy, which sums in a layout-dependent order."""
    return -vocab_parallel_cross_entropy(logits.float(), target, tp_group=group)


def output_processor(model: Any) -> Callable[..., Tensor]:
    """The hook for ``GPTModel.forward(..., labels=..., output_processor=...)``: fp32 logprobs of the labels, [b, s].

    It uses what the adapter installed on the model, and Megatron's own cross entropy where nothing is installed.
    """
    inner = unwrap(model)

    def process(
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        labels: Tensor,
        scale_logits: Any,
        **_: Any,
    ) -> Tensor:
        logits = scale_logits(
            output_layer(hidden_states, weight=output_weight, runtime_gather_output=False)[0]
        )
        target = labels.transpose(0, 1).contiguous()
        bound = getattr(inner, "token_logprobs", None)
        values = (
            native_token_logprobs(logits, target, output_layer.tp_group)
            if bound is None
            else bound(logits, target)
        )
        return values.transpose(0, 1).contiguous()

    return process


def model_inputs(tokens: Tensor, multiple: int = 1) -> dict[str, Any]:
    """Arguments of one GPTModel forward that scores ``tokens`` [b, L]: position i predicts token i + 1.

    The sequence is padded on the right with token 0 up to a multiple of ``multiple`` (the sequence-parallel degree).
    """
    rows, length = tokens.shape
    ids = torch.nn.functional.pad(tokens, (0, -length % multiple))
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1))
    positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0).expand(rows, -1)
    return {"input_ids": ids, "position_ids": positions, "attention_mask": None, "labels": labels}


def sequence_multiple(model: Any) -> int:
    """What a sequence's length must be a multiple of."""
    inner = unwrap(model)
    return inner.pg_collection.tp.size() if inner.config.sequence_parallel else 1


def align(values: Tensor, length: int) -> Tensor:
    """Logprobs by predicting position [b, s] -> by token [b, length]; column 0, which nothing predicts, is 0."""
    out = values.new_zeros(values.shape[0], length)
    out[:, 1:] = values[:, : length - 1]
    return out


def from_last_stage(value: Tensor, group: ProcessGroup) -> Tensor:
    """The last pipeline stage's ``value`` on every stage; the others pass a buffer of the same shape."""
    if group.size() > 1:
        dist.broadcast(value, group=group, group_src=group.size() - 1)
    return value


@torch.no_grad()
def score(model: Any, tokens: Tensor, *, microbatch: int = 16) -> Tensor:
    """fp32 [n, L] on every rank: logprob of tokens[:, j] given the tokens before it; column 0 is 0 and means nothing.

    ``tokens`` [n, L] int64, rows padded on the right; the caller reads only real positions.  Every rank of the model's group
    must call with the same tokens.  Under a contract the bits depend neither on ``microbatch`` nor on the layout.
    """
    if tokens.dim() != 2 or tokens.shape[0] == 0 or tokens.shape[1] < 2 or microbatch < 1:
        raise InstallError(
            region="logprobs",
            wanted="tokens [n >= 1, L >= 2] and microbatch >= 1",
            found=f"tokens {list(tokens.shape)}, microbatch {microbatch}",
            fix="pad rows on the right to one length",
        )
    inner = unwrap(model)
    n, length = tokens.shape
    size = min(microbatch, n)
    padded = torch.cat([tokens, tokens[:1].expand(-n % size, -1)])
    parts = padded.split(size)
    multiple = sequence_multiple(model)
    process = output_processor(model)

    def step(batches: Iterator[Tensor], stage: Any) -> tuple[Tensor, Callable[..., Tensor]]:
        out = stage(**model_inputs(next(batches), multiple), output_processor=process)
        return out, lambda values, non_loss_data=True: values  # noqa: ARG005

    training = model.training
    model.eval()
    try:
        found = get_forward_backward_func(
            pp_size=inner.pg_collection.pp.size(), vp_size=inner.config.virtual_pipeline_model_parallel_size
        )(
            forward_step_func=step,
            data_iterator=iter(parts),
            model=[model],
            num_microbatches=len(parts),
            seq_length=length + -length % multiple,
            micro_batch_size=size,
            forward_only=True,
            collect_non_loss_data=True,
        )
    finally:
        model.train(training)
    device = next(inner.parameters()).device
    if inner.post_process:
        out = align(torch.cat([f.float() for f in found])[:n], length).contiguous()
    else:
        out = torch.empty(n, length, dtype=torch.float32, device=device)
    return from_last_stage(out, inner.pg_collection.pp)
