# SPDX-License-Identifier: Apache-2.0
"""Looks at what a region really runs: the objects in the live model, their methods, and a canary's bits through one of them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isoexec.adapters.base import Binding, Plan, RegionReport, expected_canary
from isoexec.adapters.megatron import clipping
from isoexec.adapters.megatron.kinds import Kinds, kinds_in
from isoexec.adapters.megatron.layers import Contracted
from isoexec.adapters.megatron.moe import ContractExperts, ContractMoELayer
from isoexec.adapters.megatron.slots import slots
from isoexec.adapters.megatron.token_logprobs import TokenLogprobs
from isoexec.adapters.snapshot import Change, Snapshot
from isoexec.kernels import registry
from isoexec.kernels.canaries import chosen
from isoexec.kernels.rope import naive as rope_naive

__all__ = ["Bound", "bound_objects", "changes_of", "device_of", "name_of", "region_report", "remember"]


def name_of(obj: Any) -> str:
    """Module and name of an object's class, or of a function."""
    named = obj if inspect.isfunction(obj) else type(obj)
    return f"{named.__module__}.{named.__qualname__}"


def device_of(model: Any) -> torch.device:
    """Where the model computes."""
    device: torch.device = next(model.parameters()).device
    return device


Bound = Mapping[str, Sequence[tuple[str, Any, type]]]
"""Region -> (path, object, class wanted) of everything that serves it on this pipeline stage."""


def bound_objects(model: Any) -> Bound:
    """What is in the model's slots now; one look for all regions."""
    found: dict[str, list[tuple[str, Any, type]]] = {}
    for slot in slots(model):
        here = slot.path, slot.module, slot.wanted
        for region in slot.regions:
            found.setdefault(region, []).append(here)
    wanted = kinds_in(model).logprobs
    if wanted is not None and model.post_process:
        here = "token_logprobs", getattr(model, "token_logprobs", None), wanted
        found.setdefault("logprobs", []).append(here)
    return found


_SHARED: dict[str, tuple[str, ...]] = {
    "rope": ("rope",),
    "qkv_bias": ("bias",),
    "routing": ("routing", "topk", "score_function"),
    "combine": ("combine",),
}
"""Regions that live in another one's module -> how the names of their settings begin there."""


def remember(model: Any, plan: Plan) -> Snapshot:
    """The model, its code and its process as they are now, with the rotary tables the specification gives."""
    tables = {}
    if plan.installs("rope"):
        width, base = int(model.config.kv_channels), float(model.rotary_base)
        kinds, device = kinds_in(model), device_of(model)
        tables["rope"] = (lambda: kinds.rope_tables(width, base, device), rope_naive.table(width, base))
    return Snapshot({"": model}, plan.bindings, tables=tables)


def changes_of(bound: Bound, region: str, changes: Sequence[Change]) -> list[Change]:
    """Those of a snapshot's changes that are a region's: in its own modules, its binding or its table."""
    objects = bound.get(region, ())
    paths = {path for path, _, _ in objects}
    inside = tuple(f"{path}." for path, _, wanted in objects if wanted is ContractExperts)
    others = tuple(name for other, names in _SHARED.items() if other != region for name in names)

    def owns(change: Change) -> bool:
        if change.path.startswith(inside):
            return True
        if change.path not in paths:
            return False
        return (
            change.name.startswith(_SHARED[region])
            if region in _SHARED
            else not change.name.startswith(others)
        )

    return [c for c in changes if c.path == region or owns(c)]


def _replaced(wanted: type, kinds: Kinds) -> frozenset[str]:
    """Methods of a contract's class that are not what they were when it was imported."""
    methods = kinds.methods[wanted].items()
    return frozenset(name for name, method in methods if inspect.getattr_static(wanted, name) is not method)


def _problem(
    path: str, obj: Any, wanted: type, binding: Binding, kinds: Kinds, replaced: frozenset[str]
) -> str | None:
    cls: type = type(obj)
    if cls is not wanted:
        return f"{path} is {name_of(obj)}, not {wanted.__name__}"
    for name in kinds.methods[wanted]:
        if name in vars(obj):
            return f"{path}.{name} was set on the object"
        if name in replaced:
            return f"{wanted.__name__}.{name} was replaced"
    where = "bias_binding" if binding.region == "qkv_bias" else "binding"
    held = getattr(obj, getattr(wanted, "also", {}).get(binding.region, where))
    if held != binding:
        return f"{path} is bound to {held}"
    if binding.region == "qkv_bias" and obj.bias is None:
        return f"{path} has no bias"
    return None


def _model_problem(model: Any, region: str, bound: Bound) -> str | None:
    """What a region needs besides its modules."""
    kinds = kinds_in(model)
    if (found := kinds.problem(region, device_of(model))) is not None:
        return found
    if region == "norm":
        for index, layer in enumerate(model.decoder.layers):
            for name, wanted in kinds.adds(layer).items():
                found = getattr(layer, name)
                here = getattr(sys.modules[wanted.__module__], wanted.__name__, None)
                if found is not wanted or here is not wanted:
                    return (
                        f"decoder.layers.{index}.{name} is {name_of(found)}, not the contract's residual add"
                    )
    if region == "rope":
        if model.position_embedding_type != "none":
            return f"position_embedding_type is {model.position_embedding_type!r}: Megatron rotates as well"
        for layer in model.decoder.layers:
            base = layer.self_attention.core_attention.rope_base
            if base != float(model.rotary_base):
                return f"rotary base {base}, the model's is {model.rotary_base}"
    if region == "dispatch":
        for path, layer, _ in bound.get(region, ()):
            if layer.exchange_group is not model.pg_collection.tp_ep:
                return f"{path} exchanges rows in another group than the model's"
            if (problem := layer.unfit()) is not None:
                return f"{path} has {problem}"
    if region == "expert_linear":
        for path, experts, _ in bound.get(region, ()):
            weights = experts.named_weights()
            if len(weights) != len(experts.bound_weights):
                return f"{path} has {len(weights)} weights, {len(experts.bound_weights)} were bound"
            for (name, weight), kept in zip(weights, experts.bound_weights, strict=True):
                if weight is not kept:
                    return f"{path}.{name} is another parameter than was bound"
    return None


def region_report(
    model: Any, bound: Bound, binding: Binding, optimizer: Any, problem: str | None
) -> RegionReport:
    """The state of one region; ``problem`` is one already known.  A region only observed is described, not judged."""
    if binding.region == "grad_norm":
        return _grad_norm_report(model, binding, optimizer, problem)
    objects = bound.get(binding.region, ())
    installs = binding.enforcement.installs
    if installs and problem is None:
        kinds = kinds_in(model)
        replaced = {wanted: _replaced(wanted, kinds) for wanted in {wanted for _, _, wanted in objects}}
        wrong = (
            _problem(path, obj, wanted, binding, kinds, replaced[wanted]) for path, obj, wanted in objects
        )
        problem = next((p for p in wrong if p is not None), None)
        problem = problem or _model_problem(model, binding.region, bound)
    if objects:
        subject = objects[0][1]
        text = f"{name_of(subject)} x{len(objects)}"
    else:
        # an embedding or a head on another pipeline stage: this process attests the class it would bind
        subject = _elsewhere(binding, kinds_in(model))
        text = f"none on pipeline stage {model.pg_collection.pp.rank()}"
    judged = installs and isinstance(subject, (Contracted, TokenLogprobs))
    dtype = model.config.params_dtype
    canary = None
    if judged and problem is None:
        canary = registry.canary_digest(
            _call(binding.region, subject),
            binding.function,
            binding.constants,
            dtype=dtype,
            device=device_of(model).type,
        )
    expected = expected_canary(binding.function, binding.constants, dtype)
    return RegionReport(
        region=binding.region,
        object=text,
        provider=binding.provider,
        source=registry.source_digest(binding.function, kinds_in(model).arch),
        canary=canary,
        expected_canary=expected,
        reference_canary=expected,  # these canaries have the function's own sizes
        enforcement=binding.enforcement,
        problem=problem,
    )


def _elsewhere(binding: Binding, kinds: Kinds) -> Any:
    """An object of a region's class with its binding and nothing else."""
    if binding.region == "logprobs":
        return TokenLogprobs(binding, None)
    wanted = {"embedding": kinds.embedding, kinds.head.region: kinds.head}.get(binding.region)
    if wanted is None:
        return None
    subject = wanted.__new__(wanted)
    settings = {"binding": binding, "sequence_parallel": False, "reduce_scatter_embeddings": False}
    for name, value in settings.items():
        object.__setattr__(subject, name, value)
    return subject


def _call(region: str, o: Any) -> Callable[..., Tensor]:
    """The bound object's own path to its kernel, without a process group, taking the registry's canary by name."""
    match region:
        case "embedding":
            return lambda ids, w: o.compute(ids.unsqueeze(1), w, None)
        case "norm" if hasattr(o, "compute_sum"):
            return lambda x, w, eps: _alone_and_summed(o, x.unsqueeze(1), w, eps)
        case "norm" | "qk_norm":
            return lambda x, w, eps: o.compute(x.unsqueeze(1), w, eps, None)
        case "rope":
            return o.compute_rope
        case "qkv_bias":
            return o.compute_bias
        case "silu_mul" if isinstance(o, ContractExperts):
            return o.compute_silu
        case "attention" | "silu_mul":
            return o.compute
        case "routing":
            return lambda logits, k: chosen(*o.compute_routing(logits, k))
        case "dispatch":
            return lambda x, experts, count: _there_and_back(o, x, experts, count)
        case "expert_linear":
            return lambda x, w, offsets: _both_products(o, x, w, offsets)
        case "combine":
            return o.compute_combine
        case "head_logprobs":
            return lambda x, w, target: o.compute_logprobs(x, w, target, None)
        case "logprobs":
            return lambda logits, target: o.compute(logits, target, None)
        case _:
            return lambda x, w: o.compute(x.unsqueeze(1), w, None)


def _alone_and_summed(o: Any, x: Tensor, w: Tensor, eps: float) -> Tensor:
    """The norm of x, where that of a sum whose rounded result is x is the same; else nothing of either."""
    half = x * 0.4990234375
    rest = x - half
    alone = o.compute(half + rest, w, eps, None)
    summed, kept = o.compute_sum(half, rest, w, eps, None)
    plain: Tensor = o.compute(x, w, eps, None)
    return plain if torch.equal(summed, alone) and torch.equal(kept, half + rest) else plain.new_zeros(())


def _there_and_back(o: ContractMoELayer, x: Tensor, experts: Tensor, count: int) -> Tensor:
    """The dispatched rows, where going back to slots gives each token its own row; else no row of theirs."""
    plan = o.compute_plan(experts, 0, count)
    rows = o.compute(x, plan, None)
    home = o.compute_slots(rows, plan, None).view(*experts.shape, x.shape[1])
    return rows if torch.equal(home, x.unsqueeze(1).expand_as(home)) else rows.new_zeros(())


def _both_products(o: ContractExperts, x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """An expert's first product, where its last is the same one; else nothing of either."""
    first, last = o.compute(x, w, offsets, None), o.compute_down(x, w, offsets, None)
    return first if torch.equal(first, last) else first.new_zeros(())


def _grad_norm_report(model: Any, binding: Binding, optimizer: Any, problem: str | None) -> RegionReport:
    installs, kinds = binding.enforcement.installs, kinds_in(model)
    if problem is None and installs and not clipping.norm_is_exact(optimizer):
        problem = "an optimizer's norm is not the exact sum of squares"
    canary = None
    if installs and problem is None:
        # the path of the bound methods, so that a replaced sum is seen
        canary = registry.canary_digest(
            lambda tensors: kinds.sums.sum_of_squares([t.to(device_of(model)) for t in tensors]),
            binding.function,
            binding.constants,
        )
    expected = expected_canary(binding.function, binding.constants, torch.float32)
    return RegionReport(
        region=binding.region,
        object=" + ".join(name_of(part) for part in clipping.leaves(optimizer)),
        provider=binding.provider,
        source=registry.source_digest(binding.function, kinds.arch),
        canary=canary,
        expected_canary=expected,
        reference_canary=expected,
        enforcement=binding.enforcement,
        problem=problem,
    )
