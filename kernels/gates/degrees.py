# SPDX-License-Identifier: Apache-2.0
"""Degrees that a gate wants, and the GPUs on which it had them: what a check lacks, and what another machine could add.

Ranks of an accelerator's check may share a GPU (`sharing`), so every degree can be run on one. On more GPUs there is more to see:
each rank with its own, NCCL, and the transports that need both. A check's domain says on how many its ranks were (`gpus`), and
`isoexec gate run --extend` on a larger machine runs what was seen on fewer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from isoexec.kernels.gates.ranks import WORLD
from isoexec.kernels.gates.sharing import WORLD as SHARED
from isoexec.kernels.gates.sharing import gpus_for

if TYPE_CHECKING:
    from isoexec.contracts.evidence import Check
    from isoexec.kernels.gates.checking import Gate, Run

__all__ = ["beyond", "degrees", "lacking", "most_ranks", "possible", "said", "wanted", "wants"]

_WANTED: dict[tuple[str, str, str], dict[str, tuple[int, ...]]] = {}
Axes = Mapping[str, tuple[int, ...]]


def wants(gate: Gate, family: str, **axes: Sequence[int]) -> None:
    """Declare, beside a check, the degrees of each axis that its record should cover."""
    _WANTED[gate.function, gate.arch, family] = {axis: tuple(values) for axis, values in axes.items()}


def wanted(gate: Gate, family: str) -> Axes:
    """What `wants` declared of a check."""
    return _WANTED.get((gate.function, gate.arch, family), {})


def most_ranks(arch: str) -> int:
    """How many ranks a check of an arch can have."""
    return WORLD if arch == "cpu" else SHARED


def degrees(run: Run, axis: str, wanted: Sequence[int]) -> Iterator[int]:
    """The wanted degrees of an accelerator's check that can be run, each noted in its domain as it is run."""
    most = most_ranks("sm90")
    yield from run.over(axis, [degree for degree in wanted if degree <= most])


def lacking(gate: Gate, check: Check) -> Axes:
    """The wanted degrees that a check does not cover, by axis."""
    missing = {
        axis: tuple(d for d in values if d not in check.domain.get(axis, ()))
        for axis, values in wanted(gate, check.family).items()
    }
    return {axis: values for axis, values in missing.items() if values}


def possible(gate: Gate, check: Check) -> Axes:
    """What of a check is not all that can be known on this machine: degrees that it lacks, and GPUs beyond those it was on."""
    most = most_ranks(gate.arch)
    able = {axis: tuple(d for d in values if d <= most) for axis, values in lacking(gate, check).items()}
    held = check.domain.get("gpus", ())
    able["gpus"] = tuple(count for count in _gpus(gate, check) if all(count > int(one) for one in held))
    return {axis: values for axis, values in able.items() if values}


def beyond(gate: Gate, check: Check) -> Axes:
    """What a check covers and this machine cannot run again: degrees, and ranks that had other GPUs than they have here."""
    most, held = most_ranks(gate.arch), check.domain.get("gpus", ())
    found = {
        axis: tuple(d for d in values if d in check.domain.get(axis, ()) and d > most)
        for axis, values in wanted(gate, check.family).items()
    }
    if held and tuple(held) != _gpus(gate, check):
        found["gpus"] = tuple(int(one) for one in held)
    return {axis: values for axis, values in found.items() if values}


def _gpus(gate: Gate, check: Check) -> tuple[int, ...]:
    """On how many GPUs the several ranks of a check would be here, in the order in which they would be; () where it has none."""
    if gate.arch == "cpu" or "gpus" not in check.domain:
        return ()
    sizes = {d for values in wanted(gate, check.family).values() for d in values if d > 1}
    return tuple(dict.fromkeys(gpus_for("cuda", size) for size in sorted(sizes)))


def said(axes: Axes) -> str:
    """Axes and degrees as people read them: `TP 4, 8; SP 8`."""
    return "; ".join(f"{axis} {', '.join(map(str, values))}" for axis, values in axes.items())
