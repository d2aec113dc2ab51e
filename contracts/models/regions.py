# SPDX-License-Identifier: Apache-2.0
"""The regions and shape facts that shipped contracts are made of, by arch and by kind of layer.

A function that no kernel computes on an arch is bound all the same and has no provider: the contract says what would have to
be computed, and adapters refuse to run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from isoexec.contracts.parts import CASES, Value

__all__ = [
    "ATTENTION",
    "BIAS",
    "CPU_DENSE",
    "CPU_ENGINE",
    "CPU_MOE",
    "CPU_MOE_ENGINE",
    "CPU_MOE_TRAINER",
    "CPU_TRAINER",
    "DENSE",
    "EMBEDDING",
    "EVERY",
    "GDN",
    "HEAD",
    "KV",
    "LAYER_NORMS",
    "LENGTH",
    "MLA",
    "MOE",
    "MOE_ENGINE",
    "MOE_TRAINER",
    "NEOX",
    "PROVIDERS",
    "SIGMOID",
    "SM90",
    "SM90_ENGINE",
    "SM90_TRAINER",
    "SOFTMAX",
    "SOFTMAX_TOPK",
    "STEP",
    "TREE",
    "Admitted",
    "Degrees",
    "Facts",
    "Part",
    "cpu",
    "cpu_moe",
    "dense",
    "experts",
    "gqa",
    "grouped",
    "hybrid",
    "hybrid_moe",
    "linear",
    "mla",
    "norm",
    "silu",
]

Facts = Mapping[str, Mapping[str, object] | Value]
Degrees = Mapping[str, tuple[int, ...]]

EVERY = (1, 2, 4, 8)
"""Degrees that gates compare."""

LENGTH = 8192
"""Rows of the rotary table, so tokens of the longest sequence."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A region: the operators it owns, its function and constants, its route, and the cases it holds for (all, when ())."""

    region: str
    ops: tuple[str, ...]
    function: str
    constants: Mapping[str, Value] = field(default_factory=dict)
    route: str = "composition_defining"
    cases: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """A provider of a shipped contract: an own kernel, or, where there is a `version`, a library and its settings."""

    name: str
    version: str = ""
    settings: Mapping[str, Value] = field(default_factory=dict)


PROVIDERS: dict[str, dict[str, Admitted]] = {
    "cpu": {
        "embedding.lookup/1": Admitted(name="isoexec.kernels.embedding"),
        "rms_norm.tree/1": Admitted(name="isoexec.kernels.rms_norm"),
        "linear.chain/1": Admitted(name="isoexec.kernels.linear"),
        "linear.grouped_chain/1": Admitted(name="isoexec.kernels.grouped_linear"),
        "router.softmax_topk/1": Admitted(name="isoexec.kernels.router"),
        "moe.dispatch/1": Admitted(name="isoexec.kernels.dispatch"),
        "moe.combine/1": Admitted(name="isoexec.kernels.combine"),
        "bias.add/1": Admitted(name="isoexec.kernels.bias"),
        "rope.neox_fp32/1": Admitted(name="isoexec.kernels.rope"),
        "attention.segments/1": Admitted(name="isoexec.kernels.attention"),
        "silu_mul.exp/1": Admitted(name="isoexec.kernels.silu_mul"),
        "logprobs.leaves/1": Admitted(name="isoexec.kernels.logprobs"),
        "grad_norm.exact/1": Admitted(name="isoexec.kernels.grad_norm"),
    },
    "sm90": {
        "embedding.lookup/1": Admitted(name="isoexec.kernels.embedding.hopper"),
        "rms_norm.pairs/1": Admitted(name="isoexec.kernels.rms_norm.hopper"),
        "rms_norm.pairs_centred/1": Admitted(name="isoexec.kernels.rms_norm_centred.hopper"),
        "rms_norm.pairs_gated/1": Admitted(name="isoexec.kernels.rms_norm_gated.hopper"),
        "l2_norm.pairs/1": Admitted(name="isoexec.kernels.l2_norm.hopper"),
        "linear.mma_chain/1": Admitted(name="isoexec.kernels.linear.hopper"),
        "linear.grouped_mma_chain/1": Admitted(name="isoexec.kernels.grouped_linear.hopper"),
        "router.softmax_topk/1": Admitted(name="isoexec.kernels.router.hopper"),
        "router.sigmoid_topk/1": Admitted(name="isoexec.kernels.router.sigmoid.hopper"),
        "moe.dispatch/1": Admitted(name="isoexec.kernels.dispatch.hopper"),
        "moe.combine/1": Admitted(name="isoexec.kernels.combine.hopper"),
        "moe.shared_gate/1": Admitted(name="isoexec.kernels.shared_gate.hopper"),
        "bias.add/1": Admitted(name="isoexec.kernels.bias.hopper"),
        "rope.neox_fp32/1": Admitted(name="isoexec.kernels.rope.hopper"),
        "rope.interleaved_fp32/1": Admitted(name="isoexec.kernels.rope_interleaved.hopper"),
        "rope.yarn_interleaved_fp32/1": Admitted(name="isoexec.kernels.rope_yarn.hopper"),
        "attention.mma_segments/1": Admitted(name="isoexec.kernels.attention.hopper"),
        "attention.latent_segments/1": Admitted(name="isoexec.kernels.latent_attention.hopper"),
        "silu_mul.poly/1": Admitted(name="isoexec.kernels.silu_mul.hopper"),
        "gate.sigmoid_mul/1": Admitted(name="isoexec.kernels.sigmoid_mul.hopper"),
        "logprobs.blocks/2": Admitted(name="isoexec.kernels.logprobs.hopper"),
        "linear_logprobs.mma_blocks/1": Admitted(name="isoexec.kernels.linear_logprobs.hopper"),
        "grad_norm.exact/1": Admitted(name="isoexec.kernels.grad_norm.hopper"),
    },
}
"""Arch -> function -> who is admitted to compute it there; `isoexec provider list` knows more."""

ENGINE_CASES, TRAINER_CASES = (
    tuple(case for case, of in CASES.items() if of == role) for role in ("engine", "trainer")
)
_GRAD = ("trainer_fwd", "trainer_recompute")
STEP = Part(
    region="grad_norm", ops=("grad_norm",), function="grad_norm.exact/1", constants={"bits": 62}, cases=_GRAD
)
EMBEDDING = Part(region="embedding", ops=("embed",), function="embedding.lookup/1", route="canonical")
NEOX = Part(
    region="rope",
    ops=("rope",),
    function="rope.neox_fp32/1",
    constants={"table": "float64_to_float32", "length": LENGTH},
    route="canonical",
)
BIAS = Part(region="qkv_bias", ops=("qkv_bias",), function="bias.add/1")
LAYER_NORMS = ("residual_add", "input_norm", "post_attention_norm", "final_norm")

# what the kernels of every family rest on, by the name of the fact
_PLAIN: Facts = {
    "activation": "silu",
    "attention_bias": False,
    "sliding_window": False,
    "quantization": "none",
    "rope_type": "default",
}

_EXPERT_LINEARS = ("expert_gate_up", "expert_down")
SOFTMAX_TOPK = Part(
    region="routing",
    ops=("router_score", "router_topk", "router_weight"),
    function="router.softmax_topk/1",
    constants={"accumulate": "float32", "ties": "lowest_expert", "normalize": "chosen"},
)


def _experts(routing: Part, linears: Part, combine: tuple[str, ...]) -> tuple[Part, ...]:
    """What both archs compute alike of experts, around the `linears` that they do not."""
    return (
        routing,
        Part(
            region="dispatch",
            ops=("expert_dispatch",),
            function="moe.dispatch/1",
            constants={"order": "expert_then_token"},
            route="canonical",
        ),
        linears,
        Part(
            region="combine",
            ops=combine,
            function="moe.combine/1",
            constants={"order": "routing", "accumulate": "float32"},
        ),
    )


# -- cpu -----------------------------------------------------------------------------------------------------------------------

TREE: Mapping[str, Value] = {"reduce": "halving_tree", "accumulate": "float32"}
_CHAIN: Mapping[str, Value] = {"k_block": 64, "row_tile": 16, "accumulate": "float32"}
CPU_DENSE: Facts = {
    "hidden_size": {"multiple_of": 64, "minimum": 64},
    "intermediate_size": {"multiple_of": 128, "minimum": 128},
    "layers": {"minimum": 1},
    "heads": {"multiple_of": 2, "minimum": 2},
    "kv_heads": {"multiple_of": 2, "minimum": 2},
    "head_dim": {"multiple_of": 2, "minimum": 2},
    "q_width": {"multiple_of": 128},
    "qkv_width": {"multiple_of": 128},
    "vocab_size": {"multiple_of": 128, "minimum": 128},
    "partial_rotary": False,
    **_PLAIN,
}
# the gradients of a router's logits are sums over experts in blocks of at least 16
CPU_MOE: Facts = {
    **{name: value for name, value in CPU_DENSE.items() if name != "intermediate_size"},
    "experts": {"multiple_of": 16, "minimum": 16},
    "experts_per_token": {"minimum": 1, "maximum": 16},
    "expert_size": {"multiple_of": 128, "minimum": 128},
    "router_normalize": True,
    "tied_head": False,
    "router_score": "softmax",
    "router_bias": False,
    "expert_groups": 1,
    "dense_layers": 0,
    "shared_size": 0,
}
CPU_ENGINE: Degrees = {"TP": (1, 2)}
CPU_TRAINER: Degrees = {"TP": (1, 2), "SP": (1, 2), "PP": EVERY, "DP": EVERY}
CPU_MOE_ENGINE: Degrees = {"TP": (1, 2), "EP": (1, 2), "ETP": (1, 2)}
CPU_MOE_TRAINER: Degrees = {**CPU_MOE_ENGINE, "SP": (1, 2)}


def _chain(region: str, *ops: str, boundary: str = "model") -> Part:
    constants = {**_CHAIN, "boundary": boundary}
    return Part(region=region, ops=ops, function="linear.chain/1", constants=constants)


_CPU_NORM = Part(region="norm", ops=LAYER_NORMS, function="rms_norm.tree/1", constants=TREE)
_CPU_ATTENTION = (
    NEOX,
    Part(
        region="attention",
        ops=("attention",),
        function="attention.segments/1",
        constants={"kv_segment": 32, "query_tile": 16},
    ),
)
_CPU_HEAD = (
    _chain("lm_head", "lm_head", boundary="float32"),
    Part(
        region="logprobs",
        ops=("token_logprob",),
        function="logprobs.leaves/1",
        constants={"vocab_leaves": 8},
    ),
    STEP,
)


def _exp_silu(*ops: str) -> Part:
    return Part(region="silu_mul", ops=ops, function="silu_mul.exp/1", route="canonical")


def cpu(head: tuple[Part, ...], bias: tuple[Part, ...]) -> tuple[Part, ...]:
    return (
        EMBEDDING,
        _CPU_NORM,
        *head,
        _chain("column_linear", "qkv_proj", "gate_up_proj"),
        *bias,
        _chain("row_linear", "o_proj", "down_proj"),
        *_CPU_ATTENTION,
        _exp_silu("silu_mul"),
        *_CPU_HEAD,
    )


def cpu_moe(*head: Part) -> tuple[Part, ...]:
    """A Transformer with experts in every layer; `head` is what stands before its linears."""
    return (
        EMBEDDING,
        _CPU_NORM,
        *head,
        _chain("column_linear", "qkv_proj"),
        _chain("row_linear", "o_proj"),
        *_CPU_ATTENTION,
        _chain("router", "router_logits", boundary="float32"),
        *_experts(
            SOFTMAX_TOPK,
            Part(
                region="expert_linear",
                ops=_EXPERT_LINEARS,
                function="linear.grouped_chain/1",
                constants=_CHAIN,
            ),
            ("expert_combine",),
        ),
        _exp_silu("expert_silu_mul"),
        *_CPU_HEAD,
    )


# -- sm90 ----------------------------------------------------------------------------------------------------------------------

_PAIRS: Mapping[str, Value] = {"reduce": "pair_tree", "accumulate": "float32"}
_MMA: Mapping[str, Value] = {"step": 16, "accumulate": "float32"}
_CENTRED = "rms_norm.pairs_centred/1"

# a rank's shard of every sum is whole tensor-core steps of 16, and 8 leaves of the vocabulary are too
SM90: Facts = {
    "hidden_size": {"multiple_of": 128, "minimum": 128},
    "layers": {"minimum": 1},
    "heads": {"multiple_of": 8, "minimum": 8},
    "vocab_size": {"multiple_of": 128, "minimum": 128},
    **_PLAIN,
}
KV: Facts = {
    "kv_heads": {"one_of": (1, 2, 4, 8, 16, 32)},
    "head_dim": {"one_of": (64, 128, 256)},
    "q_width": {"multiple_of": 128},
    "qkv_width": {"multiple_of": 128},
}
DENSE: Facts = {"intermediate_size": {"multiple_of": 128, "minimum": 128}}
MOE: Facts = {
    "experts": {"multiple_of": 8, "minimum": 8},
    "experts_per_token": {"minimum": 1, "maximum": 16},
    "expert_size": {"multiple_of": 128, "minimum": 128},
    "router_normalize": True,
    "tied_head": False,
}
SOFTMAX: Facts = {"router_score": "softmax", "router_bias": False, "expert_groups": 1, "dense_layers": 0}
SIGMOID: Facts = {
    "router_score": "sigmoid",
    "router_bias": True,
    "dense_layers": {"minimum": 1},
    "shared_size": {"multiple_of": 128, "minimum": 128},
}
MLA: Facts = {
    "q_lora_rank": {"multiple_of": 16, "minimum": 16},
    "kv_lora_rank": 512,
    "qk_nope_dim": {"multiple_of": 16, "minimum": 16},
    "qk_rope_dim": 64,
    "v_head_dim": {"multiple_of": 16, "minimum": 16},
    "rope_interleave": True,
}
GDN: Facts = {
    "attention_gate": True,
    "partial_rotary": True,
    "rotary_dim": {"multiple_of": 2, "minimum": 2},
    "linear_layers": {"minimum": 1},
    "full_layers": {"minimum": 1},
    "gdn_key_heads": {"multiple_of": 8, "minimum": 8},
    "gdn_value_heads": {"multiple_of": 8, "minimum": 8},
    "gdn_key_dim": 128,
    "gdn_value_dim": 128,
    "gdn_conv_width": 4,
}
SM90_ENGINE: Degrees = {"TP": EVERY}
SM90_TRAINER: Degrees = {"TP": EVERY, "SP": EVERY, "PP": EVERY, "DP": EVERY}
MOE_ENGINE: Degrees = {**SM90_ENGINE, "EP": EVERY, "ETP": EVERY}
MOE_TRAINER: Degrees = {**SM90_TRAINER, "EP": EVERY, "ETP": EVERY}


def linear(region: str, *ops: str, boundary: str = "model") -> Part:
    constants = {**_MMA, "boundary": boundary}
    return Part(region=region, ops=ops, function="linear.mma_chain/1", constants=constants)


def grouped(region: str, *ops: str) -> Part:
    """One product an expert, or a head: each row is a chain with the weight of its group."""
    return Part(region=region, ops=ops, function="linear.grouped_mma_chain/1", constants=_MMA)


def norm(region: str, *ops: str, function: str = "rms_norm.pairs/1") -> Part:
    return Part(region=region, ops=ops, function=function, constants=_PAIRS)


def silu(*ops: str) -> Part:
    return Part(region="silu_mul", ops=ops, function="silu_mul.poly/1", route="canonical")


ATTENTION = Part(
    region="attention",
    ops=("attention",),
    function="attention.mma_segments/1",
    constants={"kv_segment": 4096},
)
_LEAVES: Mapping[str, Value] = {"block": 128, "vocab_leaves": 8}
# an engine samples from logits; a trainer needs none, and has the same bits of both together (contracts/composites.py)
HEAD = (
    replace(linear("lm_head", "lm_head", boundary="float32"), cases=ENGINE_CASES),
    Part(
        region="logprobs",
        ops=("token_logprob",),
        function="logprobs.blocks/2",
        constants=_LEAVES,
        cases=ENGINE_CASES,
    ),
    Part(
        region="head_logprobs",
        ops=("lm_head", "token_logprob"),
        function="linear_logprobs.mma_blocks/1",
        constants={**_MMA, **_LEAVES},
        cases=TRAINER_CASES,
    ),
    STEP,
)


def gqa(function: str = "rms_norm.pairs/1") -> Part:
    return norm("qk_norm", "q_norm", "k_norm", function=function)


def dense(*middle: Part) -> tuple[Part, ...]:
    """A dense Transformer; `middle` is what stands between its linears and its rope."""
    return (
        EMBEDDING,
        norm("norm", *LAYER_NORMS),
        linear("column_linear", "qkv_proj", "gate_up_proj"),
        linear("row_linear", "o_proj", "down_proj"),
        *middle,
        NEOX,
        ATTENTION,
        silu("silu_mul"),
        *HEAD,
    )


def experts(routing: Part, combine: tuple[str, ...]) -> tuple[Part, ...]:
    return (
        linear("router", "router_logits", boundary="float32"),
        *_experts(routing, grouped("expert_linear", *_EXPERT_LINEARS), combine),
    )


_SIGMOID_TOPK = Part(
    region="routing",
    ops=("router_score", "router_bias", "router_groups", "router_topk", "router_weight"),
    function="router.sigmoid_topk/1",
    constants={
        "accumulate": "float32",
        "ties": "lowest_expert",
        "normalize": "chosen",
        "bias": "selection_only",
        "group_score": "sum_of_two_best",
    },
)


def mla(rope: str) -> tuple[Part, ...]:
    return (
        EMBEDDING,
        norm("norm", *LAYER_NORMS),
        norm("latent_norm", "q_a_norm", "kv_a_norm"),
        linear("column_linear", "q_b_proj", "gate_up_proj", "shared_gate_up"),
        linear("latent_linear", "q_a_proj", "kv_a_proj"),
        linear("row_linear", "o_proj", "down_proj", "shared_down"),
        grouped("absorbed_linear", "kv_b_key", "kv_b_value"),
        Part(
            region="rope",
            ops=("rope",),
            function=rope,
            constants={"table": "float64_to_float32", "length": LENGTH},
            route="canonical",
        ),
        Part(
            region="attention",
            ops=("attention",),
            function="attention.latent_segments/1",
            constants={"kv_segment": 4096},
        ),
        *experts(_SIGMOID_TOPK, ("expert_combine", "shared_add")),
        silu("silu_mul", "expert_silu_mul", "shared_silu_mul"),
        *HEAD,
    )


_GDN_STATE: Mapping[str, Value] = {
    "chunk": 64,
    "block": 16,
    "solve": "after_read",
    "state": "float32",
    "snapshot": "bfloat16",
}


def hybrid(
    column: tuple[str, ...], row: tuple[str, ...], activations: tuple[str, ...], *moe: Part
) -> tuple[Part, ...]:
    projections = ("qkv_proj", "attn_gate_proj", "gdn_qkv_proj", "gdn_z_proj", "gdn_ba_proj")
    return (
        EMBEDDING,
        norm("norm", *LAYER_NORMS, function=_CENTRED),
        gqa(_CENTRED),
        linear("column_linear", *projections, *column),
        linear("row_linear", "o_proj", "gdn_out_proj", *row),
        NEOX,
        ATTENTION,
        Part(
            region="attention_gate", ops=("attn_gate_mul",), function="gate.sigmoid_mul/1", route="canonical"
        ),
        Part(
            region="gdn_conv",
            ops=("causal_conv1d",),
            function="conv1d.causal_silu/1",
            constants={"accumulate": "float32", "order": "oldest_first"},
        ),
        Part(
            region="gdn_gating",
            ops=("gdn_decay", "gdn_beta"),
            function="gated_delta.gating/1",
            route="canonical",
        ),
        norm("gdn_qk_norm", "gdn_q_l2norm", "gdn_k_l2norm", function="l2_norm.pairs/1"),
        Part(
            region="gdn_rule",
            ops=("gated_delta_rule",),
            function="gated_delta.chunk_rows/1",
            constants=_GDN_STATE,
        ),
        norm("gdn_norm", "gdn_gated_norm", function="rms_norm.pairs_gated/1"),
        *moe,
        silu(*activations),
        *HEAD,
    )


def hybrid_moe() -> tuple[Part, ...]:
    gate = Part(
        region="shared_gate",
        ops=("shared_gate_logit", "shared_gate_mul"),
        function="moe.shared_gate/1",
        constants=_MMA,
    )
    moe = experts(SOFTMAX_TOPK, ("expert_combine", "shared_add"))
    return hybrid(("shared_gate_up",), ("shared_down",), ("expert_silu_mul", "shared_silu_mul"), *moe, gate)
