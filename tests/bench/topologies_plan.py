# SPDX-License-Identifier: Apache-2.0
"""What `topologies.py` starts: engines and trainers of every layout that so many devices hold, and which of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import subjects  # type: ignore[import-not-found]  # noqa: F401 - puts the package on the path

from isoexec.adapters.demo.job import Layout

__all__ = ["DEGREES", "Kind", "Side", "Unit", "engines", "trainers", "waves"]

DEGREES = (1, 2, 4, 8)
Kind = Literal["engine", "score", "train"]
Side = Literal["contract", "native"]

_TRAINERS: tuple[dict[str, Any], ...] = (
    {},
    {"trainer_tp": 2},
    {"trainer_tp": 2, "sequence_parallel": True},
    {"trainer_pp": 2},
    {"trainer_dp": 2},
    {"trainer_tp": 4},
    {"trainer_tp": 4, "sequence_parallel": True},
    {"trainer_tp": 2, "sequence_parallel": True, "trainer_dp": 2},
    {"trainer_tp": 8, "sequence_parallel": True},
    {"trainer_tp": 4, "sequence_parallel": True, "trainer_dp": 2},
    {"trainer_tp": 2, "sequence_parallel": True, "trainer_pp": 2, "trainer_dp": 2},
)
_OF_EXPERTS: tuple[dict[str, Any], ...] = (
    {},
    *({"trainer_tp": n, "sequence_parallel": True, "trainer_ep": n} for n in DEGREES[1:]),
    {"trainer_tp": 4, "sequence_parallel": True, "trainer_ep": 2},
)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One runtime in one layout: an engine that samples, or a trainer that scores what engines sampled, or that trains."""

    kind: Kind
    model: str
    side: Side
    layout: Layout

    @property
    def name(self) -> str:
        return self.layout.engine_name if self.kind == "engine" else self.layout.trainer_name

    @property
    def devices(self) -> int:
        return self.layout.engine_tp if self.kind == "engine" else self.layout.trainer_ranks

    def __str__(self) -> str:
        return f"{self.model}, {self.side}: {self.kind} {self.name}"


def engines(most: int, *, experts: bool) -> list[Layout]:
    """Engines of at most ``most`` ranks; those with experts share them over all ranks."""
    wide = {"enable_expert_parallel": True}
    return [Layout(engine_tp=n, engine=wide if experts and n > 1 else {}) for n in DEGREES if n <= most]


def trainers(most: int, *, experts: bool, tied: bool) -> list[Layout]:
    """Trainers of at most ``most`` ranks, one rank first; a tied head has no pipeline of stages."""
    made = [Layout(**one) for one in (_OF_EXPERTS if experts else _TRAINERS)]
    return [one for one in made if one.trainer_ranks <= most and not (tied and one.trainer_pp > 1)]


def waves(units: Iterable[Unit], devices: int, *, alone: bool = False) -> list[list[Unit]]:
    """The units in groups that run at once, each device in one of a group's units: the largest first.

    With ``alone`` every unit is a group of its own. ValueError for a unit that needs more devices than there are.
    """
    made: list[list[Unit]] = []
    for unit in sorted(units, key=lambda one: -one.devices):
        if unit.devices > devices:
            raise ValueError(f"{unit}: wanted {unit.devices} devices, found {devices}")
        room = (w for w in made if not alone and sum(u.devices for u in w) + unit.devices <= devices)
        group = next(room, None)
        if group is None:
            made.append([unit])
        else:
            group.append(unit)
    return made


def placed(group: Sequence[Unit]) -> list[Unit]:
    """A group's units on devices of their own, in order."""
    at, out = 0, []
    for unit in group:
        chosen = tuple(range(at, at + unit.devices))
        out.append(replace(unit, layout=replace(unit.layout, devices=chosen)))
        at += unit.devices
    return out
