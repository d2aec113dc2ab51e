# SPDX-License-Identifier: Apache-2.0
"""Core attention with the contract's rotary embedding and segment attention, either of them or both.

The rotary embedding is applied inside core attention, where Megatron hands over normed heads in [s, b, heads, head_dim]; the
model itself then runs with ``position_embedding_type == "none"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from isoexec.adapters.base import Binding
from isoexec.adapters.megatron.layers import Contracted
from isoexec.contracts.errors import InstallError
from isoexec.kernels import attention as attention_kernel
from isoexec.kernels import rope as rope_kernel

__all__ = ["ContractCoreAttention", "is_causal"]


class ContractCoreAttention(Contracted, DotProductAttention):
    """Causal self-attention over positions 0..s-1; right padding changes no bit of the rows before it."""

    region = "attention"
    stock = (DotProductAttention,)
    also: ClassVar[Mapping[str, str]] = {"rope": "rope_binding"}
    rope_binding: Binding | None = None
    rope_base: float | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_planned()

    def is_planned(self) -> None:
        """Forget any binding: the adapter's install says which of the two regions this module owns."""
        self.owns: frozenset[str] = frozenset()

    @classmethod
    def adopt(cls, module: torch.nn.Module) -> Self:
        new = super().adopt(module)
        new.is_planned()
        return new

    def bind(
        self, binding: Binding | None, rope: Binding | None = None, rope_base: float | None = None
    ) -> None:
        """``binding`` and ``rope`` are None for a region Megatron keeps; both None unbinds."""
        self.binding, self.rope_binding, self.rope_base = binding, rope, rope_base
        self.owns = frozenset(n for n, b in (("attention", binding), ("rope", rope)) if b is not None)

    def unfit(self) -> str | None:
        if self.attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            return f"attention mask {self.attn_mask_type.name}, and the contract's attention is causal"
        if getattr(self, "softmax_offset", None) is not None:
            return "a softmax offset"
        if self.scale_mask_softmax.window_size is not None:
            return f"a sliding window of {self.scale_mask_softmax.window_size}"
        if self.attention_dropout.p > 0.0:
            return f"attention dropout {self.attention_dropout.p}"
        return None

    def compute_rope(self, x: Tensor, positions: Tensor, base: float) -> Tensor:
        """Rotate x [tokens, heads, head_dim] and positions [tokens] -> the same shape, in the dtype of x."""
        return rope_kernel.rope_grad(x, positions, base)

    def compute(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attend q [b, s, heads, D], k and v [b, s, groups, D] -> [b, s, heads, D]."""
        return attention_kernel.attention_varlen(q, k, v, scale, kv_segment=self.constant("kv_segment"))

    def refuse(self, found: str, fix: str) -> None:
        """Raise InstallError for sequences of another form than the contract's."""
        raise InstallError(
            region=self.region,
            wanted="one causal sequence per row, padded on the right",
            found=found,
            fix=fix,
        )

    def admit(self, query: Tensor, key: Tensor, attention_bias: Tensor | None) -> None:
        """Raise InstallError where the module owns nothing, and for what no form of sequences may have."""
        if not self.owns:
            self.require()
        if attention_bias is not None:
            self.refuse("an attention bias", "the contract has none")
        if key.shape[0] != query.shape[0]:
            self.refuse(f"{key.shape[0]} keys for {query.shape[0]} queries", "the trainer has no KV cache")

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
        """Take query [s, b, heads/t, D], key and value [s, b, groups/t, D] -> [s, b, heads/t * D]."""
        s, b, heads, width = query.shape
        self.admit(query, key, attention_bias)
        if packed_seq_params is not None:
            self.refuse("packed sequences", "give [batch, sequence] rows padded on the right")
        query, key, value = (t.transpose(0, 1).contiguous() for t in (query, key, value))
        if "rope" in self.owns:
            positions = torch.arange(s, device=query.device).repeat(b)
            base = float(self.rope_base or 0.0)
            query, key = (
                self.compute_rope(t.view(b * s, t.shape[2], width), positions, base).view(t.shape)
                for t in (query, key)
            )
        if "attention" not in self.owns:
            back = (t.transpose(0, 1).contiguous() for t in (query, key, value))
            return super().forward(*back, attention_mask, attn_mask_type=attn_mask_type)
        if attention_mask is not None and not is_causal(attention_mask, s):
            self.refuse("a mask that is not causal", "pass attention_mask=None; pad rows on the right")
        out = self.compute(query, key, value, self.softmax_scale)
        return out.transpose(0, 1).reshape(s, b, heads * width)


def is_causal(mask: Tensor, s: int) -> bool:
    """Whether a Megatron mask (True = hidden, [.., s, s]) hides exactly the future."""
    if mask.dtype != torch.bool or mask.shape[-2:] != (s, s):
        return False
    future = torch.ones(s, s, dtype=torch.bool, device=mask.device).triu(1)
    return bool(torch.equal(mask, future.expand_as(mask)))
