# SPDX-License-Identifier: Apache-2.0
"""Builds a GPTModel from a Hugging Face folder of a Qwen3, dense or with experts, a MiMo or Qwen2, native or under a contract.

The process groups are those Megatron already has.  MiMo's layers for multi-token prediction are left out: they draft tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from isoexec.adapters.megatron.adapter import MegatronAdapter
from isoexec.adapters.megatron.layers import SHARDED
from isoexec.adapters.megatron.spec import rewrite_spec
from isoexec.adapters.megatron.weights import WeightError, load_hf
from isoexec.contracts.schema import Contract

__all__ = [
    "FusedCoreAttention",
    "SequenceParallelRMSNorm",
    "build",
    "read_hf_config",
    "stock_spec",
    "transformer_config",
]


_FAMILIES = ("qwen3", "qwen3_moe", "mimo", "qwen2")
_QWEN3 = ("qwen3", "qwen3_moe")


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, marked so that Megatron sums its gradient over sequence-parallel ranks; its own wrapper refuses those."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.config = config
        setattr(self.weight, SHARDED, config.sequence_parallel)


class FusedCoreAttention(DotProductAttention):
    """Native core attention by torch's fused kernels, where Megatron's local one writes every score: causal, over whole rows."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any) -> Tensor:
        """[s, b, heads/t, D] -> [s, b, heads/t * D]; what else Megatron may pass must be absent."""
        given = [one for one in (*args, *more.values()) if one is not None and one is not AttnMaskType.causal]
        if given:
            raise WeightError(f"fused attention: wanted causal rows and nothing else, found {given[0]!r:.80}")
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def read_hf_config(folder: Path | str) -> dict[str, Any]:
    """The folder's config.json; WeightError when it is no model this module can build."""
    hf: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    family = hf.get("model_type")
    width = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    for wanted, found in (
        (f"model_type {', '.join(_FAMILIES)}", family in _FAMILIES),
        ("attention_bias false in Qwen3", family not in _QWEN3 or not hf.get("attention_bias")),
        ("attention_bias in MiMo", family != "mimo" or hf.get("attention_bias", True)),
        (
            f"head_dim x num_attention_heads to be hidden_size in {family}",
            family in _QWEN3 or width * hf["num_attention_heads"] == hf["hidden_size"],
        ),
        ("hidden_act silu", hf.get("hidden_act", "silu") == "silu"),
        ("no sliding window", not hf.get("use_sliding_window")),
        ("a whole rope_theta, as Megatron takes one", rotary_base(hf).is_integer()),
        ("an unscaled rotary table", rope.get("rope_type", "default") == "default"),
        *(_experts_wanted(hf) if family == "qwen3_moe" else ()),
    ):
        if not found:
            raise WeightError(
                f"{folder}/config.json: wanted {wanted}, found model_type {family}; this adapter builds no other models"
            )
    return hf | {"head_dim": width}


def _experts_wanted(hf: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        yield f"{name} to be a positive whole number", type(hf.get(name)) is int and hf[name] > 0
    yield "norm_topk_prob true", hf.get("norm_topk_prob") is True
    yield "experts in every layer (decoder_sparse_step 1)", hf.get("decoder_sparse_step", 1) == 1
    yield "experts in every layer (mlp_only_layers [])", not hf.get("mlp_only_layers")
    yield "no shared expert", not hf.get("shared_expert_intermediate_size")


def rotary_base(hf: dict[str, Any]) -> float:
    """``rope_theta``, from either place Hugging Face has kept it."""
    return float((hf.get("rope_parameters") or {}).get("rope_theta", hf.get("rope_theta", 10000.0)))


def transformer_config(
    hf: dict[str, Any],
    *,
    dtype: torch.dtype,
    groups: ProcessGroupCollection,
    sequence_parallel: bool = False,
    recompute: bool = False,
    **more: Any,
) -> TransformerConfig:
    """Megatron's configuration of such a model: no dropout, no fusion; ``recompute`` recomputes every layer in backward.

    Qwen3 norms query and key heads; MiMo and Qwen2 have a bias on query, key and value instead.  A layer with experts routes
    in fp32 and has neither an auxiliary loss nor a capacity.
    """
    layers, pp = hf["num_hidden_layers"], groups.pp.size()
    if recompute:
        more = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        } | more
    if layers % pp:
        # the first stage takes what does not divide
        more = {"num_layers_in_first_pipeline_stage": layers - (pp - 1) * (layers // pp)} | more
    if "num_experts" in hf:
        more = {
            "num_moe_experts": hf["num_experts"],
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": groups.ep.size(),
            "expert_tensor_parallel_size": groups.expt_tp.size(),
        } | more
    return TransformerConfig(
        num_layers=layers,
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"],
        ffn_hidden_size=hf.get("moe_intermediate_size", hf["intermediate_size"]),
        layernorm_epsilon=hf["rms_norm_eps"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=hf["model_type"] not in _QWEN3,
        qk_layernorm=hf["model_type"] in _QWEN3,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=groups.tp.size(),
        pipeline_model_parallel_size=pp,
        sequence_parallel=sequence_parallel,
        **more,
    )


def stock_spec(
    config: TransformerConfig, groups: ProcessGroupCollection, *, fused_attention: bool = False
) -> TransformerBlockSubmodules:
    """Megatron's own local spec of this stage's layers, with norms that sequence parallelism can use."""
    layer = get_gpt_layer_local_submodules(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    norm = SequenceParallelRMSNorm
    heads = layer.self_attention.submodules
    if fused_attention:
        heads = dataclasses.replace(heads, core_attention=FusedCoreAttention)
    if config.qk_layernorm:
        heads = dataclasses.replace(heads, q_layernorm=norm, k_layernorm=norm)
    layer = dataclasses.replace(
        layer,
        input_layernorm=norm,
        pre_mlp_layernorm=norm,
        self_attention=dataclasses.replace(layer.self_attention, submodules=heads),
    )
    count = get_num_layers_to_build(config, None, groups.pp.rank())
    return TransformerBlockSubmodules(
        layer_specs=[ModuleSpec(module=TransformerLayer, submodules=layer) for _ in range(count)],
        layer_norm=norm,
    )


def build(
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    contract: Contract | None = None,
    sequence_parallel: bool = False,
    recompute: bool = False,
    load: bool = True,
    fused_attention: bool = False,
    **config: Any,
) -> GPTModel:
    """Build this rank's GPTModel of a Hugging Face folder, with its weights, native or with ``contract`` installed.

    Tensor- and pipeline-parallel degrees are those ``parallel_state`` was initialised with.  ``model.isoexec_adapter`` is the
    installed adapter, or None.  Under a contract an unproven topology, dtype or model raises before anything can be scored.
    ``load=False`` leaves the weights uninitialised, for a checkpoint that follows.  ``fused_attention`` is of a native model.
    """
    hf = read_hf_config(folder)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    settings = transformer_config(
        hf, dtype=dtype, groups=groups, sequence_parallel=sequence_parallel, recompute=recompute, **config
    )
    spec = stock_spec(settings, groups, fused_attention=fused_attention and contract is None)
    plan = None
    if contract is not None:
        plan = MegatronAdapter(groups=groups, config=settings).plan(contract)
        spec = rewrite_spec(spec, plan)
    model = GPTModel(
        config=settings,
        transformer_layer_spec=spec,
        vocab_size=hf["vocab_size"],
        max_sequence_length=hf["max_position_embeddings"],
        pre_process=groups.pp.rank() == 0,
        post_process=groups.pp.rank() == groups.pp.size() - 1,
        rotary_base=int(rotary_base(hf)),
        parallel_output=True,
        share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings")),
        pg_collection=groups,
        position_embedding_type="none" if plan is not None and plan.installs("rope") else "rope",
    ).to(dtype)
    if torch.cuda.is_available():
        model.cuda()
    model.hf_config_path = str(Path(folder) / "config.json")
    model.isoexec_adapter = None
    if plan is not None:
        MegatronAdapter(model).install(plan)
    if load:
        load_hf(model, folder)
    return model
