# SPDX-License-Identifier: Apache-2.0
"""Attention over the engine's paged cache: absolute key segments, so that chunk, batch and block placement change no bit.

Bound by ``register_backend(CPU_ATTN, ...)``: on CPU the engine ignores ``attention_backend="CUSTOM"`` with one line of log.
The cache keeps the engine's tensor, blocks [blocks, kv heads, block, 2 * head_dim], keys first in the last dimension.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from isoexec.adapters.vllm import state
from isoexec.adapters.vllm.hooks import refuse_unless
from isoexec.kernels.attention import PagedPlan, attention_paged
from isoexec.kernels.attention.naive import QUERY_TILE

__all__ = ["IsoExecAttentionBackend", "IsoExecAttentionImpl"]

_REGION = "attention"
_PLAN = "isoexec_plan"


class IsoExecAttentionImpl(CPUAttentionBackendImpl):
    """Causal decoder attention of one layer, prefill and decode by the same function."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plan = state.required(_REGION)
        self._kv_segment = int(plan.constant(_REGION, "kv_segment"))
        self._inside = state.Inside(_REGION)
        outside = {
            "alibi": self.alibi_slopes is not None,
            "a sliding window": self.sliding_window != -1,
            "a logits soft cap": bool(self.logits_soft_cap),
            "attention sinks": self.sinks is not None,
            f"a {self.kv_cache_dtype} cache": self.is_fp8_kv_cache,
            f"{self.attn_type} attention": self.attn_type != "decoder",
            "a cache shared between layers": self.kv_sharing_target_layer_name is not None,
            f"{self.num_queries_per_kv} queries a key head": not 1 <= self.num_queries_per_kv <= QUERY_TILE,
        }
        found = [what for what, here in outside.items() if here]
        refuse_unless(not found, _REGION, "plain causal decoder attention", ", ".join(found))

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write ``key`` and ``value`` [tokens, kv heads, head_dim] to their slots; a negative slot is padding."""
        del layer
        block, width = kv_cache.shape[2], self.head_size
        slots = slot_mapping.long()
        key, value = key[: slots.shape[0]], value[: slots.shape[0]]
        if bool((slots < 0).any()):
            kept = slots >= 0
            slots, key, value = slots[kept], key[kept], value[kept]
        at, offset = slots // block, slots % block
        with self._inside:
            kv_cache[at, :, offset, :width] = key
            kv_cache[at, :, offset, width:] = value

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """``query`` [tokens, heads, head_dim] against the cache into ``output``; padding rows stay untouched."""
        del layer, key, value  # they are in the cache already
        if attn_metadata is None:  # the engine's own dry run before the cache exists
            return output
        refuse_unless(
            output_scale is None
            and output_block_scale is None
            and attn_metadata.causal is True
            and attn_metadata.dynamic_causal is None,
            _REGION,
            "causal attention with an unquantized output",
            "another mask or a quantized output",
        )
        with self._inside:
            plan = getattr(attn_metadata, _PLAN, None)
            if plan is None:
                plan = PagedPlan(
                    attn_metadata.query_start_loc.tolist(),
                    attn_metadata.seq_lens.tolist(),
                    self.num_queries_per_kv,
                    kv_segment=self._kv_segment,
                )
                setattr(attn_metadata, _PLAN, plan)
            tokens = attn_metadata.num_actual_tokens
            attention_paged(
                query[:tokens], kv_cache, attn_metadata.block_table, plan, self.scale, output[:tokens]
            )
        return output


class IsoExecAttentionBackend(CPUAttentionBackend):
    """The CPU backend with another implementation; block sizes, layout and metadata are the engine's."""

    @staticmethod
    def get_impl_cls() -> type[IsoExecAttentionImpl]:
        return IsoExecAttentionImpl
