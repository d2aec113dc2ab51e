# SPDX-License-Identifier: Apache-2.0
"""The model families that contracts are shipped for: what each computes, region by region, and what is claimed of it.

`isoexec.contracts.models.library` writes a contract file of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from isoexec.contracts.models.regions import (
    ATTENTION,
    BIAS,
    CPU_DENSE,
    CPU_ENGINE,
    CPU_MOE,
    CPU_MOE_ENGINE,
    CPU_MOE_TRAINER,
    CPU_TRAINER,
    DENSE,
    EMBEDDING,
    EVERY,
    GDN,
    HEAD,
    KV,
    LAYER_NORMS,
    MLA,
    MOE,
    MOE_ENGINE,
    MOE_TRAINER,
    NEOX,
    SIGMOID,
    SM90,
    SM90_ENGINE,
    SM90_TRAINER,
    SOFTMAX,
    SOFTMAX_TOPK,
    STEP,
    TREE,
    Degrees,
    Facts,
    Part,
    cpu,
    cpu_moe,
    dense,
    experts,
    gqa,
    hybrid,
    hybrid_moe,
    linear,
    mla,
    norm,
    silu,
)

__all__ = ["FAMILIES", "Family"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One shipped contract; `about` are the lines of comment at its head, `state` what its engine cases keep."""

    name: str
    arch: str
    family: str
    architectures: tuple[str, ...]
    about: tuple[str, ...]
    facts: Facts
    parts: tuple[Part, ...]
    engine: Degrees
    trainer: Degrees
    state: str = "paged_kv"
    page: int = 16

    @property
    def ops(self) -> tuple[str, ...]:
        """The operators of the forward, in the order of their regions."""
        return tuple(dict.fromkeys(op for part in self.parts if part.cases != STEP.cases for op in part.ops))


_HYBRID_ABOUT = (
    "One layer in `full_attention_interval` is gated attention, the others Gated DeltaNet. Decode evaluates one row of the",
    "chunkwise form, so that prefill, decode and trainer share one function; state is resumed at any position.",
    "Norms scale by 1 + weight. Of a multimodal checkpoint this is the language model on text, where mRoPE is RoPE.",
)
_MTP = "Multi-token-prediction layers draft tokens; they are no part of a logprob, and neither runtime loads them."

_HYBRID_MOE_FACTS = {
    **SM90,
    **KV,
    **MOE,
    **SOFTMAX,
    **GDN,
    "shared_size": {"multiple_of": 128, "minimum": 128},
}

_CPU_QK_NORM = Part(region="qk_norm", ops=("q_norm", "k_norm"), function="rms_norm.tree/1", constants=TREE)

FAMILIES: tuple[Family, ...] = (
    Family(
        name="qwen3-dense-cpu",
        arch="cpu",
        family="qwen3-dense",
        architectures=("Qwen3ForCausalLM",),
        about=(
            "Dense Qwen3 on CPU: engine and trainer give the same bits for TP 1 and 2, with sequence parallelism, PP and DP.",
            "Serves any size whose K and N shards are whole K blocks of 64 at TP 2.",
        ),
        facts=CPU_DENSE,
        parts=cpu((_CPU_QK_NORM,), ()),
        engine=CPU_ENGINE,
        trainer=CPU_TRAINER,
        page=128,
    ),
    Family(
        name="mimo-dense-cpu",
        arch="cpu",
        family="mimo-dense",
        architectures=("MiMoForCausalLM", "Qwen2ForCausalLM"),
        about=(
            "Dense MiMo on CPU: engine and trainer give the same bits for TP 1 and 2, with sequence parallelism, PP and DP.",
            "MiMo's layers are Qwen2's: a bias on query, key and value, no norm of their heads. An untied Qwen2 is served too.",
            _MTP,
        ),
        facts={**CPU_DENSE, "attention_bias": True},
        parts=cpu((), (BIAS,)),
        engine=CPU_ENGINE,
        trainer=CPU_TRAINER,
        page=128,
    ),
    Family(
        name="qwen3-moe-cpu",
        arch="cpu",
        family="qwen3-moe",
        architectures=("Qwen3MoeForCausalLM",),
        about=(
            "Qwen3 with experts in every layer, on CPU: engine and trainer give the same bits for TP, EP and ETP 1 and 2, with",
            "sequence parallelism. Rows move between ranks as they are; a token's experts are added where it lives, in fp32, in",
            "the order the router chose them.",
        ),
        facts=CPU_MOE,
        parts=cpu_moe(_CPU_QK_NORM),
        engine=CPU_MOE_ENGINE,
        trainer=CPU_MOE_TRAINER,
        page=128,
    ),
    Family(
        name="qwen3-dense-sm90",
        arch="sm90",
        family="qwen3-dense",
        architectures=("Qwen3ForCausalLM",),
        about=("Dense Qwen3 on Hopper: one K chain a product, handed from rank to rank where K is sharded.",),
        facts={**SM90, **KV, **DENSE, "partial_rotary": False},
        parts=dense(gqa()),
        engine=SM90_ENGINE,
        trainer=SM90_TRAINER,
    ),
    Family(
        name="mimo-dense-sm90",
        arch="sm90",
        family="mimo-dense",
        architectures=("MiMoForCausalLM", "Qwen2ForCausalLM"),
        about=(
            "Dense MiMo, and Qwen2, on Hopper: as dense Qwen3, with a bias on query, key and value.",
            _MTP,
        ),
        facts={**SM90, **KV, **DENSE, "partial_rotary": False, "attention_bias": True},
        parts=dense(BIAS),
        engine=SM90_ENGINE,
        trainer=SM90_TRAINER,
    ),
    Family(
        name="qwen3-moe-sm90",
        arch="sm90",
        family="qwen3-moe",
        architectures=("Qwen3MoeForCausalLM",),
        about=(
            "Qwen3 with experts in every layer, on Hopper. The router's logits are fp32; a token's experts are added in fp32,",
            "in the order the router chose them, so that neither ownership of experts nor capacity moves a bit.",
        ),
        facts={**SM90, **KV, **MOE, **SOFTMAX, "shared_size": 0, "partial_rotary": False},
        parts=(
            EMBEDDING,
            norm("norm", *LAYER_NORMS),
            gqa(),
            linear("column_linear", "qkv_proj"),
            linear("row_linear", "o_proj"),
            NEOX,
            ATTENTION,
            *experts(SOFTMAX_TOPK, ("expert_combine",)),
            silu("expert_silu_mul"),
            *HEAD,
        ),
        engine=MOE_ENGINE,
        trainer=MOE_TRAINER,
    ),
    Family(
        name="glm4-moe-lite-sm90",
        arch="sm90",
        family="glm4-moe-lite",
        architectures=("Glm4MoeLiteForCausalLM",),
        about=(
            "GLM-4.7-Flash on Hopper: latent attention, sigmoid router with a selection bias, a shared expert.",
            "Attention is the absorbed form in all five cases: query and value pass through the halves of kv_b per head,",
            "and keys are the latent cache itself. The expanded form in prefill would be another sum than decode's.",
            "Its 20 heads share TP up to 4.",
            _MTP,
        ),
        facts={
            **SM90,
            **DENSE,
            **MOE,
            **SIGMOID,
            **MLA,
            "heads": {"multiple_of": 4, "minimum": 4},
            "expert_groups": 1,
            "o_width": {"multiple_of": 64},
        },
        parts=mla("rope.interleaved_fp32/1"),
        engine={"TP": (1, 2, 4), "EP": EVERY, "ETP": (1, 2, 4)},
        trainer={
            "TP": (1, 2, 4),
            "SP": (1, 2, 4),
            "PP": EVERY,
            "DP": EVERY,
            "EP": EVERY,
            "ETP": (1, 2, 4),
        },
        page=64,
    ),
    Family(
        name="deepseek-v3-sm90",
        arch="sm90",
        family="deepseek-v3",
        architectures=("DeepseekV3ForCausalLM",),
        about=(
            "The shape of DeepSeek-V3 on Hopper with bf16 weights: latent attention under YaRN, experts chosen within groups.",
            "Attention is the absorbed form in all five cases, as in the contract of GLM-4.7-Flash.",
            "The published FP8 checkpoint has block-scaled weights, which is another function; it is refused.",
            _MTP,
        ),
        facts={
            **SM90,
            **DENSE,
            **MOE,
            **SIGMOID,
            **MLA,
            "rope_type": "yarn",
            "expert_groups": {"minimum": 1},
            "o_width": {"multiple_of": 128},
        },
        parts=mla("rope.yarn_interleaved_fp32/1"),
        engine=MOE_ENGINE,
        trainer=MOE_TRAINER,
        page=64,
    ),
    Family(
        name="qwen3.5-dense-sm90",
        arch="sm90",
        family="qwen3.5-dense",
        architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        about=("Dense Qwen3.5 on Hopper.", *_HYBRID_ABOUT, _MTP),
        facts={**SM90, **KV, **DENSE, **GDN},
        parts=hybrid(("gate_up_proj",), ("down_proj",), ("silu_mul",)),
        engine=SM90_ENGINE,
        trainer=SM90_TRAINER,
        state="recurrent",
        page=64,
    ),
    Family(
        name="qwen3.5-moe-sm90",
        arch="sm90",
        family="qwen3.5-moe",
        architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        about=("Qwen3.5 with experts, such as Qwen3.5-35B-A3B, on Hopper.", *_HYBRID_ABOUT, _MTP),
        facts=_HYBRID_MOE_FACTS,
        parts=hybrid_moe(),
        engine=MOE_ENGINE,
        trainer=MOE_TRAINER,
        state="recurrent",
        page=64,
    ),
    Family(
        name="qwen3-next-sm90",
        arch="sm90",
        family="qwen3-next",
        architectures=("Qwen3NextForCausalLM",),
        about=("Qwen3-Next on Hopper.", *_HYBRID_ABOUT, _MTP),
        facts=_HYBRID_MOE_FACTS,
        parts=hybrid_moe(),
        engine=MOE_ENGINE,
        trainer=MOE_TRAINER,
        state="recurrent",
        page=64,
    ),
)
"""Every shipped contract, in the order `isoexec contract list` shows them."""
