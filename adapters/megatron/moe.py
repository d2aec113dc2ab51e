# SPDX-License-Identifier: Apache-2.0
"""A layer with experts under the contract: router, dispatch, experts and combine in the place of megatron-core's.

The layer keeps Megatron's parameters and checkpoint names; its token dispatcher is left where it is and gives its groups alone.
No token is dropped, and none is padded to a capacity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.adapters.base import Binding
from isoexec.adapters.megatron.layers import SHARDED, Contracted, solo
from isoexec.adapters.megatron.moe_exchange import Exchange, misplaced
from isoexec.contracts.errors import InstallError
from isoexec.kernels import combine as combine_kernel
from isoexec.kernels import dispatch as dispatch_kernel
from isoexec.kernels import grouped_linear as grouped_kernel
from isoexec.kernels import linear as linear_kernel
from isoexec.kernels import router as router_kernel
from isoexec.kernels import silu_mul as silu_kernel
from isoexec.kernels.dispatch import DispatchPlan
from isoexec.kernels.groups import gather_rows, name_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from isoexec.adapters.base import Plan

__all__ = ["ContractExperts", "ContractMoELayer", "ContractRouter", "installs_experts"]

_TOGETHER = ("router", "routing", "dispatch", "expert_linear", "silu_mul", "combine")


def installs_experts(plan: Plan) -> bool:
    """Whether the plan installs the regions of a layer with experts; InstallError where it installs some of them alone.

    What one hands to the next has another form than Megatron's: slots and weights in routing order for a map of all experts.
    """
    if "expert_linear" not in plan.contract.regions:
        return False
    installed = [region for region in _TOGETHER if plan.installs(region)]
    if installed and len(installed) < len(_TOGETHER):
        rest = ", ".join(region for region in _TOGETHER if region not in installed)
        raise InstallError(
            region=next(region for region in _TOGETHER if region not in installed),
            wanted=f"all of {', '.join(_TOGETHER)}, or none of them",
            found=f"a plan that leaves {rest} to Megatron",
            fix=f"raise it in ISOEXEC_ENFORCE, or lower {', '.join(installed)} as well",
        )
    return bool(installed)


class _WeightGradient(torch.autograd.Function):
    """The logits as they are; in backward, the weight's gradient from the rows of every rank.

    It is whole on the first rank and zero on the others: Megatron adds it over the ranks that share the sequence.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, x: Tensor, w: Tensor, k_block: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.k_block, ctx.group = k_block, group
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        rows, gradients = (gather_rows(t, name_of(ctx.group)) for t in (x, gradient))
        if ctx.group.rank():
            return gradient, None, torch.zeros_like(w), None, None
        with torch.enable_grad():
            leaf = w.detach().requires_grad_()
            out = linear_kernel.column_linear(rows, leaf, k_block=ctx.k_block, out_dtype=torch.float32)
        (dw,) = torch.autograd.grad(out, leaf, gradients)
        return gradient, None, dw, None, None


class ContractRouter(Contracted, TopKRouter):
    """fp32 logits by ``linear.chain``, then the experts of the highest score, in order, and their normalized weights."""

    region = "router"
    stock = (TopKRouter,)
    also: ClassVar[Mapping[str, str]] = {"routing": "routing_binding"}
    routing_binding: Binding | None = None

    def bind(self, binding: Binding | None, routing: Binding | None = None) -> None:
        """Give both regions their bindings, or take them away."""
        self.binding, self.routing_binding = binding, routing

    def unfit(self) -> str | None:
        if self.bias is not None or self.expert_bias is not None:
            return "a bias, and the contract's router has none"
        if self.router_replay is not None:
            return "a replay of routings"
        return None

    def compute(self, x: Tensor, weight: Tensor, group: ProcessGroup | None) -> Tensor:
        """Multiply x [..., H] by weight [E, H] -> fp32 [..., E].

        Where ranks of ``group`` share the rows out, the weight's gradient is that of all rows in their order.
        """
        k_block = self.constant("k_block")
        if group is None:
            return linear_kernel.column_linear(x, weight, k_block=k_block, out_dtype=torch.float32)
        logits = linear_kernel.column_linear(x, weight.detach(), k_block=k_block, out_dtype=torch.float32)
        return _WeightGradient.apply(logits, x.detach(), weight, k_block, group)

    def compute_routing(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Choose for logits fp32 [T, E] -> weights fp32 [T, k], experts int64 [T, k], both in routing order."""
        self.require()
        return router_kernel.softmax_topk(logits, k)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """[s, b, H] -> weights fp32 [s * b, k] and experts int64 [s * b, k]."""
        group = solo(self.tp_group) if getattr(self.weight, SHARDED, False) else None
        logits = self.compute(x, self.weight, group)
        return self.compute_routing(logits.view(-1, logits.shape[-1]), self.topk)


class ContractExperts(Contracted, SequentialMLP):
    """Every expert of this rank at once: ``linear.grouped_chain``, ``silu_mul.exp``, ``linear.grouped_chain``.

    Under expert tensor parallelism an expert's gate and up rows, and the columns of its last product, are shared out; the fp32
    accumulator is handed from rank to rank.
    """

    region = "expert_linear"
    stock = (SequentialMLP,)
    also: ClassVar[Mapping[str, str]] = {"silu_mul": "silu_binding"}
    silu_binding: Binding | None = None
    bound_weights: tuple[Tensor, ...] = ()

    def bind(self, binding: Binding | None, silu_mul: Binding | None = None) -> None:
        """Give both regions their bindings, or take them away; the experts' parameters are remembered."""
        self.binding, self.silu_binding = binding, silu_mul
        self.bound_weights = tuple(w for _, w in self.named_weights()) if binding is not None else ()

    def named_weights(self) -> list[tuple[str, Tensor]]:
        """Each expert's two weights, by their path in this module."""
        return [
            (f"local_experts.{index}.{name}.weight", getattr(expert, name).weight)
            for index, expert in enumerate(self.local_experts)
            for name in ("linear_fc1", "linear_fc2")
        ]

    def unfit(self) -> str | None:
        for index, expert in enumerate(self.local_experts):
            for name in ("linear_fc1", "linear_fc2"):
                module = getattr(expert, name)
                if module.bias is not None:
                    return f"a bias in local_experts.{index}.{name}, and the contract's linear has none"
                if getattr(module, "gtp_remat_size", 1) > 1:
                    return f"gtp_remat of size {module.gtp_remat_size}"
        return None

    def compute(self, x: Tensor, weights: Tensor, offsets: Tensor, group: ProcessGroup | None) -> Tensor:
        """Rows x [R, H] by expert, weights [E, 2F/t, H] of gate rows, then up rows -> [R, 2F/t]."""
        return grouped_kernel.grouped_linear(
            x, weights, offsets, k_block=self.constant("k_block"), group=group, interleave=2
        )

    def compute_down(self, x: Tensor, weights: Tensor, offsets: Tensor, group: ProcessGroup | None) -> Tensor:
        """Rows x [R, F/t] by expert, weights [E, H, F/t] -> [R, H], the same on every rank of ``group``."""
        return grouped_kernel.row_grouped_linear(
            x, weights, offsets, k_block=self.constant("k_block"), group=group
        )

    def compute_silu(self, gate: Tensor, up: Tensor) -> Tensor:
        """From gate and up [R, F/t] -> silu(gate) * up in their dtype."""
        self.require()
        return silu_kernel.silu_mul(gate, up)

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Rows [R, H] of this rank's experts, in their order, expert i's from ``offsets[i]`` to ``offsets[i + 1]`` -> [R, H]."""
        group = solo(self.tp_group)
        first = torch.stack([expert.linear_fc1.weight for expert in self.local_experts])
        last = torch.stack([expert.linear_fc2.weight for expert in self.local_experts])
        gate, up = self.compute(rows, first, offsets, group).chunk(2, -1)
        return self.compute_down(self.compute_silu(gate, up), last, offsets, group)


class ContractMoELayer(Contracted, MoELayer):
    """Rows to the experts and back, and their sum in routing order where the token lives."""

    region = "dispatch"
    stock = (MoELayer,)
    also: ClassVar[Mapping[str, str]] = {"combine": "combine_binding"}
    combine_binding: Binding | None = None

    def bind(self, binding: Binding | None, combine: Binding | None = None) -> None:
        """Give both regions their bindings, or take them away."""
        self.binding, self.combine_binding = binding, combine

    def unfit(self) -> str | None:
        if self.shared_experts is not None:
            return "a shared expert"
        if self.moe_layer_recompute:
            return "recompute_modules with 'moe'; recompute whole layers"
        if self.replicated and self.exchange_group.size() != self.attn_tp_group.size():
            ranks = f"{self.exchange_group.size()} ranks under TP {self.attn_tp_group.size()}"
            return f"experts shared among {ranks}, whose tokens are neither the same nor split by sequence parallelism"
        return misplaced(self.exchange_group, self.ep_group, self.experts.tp_group, self.attn_tp_group)

    @property
    def exchange_group(self) -> ProcessGroup:
        """The ranks that share this layer's experts out, and those that share an expert."""
        group: ProcessGroup = self.token_dispatcher.tp_ep_group
        return group

    @property
    def replicated(self) -> bool:
        """Whether tensor-parallel ranks hold the same tokens."""
        return self.attn_tp_group.size() > 1 and not self.config.sequence_parallel

    def compute_plan(self, experts: Tensor, first: int, count: int) -> DispatchPlan:
        """The rows of ``count`` experts from ``first``, by expert and then by token."""
        self.require()
        return dispatch_kernel.plan(experts, first, count)

    def compute(self, x: Tensor, plan: DispatchPlan, group: ProcessGroup | None) -> Tensor:
        """Take x [T, H] -> [R, H] in the plan's order; see `isoexec.kernels.dispatch` for ``group``."""
        return dispatch_kernel.dispatch(x, plan, group)

    def compute_slots(self, rows: Tensor, plan: DispatchPlan, group: ProcessGroup | None) -> Tensor:
        """Put rows [R, H] of the plan's order -> [T * k, H] by slot."""
        return dispatch_kernel.by_slot(rows, plan, group)

    def compute_combine(self, y: Tensor, weights: Tensor) -> Tensor:
        """Weigh and add y [T * k, H] by slot, by weights fp32 [T, k], in routing order -> [T, H]."""
        return combine_kernel.combine(y, weights)

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: Any = None,
        padding_mask: Tensor | None = None,  # noqa: ARG002  a padded token is a token
    ) -> tuple[Tensor, None]:
        """[s, b, H], or this rank's [s/t, b, H] of it under sequence parallelism -> ([s, b, H], None)."""
        if intermediate_tensors is not None:
            raise InstallError(
                region=self.region,
                wanted="the whole layer",
                found="a part of it",
                fix="turn graph capture off",
            )
        weights, experts = self.router(hidden_states)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        slots = (self._among_replicas if self.replicated else self._among_owners)(x, experts)
        return self.compute_combine(slots, weights).view(hidden_states.shape), None

    def _among_owners(self, x: Tensor, experts: Tensor) -> Tensor:
        """Each rank has tokens of its own: all their rows go out, and come back."""
        plan = self.compute_plan(experts, 0, int(self.config.num_moe_experts))
        rows = self.compute(x, plan, None)
        if solo(self.exchange_group) is None:
            return self.compute_slots(self.experts(rows, plan.offsets), plan, None)
        exchange = Exchange.of(plan.offsets, self.exchange_group, self.experts.tp_group.size())
        rows = self.experts(exchange.out(rows), exchange.offsets)
        return self.compute_slots(exchange.back(rows), plan, None)

    def _among_replicas(self, x: Tensor, experts: Tensor) -> Tensor:
        """Tensor-parallel ranks have the same tokens: each takes the rows of its experts, and only results move."""
        group = solo(self.ep_group)
        plan = self.compute_plan(experts, self.local_expert_indices[0], self.num_local_experts)
        rows = self.experts(self.compute(x, plan, group), plan.offsets)
        return self.compute_slots(rows, plan, group)
