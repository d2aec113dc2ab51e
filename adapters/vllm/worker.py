# SPDX-License-Identifier: Apache-2.0
"""Methods a driver calls in every worker by ``collective_rpc``: what is really bound here, weight digests, reload, census.

`IsoExecExtension` goes into any worker by ``worker_extension_cls``, with or without a contract, and changes nothing by itself.
Every result is made of plain builtins: anything else leaves the caller of ``collective_rpc`` waiting for ever.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isoexec.adapters.base import REGIONS, Enforcement, RegionReport, reference_canary, regions_of
from isoexec.adapters.snapshot import Change, Snapshot, told
from isoexec.adapters.vllm import state, transfer
from isoexec.adapters.vllm.census import WorkerCensus
from isoexec.adapters.vllm.engines import found_engine
from isoexec.adapters.vllm.objects import bound_objects, changes_of, described, modules_of, sampler_of
from isoexec.adapters.vllm.topology import live_topology
from isoexec.contracts.errors import InstallError, IsoExecError
from isoexec.probes.attest import environment

__all__ = ["IsoExecExtension", "plain"]

transfer.register()  # a worker imports this before it makes its model, in whatever process it is

_KEPT = 1 << 27  # bytes of answers that are kept until they are awaited
_REFUSALS = (
    IsoExecError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
)


def plain(value: Any) -> Any:
    """``value`` as builtins only."""
    return json.loads(json.dumps(value, default=str))


class IsoExecExtension:
    """Mixed into the engine's worker class; uses only what every vLLM worker has."""

    rank: int
    vllm_config: Any
    model_runner: Any

    def isoexec_report(self) -> dict[str, Any]:
        """What this worker really runs: live groups, environment, and per region the canary of the bound objects."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.inference_mode():
            topology = live_topology()
            reports, rest = self._isoexec_regions()
            regions = {r.region: r.to_dict() for r in reports}
        found = environment()
        plan = state.active()
        contract = plan.contract if plan is not None else None
        engine = found_engine()
        return plain(
            {
                "pid": os.getpid(),
                "rank": int(self.rank),
                "world": int(self.vllm_config.parallel_config.world_size),
                "topology": topology,
                "regions": regions,
                "changed": self._isoexec_changed(rest, found),
                "environment": found,
                "identities": contract and contract.identities.to_dict(),
                "contract": contract and contract.to_dict(),
                "engine": engine and [engine[0].distribution, engine[1]],
                "runner": described(self.model_runner),
                "weight_version": getattr(self, "_isoexec_weight_version", None),
                "calls": dict(state.calls),
                "replays": dict(state.replays),
            }
        )

    def isoexec_load_weights(self, path: str, weight_version: int) -> dict[str, Any]:
        """Reload every weight from a safetensors file of Hugging Face names; native and contract engines alike.

        The driver must drop the prefix cache afterwards (`isoexec.adapters.vllm.rollout.Rollout.sync` does): its blocks hold
        keys and values of the old weights, and only the scheduler can forget them.
        """
        from safetensors import safe_open

        with safe_open(Path(path), framework="pt") as file:
            names = list(file.keys())
            self.reload_weights(  # type: ignore[attr-defined]
                weights_iterator=((name, file.get_tensor(name)) for name in names)
            )
        self._isoexec_weight_version = int(weight_version)
        return {"rank": int(self.rank), "weight_version": int(weight_version), "tensors": len(names)}

    def isoexec_received(self, weight_version: int) -> bool:
        """Say of which version the weights are that `isoexec.adapters.vllm.transfer` has loaded."""
        self._isoexec_weight_version = int(weight_version)
        return True

    def isoexec_weight_partials(self) -> dict[str, Any]:
        """Partial digests of the live parameters by Hugging Face name; what nobody can read is named in ``unknown``."""
        from isoexec.adapters.vllm.weights import partials

        found = partials(self.model_runner.get_model())
        return plain(
            {
                **found,
                "rank": int(self.rank),
                "weight_version": getattr(self, "_isoexec_weight_version", None),
            }
        )

    def isoexec_census_start(self, case: str) -> bool:
        """Note the arithmetic of a case's steps from now on until `isoexec_census_stop`."""
        self._isoexec_census = WorkerCensus(self.model_runner, case)
        self._isoexec_census.start()
        return True

    def isoexec_census_stop(self) -> dict[str, Any]:
        """What ran since the start: the case, its ``entries`` outside every region, and how many operators ran ``inside``."""
        census: WorkerCensus | None = self.__dict__.pop("_isoexec_census", None)
        if census is None:
            raise InstallError(
                region="census",
                wanted="a census that was started",
                found="none",
                fix="call isoexec_census_start first",
            )
        return plain(census.stop())

    def _isoexec_tables(self) -> list[Tensor]:
        """The rotary tables that the layers of this worker read, on the host: cosine and sine of each shape in order."""
        from isoexec.kernels.rope import ops

        return [t for shape in sorted(self._isoexec_shapes()) for t in ops._table(*shape)]

    def _isoexec_shapes(self) -> set[tuple[int, float]]:
        return {(int(r.head_size), float(r.base)) for _, r in bound_objects(self.model_runner)["rope"]}

    def _isoexec_remember(self) -> None:
        """Keep what model, code and process are now; every later report says what is different."""
        from isoexec.kernels.rope import naive

        plan, runner = state.active(), self.model_runner
        assert plan is not None
        self._isoexec_snapshot: Snapshot | None = Snapshot(
            modules_of(runner),
            plan.bindings,
            objects={"runner": runner, **sampler_of(runner)},
            tables={
                "rope": (
                    self._isoexec_tables,
                    [t for shape in sorted(self._isoexec_shapes()) for t in naive.table(*shape)],
                )
            }
            if plan.installs("rope")
            else None,
        )

    def _isoexec_disagrees(self) -> str | None:
        """What this worker's own effect says against its bound objects, in words; an engine that compiles nothing has none."""
        return None

    def _isoexec_changed(self, changes: list[Change], found: Mapping[str, Any]) -> str | None:
        """What is wrong with the process itself: what changed in no region, and what the contract does not admit."""
        plan = state.active()
        judged = plan is not None and any(b.enforcement.installs for b in plan.bindings)
        if plan is None or not judged:
            return None
        refused = plan.contract.claims.environment.refusals(found)
        return "; ".join(filter(None, (told(changes), self._isoexec_disagrees(), *refused))) or None

    def _isoexec_regions(self) -> tuple[list[RegionReport], list[Change]]:
        """One report a region of the contract or the model, and the changes since the installation that are of none.

        Every object is called, for one may be replaced alone.
        """
        objects = bound_objects(self.model_runner)
        plan = state.active()
        planned = regions_of(plan.contract, "engine") if plan is not None else ()
        snapshot: Snapshot | None = getattr(self, "_isoexec_snapshot", None)
        changes = snapshot.changes() if snapshot is not None else []
        reports = []
        for region in dict.fromkeys((*REGIONS, *planned)):
            here = objects.get(region, [])
            mine = changes_of(region, here, changes)
            told_here = told(mine) if plan is not None and plan.installs(region) else None
            changes = [c for c in changes if c not in mine]
            served = [f"{name}: {described(bound)}" for name, bound in here]
            split = self._isoexec_disagreement([*served, told_here or "what was installed"])
            names = ", ".join(sorted({described(bound) for _, bound in here})) or "nothing"
            if here or split or region in planned:
                report = self._isoexec_region(region, here, names, split, region in planned)
                if told_here is not None:
                    report = replace(report, problem="; ".join(filter(None, (report.problem, told_here))))
                reports.append(report)
        return reports, changes

    def _isoexec_disagreement(self, served: list[str]) -> str | None:
        """Which rank binds something else than most: a canary that one rank answers alone would wait for ever."""
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        if group.world_size == 1:
            return None
        every: list[Any] = [None] * group.world_size
        dist.all_gather_object(every, served, group=group.cpu_group)
        common = max(every, key=every.count)
        odd = [rank for rank, other in enumerate(every) if other != common]
        if not odd:
            return None
        both = zip_longest(common, every[odd[0]], fillvalue="nothing")
        ours, theirs = next(pair for pair in both if pair[0] != pair[1])
        also = f", and other ranks differ: {', '.join(map(str, odd[1:]))}" if odd[1:] else ""
        return f"the ranks bind different objects: rank {every.index(common)} has {ours}, rank {odd[0]} has {theirs}{also}"

    def _isoexec_region(
        self, region: str, objects: list[tuple[str, Any]], names: str, split: str | None, planned: bool
    ) -> RegionReport:
        plan = state.active()
        binding = plan.binding(region) if plan is not None else None
        if plan is None or binding is None:
            stray = plan is not None and not planned and any(b.enforcement.refuses for b in plan.bindings)
            return RegionReport(
                region=region,
                object=names,
                provider="native",
                source="",
                canary=None,
                expected_canary=None,
                enforcement=Enforcement.INSTALL_REFUSE if stray else Enforcement.OFF,
                problem="the contract has no such region, and the model runs one" if stray else None,
            )
        from isoexec.adapters.vllm.canaries import Canary

        canary = Canary(binding, self.vllm_config.model_config.dtype, self.model_runner.device.type)
        found: str | None = None
        expected: str | None = None
        problem = split
        if not objects:
            problem = problem or "no object of the model serves this region"
        if problem is None:
            found, expected, problem = _call_all(canary, objects)
        return RegionReport(
            region=region,
            object=names,
            provider=binding.provider,
            source=binding.source,
            canary=found,
            expected_canary=expected,
            reference_canary=reference_canary(binding, self.vllm_config.model_config.dtype),
            enforcement=binding.enforcement,
            problem=problem,
        )


def _call_all(canary: Any, objects: list[tuple[str, Any]]) -> tuple[str | None, str | None, str | None]:
    """What all objects answer with and should; for the first that answers otherwise, that and whose it is.

    All are asked before the first answer is awaited, but for answers that are too large to keep.
    """
    found: str | None = None
    expected: str | None = None
    waiting: list[tuple[str, Any, Any]] = []
    for place, (name, bound) in enumerate(objects, 1):
        problem, stale = None, None
        try:
            asked, stale = canary.ask(bound), canary.stale(bound)
            waiting.append((name, bound, asked))
            if stale is not None:
                problem = f"{name} computes with {stale}"
        except _REFUSALS as error:
            # a native object that cannot take the canary at all is as much a finding as one that answers otherwise
            problem = f"{name} does not take the canary: {type(error).__name__}: {error}"
        kept = sum(answer.bytes for _, _, answer in waiting)
        if problem is None and place < len(objects) and kept < _KEPT:
            continue
        try:
            digests = canary.digests([answer for _, _, answer in waiting])
        except _REFUSALS as error:  # of what a device does later
            names = " or ".join(of for of, _, _ in waiting)
            return None, expected, f"{names} does not take the canary: {type(error).__name__}: {error}"
        sound = len(waiting) - (stale is not None)  # of the last one the problem is already known
        for index, ((of, other, _), (found, expected)) in enumerate(zip(waiting, digests, strict=True)):
            if found != expected and index < sound:
                return found, expected, f"{of} ({described(other)}) computes something else"
        if problem is not None:
            return (found if stale is not None else None), expected, problem
        waiting = []
    return found, expected, None
