# SPDX-License-Identifier: Apache-2.0
"""Every error IsoExec raises on purpose, each with its facts as attributes and one readable line as its text.

::

    IsoExecError                   anything of ours; the console prints its text and exits 1
    ├── ContractError              a contract file or dict that cannot be used   path, line, field, fix
    ├── EvidenceError              a record that is missing, edited or unfit     field, wanted, found, fix
    ├── TopologyError              a degree the contract does not claim          axis, found, admitted, role
    ├── HandshakeError             two processes hold different contracts        differences
    ├── WireError                  a frame that breaks the protocol or its limits
    ├── HaltedError                the run is stopped and stays so until cleared marker
    └── InstallError               a region does not run what the contract binds region, wanted, found, fix
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "ContractError",
    "EvidenceError",
    "HaltedError",
    "HandshakeError",
    "InstallError",
    "IsoExecError",
    "TopologyError",
    "WireError",
]


class IsoExecError(Exception):
    """Root of the tree; `str()` of one is a complete sentence for a user."""


class ContractError(IsoExecError):
    """A contract that cannot be used.

    `path` is the file ("" for a dict), `line` its 1-based line or None, `field` the dotted field, `fix` what
    to do.
    """

    def __init__(
        self, problem: str, *, path: str = "", line: int | None = None, field: str = "", fix: str = ""
    ) -> None:
        self.problem = problem
        self.path = path
        self.line = line
        self.field = field
        self.fix = fix
        super().__init__(problem)

    def __str__(self) -> str:
        place = (self.path or "contract") + (f":{self.line}" if self.line is not None else "")
        where = f"{place}: {self.field}" if self.field else place
        return f"{where}: {self.problem}" + (f"; {self.fix}" if self.fix else "")


class EvidenceError(IsoExecError):
    """Evidence that is missing, unreadable, edited or of something else: `field`, `wanted`, `found`, `fix`."""

    def __init__(self, field: str, wanted: str, found: str, fix: str = "") -> None:
        self.field = field
        self.wanted = wanted
        self.found = found
        self.fix = fix
        super().__init__(field, wanted, found, fix)

    def __str__(self) -> str:
        text = f"{self.field}: wanted {self.wanted}, found {self.found}"
        return f"{text}; {self.fix}" if self.fix else text


class TopologyError(IsoExecError):
    """A parallel degree outside the claim: `axis`, `found` degree, `admitted` domain in words, `role`."""

    def __init__(self, axis: str, found: int | str, admitted: str, role: str = "") -> None:
        self.axis = axis
        self.found = found
        self.admitted = admitted
        self.role = role
        super().__init__(axis, found, admitted, role)

    def __str__(self) -> str:
        who = f"{self.role} " if self.role else ""
        return (
            f"{who}{self.axis} is {self.found}, the contract admits {self.admitted}; "
            f"run with an admitted degree, or claim this one and prove it"
        )


class HandshakeError(IsoExecError):
    """Two processes hold different contracts; `differences` are lines or objects naming the fields."""

    def __init__(self, differences: Iterable[object], message: str = "") -> None:
        self.differences: tuple[object, ...] = tuple(differences)
        self.message = message
        super().__init__(self.differences, message)

    def __str__(self) -> str:
        head = self.message or f"the two sides hold different contracts ({len(self.differences)} differences)"
        return "\n  ".join([head, *(str(difference) for difference in self.differences)])


class WireError(IsoExecError):
    """A frame that breaks the protocol or one of its limits; the connection it came from is closed."""


class HaltedError(IsoExecError):
    """The run is halted; `marker` is the sticky halt marker, or None where only the lease says so."""

    def __init__(self, marker: object, message: str = "") -> None:
        self.marker = marker
        self.message = message
        super().__init__(marker, message)  # in the order of the parameters: it travels between processes

    def __str__(self) -> str:
        if self.message or self.marker is not None:
            return self.message or str(self.marker)
        return "the run is halted; look at the cause, then `isoexec clear RUN`"


class InstallError(IsoExecError):
    """A region does not run what the contract binds: `region`, what was `wanted` and `found`, the `fix`."""

    def __init__(self, region: str, wanted: str, found: str, fix: str = "") -> None:
        self.region = region
        self.wanted = wanted
        self.found = found
        self.fix = fix
        super().__init__(region, wanted, found, fix)

    def __str__(self) -> str:
        text = f"{self.region}: wanted {self.wanted}, found {self.found}"
        return f"{text}; {self.fix}" if self.fix else text
