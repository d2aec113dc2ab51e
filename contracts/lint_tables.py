# SPDX-License-Identifier: Apache-2.0
"""What the rules know of operators, functions and states: the data to extend when a model family is added.

An operator or a function that is not listed is not checked against its shapes; its evidence still has to cover it.
"""

from __future__ import annotations

from dataclasses import dataclass

from isoexec.contracts.parts import Binding, Case, Provider
from isoexec.contracts.schema import Contract

__all__ = [
    "CARRIED_BY",
    "FACTORS",
    "FUNCTIONS",
    "OPERATORS",
    "ROPE_OPS",
    "Computes",
    "Operator",
    "Part",
    "constant",
    "degrees",
    "entry",
    "kept_by",
    "provider_entry",
    "required_ops",
    "roles_of",
]


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
    """`sums` are lengths its forward sums over, `grad_sums` those of its input's gradient, `whole` what ranks never split."""

    sums: tuple[Part, ...] = ()
    grad_sums: tuple[Part, ...] = ()
    whole: tuple[Part, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Computes:
    """A function's `constants`, all of which a binding gives, and the parameter dtypes it takes."""

    constants: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bfloat16", "float32")


_HIDDEN = (Part("hidden_size"),)
_HEADS = (Part("heads", "TP"), Part("kv_heads", "TP", copied=True))
_GDN_HEADS = (Part("gdn_key_heads", "TP"), Part("gdn_value_heads", "TP"))
_EXPERTS = (Part("experts", "EP"),)


def _column(*widths: str, axis: str = "TP", whole: tuple[Part, ...] = ()) -> Operator:
    """A linear from the hidden size to widths that ranks share."""
    return Operator(sums=_HIDDEN, grad_sums=tuple(Part(width, axis) for width in widths), whole=whole)


def _row(width: str, axis: str = "TP", whole: tuple[Part, ...] = ()) -> Operator:
    """A linear from a width that ranks share to the hidden size."""
    return Operator(sums=(Part(width, axis),), grad_sums=_HIDDEN, whole=whole)


OPERATORS: dict[str, Operator] = {
    "attention": Operator(whole=_HEADS),
    "gated_delta_rule": Operator(whole=_GDN_HEADS),
    "lm_head": _column("vocab_size"),
    "qkv_proj": _column("qkv_width", whole=_HEADS),
    "o_proj": _row("q_width", whole=_HEADS),
    "gate_up_proj": _column("intermediate_size"),
    "down_proj": _row("intermediate_size"),
    # a gate on attention's output, and Gated DeltaNet
    "attn_gate_proj": _column("q_width"),
    "gdn_qkv_proj": _column("gdn_key_width", "gdn_value_width", whole=_GDN_HEADS),
    "gdn_z_proj": _column("gdn_value_width"),
    "gdn_ba_proj": Operator(sums=_HIDDEN),
    "gdn_out_proj": _row("gdn_value_width"),
    # latent attention: the latent is whole on every rank
    "q_a_proj": Operator(sums=_HIDDEN, grad_sums=(Part("q_lora_rank"),)),
    "q_b_proj": Operator(sums=(Part("q_lora_rank"),), whole=(Part("heads", "TP"),)),
    "kv_a_proj": Operator(sums=_HIDDEN),
    "kv_b_key": Operator(sums=(Part("qk_nope_dim"),), grad_sums=(Part("kv_lora_rank"),)),
    "kv_b_value": Operator(sums=(Part("kv_lora_rank"),), grad_sums=(Part("v_head_dim"),)),
    # experts: EP shares them out, ETP shards each; the router and its gate are whole on every rank
    "router_logits": Operator(sums=_HIDDEN),
    "expert_gate_up": _column("expert_size", axis="ETP", whole=_EXPERTS),
    "expert_down": _row("expert_size", axis="ETP", whole=_EXPERTS),
    "shared_gate_up": _column("shared_size"),
    "shared_down": _row("shared_size"),
    "shared_gate_logit": Operator(sums=_HIDDEN),
    "shared_gate_mul": Operator(),
}

FACTORS: dict[str, tuple[tuple[str, ...], str]] = {
    "q_width": (("heads",), "head_dim"),
    "kv_width": (("kv_heads",), "head_dim"),
    "qkv_width": (("heads", "kv_heads"), "head_dim"),
    "o_width": (("heads",), "v_head_dim"),
    "gdn_key_width": (("gdn_key_heads",), "gdn_key_dim"),
    "gdn_value_width": (("gdn_value_heads",), "gdn_value_dim"),
}
"""A width is a sum of counts of heads, times a head's dimension."""

ROPE_OPS = frozenset({"rope"})
"""Operators that read a rotary table of `length` rows."""

_NORM = Computes(constants=("accumulate", "reduce"))
_ROPE = Computes(constants=("length", "table"))
_MMA = Computes(constants=("accumulate", "boundary", "step"))

FUNCTIONS: dict[str, Computes] = {
    "attention.latent_segments/1": Computes(constants=("kv_segment",)),
    "attention.mma_segments/1": Computes(constants=("kv_segment",)),
    "attention.segments/1": Computes(constants=("kv_segment", "query_tile")),
    "bias.add/1": Computes(),
    "embedding.lookup/1": Computes(),
    "grad_norm.exact/1": Computes(constants=("bits",)),
    "linear.chain/1": Computes(constants=("accumulate", "boundary", "k_block", "row_tile")),
    "linear.grouped_mma_chain/1": Computes(constants=("accumulate", "step")),
    "linear.mma_chain/1": _MMA,
    "logprobs.blocks/1": Computes(constants=("block", "vocab_leaves")),
    "logprobs.leaves/1": Computes(constants=("vocab_leaves",)),
    "rms_norm.pairs/1": _NORM,
    "rms_norm.pairs_centred/1": _NORM,
    "rms_norm.pairs_gated/1": _NORM,
    "rms_norm.tree/1": _NORM,
    "rope.interleaved_fp32/1": _ROPE,
    "rope.neox_fp32/1": _ROPE,
    "rope.yarn_interleaved_fp32/1": _ROPE,
    "silu_mul.exp/1": Computes(),
    "silu_mul.poly/1": Computes(),
}
"""Functions whose constants are known; a test holds them against the kernels' registry."""

CARRIED_BY = {"cublas": "torch", "cublaslt": "torch", "cudnn": "torch", "cutlass": "torch"}
"""Libraries that come inside another component, whose version then says theirs."""

_KEPT_BY_MODE = {"paged_kv": ("kv_cache", "prefix_cache"), "recurrent": ("recurrent_state",)}
_KEPT_BY_OP = {
    "attention": ("kv_cache", "prefix_cache"),
    "causal_conv1d": ("conv_state",),
    "gated_delta_rule": ("recurrent_state",),
}


def kept_by(contract: Contract, case: Case) -> tuple[str, ...]:
    """Return what a case keeps between calls, by the names that `claims.state` uses, sorted."""
    if case.state == "stateless":
        return ()
    held = set(_KEPT_BY_MODE.get(case.state, (case.state,)))
    for op in contract.model.ops:
        held |= set(_KEPT_BY_OP.get(op, ()))
    return tuple(sorted(held))


def entry(contract: Contract, binding: Binding) -> str:
    """Return the path of a composition entry; its cases tell the entries of one region apart."""
    if sum(one.region == binding.region for one in contract.composition) == 1:
        return f"composition[{binding.region}]"
    return f"composition[{binding.region}|{'+'.join(sorted(binding.cases))}]"


def provider_entry(provider: Provider) -> str:
    """Return the path of a provider."""
    return f"providers[{provider.function}|{provider.name}]"


def required_ops(contract: Contract, case: str) -> tuple[str, ...]:
    """Return the operators a case must own: the model's, and the step's where it has gradients."""
    grad = contract.case(case).grad
    return (*contract.model.ops, *(contract.model.step_ops if grad != "no_grad" else ()))


def roles_of(contract: Contract, binding: Binding) -> set[str]:
    """Return the roles whose cases an entry holds for."""
    return {case.role for case in contract.cases if case.name in binding.cases}


def degrees(contract: Contract, roles: set[str], axis: str) -> tuple[int, ...]:
    """Return the degrees that any of the roles claims of an axis, ascending."""
    claims = (contract.claims.topology.get(role, {}).get(axis) for role in roles)
    return tuple(sorted({degree for claim in claims if claim is not None for degree in claim.domain}))


def constant(binding: Binding, name: str) -> int | None:
    """Return an integer constant, or None where the entry has none of that name."""
    value = binding.constants.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
