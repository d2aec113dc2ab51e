# SPDX-License-Identifier: Apache-2.0
"""Certifies a provider: the function's conformance family under given constants, and a record of it where every check holds."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from isoexec.contracts.canonical import encode
from isoexec.contracts.digests import digest_bytes, digest_of
from isoexec.contracts.errors import EvidenceError
from isoexec.contracts.evidence import Check, EvidenceRecord, Store, default_store, moment, stamp
from isoexec.contracts.parts import Provider as Admitted
from isoexec.contracts.schema import Contract
from isoexec.kernels import registry, switches
from isoexec.kernels.gates import checking
from isoexec.kernels.gates.found import constants_of, contracts_for, device_for, environment, gate_for
from isoexec.kernels.gates.running import single_thread
from isoexec.kernels.providers.catalogue import Provider, provider_for
from isoexec.kernels.providers.conformance import Watched, conformance

__all__ = ["CertificationError", "certify", "certify_for", "constants_for", "gate_digest"]

Value = str | int | bool
Constants = Mapping[str, Value]
_DAY = 86400.0
_DEFAULTS: dict[str, Value] = {"k_block": 64, "kv_segment": 32, "vocab_leaves": 8, "boundary": "model"}


class CertificationError(EvidenceError):
    """A provider whose bits are not the function's: `examples` are elements that differ, in words."""

    def __init__(
        self, provider: str, function: str, failures: Sequence[str], examples: Sequence[str]
    ) -> None:
        self.examples = tuple(examples)
        found = "; ".join(failures) + ("".join(f"; {example}" for example in examples))
        super().__init__(
            field=f"provider {provider}",
            wanted=f"the bits of {function}",
            found=found,
            fix="use another provider of this function, or another version of this one",
        )


def gate_digest(provider: Provider) -> str:
    """Digest of what decides the result: an own kernel's gate; or how the library is called and compared, and the framework.

    How a provider is described, listed or looked up is no part of it.
    """
    if provider.make is None:
        return gate_for(provider.function, provider.arch).digest()
    gates, here = Path(checking.__file__).parent, Path(__file__).parent
    files = {f"gates/{name}": gates / name for name in ("checking.py", "forward.py", "inputs.py")}
    files |= {name: here / name for name in ("conformance.py", "versions.py")}
    if provider.function == "linear.mma_chain/1":  # compares what the own kernel's gate compares
        files["gate.py"] = gate_for(provider.function, provider.arch).path
    parts = {name: digest_bytes(_lines(path)) for name, path in files.items()}
    return digest_of(parts | {"call": digest_bytes(inspect.getsource(provider.make).encode())})


def _lines(path: Path) -> bytes:
    return b"\n".join(line.rstrip() for line in path.read_bytes().splitlines())


def constants_for(function: str, arch: str, contracts: Iterable[Contract] = ()) -> list[dict[str, Value]]:
    """The sets of constants that contracts of the arch bind the function with; a usual set where none does."""
    bound = constants_of(function, [*contracts_for(arch), *(c for c in contracts if c.arch == arch)])
    if bound:
        return bound
    declared = registry.FUNCTIONS[function]
    return [{**dict(declared.fixed), **{name: _DEFAULTS[name] for name in declared.free}}]


def certify(
    provider: Provider,
    constants: Sequence[Constants],
    *,
    full: bool,
    valid_days: int = 365,
    now: float | None = None,
) -> EvidenceRecord:
    """Compare the provider with its function under each set of constants and return the record.

    Raises `CertificationError` where a bit differs or a control passes, `EvidenceError` or `GateError` where it cannot be run
    here. Needs the arch's hardware; a full run on a CPU takes seconds, on a GPU up to a minute.
    """
    device = device_for(provider.arch)
    checks: list[Check] = []
    examples: list[str] = []
    with single_thread(), torch.no_grad(), provider.held():
        before = environment(provider.arch) | _switches(provider)
        subject = provider.subject()
        for one in constants:
            registry.check_constants(provider.function, one)
            if provider.make is None:
                gate = gate_for(provider.function, provider.arch)
                checks.append(gate.run("conformance", one, full=full, device=device))
                continue
            run = Watched(constants=one, full=full, device=device)
            conformance(run, provider.function, provider.make(one))
            checks.append(run.result("conformance"))
            examples += run.examples
        after = environment(provider.arch) | _switches(provider)
    moved = [f"switch {line}" for line in switches.changes(before, after)]
    failures = [*(why for check in checks for why in check.failures()), *moved]
    if failures or not checks:
        raise CertificationError(provider.name, provider.function, failures or ["no constants"], examples)
    made = time.time() if now is None else now
    return EvidenceRecord(
        schema_version=1,
        function=provider.function,
        provider=subject,
        arch=provider.arch,
        environment=before,
        profile="full" if full else "quick",
        gate=gate_digest(provider),
        made=stamp(made),
        expires=stamp(made + valid_days * _DAY),
        checks=tuple(checks),
    )


def _switches(provider: Provider) -> dict[str, str]:
    """The switches that may change a library's bits, and the variables that are set, as a record names them."""
    if provider.make is None:
        return {}
    found = {f"switches.{name}": str(value) for name, value in switches.read().items()}
    return found | {f"variables.{name}": value for name, value in switches.variables().items() if value}


def certify_for(
    contract: Contract,
    provider: Admitted,
    function: str,
    constants: Iterable[Constants],
    *,
    store: Store | None = None,
    now: float | None = None,
) -> str:
    """Digest of evidence that an admitted provider, as it is installed here, has the function's bits under these constants.

    Evidence in the store is taken where it is of this build; else the provider is certified on the spot (quick) and the record
    kept, if `claims.evidence.certify` is `install`. Raises `EvidenceError` naming what was wanted, found and what to do: for a
    provider that is not the admitted one, one that may not be certified here, and one whose bits differ.
    """
    here = store or default_store()
    at = time.time() if now is None else now
    arch = provider.arch or contract.arch
    known = provider_for(provider.name, function, arch)
    place = f"providers[{function}|{provider.name}]"
    found = known.subject()
    for name in ("kind", "source", "version", "settings"):
        wanted, ours = getattr(provider, name), getattr(found, name)
        if name == "settings":
            wanted, ours = dict(wanted), dict(ours)
        if wanted != ours:
            raise EvidenceError(
                field=f"{place}.{name}",
                wanted=str(wanted),
                found=f"{ours}, which is installed here",
                fix="install the admitted one, or certify this one and admit it (isoexec provider certify)",
            )
    sets = [dict(one) for one in {encode(dict(one)): one for one in constants}.values()]
    policy = contract.claims.evidence
    for record in here.find(function=function, provider=provider.name, arch=arch):
        too_old = policy.max_age_days is not None and at - moment(record.made) > policy.max_age_days * _DAY
        if record.provider != found or moment(record.expires) <= at or too_old:
            continue
        if not _same_build(record, environment(arch)):
            continue
        held = [record.check("conformance", one) for one in sets]
        if all(check is not None and not check.failures() for check in held):
            return record.digest
    if policy.certify != "install":
        raise EvidenceError(
            field=f"{place}.discharge.evidence",
            wanted=f"a record of {provider.name} {provider.version or provider.source} with {len(sets)} sets of constants",
            found=f"none of this build in {', '.join(map(str, here.paths))}",
            fix=f"isoexec provider certify {provider.name} --function {function} --arch {arch}, or let the contract say "
            "claims.evidence.certify: install",
        )
    return here.write(certify(known, sets, full=False, now=at))


def _same_build(record: EvidenceRecord, here: Mapping[str, str]) -> bool:
    """Whether what both environments name is the same: another torch, GPU or instruction set is another build."""
    return all(record.environment.get(name) == value for name, value in here.items() if name != "threads")
