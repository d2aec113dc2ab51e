# SPDX-License-Identifier: Apache-2.0
"""Makes records that discharge a contract, for tests of what is done with evidence; no kernel ran for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from isoexec.contracts.discharge import degrees_for, families_for
from isoexec.contracts.evidence import Check, Control, EvidenceRecord, Store, Subject, stamp
from isoexec.contracts.operators import dtypes_of
from isoexec.contracts.parts import Value
from isoexec.contracts.schema import Contract

NOW = 1_800_000_000.0
DAY = 86400.0
GATE = "sha256:" + "9" * 64


def record_for(contract: Contract, function: str, provider: str) -> EvidenceRecord:
    """The record that discharges one provider of a function and all bindings of the function, made a day before NOW."""
    held = next(p for p in contract.providers if (p.function, p.name) == (function, provider))
    checks: dict[tuple[str, str], Check] = {}
    for binding in contract.composition:
        if binding.function != function:
            continue
        dtypes = {d for op in binding.ops for d in dtypes_of(op, contract.claims.dtypes)}
        for family in (*families_for(contract, binding), "conformance"):
            domain: dict[str, tuple[Value, ...]] = {
                "dtype": tuple(sorted(dtypes)),
                "case": tuple(sorted(binding.cases)),
            }
            if family == "partition_invariance":
                domain |= degrees_for(contract, binding)
            key = family, repr(sorted(binding.constants.items()))
            if key in checks:  # another region binds the function with these constants: one check covers both
                before = checks[key].domain
                names = {**before, **domain}
                domain = {n: tuple(sorted({*before.get(n, ()), *domain.get(n, ())}, key=str)) for n in names}
            checks[key] = Check(
                family=family,
                constants=binding.constants,
                domain=domain,
                elements=1000,
                differing=0,
                controls=(Control(name="one_bit", elements=1000, differing=1),),
            )
    return EvidenceRecord(
        schema_version=1,
        function=function,
        provider=Subject(
            name=held.name, kind=held.kind, source=held.source, version=held.version, settings=held.settings
        ),
        arch=contract.arch,
        environment={"torch": "2.13.0"},
        profile="full",
        gate=GATE,
        made=stamp(NOW - DAY),
        expires=stamp(NOW + 300 * DAY),
        checks=tuple(checks.values()),
    )


def proven(contract: Contract, store: Store, records: Iterable[EvidenceRecord] = ()) -> Contract:
    """Put records into the store, made-up ones where none is given, and return the contract that names them."""
    given = {(one.function, one.provider.name): one for one in records}
    data = contract.to_dict()
    digests: dict[str, str] = {}
    for entry in _entries(data, "providers"):
        key = (str(entry["function"]), str(entry["name"]))
        digest = store.write(given.get(key) or record_for(contract, *key))
        entry["discharge"] = {"kind": "evidence", "evidence": digest}
        digests.setdefault(key[0], digest)
    for entry in _entries(data, "composition"):
        entry["discharge"] = {"kind": "evidence", "evidence": digests[str(entry["function"])]}
    return Contract.from_dict(data)


def _entries(data: dict[str, object], name: str) -> list[dict[str, object]]:
    entries = data[name]
    if not isinstance(entries, list):
        raise TypeError(name)
    return entries


@pytest.fixture
def make_record() -> Callable[[Contract, str, str], EvidenceRecord]:
    return record_for


@pytest.fixture
def make_proven() -> Callable[..., Contract]:
    return proven


@pytest.fixture
def now() -> float:
    """The time at which the made-up records are a day old and far from expiry."""
    return NOW
