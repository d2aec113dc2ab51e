# SPDX-License-Identifier: Apache-2.0
"""Token logprobs from a GPTModel, through its ``output_processor`` hook, and scoring of whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.adapters.megatron.kinds import kinds_in
from isoexec.adapters.megatron.weights import unwrap
from isoexec.contracts.errors import InstallError

__all__ = [
    "BOUNDS",
    "from_last_stage",
    "model_inputs",
    "native_token_logprobs",
    "output_processor",
    "packed_inputs",
    "score",
    "score_packed",
    "sequence_multiple",
    "unpacked",
]


def native_token_logprobs(logits: Tensor, target: Tensor, group: ProcessGroup) -> Tensor:
    """Megatron's own: the negated vocabulary-parallel cross entropy, which sums in a layout-dependent order."""
    return -vocab_parallel_cross_entropy(logits.float(), target, tp_group=group)


def output_processor(
    model: Any, *, temperature: float | Tensor | None = None, entropy: bool = False
) -> Callable[..., Tensor]:
    """The hook for ``GPTModel.forward(..., labels=..., output_processor=...)``: fp32 logprobs of the labels, [b, s].

    It uses what the adapter installed on the model, and Megatron's own cross entropy where nothing is installed.  A head that
    computes logprobs itself also takes a ``temperature``, one number or fp32 [b, s], and with ``entropy`` gives fp32
    [2, b, s], logprobs and then entropies in nats; InstallError where another head is asked for either.
    """
    inner = unwrap(model)
    asked = temperature is not None or entropy

    def process(
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        labels: Tensor,
        scale_logits: Any,
        **_: Any,
    ) -> Tensor:
        own = getattr(output_layer, "logprobs", None)
        if own is not None:
            found: Tensor = own(
                hidden_states, labels, weight=output_weight, temperature=temperature, entropy=entropy
            )
            return found
        if asked:
            raise InstallError(
                region="logprobs",
                wanted="a head that computes logprobs with a temperature, and entropies",
                found=type(output_layer).__name__,
                fix="install a contract whose head has them, or compute them from logits",
            )
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


BOUNDS = "isoexec_bounds"
"""On a PackedSeqParams: its bounds as numbers of the host, so that nobody has to wait for the GPU to read them."""


def packed_inputs(sequences: Sequence[Tensor], multiple: int = 1) -> dict[str, Any]:
    """Arguments of one GPTModel forward that scores sequences of ids [L] packed one after the other (thd), as [1, tokens].

    Position i of a sequence predicts its token i + 1.  The pack is padded up to a multiple of ``multiple`` by one more sequence
    of token 0.  Make it anew for every micro-batch: a step's plan is kept on it.
    """
    parts = list(sequences)
    extra = -sum(map(len, parts)) % multiple
    if extra:
        parts.append(parts[0].new_zeros(extra))
    bounds = [0, *accumulate(map(len, parts))]
    device = parts[0].device
    starts = torch.tensor(bounds, dtype=torch.int32).to(device, non_blocking=True)
    most = max(map(len, parts))
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=most,
        max_seqlen_kv=most,
    )
    setattr(params, BOUNDS, bounds)
    return {
        "input_ids": torch.cat(parts).unsqueeze(0),
        "position_ids": torch.cat([torch.arange(len(p), device=device) for p in parts]).unsqueeze(0),
        "attention_mask": None,
        "labels": torch.cat([torch.nn.functional.pad(p[1:], (0, 1)) for p in parts]).unsqueeze(0),
        "packed_seq_params": params,
    }


def unpacked(values: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Logprobs by predicting position of a pack [1, tokens] -> by token, [L] of each sequence; the first, of nothing, is 0."""
    flat = values.view(-1)[: sum(lengths)]
    return [torch.nn.functional.pad(v[:-1], (1, 0)) for v in torch.split(flat, list(lengths))]


def sequence_multiple(model: Any) -> int:
    """What a sequence's length must be a multiple of."""
    inner = unwrap(model)
    tp = inner.pg_collection.tp.size()
    return tp * kinds_in(inner).rows if inner.config.sequence_parallel and tp > 1 else 1


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


def _forward(model: Any, batches: Sequence[dict[str, Any]], **processed: Any) -> list[Tensor]:
    """What the last stage makes of each batch's inputs, by Megatron's own schedule; nothing on the other stages.

    ``processed`` are options of the `output_processor`.
    """
    inner = unwrap(model)
    process = output_processor(model, **processed)

    def step(rest: Iterator[dict[str, Any]], stage: Any) -> tuple[Tensor, Callable[..., Tensor]]:
        out = stage(**next(rest), output_processor=process)
        return out, lambda values, non_loss_data=True: values  # noqa: ARG005

    size, length = batches[0]["input_ids"].shape
    training = model.training
    model.eval()
    try:
        found: list[Tensor] = get_forward_backward_func(
            pp_size=inner.pg_collection.pp.size(), vp_size=inner.config.virtual_pipeline_model_parallel_size
        )(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=size,
            forward_only=True,
            collect_non_loss_data=True,
        )
    finally:
        model.train(training)
    return found


@torch.no_grad()
def score_packed(model: Any, sequences: Sequence[Tensor]) -> list[Tensor]:
    """`score` of sequences of ids [L >= 2], packed in one micro-batch: fp32 [L] of each, on every rank.

    Under a contract whose attention takes packs the bits are those of `score`.
    """
    if not sequences or min(map(len, sequences)) < 2:
        raise InstallError(
            region="logprobs",
            wanted="sequences of two tokens and more",
            found=f"lengths {[len(s) for s in sequences]}",
            fix="leave the others out: nothing predicts a first token",
        )
    inner = unwrap(model)
    inputs = packed_inputs(sequences, sequence_multiple(model))
    found = _forward(model, [inputs])
    tokens = inputs["input_ids"].shape[1]
    out = found[0].float() if inner.post_process else torch.empty(1, tokens, device=sequences[0].device)
    return unpacked(from_last_stage(out, inner.pg_collection.pp), [len(s) for s in sequences])


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
    multiple = sequence_multiple(model)
    found = _forward(model, [model_inputs(part, multiple) for part in padded.split(size)])
    device = next(inner.parameters()).device
    if inner.post_process:
        out = align(torch.cat([f.float() for f in found])[:n], length).contiguous()
    else:
        out = torch.empty(n, length, dtype=torch.float32, device=device)
    return from_last_stage(out, inner.pg_collection.pp)
