# SPDX-License-Identifier: Apache-2.0
"""What shipped sm90 contracts would still lack, were every gate run in full on one GPU: judged from what gates cover and declare.

No GPU is needed: a check covers the same dtypes and cases at tiny sizes, and the degrees of its axes are what it declares beside
itself (`degrees.wants`). `python discharging.py` in this folder runs the gates in the interpreter and prints what is left.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from isoexec.contracts.discharge import Refusal, refusals
from isoexec.contracts.evidence import Check, Control, EvidenceRecord, Store, shipped, stamp
from isoexec.contracts.parts import Discharge
from isoexec.contracts.schema import Contract
from isoexec.kernels.gates.checking import subject
from isoexec.kernels.gates.degrees import wanted
from isoexec.kernels.gates.found import constants_of, contracts_for, gate_for

HERE = Path(__file__).parent
NOW = 1_900_000_000.0
Domain = Mapping[str, Any]


def record(function: str, domains: Mapping[str, Domain]) -> EvidenceRecord:
    """What a run of a function's gate would write, by the domain of each family; that it holds is taken as given."""
    gate, checks = gate_for(function, "sm90"), []
    for constants in constants_of(function, _contracts()):
        for family in gate.families:
            domain = {axis: tuple(values) for axis, values in domains[family].items()}
            # an axis that the check ran at all, it runs to the degrees that it declares
            domain |= {axis: degrees for axis, degrees in wanted(gate, family).items() if axis in domain}
            one = Control(name="a_fault", elements=1, differing=1)
            checks.append(
                Check(
                    family=family,
                    constants=constants,
                    domain=domain,
                    elements=1,
                    differing=0,
                    controls=(one,),
                )
            )
    return EvidenceRecord(
        schema_version=1,
        function=function,
        provider=subject(function, "sm90"),
        arch="sm90",
        environment={"torch": "any"},
        profile="full",
        gate=gate.digest(),
        made=stamp(NOW - 86400),
        expires=stamp(NOW + 86400),
        checks=tuple(sorted(checks, key=lambda one: (one.family, str(one.constants)))),
    )


@cache
def _contracts() -> tuple[Contract, ...]:
    return tuple(contracts_for("sm90"))


def left(found: Mapping[str, Mapping[str, Domain]], folder: Path) -> dict[str, list[Refusal]]:
    """By shipped sm90 contract, what keeps its bindings of these functions from being discharged by such records."""
    store, out = Store([folder]), {}
    made = {function: record(function, domains) for function, domains in found.items()}
    for one in made.values():
        store.write(one)
    for held in _contracts():
        contract = replace(
            held,
            providers=tuple(
                replace(p, source=made[p.function].provider.source, discharge=_by(made[p.function]))
                if p.function in made and p.kind == "kernel"
                else p
                for p in held.providers
            ),
            composition=tuple(
                replace(b, discharge=_by(made[b.function])) if b.function in made else b
                for b in held.composition
            ),
        )
        regions = {b.region for b in contract.composition if b.function in made}
        claims = [one for one in refusals(contract, store, now=NOW) if set(one.regions) & regions]
        if claims:
            out[contract.name] = claims
    return out


def _by(one: EvidenceRecord) -> Discharge:
    return Discharge(kind="evidence", evidence=one.digest)


def recorded(function: str) -> dict[str, Domain]:
    """What the newest shipped record of a function covers, by family."""
    found = Store([shipped()]).find(function=function, provider=subject(function, "sm90").name, arch="sm90")
    return {check.family: check.domain for check in found[0].checks} if found else {}


def main() -> None:
    """Print what is left of every contract: gates that the interpreter runs by what they cover now, others by their records."""
    from test_gated import FUNCTIONS  # type: ignore[import-not-found]

    said = subprocess.run(
        [sys.executable, "gated.py", *sys.argv[1:]], capture_output=True, text=True, check=True, cwd=HERE
    )
    covered: dict[str, dict[str, Domain]] = {}
    for name, one in json.loads(said.stdout).items():
        op, family = name.split()
        if "domain" not in one:
            print(name, *one["failures"])
            continue
        covered.setdefault(FUNCTIONS[op], {})[family] = one["domain"]
    functions = {b.function for c in _contracts() for b in c.composition} - set(covered)
    covered |= {function: held for function in functions if (held := recorded(function))}
    with tempfile.TemporaryDirectory() as folder:
        remaining = left(covered, Path(folder))
    for contract in _contracts():
        unknown = sorted({b.region for b in contract.composition if b.function not in covered})
        print(f"{contract.name}: {len(remaining.get(contract.name, ()))} refusals; no gate: {unknown}")
        for one in remaining.get(contract.name, ()):
            print(f"  {one}")


if __name__ == "__main__":
    main()
