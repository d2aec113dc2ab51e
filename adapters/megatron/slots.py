# SPDX-License-Identifier: Apache-2.0
"""Where each region's modules sit in a live GPTModel, and what in its configuration the contract does not cover."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.nn.functional import silu

from isoexec.adapters.megatron.kinds import kinds_in
from isoexec.adapters.megatron.layers import Contracted

__all__ = ["Slot", "facts_of", "slots", "topology_of", "uncovered"]

# region, path in the layer, name of the class in `Kinds`
_ATTENTION: tuple[tuple[str, str, str], ...] = (
    ("norm", "input_layernorm", "norm"),
    ("column_linear", "self_attention.linear_qkv", "column"),
    ("qk_norm", "self_attention.q_layernorm", "head_norm"),
    ("qk_norm", "self_attention.k_layernorm", "head_norm"),
    ("attention", "self_attention.core_attention", "core"),
    ("row_linear", "self_attention.linear_proj", "row"),
    ("norm", "pre_mlp_layernorm", "norm"),
)
_DENSE: tuple[tuple[str, str, str], ...] = (
    ("silu_mul", "mlp", "mlp"),
    ("column_linear", "mlp.linear_fc1", "column"),
    ("row_linear", "mlp.linear_fc2", "row"),
)
_EXPERTS: tuple[tuple[str, str, str], ...] = (
    ("dispatch", "mlp", "moe"),
    ("router", "mlp.router", "router"),
    ("expert_linear", "mlp.experts", "experts"),
)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """An attribute of the model that a region's module occupies; ``wanted`` is the contract's class for it."""

    region: str
    path: str
    owner: Any
    name: str
    wanted: type[Contracted]
    group: ProcessGroup

    @property
    def module(self) -> Any:
        return getattr(self.owner, self.name, None)

    @property
    def regions(self) -> tuple[str, ...]:
        """The slot's own region, then those its module computes besides."""
        return (self.region, *self.wanted.also, *(("qkv_bias",) if self.name == "linear_qkv" else ()))

    @property
    def axis(self) -> str:
        """The axis of the slot's ``tp_group``: ranks that share an expert are those of ETP."""
        return "ETP" if self.region == "expert_linear" else "TP"


def slots(model: Any) -> Iterator[Slot]:
    """Every slot of this pipeline stage; ``model`` is the GPTModel itself. `Slot.regions` names what else a slot serves."""
    group, kinds = model.pg_collection.tp, kinds_in(model)
    if model.pre_process:
        yield _slot("embedding", "embedding.word_embeddings", model, kinds.embedding, group)
    for index, layer in enumerate(model.decoder.layers):
        for region, path, kind in _ATTENTION + (_DENSE if model.config.num_moe_experts is None else _EXPERTS):
            if region == "qk_norm" and not model.config.qk_layernorm:
                continue
            wanted = kinds.by_slot(kind)
            yield _slot(region, path, layer, wanted, layer.tp_group, prefix=f"decoder.layers.{index}.")
    if model.post_process:
        yield _slot("norm", "decoder.final_layernorm", model, kinds.norm, group)
        yield _slot(kinds.head.region, "output_layer", model, kinds.head, group)


def _slot(
    region: str, path: str, root: Any, wanted: type[Contracted], group: ProcessGroup, prefix: str = ""
) -> Slot:
    at, _, name = path.rpartition(".")
    owner = root.get_submodule(at) if at else root
    return Slot(region=region, path=prefix + path, owner=owner, name=name, wanted=wanted, group=group)


def topology_of(groups: Any, config: Any) -> dict[str, int]:
    """Axis -> live degree, from process groups; SP is 1 when off and the tensor-parallel degree when on.

    A model without experts shards none, whatever size Megatron gives the expert groups it never uses.
    """

    def size(name: str) -> int:
        group = getattr(groups, name, None)
        return group.size() if group is not None else 1

    tp = size("tp")
    experts = config.num_moe_experts is not None
    return {
        "TP": tp,
        "SP": tp if config.sequence_parallel else 1,
        "PP": size("pp"),
        "CP": size("cp"),
        "EP": size("ep") if experts else 1,
        "ETP": size("expt_tp") if experts else 1,
        "DP": size("dp"),
    }


# configuration of the dense model the regions cover: attribute -> values admitted
_ADMITTED: dict[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
    "gated_linear_unit": (True,),
    "activation_func": (silu,),
    "add_bias_linear": (False,),
    "hidden_dropout": (0.0,),
    "attention_dropout": (0.0,),
    "layernorm_zero_centered_gamma": (False,),
    "fp32_residual_connection": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "multi_latent_attention": (False,),
    "mtp_num_layers": (None, 0),
    "use_mup": (False,),
    "fp8": (None,),
    "fp4": (None,),
    "fp16": (False,),
    "apply_query_key_layer_scaling": (False,),
    "attention_output_gate": (False,),
    "rotary_interleaved": (False,),
    "fused_single_qkv_rope": (False,),
    "no_rope_freq": (None,),
    "softmax_type": ("vanilla",),
    "window_size": (None,),
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (0.0,),
    "gradient_accumulation_fusion": (False,),
    "defer_embedding_wgrad_compute": (False,),
    "delay_wgrad_compute": (False,),
    "cpu_offloading": (False,),
    "virtual_pipeline_model_parallel_size": (None,),
    "batch_invariant_mode": (False,),
    "mlp_chunks_for_training": (1,),
}
# and of its layers with experts, where the contract has regions for them
_ADMITTED_EXPERTS: dict[str, tuple[Any, ...]] = {
    "moe_layer_freq": (1,),
    "moe_router_score_function": ("softmax",),
    "moe_router_pre_softmax": (False,),
    "moe_router_topk_scaling_factor": (None,),
    "moe_router_num_groups": (None, 1),
    "moe_router_group_topk": (None, 1),
    "moe_router_topk_limited_devices": (None,),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_load_balancing_type": ("none",),
    "moe_aux_loss_coeff": (0.0,),
    "moe_z_loss_coeff": (None,),
    "moe_input_jitter_eps": (None,),
    "moe_router_force_load_balancing": (False,),
    "moe_router_force_biased": (None,),
    "moe_enable_routing_replay": (False,),
    "moe_token_dropping": (False,),
    "moe_expert_capacity_factor": (None,),
    "moe_expert_rank_capacity_factor": (None,),
    "moe_pad_expert_input_to_capacity": (False,),
    "moe_router_padding_for_quantization": (False,),
    "moe_apply_probs_on_input": (False,),
    "moe_shared_expert_intermediate_size": (None,),
    "moe_latent_size": (None,),
    "moe_single_grouped_weight": (False,),
    "moe_mlp_glu_interleave_size": (None,),
    "overlap_moe_expert_parallel_comm": (False,),
    "overlap_dispatch_backward_with_experts_wgrad": (False,),
    "cuda_graph_impl": ("none",),
}


def uncovered(model: Any, regions: Collection[str]) -> list[str]:
    """What in the model's configuration no region of a contract covers, one line each, and what a region covers in vain."""
    config = model.config
    parts: dict[str, tuple[Any, ...]] = {
        "add_qkv_bias": ("qkv_bias" in regions,),
        "qk_layernorm": ("qk_norm" in regions,),
    }
    if "expert_linear" not in regions:
        parts["num_moe_experts"] = (None,)
    elif config.num_moe_experts is None:
        return ["num_moe_experts=None, and the contract's layers have experts"]
    else:
        parts |= _ADMITTED_EXPERTS
    lines = [
        f"{name}={getattr(config, name)!r}, the contract covers {' or '.join(map(repr, admitted))}"
        for name, admitted in (_ADMITTED | parts).items()
        if hasattr(config, name) and getattr(config, name) not in admitted
    ]
    if config.params_dtype not in (torch.bfloat16, torch.float32):
        lines.append(f"params_dtype={config.params_dtype}, the contract covers bfloat16 and float32")
    if model.position_embedding_type not in ("rope", "none"):
        lines.append(
            f"position_embedding_type={model.position_embedding_type!r}, the contract covers 'rope' and 'none'"
        )
    if getattr(model, "rotary_percent", 1.0) != 1.0:
        lines.append(f"rotary_percent={model.rotary_percent}, the contract covers 1.0")
    if getattr(model, "rotary_scaling", False):
        lines.append("rope_scaling=True, the contract covers unscaled tables")
    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is not None and getattr(rotary, "seq_len_interpolation_factor", None) is not None:
        lines.append("seq_len_interpolation_factor, the contract covers unscaled tables")
    if config.num_query_groups < model.pg_collection.tp.size():
        lines.append(f"num_query_groups={config.num_query_groups} under TP={model.pg_collection.tp.size()}")
    if model.share_embeddings_and_output_weights and model.pg_collection.pp.size() > 1:
        lines.append(
            "a tied head with PP > 1: the two stages add their gradients in another order than one stage does"
        )
    return lines


def facts_of(model: Any) -> dict[str, int | str | bool]:
    """The shape facts a contract may constrain, by the contract's names; widths in elements."""
    c = model.config
    return {
        "hidden_size": c.hidden_size,
        **(_experts_of(c) if c.num_moe_experts is not None else {"intermediate_size": c.ffn_hidden_size}),
        "layers": c.num_layers,
        "heads": c.num_attention_heads,
        "kv_heads": c.num_query_groups,
        "head_dim": c.kv_channels,
        "q_width": c.num_attention_heads * c.kv_channels,
        "kv_width": c.num_query_groups * c.kv_channels,
        "qkv_width": (c.num_attention_heads + 2 * c.num_query_groups) * c.kv_channels,
        "vocab_size": model.vocab_size,
        "tied_head": model.share_embeddings_and_output_weights,
        "activation": "silu" if c.activation_func is silu else str(c.activation_func),
        "attention_bias": bool(c.add_qkv_bias),
        "sliding_window": c.window_size is not None,
        "quantization": str(c.fp8 or c.fp4 or "none"),
        "rope_type": "scaled" if getattr(model, "rotary_scaling", False) else "default",
        "partial_rotary": getattr(model, "rotary_percent", 1.0) != 1.0,
    }


def _experts_of(c: Any) -> dict[str, int | str | bool]:
    every = c.moe_layer_freq
    sparse = every if isinstance(every, list) else [int(i % every == 0) for i in range(c.num_layers)]
    return {
        "experts": c.num_moe_experts,
        "experts_per_token": c.moe_router_topk,
        "expert_size": c.moe_ffn_hidden_size,
        "expert_groups": c.moe_router_num_groups or 1,
        "dense_layers": len(sparse) - sum(sparse),
        "router_score": c.moe_router_score_function,
        "router_bias": bool(c.moe_router_enable_expert_bias),
        "router_normalize": not c.moe_router_pre_softmax,
        "shared_size": c.moe_shared_expert_intermediate_size or 0,
    }
