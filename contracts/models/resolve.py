# SPDX-License-Identifier: Apache-2.0
"""Finds the shipped contract of a model and says whether a runtime may run under it: facts, regions, and what is unproven."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from isoexec.contracts.discharge import Refusal, unproven
from isoexec.contracts.errors import ContractError
from isoexec.contracts.evidence import Store, default_store
from isoexec.contracts.models.config import FIELDS, ModelConfig, facts_of
from isoexec.contracts.models.runtimes import RUNTIMES, Runtime
from isoexec.contracts.parts import Binding, Value, derived_widths
from isoexec.contracts.schema import Contract, library

__all__ = ["FactRefusal", "RegionState", "Resolution", "region_states", "resolve", "shipped_contracts"]

_ANOTHER = "choose a contract for such a model, or widen model.facts and prove it"
_FIXES = {
    "quantization": "take the unquantized checkpoint; a quantized product is another function",
    "dtype": "load the model in an admitted dtype",
    "sliding_window": "no contract has a window; take a model without one",
    "rope_type": "take the checkpoint without scaled positions, or a contract whose rope function scales them",
    "attention_bias": "choose the contract of an architecture with such projections",
    "experts": "experts are shared evenly by every claimed EP degree; claim fewer, or choose another model",
}


@dataclass(frozen=True, kw_only=True)
class FactRefusal:
    """A fact of the model that is not admitted; `field` is what says it in config.json."""

    fact: str
    field: str
    wanted: str
    found: str
    fix: str

    def to_dict(self) -> dict[str, str]:
        """Return the refusal as plain JSON values."""
        return {name: str(getattr(self, name)) for name in ("fact", "field", "wanted", "found", "fix")}

    def __str__(self) -> str:
        return f"{self.fact} ({self.field}): wanted {self.wanted}, found {self.found}; {self.fix}"


@dataclass(frozen=True, kw_only=True)
class RegionState:
    """A region: what it binds, who computes it for the role asked for, and why it is unproven (empty where it is proven).

    `kind` sums the reasons up: `proven`, `no kernel`, `no evidence` or `evidence refused`.
    """

    region: str
    ops: tuple[str, ...]
    function: str
    constants: Mapping[str, Value]
    providers: tuple[str, ...]
    kind: str
    reasons: tuple[str, ...] = ()

    @property
    def proven(self) -> bool:
        return self.kind == "proven"

    def to_dict(self) -> dict[str, object]:
        """Return the state as plain JSON values."""
        return {
            "region": self.region,
            "ops": list(self.ops),
            "function": self.function,
            "constants": dict(self.constants),
            "providers": list(self.providers),
            "state": self.kind,
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """A model against one contract, for one runtime."""

    config: ModelConfig
    runtime: Runtime
    contract: Contract
    path: str
    facts: Mapping[str, Value]
    refused: tuple[FactRefusal, ...]
    regions: tuple[RegionState, ...]

    @property
    def unproven(self) -> tuple[RegionState, ...]:
        return tuple(region for region in self.regions if not region.proven)

    @property
    def usable(self) -> bool:
        """Whether the runtime may be installed into: nothing refused, nothing unproven."""
        return not self.refused and not self.unproven

    def to_dict(self) -> dict[str, object]:
        """Return the resolution as plain JSON values."""
        return {
            "model": self.config.path,
            "architectures": list(self.config.architectures),
            "runtime": self.runtime.name,
            "role": self.runtime.role,
            "contract": self.contract.name,
            "path": self.path,
            "arch": self.contract.arch,
            "family": self.contract.model.family,
            "identities": self.contract.identities.to_dict(),
            "usable": self.usable,
            "facts": dict(self.facts),
            "refused": [one.to_dict() for one in self.refused],
            "regions": [one.to_dict() for one in self.regions],
            "notes": list(self.runtime.notes),
        }


def shipped_contracts() -> list[tuple[Path, Contract]]:
    """Return every shipped contract with its path, by name."""
    return [(path, Contract.load(path)) for path in sorted(library().glob("*.yaml"))]


def resolve(
    config: ModelConfig,
    runtime: str,
    *,
    arch: str | None = None,
    contracts: Iterable[tuple[Path, Contract]] | None = None,
    store: Store | None = None,
    now: float | None = None,
) -> list[Resolution]:
    """Resolve a model for a runtime on an arch, or on every arch that has a contract for it, by arch.

    `contracts` and `store` default to what is shipped, `now` (Unix seconds) to the clock. Raises ContractError for a model no
    contract speaks of, naming the nearest families, and for a config that cannot be read.
    """
    side = RUNTIMES.get(runtime)
    if side is None:
        raise ContractError(f"no runtime {runtime!r}", fix=f"use one of {', '.join(sorted(RUNTIMES))}")
    known = list(shipped_contracts() if contracts is None else contracts)
    found = [(path, one) for path, one in known if set(config.architectures) & set(one.model.architectures)]
    if not found:
        raise _unknown(config, [one for _, one in known])
    here = [(path, one) for path, one in found if arch in (None, one.arch)]
    if not here:
        archs = ", ".join(sorted({one.arch for _, one in found}))
        raise ContractError(
            f"no contract of {found[0][1].model.family} for arch {arch}",
            path=config.path,
            field="architectures",
            fix=f"there are contracts for {archs}",
        )
    facts = facts_of(config)
    moment = time.time() if now is None else now
    held = default_store() if store is None else store
    out = [_resolution(config, side, path, one, facts, held, moment) for path, one in here]
    return sorted(out, key=lambda one: (one.contract.arch, len(one.refused), one.contract.name))


def _mentioning(config: ModelConfig) -> list[tuple[Path, Contract]]:
    # reading a file is cheap beside checking it, so those that cannot be meant are not loaded
    paths = [
        path
        for path in sorted(library().glob("*.yaml"))
        if any(name in path.read_text(encoding="utf-8") for name in config.architectures)
    ]
    return [(path, Contract.load(path)) for path in paths]


def _unknown(config: ModelConfig, contracts: list[Contract]) -> ContractError:
    families = {name: one.model.family for one in contracts for name in one.model.architectures}
    near = difflib.get_close_matches(config.architectures[0], families, n=3, cutoff=0.3)
    words = ", ".join(f"{families[name]} ({name})" for name in near) or ", ".join(
        sorted(set(families.values()))
    )
    return ContractError(
        f"no contract for {' or '.join(config.architectures)}",
        path=config.path,
        field="architectures",
        fix=f"the nearest families are {words}; see isoexec contract list",
    )


def _resolution(
    config: ModelConfig,
    runtime: Runtime,
    path: Path,
    contract: Contract,
    facts: Mapping[str, Value],
    store: Store,
    now: float,
) -> Resolution:
    cases = set(contract.cases_of(runtime.role))
    mine = {one.region for one in contract.composition if cases & set(one.cases)}
    states = [one for one in region_states(contract, store, now=now, role=runtime.role) if one.region in mine]
    return Resolution(
        config=config,
        runtime=runtime,
        contract=contract,
        path=str(path),
        facts=facts,
        refused=tuple(_refused(contract, runtime, facts)),
        regions=tuple(states),
    )


def _refused(contract: Contract, runtime: Runtime, facts: Mapping[str, Value]) -> list[FactRefusal]:
    known = {**derived_widths(facts), **facts}
    out = []
    for name, constraint in sorted(contract.model.facts.items()):
        found = known.get(name)
        if found is None or not constraint.admits(found):
            out.append(_refusal(name, str(constraint), "nothing" if found is None else str(found)))
    dtype = facts.get("dtype")
    if dtype is not None and dtype not in contract.claims.dtypes:
        out.append(_refusal("dtype", " or ".join(sorted(contract.claims.dtypes)), str(dtype)))
    for limit, value in runtime.refusals(contract.arch, facts):
        wanted = f"{limit.admitted}, as the {runtime.name} adapter has it"
        out.append(
            FactRefusal(
                fact=limit.fact,
                field=FIELDS[limit.fact],
                wanted=wanted,
                found=str(value),
                fix=limit.fix,
            )
        )
    if not runtime.serves(contract.arch, contract.model.family):
        builds = ", ".join(
            " for ".join(filter(None, (f"{build} on {arch}", " and ".join(runtime.families.get(arch, ())))))
            for arch, build in runtime.builds.items()
        )
        out.append(
            FactRefusal(
                fact="arch",
                field=f"--runtime {runtime.name}",
                wanted=f"an adapter that installs {contract.model.family} on {contract.arch}",
                found=builds,
                fix="watch the run with this contract, or take one of the adapter's archs",
            )
        )
    return out


def _refusal(fact: str, wanted: str, found: str) -> FactRefusal:
    return FactRefusal(
        fact=fact,
        field=FIELDS.get(fact, fact),
        wanted=wanted,
        found=found,
        fix=_FIXES.get(fact, _ANOTHER),
    )


def region_states(contract: Contract, store: Store, *, now: float, role: str = "") -> list[RegionState]:
    """Return every region's state, proven ones first, each part in the contract's order; `role` narrows its providers."""
    refused = unproven(contract, store, now=now)
    merged: dict[str, list[Binding]] = {}
    for binding in contract.composition:
        merged.setdefault(binding.region, []).append(binding)
    states = [
        _state(contract, name, bindings, refused.get(name, []), role) for name, bindings in merged.items()
    ]
    return sorted(states, key=lambda state: not state.proven)


def _state(
    contract: Contract, region: str, bindings: list[Binding], refused: list[Refusal], role: str
) -> RegionState:
    functions = sorted({one.function for one in bindings})
    roles = {
        case.role
        for case in contract.cases
        if any(case.name in one.cases for one in bindings) and role in ("", case.role)
    }
    serving = [one for one in contract.providers if one.function in functions and roles & set(one.roles)]
    missing = sorted(
        function
        for function in functions
        if not all(any(one.function == function and r in one.roles for one in serving) for r in roles)
    )
    if missing:
        kind = "no kernel"
        reasons = [f"no provider computes {function} on {contract.arch}" for function in missing]
    elif refused and all(one.rule in ("IX009", "IX011") for one in refused):
        kind, reasons = "no evidence", ["no gate's record discharges it; run its gate (isoexec gate run)"]
    elif refused:
        kind, reasons = (
            "evidence refused",
            [
                f"{one.name}: wanted {one.wanted}, found {one.found}; {one.fix} ({one.rule})"
                for one in refused
            ],
        )
    else:
        kind, reasons = "proven", []
    return RegionState(
        region=region,
        ops=tuple(dict.fromkeys(op for one in bindings for op in one.ops)),
        function=", ".join(functions),
        constants=bindings[0].constants,
        providers=tuple(sorted(one.name for one in serving)),
        kind=kind,
        reasons=tuple(reasons),
    )
