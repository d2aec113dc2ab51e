# SPDX-License-Identifier: Apache-2.0
"""Finds the live objects of a loaded model that serve each region."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from isoexec.adapters.base import REGIONS
from isoexec.adapters.snapshot import Change

__all__ = ["bound_objects", "changes_of", "described", "modules_of", "sampler_of"]


def described(bound: Any) -> str:
    """The class of a live object; of a layer that hands its arithmetic on, with the class it hands it to."""
    kind = type(bound)
    name = f"{kind.__module__}.{kind.__qualname__}"
    inner = getattr(bound, "impl" if isinstance(bound, Attention) else "quant_method", None)
    return name if inner is None else f"{name}[{type(inner).__module__}.{type(inner).__qualname__}]"


def _region_of(name: str, module: Any) -> str | None:
    if isinstance(module, ParallelLMHead):
        return "lm_head"
    if isinstance(module, VocabParallelEmbedding):
        return "embedding"
    if isinstance(module, GateLinear):
        return "router"
    if isinstance(module, LinearBase):
        return "row_linear" if isinstance(module, RowParallelLinear) else "column_linear"
    if isinstance(module, RMSNorm):
        return "qk_norm" if name.endswith(("q_norm", "k_norm")) else "norm"
    if isinstance(module, RotaryEmbeddingBase):
        return "rope"
    if isinstance(module, SiluAndMul):
        return "silu_mul"
    return None


def _of_experts(name: str, layer: RoutedExperts) -> Iterator[tuple[str, str, Any]]:
    """(region, path, object) of a layer's experts: the engine's own kernel computes three regions in one object."""
    steps = getattr(layer.quant_method, "steps", dict.fromkeys(("dispatch", "expert_linear", "combine"), ()))
    for region, parts in steps.items():
        for part in parts:
            yield region, f"{name}.{part}", getattr(layer, part)
        if not parts:
            yield region, name, layer


def bound_objects(runner: Any) -> dict[str, list[tuple[str, Any]]]:
    """Region -> (path, live object) of the model and the sampler in a model runner."""
    found: dict[str, list[tuple[str, Any]]] = {region: [] for region in REGIONS}
    for name, module in runner.get_model().named_modules():
        region = _region_of(name, module)
        if region is not None:
            found[region].append((name, module))
        if isinstance(module, ColumnParallelLinear) and (module.has_bias or module.bias is not None):
            found["qkv_bias"].append((name, module))
        if isinstance(module, Attention):
            found["attention"].append((name, module))
        if isinstance(module, MoERunner):
            found["routing"].append((name, module.router))
        if isinstance(module, RoutedExperts):
            for region, path, part in _of_experts(name, module):
                found[region].append((path, part))
    head = getattr(runner.get_model(), "lm_head", None)
    if isinstance(head, VocabParallelEmbedding) and not isinstance(head, ParallelLMHead):
        found["lm_head"].append(("lm_head", head))  # the embedding itself, of a model that ties the two
    found["logprobs"].append(("sampler", runner.sampler))
    return found


def modules_of(runner: Any) -> dict[str, nn.Module]:
    """The roots of a model runner by the prefix of their paths: the model, and a sampler that is a module."""
    sampler = {"sampler": runner.sampler} if isinstance(runner.sampler, nn.Module) else {}
    return {"": runner.get_model(), **sampler}


def sampler_of(runner: Any) -> dict[str, Any]:
    """The sampler of a model runner by its path, where it is no module."""
    return {} if isinstance(runner.sampler, nn.Module) else {"sampler": runner.sampler}


def changes_of(region: str, objects: Sequence[tuple[str, Any]], changes: Sequence[Change]) -> list[Change]:
    """Those of a snapshot's changes that are a region's: in its own objects, its binding or its table."""
    paths = {path for path, _ in objects}

    def owns(change: Change) -> bool:
        # a linear's bias is a region of its own in the same module
        return change.path in paths and change.name.startswith("bias") == (region == "qkv_bias")

    return [c for c in changes if c.path == region or owns(c)]
