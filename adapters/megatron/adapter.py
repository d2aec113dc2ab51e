# SPDX-License-Identifier: Apache-2.0
"""The megatron-core adapter: describes a live model, plans, installs, verifies what is bound, removes, and takes a census."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from isoexec.adapters.base import (
    REGIONS,
    Binding,
    Census,
    Plan,
    Report,
    RuntimeDescription,
    make_plan,
)
from isoexec.adapters.megatron import census as census_of
from isoexec.adapters.megatron import verifying
from isoexec.adapters.megatron.attention import ContractCoreAttention
from isoexec.adapters.megatron.clipping import bind_grad_norm
from isoexec.adapters.megatron.kinds import kinds_in, kinds_of
from isoexec.adapters.megatron.layers import ContractColumnParallelLinear, Contracted
from isoexec.adapters.megatron.moe import installs_experts
from isoexec.adapters.megatron.slots import Slot, facts_of, slots, topology_of, uncovered
from isoexec.adapters.megatron.weights import unwrap
from isoexec.adapters.snapshot import Snapshot, told
from isoexec.contracts.errors import InstallError
from isoexec.contracts.schema import Contract
from isoexec.contracts.topology import check_topology
from isoexec.probes.attest import arch, environment

__all__ = ["SUPPORTED", "MegatronAdapter"]

SUPPORTED = ((0, 19, 2), (0, 20, 0))
"""megatron-core versions the adapter knows: from the first, below the second."""


class MegatronAdapter:
    """One process's trainer model, or, before the model exists, its process groups and configuration.

    ``MegatronAdapter(groups=..., config=...)`` plans, for :func:`~isoexec.adapters.megatron.spec.rewrite_spec`;
    ``MegatronAdapter(model)`` installs, verifies and removes. ``model`` may be wrapped in Float16Module and DDP.

    Under a contract of sm90, planning claims the process's cuBLASLt switches, which stay claimed, and installing lets the
    tensor-parallel ranks agree on a transport of accumulators (``isoexec.kernels.linear.hopper.transport``; ``transport.use``
    names one beforehand), so that every rank must call it.
    """

    role = "trainer"

    def __init__(self, model: Any = None, *, groups: Any = None, config: Any = None) -> None:
        self._model = None if model is None else unwrap(model)
        self._groups = groups
        self._config = config
        self._plan: Plan | None = None
        self._undo: list[Callable[[], None]] = []
        self._failed: dict[str, str] = {}
        self._snapshot: Snapshot | None = None
        self._transport: str | None = None
        self.optimizer: Any = None

    @property
    def model(self) -> Any:
        """The GPTModel; InstallError where there is none yet."""
        if self._model is None:
            raise InstallError(
                region="model",
                wanted="a built GPTModel",
                found="none",
                fix="construct MegatronAdapter(model)",
            )
        return self._model

    @property
    def contract(self) -> Contract | None:
        """The contract installed here, or None."""
        return self._plan.contract if self._plan is not None else None

    # -- describe and plan ---------------------------------------------------------------------------------------------

    def topology(self) -> dict[str, int]:
        """Axis -> degree: from the modules' own groups in a live model, else from the groups given."""
        if self._model is None:
            if self._groups is None or self._config is None:
                raise InstallError(
                    region="model",
                    wanted="a model, or groups and config",
                    found="neither",
                    fix="pass what exists: MegatronAdapter(model) or MegatronAdapter(groups=..., config=...)",
                )
            return topology_of(self._groups, self._config)
        live, problem = self._live_topology()
        if problem is not None:
            raise InstallError(
                region="topology",
                wanted="every module on the model's own process groups",
                found=problem,
                fix="build every module on the model's own process groups",
            )
        return live

    def _live_topology(self) -> tuple[dict[str, int], str | None]:
        """Degrees as the live modules have them, and which module first leaves the model's groups, if one does."""
        model = self.model
        live = topology_of(model.pg_collection, model.config)
        for slot in slots(model):
            module, found = slot.module, dict(live)
            for axis, name in ((slot.axis, "tp_group"), ("EP", "ep_group")):
                group = getattr(module, name, None)
                if group is not None:
                    found[axis] = group.size()
            split = getattr(module, "sequence_parallel", None)
            if split is not None:
                found["SP"] = found["TP"] if split else 1
            if found != live:
                there, here = (
                    " and ".join(f"{axis} {degrees[axis]}" for axis in live if found[axis] != live[axis])
                    for degrees in (found, live)
                )
                return found, f"{slot.path} is on {there}, the model on {here}"
        return live, None

    def describe(self) -> RuntimeDescription:
        """Versions, live topology, and the objects that serve each region now."""
        modules: dict[str, list[str]] = {}
        if self._model is not None:
            for slot in slots(self._model):
                text = f"{slot.path}: {verifying.name_of(slot.module)}"
                if self._transport is not None and slot.region in ("column_linear", "row_linear"):
                    text += f", {self._transport}"
                for region in slot.regions:
                    if region != "qkv_bias" or slot.module.bias is not None:
                        modules.setdefault(region, []).append(text)
            bound = getattr(self._model, "token_logprobs", None)
            if self._model.post_process and kinds_in(self._model).logprobs is not None:
                modules["logprobs"] = [
                    f"token_logprobs: {verifying.name_of(bound)}" if bound else "not installed"
                ]
        return RuntimeDescription(
            runtime="megatron-core",
            role=self.role,
            versions={"megatron-core": version("megatron-core"), "torch": torch.__version__},
            topology=self.topology(),
            modules=modules,
        )

    def plan(self, contract: Contract) -> Plan:
        """Bind the contract's regions for this process; TopologyError and InstallError as ``make_plan`` says."""
        _check_version()
        _known_regions(contract)
        _begin(contract)
        config = self._config if self._model is None else self._model.config
        plan = make_plan(
            contract, self.role, self.topology(), str(config.params_dtype).removeprefix("torch.")
        )
        refused = contract.claims.environment.refusals(environment())
        if refused and any(b.enforcement.refuses for b in plan.bindings):
            raise InstallError(
                region="environment",
                wanted="what the contract was proven on",
                found="; ".join(refused),
                fix="set it before the model is built",
            )
        return plan

    # -- install -------------------------------------------------------------------------------------------------------

    def install(self, plan: Plan) -> None:
        """Put the plan's regions into the live model and check each; nothing is left half done.

        A slot that holds a contract module (from a rewritten spec) is bound; one that holds Megatron's own is replaced on its
        owner by a contract module sharing its parameters.  Raises TopologyError or InstallError, naming the region.
        """
        _check_version()
        model = self.model
        if self._plan is not None:
            if plan == self._plan:
                return
            raise InstallError(
                region="plan", wanted="one plan", found="another plan installed", fix="call remove() first"
            )
        check_topology(plan.contract, self.role, self.topology())
        refused = _refused_facts(plan, model) + uncovered(model, plan.contract.regions)
        if refused and any(b.enforcement.refuses for b in plan.bindings):
            raise InstallError(
                region="model",
                wanted="a model the contract covers",
                found="; ".join(refused),
                fix="change the model's configuration, or lower the enforcement",
            )
        self._plan = plan
        try:
            _begin(plan.contract)
            kinds = kinds_of(plan.contract.arch)
            self._set(model, "isoexec_kinds", kinds)
            if refused:
                self._failed = dict.fromkeys((b.region for b in plan.bindings), "; ".join(refused))
            else:
                self._put(plan)
            model.isoexec_adapter = self
            self._transport = kinds.agree(model.pg_collection.tp, verifying.device_of(model))
            self._snapshot = verifying.remember(model, plan)
            for report in self.verify():
                report.require()
        except BaseException:
            self.remove()
            raise

    def _put(self, plan: Plan) -> None:
        installs_experts(plan)  # all of a layer's regions, or none
        for slot in slots(self.model):
            bindings = self._bindings_of(slot, plan)
            if any(b is not None for b in bindings.values()):
                try:
                    self._fill(slot, bindings)
                except InstallError as error:
                    if any(b is not None and b.enforcement.refuses for b in bindings.values()):
                        raise
                    self._failed |= {r: str(error) for r, b in bindings.items() if b is not None}
        kinds = kinds_in(self.model)
        if plan.installs("norm"):
            for layer in self.model.decoder.layers:
                for name, add in kinds.adds(layer).items():
                    self._set(layer, name, add)
        if plan.installs("rope"):
            self._set(self.model, "position_embedding_type", "none")
        logprobs = plan.binding("logprobs")
        if (
            logprobs is not None
            and logprobs.enforcement.installs
            and kinds.logprobs is not None
            and self.model.post_process
        ):
            self._set(self.model, "token_logprobs", kinds.logprobs(logprobs, self.model.pg_collection.tp))

    def _bindings_of(self, slot: Slot, plan: Plan) -> dict[str, Binding | None]:
        return {r: plan.binding(r) if plan.installs(r) else None for r in slot.regions}

    def _fill(self, slot: Slot, bindings: dict[str, Binding | None]) -> None:
        module = slot.module
        # the output layer's contract class is a column-parallel linear too, so the exact class is asked for
        if type(module) is not slot.wanted:
            if isinstance(module, Contracted) or not slot.wanted.takes(module):
                stock = ", ".join(s.__name__ for s in slot.wanted.stock)
                raise InstallError(
                    region=slot.region,
                    wanted=f"{slot.wanted.__name__} or {stock} at {slot.path}",
                    found=verifying.name_of(module),
                    fix="build the model from rewrite_spec(spec, plan)",
                )
            module = slot.wanted.adopt(module)
        if isinstance(module, ContractColumnParallelLinear):
            module.biased = slot.name == "linear_qkv" and bool(self.model.config.add_qkv_bias)
        problem = module.unfit()
        if problem is not None:
            raise InstallError(
                region=slot.region, wanted=f"a coverable {slot.path}", found=problem, fix="turn it off"
            )
        if hasattr(type(module), "tp_group"):  # norms are built without a group; their layer has it
            setattr(module, "tp_group", slot.group)  # noqa: B010 only some contract classes have it
        if isinstance(module, ContractCoreAttention):
            module.bind(bindings["attention"], rope=bindings["rope"], rope_base=float(self.model.rotary_base))
            self._undo.append(lambda: module.bind(None))
        elif isinstance(module, ContractColumnParallelLinear):
            module.bind(bindings[slot.region], bias=bindings.get("qkv_bias"))
            self._undo.append(lambda: module.bind(None))
        else:
            module.bind(bindings[slot.region], **{region: bindings[region] for region in slot.wanted.also})
            self._undo.append(lambda: module.bind(None))
        if module is not slot.module:
            self._set(slot.owner, slot.name, module)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        missing = object()
        before = getattr(owner, name, missing)
        if before is value:
            return
        setattr(owner, name, value)
        self._undo.append(lambda: delattr(owner, name) if before is missing else setattr(owner, name, before))

    def bind_optimizer(self, optimizer: Any) -> None:
        """Give a Megatron optimizer the contract's gradient norm, where the plan installs ``grad_norm``."""
        if self._plan is None:
            raise InstallError(
                region="grad_norm", wanted="an installed plan", found="none", fix="call install(plan) first"
            )
        if self._plan.installs("grad_norm"):
            self.optimizer = optimizer
            self._undo.append(bind_grad_norm(optimizer, kinds_in(self.model).sums))

    def remove(self) -> None:
        """Undo everything install did, last first; a model built from a rewritten spec then refuses to run."""
        while self._undo:
            self._undo.pop()()
        self._plan, self._failed, self._snapshot, self.optimizer = None, {}, None, None
        self._transport = None
        if self._model is not None and getattr(self._model, "isoexec_adapter", None) is self:
            self._model.isoexec_adapter = None

    # -- look ----------------------------------------------------------------------------------------------------------

    def verify(self) -> Sequence[Report]:
        """What is bound now, from the live model: one report, with a canary run through each region's bound object."""
        if self._plan is None:
            raise InstallError(
                region="plan", wanted="an installed plan", found="none", fix="call install(plan) first"
            )
        plan = self._plan
        topology, moved = self._live_topology()
        if moved is None and topology != plan.topology:
            moved = f"the topology is {topology}, planned for {dict(plan.topology)}"
        changes = self._snapshot.changes() if self._snapshot is not None else []
        bound = verifying.bound_objects(self.model)
        regions = []
        for binding in plan.bindings:
            if binding.region not in REGIONS and self.optimizer is None:
                continue
            report = verifying.region_report(
                self.model, bound, binding, self.optimizer, self._failed.get(binding.region)
            )
            mine = verifying.changes_of(bound, binding.region, changes)
            if binding.enforcement.installs and mine:
                changes = [c for c in changes if c not in mine]
                if report.problem is None:
                    report = replace(report, problem=told(mine))
            regions.append(report)
        found = environment()
        refused = plan.contract.claims.environment.refusals(found)
        return [
            Report(
                role=self.role,
                rank=dist.get_rank(),
                world=dist.get_world_size(),
                topology=topology,
                regions=tuple(regions),
                problem=moved,
                changed="; ".join(filter(None, (told(changes), *refused))) or None,
                environment=found,
            )
        ]

    def census(self) -> Census:
        """Arithmetic outside every region in one forward of each case, with its backward; every rank must call it."""
        return census_of.census(self.model, self._plan.contract if self._plan is not None else None)


def _check_version() -> None:
    found = version("megatron-core")
    numbers = tuple(int(p) for p in found.split("+")[0].split(".")[:3] if p.isdigit())
    if not SUPPORTED[0] <= numbers < SUPPORTED[1]:
        low, high = (".".join(map(str, v)) for v in SUPPORTED)
        raise InstallError(
            region="megatron-core", wanted=f">={low},<{high}", found=found, fix="install a supported version"
        )


def _begin(contract: Contract) -> None:
    """Claim the process's switches for a contract of this arch; one of another is refused, and changes nothing."""
    if contract.arch == arch():
        kinds_of(contract.arch).begin()


def _known_regions(contract: Contract) -> None:
    """InstallError for a region that adapters know and that no module of this arch here computes."""
    kinds = kinds_of(contract.arch)
    if "expert_linear" in contract.regions:
        kinds.by_slot("experts")


def _refused_facts(plan: Plan, model: Any) -> list[str]:
    """Shape facts of the contract that the model breaks; a fact nobody can read here is one too."""
    facts = facts_of(model)
    lines = []
    for name, constraint in plan.contract.model.facts.items():
        if name not in facts:
            lines.append(f"{name} is unknown to this adapter, the contract wants {constraint}")
        elif not constraint.admits(facts[name]):
            lines.append(f"{name}={facts[name]}, the contract wants {constraint}")
    return lines
