# SPDX-License-Identifier: Apache-2.0
"""Degrees that a gate wants in real processes: which of them run on this machine, and what a check therefore lacks.

A process group on GPUs needs a GPU a rank. Where there are fewer, the check runs the degrees that there are; its record has those
in its domain and no other, the run says what is left out, and `isoexec gate run --extend` on a larger machine adds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from isoexec.kernels.gates.ranks import WORLD

if TYPE_CHECKING:
    from isoexec.contracts.evidence import Check
    from isoexec.kernels.gates.checking import Gate, Run

__all__ = ["beyond", "degrees", "lacking", "most_ranks", "possible", "said", "wants"]

_WANTED: dict[tuple[str, str, str], dict[str, tuple[int, ...]]] = {}
Axes = Mapping[str, tuple[int, ...]]


def wants(gate: Gate, family: str, **axes: Sequence[int]) -> None:
    """Declare, beside a check, the degrees of each axis that its record should cover."""
    _WANTED[gate.function, gate.arch, family] = {axis: tuple(values) for axis, values in axes.items()}


def most_ranks(device: str) -> int:
    """How many ranks a check can have on this kind of device here."""
    return torch.cuda.device_count() if device == "cuda" else WORLD


def degrees(run: Run, axis: str, wanted: Sequence[int]) -> Iterator[int]:
    """The wanted degrees that can be run here, each noted in the check's domain as it is run."""
    most = most_ranks(run.device.type)
    yield from run.over(axis, [degree for degree in wanted if degree <= most])


def _most(gate: Gate) -> int:
    return most_ranks("cpu" if gate.arch == "cpu" else "cuda")


def lacking(gate: Gate, check: Check) -> Axes:
    """The wanted degrees that a check does not cover, by axis."""
    wanted = _WANTED.get((gate.function, gate.arch, check.family), {})
    missing = {
        axis: tuple(d for d in values if d not in check.domain.get(axis, ()))
        for axis, values in wanted.items()
    }
    return {axis: values for axis, values in missing.items() if values}


def possible(gate: Gate, check: Check) -> Axes:
    """Of `lacking`, what this machine could run: a result from a smaller one is not all that can be known here."""
    able = {
        axis: tuple(d for d in values if d <= _most(gate)) for axis, values in lacking(gate, check).items()
    }
    return {axis: values for axis, values in able.items() if values}


def beyond(gate: Gate, check: Check) -> Axes:
    """The degrees that a check covers and this machine cannot run again."""
    wanted = _WANTED.get((gate.function, gate.arch, check.family), {})
    found = {
        axis: tuple(d for d in values if d in check.domain.get(axis, ()) and d > _most(gate))
        for axis, values in wanted.items()
    }
    return {axis: values for axis, values in found.items() if values}


def said(axes: Axes) -> str:
    """Axes and degrees as people read them: `TP 4, 8; SP 8`."""
    return "; ".join(f"{axis} {', '.join(map(str, values))}" for axis, values in axes.items())
