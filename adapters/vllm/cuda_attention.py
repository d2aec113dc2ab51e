# SPDX-License-Identifier: Apache-2.0
"""Attention over vLLM's paged cache on CUDA: one plan a step, filled on the device by its first layer, used by every one.

Bound by ``register_backend(CUSTOM, ...)``, and ``attention_backend="CUSTOM"`` in the engine's arguments, which refuses to start
where nothing is registered.  The cache is [blocks, 2, block, kv heads, head_dim], keys and values apart; the engine's own op
writes it.

A graph of a whole decode step holds the filling too, which costs the host nothing then: what is made for a capture is kept, and
each replay fills it from where the engine's own buffers lie, which is held to at every step.  A step of any other shape gets a
plan of its own; in piecewise graphs attention is not captured at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm import _custom_ops  # noqa: F401  (loads the op that writes the cache)
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
)

from isoexec.adapters.vllm import state
from isoexec.adapters.vllm.hooks import refuse_unless
from isoexec.kernels.attention.hopper import ops

if TYPE_CHECKING:
    from isoexec.kernels.attention.hopper.ops import Plan

__all__ = [
    "HEAD_SIZES",
    "PAGES",
    "IsoExecAttentionBackend",
    "IsoExecAttentionImpl",
    "IsoExecMetadata",
    "IsoExecMetadataBuilder",
]

_REGION = "attention"
HEAD_SIZES = (64, 128, 256)
PAGES = (16, 64)  # rows of a cache block


class Said(NamedTuple):
    """What the engine says of a step, on the device: ``positions`` [tokens] (None where a request has one row, its last),
    ``q_start`` [B + 1], ``lengths`` [B] and ``blocks`` [B, width].
    """

    positions: Tensor | None
    q_start: Tensor
    lengths: Tensor
    blocks: Tensor

    @property
    def places(self) -> tuple[int, ...]:
        """Where it lies."""
        return tuple(0 if t is None else t.data_ptr() for t in self)


@dataclass
class IsoExecMetadata(AttentionMetadata):
    """A step: its plan, and the int32 ``position`` of each of its ``tokens`` rows; rows behind them are padding.

    Both are filled from ``said`` by the layer that runs first, ``filler``, whenever it runs; ``held`` is where a graph reads it.
    """

    plan: Plan
    position: Tensor
    tokens: int
    said: Said
    filler: IsoExecAttentionImpl | None = None
    held: tuple[int, ...] | None = None

    def fill(self) -> None:
        """Fill plan and positions on the device's current stream; the host waits for nothing."""
        positions, q_start, lengths, blocks = self.said
        if positions is None:
            torch.sub(lengths[: self.tokens], 1, out=self.position).clamp_(min=0)
        else:
            self.position.copy_(positions)
        self.plan.fill(q_start, lengths, blocks=blocks)
        if self.position.is_cuda and torch.cuda.is_current_stream_capturing():
            self.held = self.said.places


class IsoExecMetadataBuilder(AttentionMetadataBuilder[IsoExecMetadata]):
    """Makes a step's metadata.

    ``kept`` are those whose tables a captured graph holds, by (requests, rows, most rows of a request).
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._page = int(kv_cache_spec.block_size)
        self._most_keys = int(vllm_config.model_config.max_model_len)
        self._kv_segment = int(state.required(_REGION).constant(_REGION, "kv_segment"))
        self.kept: dict[tuple[int, int, int], IsoExecMetadata] = {}

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> IsoExecMetadata:
        """The metadata of a step.  Raises InstallError where a graph would read them in another place than they are in."""
        del fast_build
        refuse_unless(common_prefix_len == 0, _REGION, "each request's own keys", "a common prefix by itself")
        common = common_attn_metadata
        made = self.kept.get(self._key(common))
        if made is None:
            return self._made(common, int(common.max_seq_len))
        made.said = _said(common)
        refuse_unless(
            made.held in (None, made.said.places),
            _REGION,
            "a step's tables in the buffers that its graph reads",
            "other buffers",
            "run the V2 model runner, or pass compilation_config={'cudagraph_mode': 'PIECEWISE'}",
        )
        return made

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> IsoExecMetadata:
        """The metadata that a graph holds: for any number of keys, and one for all captures of its shape."""
        common = common_attn_metadata
        key = self._key(common)
        if key not in self.kept:
            self.kept[key] = self._made(common, self._most_keys)
        self.kept[key].said = _said(common)
        return self.kept[key]

    @staticmethod
    def _key(common: Any) -> tuple[int, int, int]:
        return int(common.num_reqs), int(common.num_actual_tokens), int(common.max_query_len)

    def _made(self, common: Any, most_keys: int) -> IsoExecMetadata:
        requests, tokens, most_rows = self._key(common)
        plan = ops.plan(
            requests=requests,
            tokens=tokens,
            most_rows=min(most_rows, tokens),
            most_keys=max(most_keys, 1),
            kv_segment=self._kv_segment,
            page=self._page,
            device=self.device,
        )
        position = torch.zeros(tokens, dtype=torch.int32, device=self.device)
        return IsoExecMetadata(plan=plan, position=position, tokens=tokens, said=_said(common))


def _said(common: Any) -> Said:
    """What the engine says of a step; InstallError where that is no step of causal attention, or lacks the rows' positions."""
    refuse_unless(common.causal is True, _REGION, "causal attention", "another mask")
    requests, tokens = int(common.num_reqs), int(common.num_actual_tokens)
    # a row a request is its last one, behind them is padding: so a drafting head says no positions, though its captures do
    last = common.max_query_len == 1 and tokens <= requests
    refuse_unless(
        common.positions is not None or last,
        _REGION,
        "a position for each row in the step's metadata",
        "none",
        "run the V2 model runner: VLLM_USE_V2_MODEL_RUNNER must not be 0",
    )
    return Said(
        None if last else common.positions[:tokens],
        common.query_start_loc[: requests + 1],
        common.seq_lens[:requests],
        common.block_table_tensor[:requests],
    )


class IsoExecAttentionImpl(AttentionImpl[IsoExecMetadata]):
    """Causal decoder attention of one layer: prefill, chunks, decode and drafts by the same function."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self._inside = state.Inside(_REGION)
        state.required(_REGION)
        outside = {
            "alibi": alibi_slopes is not None,
            "a sliding window": sliding_window is not None,
            "a logits soft cap": bool(logits_soft_cap),
            "attention sinks": sinks is not None,
            f"a {kv_cache_dtype} cache": kv_cache_dtype not in ("auto", "bfloat16"),
            f"{attn_type} attention": attn_type != "decoder",
            "a cache shared between layers": kv_sharing_target_layer_name is not None,
        }
        found = [what for what, here in outside.items() if here]
        refuse_unless(not found, _REGION, "plain causal decoder attention", ", ".join(found))

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write ``key`` and ``value`` [tokens, kv heads, head_dim] to their slots; a negative slot is padding."""
        keys, values = kv_cache.unbind(1)
        with self._inside:
            torch.ops._C_cache_ops.reshape_and_cache_flash(
                key, value, keys, values, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
            )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: IsoExecMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """``query`` [tokens, heads, head_dim] against the cache into ``output``; padding rows stay untouched."""
        del layer, key, value  # they are in the cache already
        if attn_metadata is None:  # the engine's own dry run before the cache exists
            return output.fill_(0)
        refuse_unless(
            output_scale is None and output_block_scale is None,
            _REGION,
            "an unquantized output",
            "a scale of the output",
        )
        if attn_metadata.filler is None:
            attn_metadata.filler = self
        rows = attn_metadata.tokens
        # a single kv head may have any stride, and the library's copies ask for a row's
        keys, values = (canonicalize_singleton_dim_strides(part) for part in kv_cache.unbind(1))
        with self._inside:
            if attn_metadata.filler is self:
                attn_metadata.fill()
            found = ops.attention(
                query[:rows], keys, values, attn_metadata.position, attn_metadata.plan, scale=self.scale
            )
            output[:rows].copy_(found)
        return output


class IsoExecAttentionBackend(AttentionBackend):
    """The backend's description: bfloat16, no scaled or windowed variant, cache blocks of whole pages, keys before values."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16"]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[IsoExecAttentionImpl]:
        return IsoExecAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[IsoExecMetadataBuilder]:
        return IsoExecMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return list(PAGES)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @classmethod
    def get_required_kv_cache_layout(cls) -> Any:
        return "NHD"

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        del cache_dtype_str
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)
