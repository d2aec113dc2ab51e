# SPDX-License-Identifier: Apache-2.0
"""What the rules know of functions, widths and states, beside what `isoexec.contracts.operators` knows of operators.

A function that is not listed is not checked against its constants; its evidence still has to cover it.
"""

from __future__ import annotations

from dataclasses import dataclass

from isoexec.contracts.operators import OPERATORS
from isoexec.contracts.parts import Binding, Case, Provider
from isoexec.contracts.schema import Contract

__all__ = [
    "CARRIED_BY",
    "FACTORS",
    "FUNCTIONS",
    "ROPE_OPS",
    "Computes",
    "constant",
    "degrees",
    "entry",
    "kept_by",
    "provider_entry",
    "required_ops",
    "roles_of",
]


@dataclass(frozen=True, kw_only=True)
class Computes:
    """A function's `constants`, all of which a binding gives, and the parameter dtypes it takes."""

    constants: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bfloat16", "float32")


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
_ROUTER = ("accumulate", "normalize", "ties")

FUNCTIONS: dict[str, Computes] = {
    "attention.latent_segments/1": Computes(constants=("kv_segment",)),
    "attention.mma_segments/1": Computes(constants=("kv_segment",)),
    "attention.mma_segments_cudnn/1": Computes(constants=("gradient", "kv_segment")),
    "attention.mma_window/1": Computes(constants=("kv_segment", "window")),
    "attention.segments/1": Computes(constants=("kv_segment", "query_tile")),
    "bias.add/1": Computes(),
    "embedding.lookup/1": Computes(),
    "grad_norm.exact/1": Computes(constants=("bits",)),
    "gate.sigmoid_mul/1": Computes(),
    "l2_norm.pairs/1": _NORM,
    "linear.chain/1": Computes(constants=("accumulate", "boundary", "k_block", "row_tile")),
    "linear.grouped_chain/1": Computes(constants=("accumulate", "k_block", "row_tile")),
    "linear.grouped_mma_chain/1": Computes(constants=("accumulate", "step")),
    "linear.mma_chain/1": _MMA,
    "linear_logprobs.mma_blocks/1": Computes(constants=("accumulate", "block", "step", "vocab_leaves")),
    "logprobs.blocks/2": Computes(constants=("block", "vocab_leaves")),
    "logprobs.leaves/1": Computes(constants=("vocab_leaves",)),
    "moe.combine/1": Computes(constants=("accumulate", "order")),
    "moe.dispatch/1": Computes(constants=("order",)),
    "moe.shared_gate/1": Computes(constants=("accumulate", "step")),
    "rms_norm.pairs/1": _NORM,
    "rms_norm.pairs_centred/1": _NORM,
    "rms_norm.pairs_gated/1": _NORM,
    "rms_norm.tree/1": _NORM,
    "rope.interleaved_fp32/1": _ROPE,
    "rope.neox_fp32/1": _ROPE,
    "rope.yarn_interleaved_fp32/1": _ROPE,
    "router.sigmoid_topk/1": Computes(constants=(*_ROUTER, "bias", "group_score")),
    "router.softmax_topk/1": Computes(constants=_ROUTER),
    "silu_mul.exp/1": Computes(),
    "silu_mul.poly/1": Computes(),
}
"""Functions whose constants are known; a test holds them against the kernels' registry."""

CARRIED_BY = {"cublas": "torch", "cublaslt": "torch", "cudnn": "torch", "cutlass": "torch"}
"""Libraries that come inside another component, whose version then says theirs."""

_KEPT_BY_MODE = {"paged_kv": ("kv_cache", "prefix_cache"), "recurrent": ("recurrent_state",)}


def kept_by(contract: Contract, case: Case) -> tuple[str, ...]:
    """Return what a case keeps between calls, by the names that `claims.state` uses, sorted."""
    if case.state == "stateless":
        return ()
    held = set(_KEPT_BY_MODE.get(case.state, (case.state,)))
    for op in contract.model.ops:
        held |= set(OPERATORS[op].keeps if op in OPERATORS else ())
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
