# SPDX-License-Identifier: Apache-2.0
"""Looks at every record of a store, and at what contracts say of them, and runs a sample of their checks again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from isoexec.contracts.discharge import Live, refusals
from isoexec.contracts.errors import EvidenceError, IsoExecError
from isoexec.contracts.evidence import Check, EvidenceRecord, Store, moment, stamp
from isoexec.contracts.schema import Contract
from isoexec.contracts.signing import signers
from isoexec.kernels import registry
from isoexec.kernels.gates.checking import Gate, GateError
from isoexec.kernels.gates.degrees import beyond, said
from isoexec.kernels.gates.found import device_for, environment, gate_for
from isoexec.kernels.gates.running import live_sources

__all__ = ["Finding", "Held", "judge", "names", "refused", "rerun", "sample", "unproven"]

_DAY = 86400.0
_UNPROVEN = ("IX009", "IX011")  # a provider, a binding without evidence
_IDLE = frozenset({"python"})  # named in a record, and no part of what a kernel computes


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One field that is not as it must be: of a record, or of a contract that names it. `where` is the digest or the file."""

    where: str
    field: str
    wanted: str
    found: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.field}: wanted {self.wanted}, found {self.found}; {self.fix}"


@dataclass(frozen=True, kw_only=True)
class Held:
    """A record as it lies in the store: its digest, the record where it can be read, who signed it, what is not as it must be.

    `notes` say what could not be compared here, and why.
    """

    digest: str
    record: EvidenceRecord | None
    signers: frozenset[str]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()


def judge(store: Store, digest: str, *, now: float) -> Held:
    """Recompute a record's digest and compare its source, gate, environment, dates, checks and signatures with what is here."""
    short = digest[:19]
    try:
        record = store.read(digest)
    except EvidenceError as error:
        finding = Finding(
            where=short, field=error.field, wanted=error.wanted, found=error.found, fix=error.fix
        )
        return Held(digest=digest, record=None, signers=frozenset(), findings=(finding,))
    found = [Finding(where=short, field=f, wanted=w, found=g, fix=fix) for f, w, g, fix in _of(record, now)]
    notes: list[str] = []
    there, note = _environment(record)
    found += [
        Finding(
            where=short,
            field=f"environment.{name}",
            wanted=wanted,
            found=has,
            fix="run the gate in this environment",
        )
        for name, wanted, has in there
    ]
    notes += [note] if note else []
    notes += _not_again(record)
    signed: frozenset[str] = frozenset()
    try:
        signed = signers(store, digest)
    except EvidenceError as error:
        found.append(
            Finding(where=short, field=error.field, wanted=error.wanted, found=error.found, fix=error.fix)
        )
    return Held(digest=digest, record=record, signers=signed, findings=tuple(found), notes=tuple(notes))


def _of(record: EvidenceRecord, now: float) -> Iterator[tuple[str, str, str, str]]:
    again = "run the gate again (isoexec gate run)"
    for check in record.checks:
        for failure in check.failures():
            yield f"checks.{check.family}", "a check that holds", failure, again
    if moment(record.expires) <= now:
        yield "expires", f"later than {stamp(now)}", record.expires, again
    if moment(record.made) > now + _DAY:
        yield "made", f"not after {stamp(now)}", record.made, "set the clock right"
    yield from _provider(record)


def _provider(record: EvidenceRecord) -> Iterator[tuple[str, str, str, str]]:
    from isoexec.kernels.providers.catalogue import provider_for
    from isoexec.kernels.providers.certify import gate_digest

    again = "run the gate again (isoexec gate run, isoexec provider certify)"
    subject = record.provider
    try:
        provider = provider_for(subject.name, record.function, record.arch)
    except IsoExecError as error:
        yield "provider.name", "a provider of this release", f"{subject.name}: {error}", again
        return
    if provider.kind == "kernel":
        source = registry.source_digest(record.function, record.arch)
        if subject.source != source:
            yield "provider.source", f"{source}, which is installed here", str(subject.source), again
    try:
        gate = gate_digest(provider)
        if record.gate != gate:
            yield "gate", f"{gate}, which is installed here", record.gate, again
        device_for(record.arch)
        here = provider.subject()
    except GateError:
        return  # of an arch that is not here: what it runs under is not looked at, and a note says so
    except (IsoExecError, ImportError) as error:
        yield "provider", "one that can be looked at", str(error), "install what it needs"
        return
    for name in ("kind", "version", "settings"):
        if getattr(subject, name) != getattr(here, name):
            yield (
                f"provider.{name}",
                f"{getattr(here, name)}, which is here",
                str(getattr(subject, name)),
                again,
            )


def _environment(record: EvidenceRecord) -> tuple[list[tuple[str, str, str]], str]:
    try:
        device_for(record.arch)
    except GateError as error:
        return [], f"environment not compared: {error.found} here"
    here = environment(record.arch)
    return [
        (name, f"{here.get(name, 'unknown')}, which is here", value)
        for name, value in sorted(record.environment.items())
        if name not in _IDLE and name in here and here[name] != value
    ], ""


def names(contract: Contract) -> dict[str, list[str]]:
    """The digests that a contract names, each with where."""
    out: dict[str, list[str]] = {}
    for provider in contract.providers:
        if provider.discharge.evidence:
            out.setdefault(provider.discharge.evidence, []).append(f"providers[{provider.name}]")
    for binding in contract.composition:
        if binding.discharge.evidence:
            out.setdefault(binding.discharge.evidence, []).append(f"composition[{binding.region}]")
    return out


def _not_again(record: EvidenceRecord) -> list[str]:
    """What of a record this machine has too few ranks or other GPUs to run again."""
    if record.provider.kind != "kernel":
        return []
    try:
        device_for(record.arch)
        gate = gate_for(record.function, record.arch)
    except (IsoExecError, ImportError):
        return []  # another arch's, or of a function that is no longer here: findings and notes say so
    found = {check.family: said(beyond(gate, check)) for check in record.checks}
    return [
        f"{family} covers {what}, which this machine's ranks and GPUs are not enough for"
        for family, what in found.items()
        if what
    ]


def unproven(contract: Contract) -> list[str]:
    """The regions that a contract itself says are unproven: it promises nothing of them, and an adapter refuses them."""
    nobody = {p.function for p in contract.providers if p.discharge.kind == "none"} - {
        p.function for p in contract.providers if p.discharge.kind != "none"
    }
    return sorted(
        {b.region for b in contract.composition if b.discharge.kind == "none" or b.function in nobody}
    )


def refused(contract: Contract, store: Store, *, now: float) -> list[Finding]:
    """What keeps what a contract says is proven from being so in this process; warnings are left out."""
    try:
        device_for(contract.arch)
        live = Live(
            arch=contract.arch, sources=live_sources(contract.arch), environment=environment(contract.arch)
        )
    except GateError:
        live = None  # an arch that is not here: judged as the linter does
    return [
        Finding(
            where=f"{contract.name}: {one.path}",
            field=f"{one.rule} {one.name}",
            wanted=one.wanted,
            found=one.found,
            fix=one.fix,
        )
        for one in refusals(contract, store, now=now, live=live)
        if one.severity == "error" and not (one.rule in _UNPROVEN and one.found == "kind none")
    ]


def sample(held: Sequence[Held], count: int, seed: int) -> list[tuple[Held, Check]]:
    """`count` checks of readable records of own kernels that can be run here, by a seed."""
    able: list[tuple[Held, Check]] = []
    for one in held:
        if one.record is None or one.record.provider.kind != "kernel" or one.findings:
            continue
        try:
            device_for(one.record.arch)
        except GateError:
            continue
        gate = gate_for(one.record.function, one.record.arch)
        able += [(one, check) for check in one.record.checks if not beyond(gate, check)]
    return random.Random(seed).sample(able, min(count, len(able)))  # noqa: S311 - a sample, no secret


def rerun(held: Held, check: Check) -> list[Finding]:
    """Run one check again: what it compared, and what each control showed, must be what the record says."""
    record = held.record
    assert record is not None
    gate: Gate = gate_for(record.function, record.arch)
    again = gate.run(
        check.family, check.constants, full=record.profile == "full", device=device_for(record.arch)
    )
    where = f"{held.digest[:19]} {record.function} {check.family}"
    fix = "the record is not of this kernel here: run the gate again"
    pairs: Mapping[str, tuple[object, object]] = {
        "elements": (check.elements, again.elements),
        "differing": (check.differing, again.differing),
        "domain": (_plain(check), _plain(again)),
        "controls": (
            {one.name: (one.elements, one.differing) for one in check.controls},
            {one.name: (one.elements, one.differing) for one in again.controls},
        ),
    }
    return [
        Finding(where=where, field=name, wanted=str(said), found=str(now), fix=fix)
        for name, (said, now) in pairs.items()
        if said != now
    ]


def _plain(check: Check) -> dict[str, list[str]]:
    return {name: sorted(map(str, values)) for name, values in check.domain.items()}
