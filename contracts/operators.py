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
