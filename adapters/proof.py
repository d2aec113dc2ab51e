# SPDX-License-Identifier: Apache-2.0
"""Refuses what is not proven here and now: each binding's evidence is judged against this process before anything is installed.

Where the contract says ``claims.evidence.certify: install``, and the records it names are of another build alone (another torch,
another CPU), this machine's quick gates run first, in processes of their own; the user's store keeps what they prove.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog
import yaml

from isoexec.contracts.discharge import Live, Refusal, refusals
from isoexec.contracts.errors import EvidenceError, InstallError
from isoexec.contracts.evidence import Store, default_store
from isoexec.contracts.parts import Provider
from isoexec.contracts.schema import Contract
from isoexec.kernels import registry
from isoexec.kernels.providers.certify import certify_for
from isoexec.probes.attest import environment

if TYPE_CHECKING:
    from isoexec.adapters.base import Binding

__all__ = ["live", "require_evidence"]

_OTHER_BUILD = "IX050"
"""What a run on this machine mends; a record that is gone, edited, foreign or expired is refused."""
_LIMIT = 600.0  # seconds for the quick gate of one function


def live(functions: Iterable[str]) -> Live:
    """The process as evidence is judged against it: arch, sources of the kernels installed here for it, environment."""
    found = {name: str(value) for name, value in environment().items()}
    arch = found["arch"]
    here = [name for name in functions if arch in registry.FUNCTIONS[name].arch]
    return Live(
        arch=arch,
        sources={function: registry.source_digest(function, arch) for function in here},
        environment=found,
    )


def require_evidence(contract: Contract, bindings: Sequence[Binding]) -> None:
    """Return where every binding is proven; InstallError names the first field of its evidence that does not hold.

    Records are read anew at each call, from ISOEXEC_EVIDENCE and those that come with the package.
    """
    if not bindings:
        return
    here = live(sorted({b.function for b in bindings}))
    store = default_store()
    found = _errors(contract, bindings, store, here)
    if found and contract.claims.evidence.certify == "install" and not _beyond_mending(found):
        with _alone(store):  # whoever waited finds the records of the one before
            lacking = [one for one in _errors(contract, bindings, store, here) if one.rule == _OTHER_BUILD]
            regions = {region for one in lacking for region in one.regions}
            _certify(
                contract, sorted({b.function for b in bindings if b.region in regions}), store, here.arch
            )
        found = _errors(contract, bindings, store, here)
    if found:
        first = found[0]
        raise InstallError(
            region=next(b.region for b in bindings if b.region in first.regions),
            wanted=f"{first.path}: {first.name}: {first.wanted}",
            found=first.found,
            fix=first.fix,
        )


def _beyond_mending(found: Sequence[Refusal]) -> bool:
    """Whether a region would be refused whatever this machine proved of itself."""
    of_another_build = {region for one in found if one.rule == _OTHER_BUILD for region in one.regions}
    return any(not of_another_build.intersection(one.regions) for one in found)


def _errors(contract: Contract, bindings: Sequence[Binding], store: Store, here: Live) -> list[Refusal]:
    regions = {b.region for b in bindings}
    found = refusals(contract, store, now=time.time(), live=here)
    return [one for one in found if one.severity == "error" and regions & set(one.regions)]


@contextmanager
def _alone(store: Store) -> Iterator[None]:
    """Hold the user's store against the other processes of this machine."""
    store.paths[0].mkdir(parents=True, exist_ok=True)
    with (store.paths[0] / ".certify.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _certify(contract: Contract, functions: Sequence[str], store: Store, arch: str) -> None:
    """Run the quick gates of the functions' own kernels, and certify the libraries the contract admits for them."""
    if not functions:
        return
    structlog.get_logger("isoexec").info("certifying on this machine", functions=list(functions), arch=arch)
    asked = store.paths[0] / f".{os.getpid()}.yaml"
    asked.write_text(yaml.safe_dump(contract.to_dict(), sort_keys=False))
    where = ["--quick", "--arch", arch, "--contract", str(asked), "--store", str(store.paths[0])]
    try:
        for function in functions:
            admitted = [p for p in contract.providers if p.function == function]
            if any(p.kind == "kernel" for p in admitted):
                _gate(function, where)
            for provider in admitted:
                if provider.kind == "library":
                    _library(contract, provider, store)
    finally:
        asked.unlink(missing_ok=True)


def _gate(function: str, where: Sequence[str]) -> None:
    # in a process of its own: partition gates start processes, which a worker of an engine may not
    command = [
        sys.executable,
        "-P",
        "-m",
        "isoexec.contracts.main",
        "gate",
        "run",
        "--function",
        function,
        *where,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=False)
        problem = " ; ".join((done.stdout + done.stderr).strip().splitlines()[-5:]) if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"nothing in {_LIMIT:.0f} s"
    if problem:
        raise InstallError(
            region="evidence",
            wanted=f"{function} certified on this machine, as the contract lets it",
            found=problem,
            fix=f"isoexec gate run --function {function} says more",
        )


def _library(contract: Contract, provider: Provider, store: Store) -> None:
    constants = [b.constants for b in contract.composition if b.function == provider.function]
    try:
        certify_for(contract, provider, provider.function, constants, store=store)
    except EvidenceError as error:
        raise InstallError(
            region="evidence", wanted=error.wanted, found=f"{error.field}: {error.found}", fix=error.fix
        ) from error
