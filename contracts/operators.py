# SPDX-License-Identifier: Apache-2.0
"""What is known of a logical operator: what it sums over, which parallel axes cut that, what it keeps between calls.

This table is the place to extend when a model family is added. An operator that is not in it is taken to be cut by every axis:
what nobody has thought about has to be proven.
"""

from __future__ import annotations

from dataclasses import dataclass

from isoexec.contracts.parts import AXES

__all__ = ["OPERATORS", "Operator", "Part", "axes_of", "dtypes_of", "keeps_state"]


@dataclass(frozen=True)
class Part:
    """A model fact, in elements or heads, and the `axis` that shards it; "" where every rank has the whole.

    `copied`: ranks beyond the fact's value may hold the same part whole, as with KV heads.
    """

    fact: str
    axis: str = ""
    copied: bool = False


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One logical operator.

    `axes` are those whose degree cuts its sums, or those of its weights' gradients: SP cuts the rows between the parallel
    regions, so it cuts sums over rows. `sums` are lengths its forward sums over, `grad_sums` those of its input's gradient,
    `whole` what ranks never split, `keeps` the states it reads that earlier calls left, and `float32` that its operands are
    of that dtype whatever the model's.
    """

    axes: tuple[str, ...] = ()
    sums: tuple[Part, ...] = ()
    grad_sums: tuple[Part, ...] = ()
    whole: tuple[Part, ...] = ()
    keeps: tuple[str, ...] = ()
    float32: bool = False


_HIDDEN = (Part("hidden_size"),)
_HEADS = (Part("heads", "TP"), Part("kv_heads", "TP", copied=True))
_GDN_HEADS = (Part("gdn_key_heads", "TP"), Part("gdn_value_heads", "TP"))
_EXPERTS = (Part("experts", "EP"),)
_DENSE = ("TP", "SP")
_EXPERT = ("TP", "EP", "ETP", "SP")


def _column(
    *widths: str, axis: str = "TP", whole: tuple[Part, ...] = (), axes: tuple[str, ...] = _DENSE
) -> Operator:
    """A linear from the hidden size to widths that ranks share."""
    grad_sums = tuple(Part(width, axis) for width in widths)
    return Operator(axes=axes, sums=_HIDDEN, grad_sums=grad_sums, whole=whole)


def _row(
    width: str, axis: str = "TP", whole: tuple[Part, ...] = (), axes: tuple[str, ...] = _DENSE
) -> Operator:
    """A linear from a width that ranks share to the hidden size."""
    return Operator(axes=axes, sums=(Part(width, axis),), grad_sums=_HIDDEN, whole=whole)


OPERATORS: dict[str, Operator] = {
    "embed": Operator(axes=_DENSE),
    "residual_add": Operator(),
    **dict.fromkeys(("input_norm", "post_attention_norm", "final_norm"), Operator(axes=("SP",))),
    **dict.fromkeys(("q_norm", "k_norm", "rope", "silu_mul"), Operator(axes=("TP",))),
    "qkv_proj": _column("qkv_width", whole=_HEADS),
    "qkv_bias": Operator(axes=_DENSE),
    "attention": Operator(axes=("TP", "CP"), whole=_HEADS, keeps=("kv_cache", "prefix_cache")),
    "o_proj": _row("q_width", whole=_HEADS),
    "gate_up_proj": _column("intermediate_size"),
    "down_proj": _row("intermediate_size"),
    "lm_head": _column("vocab_size"),
    "token_logprob": Operator(axes=("TP",), float32=True),
    "grad_norm": Operator(axes=AXES, float32=True),
    # latent attention: the latent is whole on every rank, but the gradients of what is made of it are sums over heads
    "q_a_proj": Operator(axes=_DENSE, sums=_HIDDEN, grad_sums=(Part("q_lora_rank"),)),
    "q_b_proj": Operator(axes=_DENSE, sums=(Part("q_lora_rank"),), whole=(Part("heads", "TP"),)),
    "kv_a_proj": Operator(axes=_DENSE, sums=_HIDDEN),
    "kv_b_key": Operator(axes=_DENSE, sums=(Part("qk_nope_dim"),), grad_sums=(Part("kv_lora_rank"),)),
    "kv_b_value": Operator(axes=_DENSE, sums=(Part("kv_lora_rank"),), grad_sums=(Part("v_head_dim"),)),
    **dict.fromkeys(("q_a_norm", "kv_a_norm"), Operator(axes=_DENSE)),
    # a gate on attention's output, and Gated DeltaNet
    "attn_gate_proj": _column("q_width"),
    "gdn_qkv_proj": _column("gdn_key_width", "gdn_value_width", whole=_GDN_HEADS),
    "gdn_z_proj": _column("gdn_value_width"),
    "gdn_ba_proj": Operator(axes=_DENSE, sums=_HIDDEN),
    "gdn_out_proj": _row("gdn_value_width"),
    **dict.fromkeys(("attn_gate_mul", "gdn_decay", "gdn_beta", "gdn_gated_norm"), Operator(axes=("TP",))),
    **dict.fromkeys(("gdn_q_l2norm", "gdn_k_l2norm"), Operator(axes=("TP",))),
    "causal_conv1d": Operator(axes=("TP", "CP"), keeps=("conv_state",)),
    "gated_delta_rule": Operator(axes=("TP", "CP"), whole=_GDN_HEADS, keeps=("recurrent_state",)),
    # experts: EP shares them out, ETP shards each, and who owns one decides where its rows meet and in which order its
    # weights' gradient adds them; the router and its gate are whole on every rank
    "router_logits": Operator(axes=("SP",), sums=_HIDDEN),
    **dict.fromkeys(
        ("router_score", "router_bias", "router_groups", "router_topk", "router_weight"),
        Operator(float32=True),
    ),
    "expert_dispatch": Operator(axes=("EP", "ETP")),
    "expert_gate_up": _column("expert_size", axis="ETP", whole=_EXPERTS, axes=_EXPERT),
    "expert_down": _row("expert_size", axis="ETP", whole=_EXPERTS, axes=_EXPERT),
    "expert_silu_mul": Operator(axes=("EP", "ETP")),
    "expert_combine": Operator(axes=_EXPERT),
    "shared_gate_up": _column("shared_size"),
    "shared_down": _row("shared_size"),
    "shared_gate_logit": Operator(axes=_DENSE, sums=_HIDDEN),
    "shared_gate_mul": Operator(axes=_DENSE),
    **dict.fromkeys(("shared_silu_mul", "shared_add"), Operator(axes=("TP",))),
}

# PP and DP move layers or rows as they are, and cut no sum of a forward operator
_UNKNOWN = Operator(axes=tuple(axis for axis in AXES if axis not in ("PP", "DP")))


def axes_of(op: str) -> tuple[str, ...]:
    """Return the axes whose degree decides how an operator's sums are cut."""
    return OPERATORS.get(op, _UNKNOWN).axes


def keeps_state(op: str) -> bool:
    """Say whether an operator reads what earlier calls kept (a KV cache, a recurrent state)."""
    return bool(OPERATORS.get(op, _UNKNOWN).keeps)


def dtypes_of(op: str, dtypes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the dtypes an operator's operands come in, in a model whose parameters come in `dtypes`."""
    return ("float32",) if OPERATORS.get(op, _UNKNOWN).float32 else dtypes
