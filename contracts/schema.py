# SPDX-License-Identifier: Apache-2.0
"""The contract: loaded strictly from YAML or a dict, written as one canonical dict, named by three digests.

Parts are in `isoexec.contracts.parts`; meaning across parts is checked by `isoexec.contracts.lint`.
"""

# ruff: noqa: RUF009  (wire() makes a dataclass field, not a shared default)
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from isoexec.contracts.errors import ContractError
from isoexec.contracts.identities import Identities, identities_of
from isoexec.contracts.kinds import Int, ListOf, MapOf, Record, Scalar, Text, read_record, schema_of, wire
from isoexec.contracts.kinds import write_record as _write
from isoexec.contracts.loading import Document, Place, read
from isoexec.contracts.parts import Binding, Case, Claims, Discharge, Model, Provider, Value

__all__ = ["SCHEMA_VERSION", "Contract", "RegionBinding", "json_schema", "library"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class RegionBinding:
    """What one region computes and who may compute it; `constants` are the function's, by name."""

    region: str
    function: str
    constants: Mapping[str, Value]
    cases: tuple[str, ...]
    ops: tuple[str, ...]
    route: str
    discharge: Discharge
    providers: tuple[Provider, ...]

    def providers_for(self, role: str) -> tuple[Provider, ...]:
        """Return the providers admitted for a role, by name."""
        return tuple(provider for provider in self.providers if role in provider.roles)

    def provider(self, role: str) -> Provider:
        """Return the one provider admitted for a role; raises ContractError for none, or a choice."""
        found = self.providers_for(role)
        if len(found) != 1:
            names = ", ".join(provider.name for provider in found) or "none"
            raise ContractError(
                f"{len(found)} providers of {self.function} serve the {role}: {names}",
                field=f"composition[{self.region}]",
                fix="admit one, or choose with providers_for(role)",
            )
        return found[0]


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What a rollout engine and a trainer promise to compute, and how."""

    schema_version: int = wire(Int(), "version of this format, 1")
    name: str = wire(Text(), "name of the contract; changes no bit")
    arch: str = wire(Text(), "arch the composition is proven on")
    model: Model = wire(Record(Model), "the logical model")
    cases: tuple[Case, ...] = wire(
        ListOf(Record(Case), least=1, key=("name",)), "every way a logprob comes to be"
    )
    composition: tuple[Binding, ...] = wire(
        ListOf(Record(Binding), least=1, key=("region", "cases")),
        "which region computes what, in which cases",
    )
    providers: tuple[Provider, ...] = wire(
        ListOf(Record(Provider), least=1, key=("name", "function", "kind")), "who may compute a function"
    )
    claims: Claims = wire(Record(Claims), "topology, state, parity, environment")
    deployment_section: Mapping[str, Value] = wire(
        MapOf(Scalar()), "settings proven not to change bits", default={}, name="deployment"
    )

    def problem(self) -> tuple[str, str] | None:
        if self.schema_version != SCHEMA_VERSION:
            return (
                f"schema_version {self.schema_version} is not known",
                f"write schema_version {SCHEMA_VERSION}",
            )
        return None

    @classmethod
    def load(cls, path: str | Path) -> Contract:
        """Load a contract file; raises ContractError naming path, line, field and fix."""
        return cls.from_document(read(path))

    @classmethod
    def from_document(cls, document: Document) -> Contract:
        """Make a contract of a parsed file."""
        return cls._checked(document.value, document.place)

    @classmethod
    def from_dict(cls, data: Mapping[str, object], path: str = "") -> Contract:
        """Make a contract of plain values, such as a canonical dict from the wire."""
        return cls._checked(data, Place(path=path))

    @classmethod
    def _checked(cls, value: object, place: Place) -> Contract:
        made = read_record(cls, value, place)
        if not isinstance(made, cls):
            raise place.error("is not a contract", "start from a shipped contract")
        return made

    def to_dict(self) -> dict[str, object]:
        """Return the canonical dict: sets in order, fields at their default left out."""
        return _write(self)

    @cached_property
    def identities(self) -> Identities:
        """The three digests and the sections that made them."""
        return identities_of(self.to_dict())

    @property
    def semantic(self) -> str:
        """Digest of the logical model."""
        return self.identities.semantic

    @property
    def numerical_policy(self) -> str:
        """Digest of everything that can change a bit or what is claimed of it."""
        return self.identities.numerical_policy

    @property
    def deployment(self) -> str:
        """Digest of what is proven not to change bits; the section itself is `deployment_section`."""
        return self.identities.deployment

    @property
    def regions(self) -> tuple[str, ...]:
        """Names of the regions, sorted."""
        return tuple(sorted({binding.region for binding in self.composition}))

    def case(self, name: str) -> Case:
        """Return a case; raises ContractError for a name that is none, which is a logprob path to refuse."""
        for case in self.cases:
            if case.name == name:
                return case
        known = ", ".join(sorted(case.name for case in self.cases))
        raise ContractError(f"no case {name!r}", field="cases", fix=f"use one of {known}, or add the case")

    def cases_of(self, role: str) -> tuple[str, ...]:
        """Return the names of a role's cases, sorted."""
        return tuple(sorted(case.name for case in self.cases if case.role == role))

    def region(self, name: str, case: str | None = None) -> RegionBinding:
        """Return what a region is bound to, in one case or, where all its cases agree, in all.

        Raises ContractError for an unknown region, and when bindings differ by case and none is given.
        """
        found = [b for b in self.composition if b.region == name and (case is None or case in b.cases)]
        if not found:
            where = f" in case {case}" if case else ""
            raise ContractError(
                f"no region {name!r}{where}", field="composition", fix=f"use one of {', '.join(self.regions)}"
            )
        first = found[0]
        for other in found[1:]:
            if (other.function, dict(other.constants)) != (first.function, dict(first.constants)):
                raise ContractError(
                    f"bound to {first.function} and {other.function}, with constants, by case",
                    field=f"composition[{name}]",
                    fix="name the case",
                )
        providers = [provider for provider in self.providers if provider.function == first.function]
        return RegionBinding(
            region=name,
            function=first.function,
            constants=first.constants,
            cases=tuple(sorted({one for binding in found for one in binding.cases})),
            ops=tuple(sorted({one for binding in found for one in binding.ops})),
            route=first.route,
            discharge=first.discharge,
            providers=tuple(sorted(providers, key=lambda provider: provider.name)),
        )


def library(name: str = "") -> Path:
    """Return the path of a shipped contract, or of their folder for ""; refuses an unknown name."""
    folder = Path(__file__).parent / "library"
    if not name:
        return folder
    path = folder / f"{name}.yaml"
    known = sorted(one.stem for one in folder.glob("*.yaml"))
    if name not in known:
        raise ContractError(
            f"no shipped contract {name!r}", path=str(folder), fix=f"use one of {', '.join(known)}"
        )
    return path


def json_schema(of: str = "contract") -> dict[str, object]:
    """Return the JSON Schema of a contract's plain values, as YAML or canonical JSON hold them, or of an evidence record's."""
    from isoexec.contracts.evidence import EvidenceRecord  # it is made of a contract's parts

    cls: type = {"contract": Contract, "evidence": EvidenceRecord}[of]
    words = {"contract": "contract", "evidence": "evidence record"}[of]
    defs: dict[str, object] = {}
    root = schema_of(cls, defs)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:isoexec:{of}:v1",
        "title": f"IsoExec {words}, version 1",
        **root,
        "$defs": dict(sorted(defs.items())),
    }
