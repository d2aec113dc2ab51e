# SPDX-License-Identifier: Apache-2.0
"""What this process of the engine was asked to bind: one plan a process, and a mark while a region's code runs."""

from __future__ import annotations

from collections import Counter
from types import TracebackType

from isoexec.adapters.base import Plan
from isoexec.contracts.diff import disagreements, one_line
from isoexec.contracts.errors import InstallError

__all__ = [
    "Inside",
    "activate",
    "active",
    "calls",
    "deactivate",
    "inside_region",
    "installs",
    "replays",
    "required",
]

_plan: Plan | None = None
_depth = 0
calls: Counter[str] = Counter()
"""How often each region's code ran in this process."""
replays: Counter[str] = Counter()
"""How often a region was a graph of its own, recorded earlier, beside those that are in a graph of the engine's."""


def activate(plan: Plan) -> None:
    """Make ``plan`` the plan of this process; a second plan of another contract is refused."""
    global _plan
    differences = [] if _plan is None else disagreements(_plan.contract.to_dict(), plan.contract.to_dict())
    if differences:
        raise InstallError(
            region="engine",
            wanted="one contract a process",
            found=one_line(differences, "what is installed", "what is asked for"),
            fix="start a new process for another contract",
        )
    _plan = plan


def deactivate() -> None:
    """Forget the plan; hooks that are still bound then refuse to compute."""
    global _plan
    _plan = None


def active() -> Plan | None:
    """The plan of this process, or None when it is only monitored."""
    return _plan


def required(region: str) -> Plan:
    """The plan of this process; InstallError where a hook is bound and no plan is active."""
    if _plan is None:
        raise InstallError(
            region=region,
            wanted="a contract in this process",
            found="none",
            fix="set ISOEXEC_CONTRACT before the engine starts, so that every one of its processes reads it",
        )
    return _plan


def installs(region: str) -> bool:
    """Whether this process binds the contract's function in ``region``."""
    return _plan is not None and _plan.installs(region)


def inside_region() -> bool:
    """Whether a region's code is running; the census asks."""
    return _depth > 0


class Inside:
    """Context that marks a region's code; one object a region, reused at every call."""

    __slots__ = ("_region",)

    def __init__(self, region: str) -> None:
        self._region = region

    def __enter__(self) -> None:
        global _depth
        _depth += 1
        calls[self._region] += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _depth
        _depth -= 1
