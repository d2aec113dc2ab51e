# SPDX-License-Identifier: Apache-2.0
"""Core attention on sm90: rotary embedding and segment attention of rows [b, s] or of packed sequences, by one plan a step.

A plan's tables depend on the lengths alone, so all layers share them, and so does a layer that is computed again in backward:
the plan of packed sequences is kept on their ``PackedSeqParams``, which Megatron hands to both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from isoexec.adapters.megatron.attention import ContractCoreAttention, is_causal
from isoexec.adapters.megatron.logprobs import BOUNDS
from isoexec.contracts.errors import InstallError
from isoexec.kernels.attention.hopper import ops as attention
from isoexec.kernels.rope.hopper import ops as rope
from isoexec.kernels.rope.naive import LENGTH

__all__ = ["CudaCoreAttention", "Step", "of_packed", "of_rows", "steps_kept"]

_KEPT = "isoexec_step"  # on the PackedSeqParams


@dataclass(frozen=True, kw_only=True)
class Step:
    """The plan of a micro-batch's sequences, one after the other, and each token's place in its own: int32 [tokens]."""

    plan: attention.Plan
    positions: Tensor


_RECORDING: list[list[Step]] = []


@contextmanager
def steps_kept() -> Iterator[list[Step]]:
    """The steps that attention takes meanwhile: a CUDA graph reads their tables as long as it is replayed, so it holds them."""
    kept: list[Step] = []
    _RECORDING.append(kept)
    try:
        yield kept
    finally:
        _RECORDING.remove(kept)


def _made(lengths: list[int], kv_segment: int, device: torch.device) -> Step:
    """The step of whole sequences of these lengths, none empty or longer than the rotary table."""
    if not lengths or min(lengths) < 1 or max(lengths) > LENGTH:
        raise InstallError(
            region="attention",
            wanted=f"sequences of 1 to {LENGTH} tokens",
            found=f"{len(lengths)} of {min(lengths, default=0)} to {max(lengths, default=0)}",
            fix="leave empty ones out, and cut longer ones",
        )
    starts = [0, *accumulate(lengths)]
    bounds = torch.tensor(starts, dtype=torch.int32).to(device, non_blocking=True)
    plan = attention.plan(
        requests=len(lengths),
        tokens=starts[-1],
        most_rows=max(lengths),
        most_keys=max(lengths),
        kv_segment=kv_segment,
        gradients=True,
        device=device,
    )
    plan.fill(bounds, bounds[1:] - bounds[:-1], k_start=bounds[:-1])
    place = torch.arange(starts[-1], dtype=torch.int32, device=device)
    owner = torch.searchsorted(bounds[1:], place, right=True)
    return Step(plan=plan, positions=place - bounds[owner])


@lru_cache(maxsize=8)
def of_rows(rows: int, length: int, kv_segment: int, device: torch.device) -> Step:
    """The step of ``rows`` sequences of one length."""
    return _made([length] * rows, kv_segment, device)


def of_packed(params: Any, tokens: int, kv_segment: int, device: torch.device) -> Step:
    """The step of packed sequences, made once for these ``PackedSeqParams``; ``tokens`` are all of the pack.

    Sequences that are padded one by one count with their padding (``cu_seqlens_q_padded``): what comes behind a row changes no
    bit of it.  The bounds are read on the host once a pack: `packed_inputs` gives them there, others' tensors of a GPU are waited
    for.  InstallError where the bounds do not cover the pack, for a row without a sequence would be nobody's.
    """
    kept = getattr(params, _KEPT, None)
    if kept is not None and kept.plan.kv_segment == kv_segment and kept.plan.tokens == tokens:
        step: Step = kept
        return step
    padded = params.cu_seqlens_q_padded
    bounds = getattr(params, BOUNDS, None)
    if bounds is None:
        bounds = (padded if padded is not None else params.cu_seqlens_q).tolist()
    lengths = [b - a for a, b in pairwise(bounds)]
    if params.qkv_format != "thd" or bounds[0] != 0 or bounds[-1] != tokens:
        raise InstallError(
            region="attention",
            wanted=f"packed sequences (thd) whose bounds run from 0 to all {tokens} tokens",
            found=f"{params.qkv_format!r}, {len(lengths)} from {bounds[0]} to {bounds[-1]}",
            fix="give padding at the end a sequence of its own, or let the last one have it",
        )
    step = _made([n for n in lengths if n], kv_segment, device)
    setattr(params, _KEPT, step)
    return step


class CudaCoreAttention(ContractCoreAttention):
    """Causal self-attention over whole sequences: rows [b, s] padded on the right, or packed ones (thd)."""

    def compute_rope(self, x: Tensor, positions: Tensor, base: float) -> Tensor:
        """Rotate x [tokens, heads, head_dim] at positions [tokens] -> the same shape and dtype."""
        return rope.rope(x, positions, *rope.tables(x.shape[-1], base, x.device))

    def compute(self, q: Tensor, k: Tensor, v: Tensor, scale: float, step: Step | None = None) -> Tensor:
        """Attend q [b, s, heads, D], k and v [b, s, groups, D] -> [b, s, heads, D]; a step of packs has b 1."""
        kv_segment = self.constant("kv_segment")
        step = step or of_rows(*q.shape[:2], kv_segment, q.device)
        shape = q.shape
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        return attention.attention(q, k, v, step.positions, step.plan, scale=scale).view(shape)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[s, b, heads/t, D] -> [s, b, heads/t * D]; packed [tokens, heads/t, D] -> [tokens, heads/t, D]."""
        self.admit(query, key, attention_bias)
        packed = packed_seq_params is not None
        if packed and "attention" not in self.owns:
            self.refuse("packed sequences for Megatron's own attention", "install the attention region too")
        if packed and query.dim() != 3:
            self.refuse(
                f"a pack of shape {list(query.shape)}", "thd packs have the shape [tokens, heads, head_dim]"
            )
        s, b = (len(query), 1) if packed else query.shape[:2]
        # rope alone needs a step's positions, whatever the segments
        kv_segment = self.constant("kv_segment") if "attention" in self.owns else LENGTH
        if packed:
            step = of_packed(packed_seq_params, s, kv_segment, query.device)
            q, k, v = query, key, value
        else:
            step = of_rows(b, s, kv_segment, query.device)
            q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in (query, key, value))
        for kept in _RECORDING:
            kept.append(step)
        if "rope" in self.owns:
            base = float(self.rope_base or 0.0)
            q, k = (self.compute_rope(t, step.positions, base) for t in (q, k))
        if "attention" not in self.owns:
            back = (t.view(b, s, *t.shape[1:]).transpose(0, 1).contiguous() for t in (q, k, v))
            out: Tensor = DotProductAttention.forward(
                self, *back, attention_mask, attn_mask_type=attn_mask_type
            )
            return out
        if attention_mask is not None and (packed or not is_causal(attention_mask, s)):
            self.refuse("a mask that is not causal", "pass attention_mask=None; pad rows on the right")
        out = self.compute(q[None], k[None], v[None], self.softmax_scale, step)[0]
        return out if packed else out.view(b, s, -1).transpose(0, 1).contiguous()
