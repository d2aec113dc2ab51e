# SPDX-License-Identifier: Apache-2.0
"""Runs gates, keeps what is done so that an interrupted run goes on, and makes records of gates that hold as a whole."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from isoexec.contracts.canonical import encode
from isoexec.contracts.digests import digest_of
from isoexec.contracts.errors import ContractError, IsoExecError
from isoexec.contracts.evidence import Check, EvidenceRecord, Store, moment, put_file, stamp
from isoexec.contracts.halting import StateDirectory
from isoexec.contracts.kinds import read_record, write_record
from isoexec.contracts.loading import Place
from isoexec.contracts.pinning import pin
from isoexec.contracts.schema import Contract
from isoexec.kernels import registry
from isoexec.kernels.gates.checking import Gate, Value, subject
from isoexec.kernels.gates.degrees import lacking, possible
from isoexec.kernels.gates.found import constants_of, device_for, environment, gate_for, hold_switches

__all__ = [
    "Job",
    "Outcome",
    "State",
    "carry_over",
    "jobs_of",
    "live_sources",
    "pin_contract",
    "proven",
    "record_of",
    "run_gates",
    "single_thread",
]

_DAY = 86400.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One check to run: a gate's family under one set of constants, quick or `full`."""

    gate: Gate
    family: str
    constants: Mapping[str, Value]
    full: bool

    @property
    def label(self) -> str:
        """What a progress bar says."""
        few = ", ".join(
            f"{name} {value}" for name, value in sorted(self.constants.items()) if name != "accumulate"
        )
        return f"{self.gate.function} {self.family}" + (f" ({few})" if few else "")

    def key(self, found: Mapping[str, str]) -> str:
        """Name of its result: everything that a result is of. Another source, gate or environment is another name."""
        ours = subject(self.gate.function, self.gate.arch)
        return digest_of(
            {
                "function": self.gate.function,
                "arch": self.gate.arch,
                "source": ours.source,
                "gate": self.gate.digest(),
                "environment": dict(found),
                "family": self.family,
                "constants": dict(self.constants),
                "full": self.full,
            }
        ).removeprefix("sha256:")


class State:
    """Results of checks that held, one file each, in the work directory; those of a record that was written are removed."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or StateDirectory.default().path / "gates"

    def get(self, key: str) -> Check | None:
        """The result of that name, or None; what cannot be read is as if it were not there, and is run again."""
        try:
            value = json.loads((self.folder / f"{key}.json").read_bytes())
            check: Check = read_record(Check, value, Place(path=key))
        except (OSError, ValueError, ContractError):
            return None
        return None if check.failures() else check

    def put(self, key: str, check: Check) -> None:
        """Keep a result so that no reader ever sees half of it."""
        put_file(self.folder, f"{key}.json", encode(write_record(check)))

    def drop(self, keys: Iterable[str]) -> None:
        """Forget results."""
        for key in keys:
            (self.folder / f"{key}.json").unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one gate: its checks by job, those that were `kept` from an earlier run, and what broke."""

    gate: Gate
    checks: tuple[Check, ...]
    broken: tuple[str, ...] = ()
    kept: int = 0
    seconds: float = 0.0

    @property
    def failures(self) -> tuple[str, ...]:
        """Each reason why the gate proves nothing, with its family; empty when it holds."""
        found = [f"{one.family}: {why}" for one in self.checks for why in one.failures()]
        return (*found, *self.broken)

    @property
    def elements(self) -> int:
        """Elements compared as integers."""
        return sum(one.elements for one in self.checks)


def jobs_of(
    functions: Sequence[str],
    arch: str,
    contracts: Sequence[Contract],
    *,
    families: Sequence[str] = (),
    full: bool,
) -> list[Job]:
    """The checks to run for these functions, gate by gate; raises `GateError` for a function without a gate."""
    return [
        Job(gate=gate, family=family, constants=constants, full=full)
        for gate in (gate_for(function, arch) for function in functions)
        for constants in constants_of(gate.function, contracts)
        for family in gate.families
        if not families or family in families
    ]


def run_gates(
    jobs: Sequence[Job], state: State, *, fresh: bool = False, said: Callable[[Job, Check | None, bool], None]
) -> Iterator[Outcome]:
    """Run the checks and yield one outcome a gate; a check that an earlier run did is kept, unless `fresh`.

    `said(job, check, kept)` is told before a check is run (None) and after it. A check that raises does not hold; the others
    of its gate are run all the same.
    """
    arch = jobs[0].gate.arch if jobs else "cpu"
    device, found = device_for(arch), environment(arch)
    hold_switches(arch)
    by_gate: dict[str, list[Job]] = {}
    for job in jobs:
        by_gate.setdefault(job.gate.function, []).append(job)
    for own in by_gate.values():
        checks, broken, kept, began = [], [], 0, time.monotonic()
        for job in own:
            said(job, None, False)
            key = job.key(found)
            check = None if fresh else state.get(key)
            if check is not None and possible(job.gate, check):
                check = None  # of a machine with fewer ranks than this one
            kept += check is not None
            if check is None:
                try:
                    check = job.gate.run(job.family, job.constants, full=job.full, device=device)
                except Exception as error:  # noqa: BLE001 - a check that breaks is one that does not hold
                    broken.append(f"{job.family}: {type(error).__name__}: {error}")
                    continue
                if not check.failures():
                    state.put(key, check)
                said(job, check, False)
            else:
                said(job, check, True)
            checks.append(check)
        yield Outcome(
            gate=own[0].gate,
            checks=tuple(checks),
            broken=tuple(broken),
            kept=kept,
            seconds=time.monotonic() - began,
        )


def record_of(outcome: Outcome, *, full: bool, valid_days: int, now: float | None = None) -> EvidenceRecord:
    """The record of a gate that holds; raises `IsoExecError` for one that does not: what failed leaves no evidence."""
    if outcome.failures or not outcome.checks:
        raise IsoExecError(
            f"{outcome.gate.function}: no evidence of a gate that fails: {outcome.failures[:1]}"
        )
    made = time.time() if now is None else now
    return EvidenceRecord(
        schema_version=1,
        function=outcome.gate.function,
        provider=subject(outcome.gate.function, outcome.gate.arch),
        arch=outcome.gate.arch,
        environment=environment(outcome.gate.arch),
        profile="full" if full else "quick",
        gate=outcome.gate.digest(),
        made=stamp(made),
        expires=stamp(made + valid_days * _DAY),
        checks=outcome.checks,
    )


def _of_here(jobs: Sequence[Job], store: Store, *, now: float) -> Iterator[EvidenceRecord]:
    """Records of this source, gate and environment, newest first, that have not expired and are full where the jobs are."""
    gate = jobs[0].gate
    ours, here, digest = subject(gate.function, gate.arch), environment(gate.arch), gate.digest()
    for record in store.find(function=gate.function, provider=ours.name, arch=gate.arch):
        same = (record.provider, record.gate, dict(record.environment)) == (ours, digest, here)
        if same and moment(record.expires) > now and (record.profile == "full" or not jobs[0].full):
            yield record


def proven(jobs: Sequence[Job], store: Store, *, now: float) -> EvidenceRecord | None:
    """A record that says of this source, gate and environment what these checks of one gate would say, or None.

    It is whole, has not expired, is full where the jobs are, and covers every degree that could be run here.
    """
    for record in _of_here(jobs, store, now=now):
        held = [(job.gate, record.check(job.family, job.constants)) for job in jobs]
        if all(
            check is not None and not check.failures() and not possible(gate, check) for gate, check in held
        ):
            return record
    return None


def carry_over(jobs: Sequence[Job], store: Store, state: State, *, now: float) -> int:
    """Take what the newest record of this source, gate, environment and profile says of these jobs of one gate as already run.

    `run_gates` then runs what it lacks: other constants, families, and degrees that this machine has ranks for. Returns how many
    checks were taken over.
    """
    alike = (one for one in _of_here(jobs, store, now=now) if (one.profile == "full") == jobs[0].full)
    record = next(alike, None)
    if record is None:
        return 0
    found, taken = environment(record.arch), 0
    for job in jobs:
        check = record.check(job.family, job.constants)
        if check is None or check.failures():
            continue
        kept = state.get(job.key(found))
        if kept is None or lacking(job.gate, kept):
            state.put(job.key(found), check)
        taken += 1
    return taken


def pin_contract(path: Path, records: Iterable[EvidenceRecord]) -> list[str]:
    """Write the sources and records into a contract file that binds their functions; returns the functions that changed."""
    contract = Contract.load(path)
    ours = {record.function: record for record in records if record.arch == contract.arch}
    own = {p.function for p in contract.providers if p.kind == "kernel"} & set(ours)
    evidence = {function: ours[function].digest for function in own}
    return pin(path, {f: ours[f].provider.source or "" for f in own}, evidence)


@contextlib.contextmanager
def single_thread() -> Iterator[None]:
    """Kernels compute on one thread, as the contracts claim; the environment says so to processes that are started."""
    threads, said = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if said is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = said


def live_sources(arch: str) -> dict[str, str]:
    """The source digest of each function's own kernel of an arch, as `contracts.discharge.Live` takes it."""
    return {
        name: registry.source_digest(name, arch)
        for name, function in registry.FUNCTIONS.items()
        if arch in function.arch
    }
