# SPDX-License-Identifier: Apache-2.0
"""Rewrites the specs a framework built so that GPTModel builds contract modules, and offers them as a backend spec provider.

A spec tree is ``ModuleSpec``, ``*Submodules`` dataclasses, ``functools.partial``, lists and classes; it is copied, never changed
in place, and everything that is not a covered class comes out as it went in.  What a rewrite cannot reach, the adapter's install
finds in the live model and refuses.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from isoexec.adapters.base import Plan
from isoexec.adapters.megatron.kinds import kinds_of
from isoexec.adapters.megatron.moe import installs_experts

__all__ = ["KEYS_MAP", "ContractSpecProvider", "rewrite_spec"]

KEYS_MAP = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Checkpoints name the norms as if they were fused into the linear after them; without this map they do not load."""

# By class name, so that Transformer Engine classes are known where it is not installed.
_COLUMN = {"ColumnParallelLinear", "TEColumnParallelLinear"}
_FUSED = {"TELayerNormColumnParallelLinear"}
_ROW = {"RowParallelLinear", "TERowParallelLinear"}
_NORM = {"WrappedTorchNorm", "TENorm", "FusedLayerNorm", "RMSNorm", "SequenceParallelRMSNorm"}
_CORE = {"DotProductAttention", "TEDotProductAttention"}
_MLP = {"MLP", "TEFusedMLP"}
_EXPERTS = {"MoELayer": "moe", "TopKRouter": "router", "SequentialMLP": "experts"}  # and its name in `Kinds`


def rewrite_spec(spec: Any, plan: Plan) -> Any:
    """A copy of ``spec`` with the modules of the plan's installed regions in the place of Megatron's.

    Takes a layer spec, a ``TransformerBlockSubmodules`` or any part of one; keeps ``sharded_state_dict_keys_map``.
    """
    return _rewrite(spec, plan, "")


def _class(name: str, plan: Plan, field: str) -> Any:
    """The contract class for a class name met in a field, or None where the plan leaves it."""
    kinds = kinds_of(plan.contract.arch)
    if name in _COLUMN | _FUSED and (
        plan.installs("column_linear") or (field == "linear_qkv" and plan.installs("qkv_bias"))
    ):
        return kinds.column
    if name in _ROW and plan.installs("row_linear"):
        return kinds.row
    if name in _NORM:
        heads = field in ("q_layernorm", "k_layernorm")
        if plan.installs("qk_norm" if heads else "norm"):
            return kinds.head_norm if heads else kinds.norm
    if name in _CORE and (plan.installs("attention") or plan.installs("rope")):
        return kinds.core
    if name in _MLP and plan.installs("silu_mul"):
        return kinds.mlp
    if name in _EXPERTS and installs_experts(plan):
        return kinds.by_slot(_EXPERTS[name])
    return None


def _rewrite(spec: Any, plan: Plan, field: str) -> Any:
    if isinstance(spec, type):
        return _class(spec.__name__, plan, field) or spec
    if spec is get_bias_dropout_add:
        return kinds_of(plan.contract.arch).residual_add if plan.installs("norm") else spec
    if isinstance(spec, functools.partial):
        return functools.partial(
            _rewrite_builder(spec.func, plan, field),
            *[_rewrite(a, plan, field) for a in spec.args],
            **{k: _rewrite(v, plan, k) for k, v in spec.keywords.items()},
        )
    if isinstance(spec, ModuleSpec) and spec.module is MLP and plan.installs("silu_mul"):
        # the layer tells MLP from MoE by the class itself, so a subclass has to come as its own builder
        return functools.partial(
            kinds_of(plan.contract.arch).mlp.as_mlp_submodule,
            submodules=_rewrite(spec.submodules, plan, "submodules"),
            **spec.params,
        )
    if isinstance(spec, MoESubmodules):
        return dataclasses.replace(
            spec, router=_rewrite(spec.router, plan, "router"), experts=_rewrite_experts(spec.experts, plan)
        )
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        values = {
            f.name: _rewrite(getattr(spec, f.name), plan, f.name) for f in dataclasses.fields(spec) if f.init
        }
        if isinstance(spec, TransformerLayerSubmodules):
            values = _unfused(spec, values, plan)
        return dataclasses.replace(spec, **values)
    if isinstance(spec, list):
        return [_rewrite(s, plan, field) for s in spec]
    return _rewrite_builder(spec, plan, field)


def _rewrite_experts(builder: Any, plan: Plan) -> Any:
    """The builder of the experts with its class replaced; its linears hold the weights and compute nothing."""
    if isinstance(builder, functools.partial):
        func = _rewrite_builder(builder.func, plan, "experts")
        return functools.partial(func, *builder.args, **builder.keywords)
    if isinstance(builder, ModuleSpec):
        return dataclasses.replace(builder, module=_rewrite_builder(builder.module, plan, "experts"))
    return _rewrite_builder(builder, plan, "experts")


def _rewrite_builder(builder: Any, plan: Plan, field: str) -> Any:
    """A class, or the bound classmethod ``MLP.as_mlp_submodule``, with its class replaced."""
    if isinstance(builder, type):
        return _class(builder.__name__, plan, field) or builder
    owner = getattr(builder, "__self__", None)
    if isinstance(owner, type):
        return getattr(_class(owner.__name__, plan, field) or owner, builder.__name__)
    return builder


def _name(spec: Any) -> str:
    return spec.__name__ if isinstance(spec, type) else ""


def _unfused(spec: Any, values: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Give a layer explicit norms where Transformer Engine's fused linear held them, under the same checkpoint names."""
    if not plan.installs("column_linear"):
        return values
    inner = {
        "input_layernorm": getattr(getattr(spec.self_attention, "submodules", None), "linear_qkv", None),
        "pre_mlp_layernorm": getattr(_mlp_submodules(spec.mlp), "linear_fc1", None),
    }
    fused = [norm for norm, linear in inner.items() if _name(linear) in _FUSED and values[norm] is IdentityOp]
    if fused:
        values |= dict.fromkeys(fused, kinds_of(plan.contract.arch).norm)
        values["sharded_state_dict_keys_map"] = KEYS_MAP | dict(values["sharded_state_dict_keys_map"])
    return values


def _mlp_submodules(spec: Any) -> Any:
    return (
        spec.keywords.get("submodules")
        if isinstance(spec, functools.partial)
        else getattr(spec, "submodules", None)
    )


class ContractSpecProvider(LocalSpecProvider):
    """Megatron's backend spec provider with the plan's modules; for code that builds specs from a backend."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def column_parallel_linear(self) -> type:
        return self._or(super().column_parallel_linear(), "linear")

    def row_parallel_linear(self) -> type:
        return self._or(super().row_parallel_linear(), "linear")

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        stock = super().layer_norm(rms_norm=rms_norm, for_qk=for_qk, has_residual=has_residual)
        return self._or(stock, "q_layernorm" if for_qk else "layer_norm") if rms_norm else stock

    def core_attention(self) -> type:
        return self._or(super().core_attention(), "core_attention")

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        return _rewrite_experts(super().grouped_mlp_modules(moe_use_grouped_gemm), self.plan)

    def _or(self, stock: Any, field: str) -> Any:
        return _class(stock.__name__, self.plan, field) or stock
