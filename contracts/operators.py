# SPDX-License-Identifier: Apache-2.0
"""What is known of a logical operator: the parallel axes that split its arithmetic or its gradient's, and whether it keeps state.

An operator that is not listed is taken to be split by every axis: what nobody has thought about has to be proven.
"""

from __future__ import annotations

from isoexec.contracts.parts import AXES

__all__ = ["axes_of", "dtypes_of", "keeps_state"]

# SP splits the rows of what lies between the parallel regions, so it splits sums over rows: the gradients of weights and scales.
_SPLIT_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("embed", "lm_head"), ("TP", "SP")),
    "residual_add": (),
    **dict.fromkeys(("input_norm", "post_attention_norm", "final_norm"), ("SP",)),
    **dict.fromkeys(("q_norm", "k_norm"), ("TP",)),
    **dict.fromkeys(("qkv_proj", "qkv_bias", "gate_up_proj", "o_proj", "down_proj"), ("TP", "SP")),
    **dict.fromkeys(("rope", "silu_mul", "token_logprob"), ("TP",)),
    "attention": ("TP", "CP"),
    "grad_norm": ("TP", "EP", "ETP", "SP", "CP", "PP", "DP"),
    # latent attention: the narrow projections are whole on every rank, but their outputs' gradients are sums over heads
    **dict.fromkeys(("q_a_proj", "kv_a_proj", "q_a_norm", "kv_a_norm"), ("TP", "SP")),
    **dict.fromkeys(("q_b_proj", "kv_b_key", "kv_b_value"), ("TP", "SP")),
    # gated attention and Gated DeltaNet
    **dict.fromkeys(
        ("attn_gate_proj", "gdn_qkv_proj", "gdn_z_proj", "gdn_ba_proj", "gdn_out_proj"), ("TP", "SP")
    ),
    **dict.fromkeys(("attn_gate_mul", "gdn_decay", "gdn_beta", "gdn_gated_norm"), ("TP",)),
    **dict.fromkeys(("gdn_q_l2norm", "gdn_k_l2norm"), ("TP",)),
    **dict.fromkeys(("causal_conv1d", "gated_delta_rule"), ("TP", "CP")),
    # experts: who owns one decides where its rows meet, and in which order its weights' gradient adds them
    "router_logits": ("SP",),
    **dict.fromkeys(("router_score", "router_bias", "router_groups", "router_topk", "router_weight"), ()),
    "expert_dispatch": ("EP", "ETP"),
    **dict.fromkeys(("expert_gate_up", "expert_down"), ("TP", "EP", "ETP", "SP")),
    "expert_silu_mul": ("EP", "ETP"),
    "expert_combine": ("TP", "EP", "ETP", "SP"),
    **dict.fromkeys(("shared_gate_up", "shared_down", "shared_gate_logit", "shared_gate_mul"), ("TP", "SP")),
    **dict.fromkeys(("shared_silu_mul", "shared_add"), ("TP",)),
}
# of the axes above, these move rows or layers as they are and split no sum of a forward operator
_MOVES_ONLY = ("PP", "DP")
_ALWAYS_FLOAT32 = frozenset({"token_logprob", "grad_norm"})
_STATEFUL = frozenset({"attention", "causal_conv1d", "gated_delta_rule"})


def axes_of(op: str) -> tuple[str, ...]:
    """Return the axes whose degree decides how an operator's sums are cut."""
    return _SPLIT_BY.get(op, tuple(axis for axis in AXES if axis not in _MOVES_ONLY))


def keeps_state(op: str) -> bool:
    """Say whether an operator reads what earlier calls kept (a KV cache, a recurrent state)."""
    return op in _STATEFUL


def dtypes_of(op: str, dtypes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the dtypes an operator's operands come in, in a model whose parameters come in `dtypes`."""
    return ("float32",) if op in _ALWAYS_FLOAT32 else dtypes
