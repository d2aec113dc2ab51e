# SPDX-License-Identifier: Apache-2.0
"""Which contract a process is held to now: what it installed, and what its file says today, against what it greeted with.

A process reads its contract once, when it starts.  At every attestation it is looked at again, so that a worker with another
contract, or a file that was edited between two weight syncs, is found by its fields and not by a mismatch of bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from isoexec.contracts.diff import Difference, counted, disagreements
from isoexec.contracts.errors import ContractError, HandshakeError
from isoexec.contracts.identities import identities_of
from isoexec.contracts.loading import parse, read_bytes
from isoexec.contracts.schema import Contract
from isoexec.probes.client import ProbeSettings

__all__ = ["SAME", "ContractNow", "contract_now"]

SAME: Any = object()
"""Stands for an installed contract that nobody looked at: the process's own is taken."""


@dataclass(frozen=True, kw_only=True)
class ContractNow:
    """A contract in force (canonical dict, None without one), the one said at hello, and why the file cannot be read.

    ``what`` says what is wrong where they differ, ``side`` what holds the one in force, as in "the worker of rank 1".
    """

    what: str
    side: str
    said: Mapping[str, Any] | None
    found: Mapping[str, Any] | None
    error: ContractError | None = None

    @property
    def identities(self) -> dict[str, str] | None:
        """The three digests; None without a contract, and where it cannot be known."""
        if self.error is not None or self.found is None:
            return None
        return identities_of(self.found).to_dict()

    @property
    def agrees(self) -> bool:
        """Whether the contract in force is known, and is the one said at hello."""
        return self.error is None and not self._differences

    @property
    def changed(self) -> Mapping[str, Any] | None:
        """The contract in force where model or policy are not those said at hello, to be sent along."""
        return None if self.agrees else self.found

    def require(self) -> None:
        """Raise ContractError where the file cannot be read, HandshakeError with every field that differs from hello's."""
        if self.error is not None:
            raise self.error
        found = self._differences
        if found:
            lines = [one.line(self.side, "the hello") for one in found]
            raise HandshakeError(lines, f"{self.what}: {counted(found)}")

    @cached_property
    def _differences(self) -> list[Difference]:
        return disagreements(self.found, self.said)


@lru_cache(maxsize=2)
def _parsed(data: bytes, path: Path) -> Mapping[str, Any]:
    # the file is read at every attestation, and parsed where it is not what it was
    return Contract.from_document(parse(data, path=str(path))).to_dict()


def contract_now(
    settings: ProbeSettings,
    installed: Contract | Mapping[str, Any] | None = SAME,
    *,
    who: str = "what is installed",
) -> ContractNow:
    """Look at the contract again: ``installed`` (called ``who``) where it differs from hello's, else the file today.

    A process that greeted without a contract, or was given one without a file, has no file to look at.
    """
    said = settings.contract.to_dict() if settings.contract is not None else None
    if installed is not SAME:
        found = installed.to_dict() if isinstance(installed, Contract) else installed
        if disagreements(found, said):
            what = f"{who} holds another contract than this process greeted the daemon with"
            return ContractNow(what=what, side=who, said=said, found=found)
    path = settings.contract_path
    what = f"{path} was edited since this process greeted the daemon"
    if said is None or path is None:
        return ContractNow(what=what, side=who, said=said, found=said)
    try:
        today = _parsed(read_bytes(path), path)
    except ContractError as error:
        return ContractNow(what=what, side="the file", said=said, found=None, error=error)
    return ContractNow(what=what, side="the file", said=said, found=today)
