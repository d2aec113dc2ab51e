# SPDX-License-Identifier: Apache-2.0
"""Compares the weights of both sides by name: shards add up mod 2^64, replicas are compared one by one.

A source that covers a whole tensor is a copy of its own; sources that cover parts are added up within their
replica. What is not covered or could not be read is unknown, never equal. Memory is bounded: the versions reported first go
first, and a report for which there is no room at all is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from isoexec.contracts.errors import WireError
from isoexec.contracts.window import WeightBreak
from isoexec.contracts.wire import Weights

__all__ = ["WeightLedger"]

_MASK = (1 << 64) - 1
_KEPT_VERSIONS = 8
_LIMIT_BYTES = 512 << 20
_PART_BYTES = 320  # what a part costs, with its place in two maps
_LISTED = 256
"""Breaks listed of one window; a run whose every tensor differs needs no longer list."""

Lanes = tuple[int, int]


@dataclass(slots=True)
class _Part:
    replica: str
    lanes: Lanes
    numel: int
    total: int
    zero: bool


@dataclass(slots=True)
class _Version:
    parts: dict[str, dict[str, _Part]] = field(default_factory=dict)  # tensor -> source -> part
    unknown: dict[str, set[str]] = field(default_factory=dict)  # tensor -> sources
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Whole:
    lanes: Lanes | None  # None: not covered, or not readable
    zero: bool


class WeightLedger:
    """What each side of one run said about its weights, the last few versions of it that came."""

    def __init__(self, *, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._sides: dict[str, dict[int, _Version]] = {"engine": {}, "trainer": {}}

    @property
    def held_bytes(self) -> int:
        """Bytes held, about."""
        return sum(version.bytes for side in self._sides.values() for version in side.values())

    def add(self, message: Weights, replica: str = "") -> None:
        """Take a rank's partial sums; a repeated report of one source replaces its earlier one.

        Raises WireError where one version alone has more names and ranks than there is room for.
        """
        side = self._sides.get(message.role)
        if side is None:
            return
        version = side.setdefault(message.weight_version, _Version())
        names = [name for name in message.tensors if message.source not in version.parts.get(name, ())]
        names += [name for name in message.unknown if message.source not in version.unknown.get(name, ())]
        size = sum(map(len, names)) + _PART_BYTES * len(names)
        self._make_room(version, size)
        version.bytes += size
        zero = set(message.zero)
        for name, lanes in message.tensors.items():
            part = _Part(
                replica, (lanes[0], lanes[1]), message.numel[name], message.total[name], name in zero
            )
            version.parts.setdefault(name, {})[message.source] = part
        for name in message.unknown:
            version.unknown.setdefault(name, set()).add(message.source)
        # in the order in which they came: a number far ahead of all others must not push these out
        for old in list(side)[:-_KEPT_VERSIONS]:
            del side[old]

    def _make_room(self, current: _Version, size: int) -> None:
        over = self.held_bytes + size - self._limit
        for side in self._sides.values():
            for number, version in list(side.items()):
                if over > 0 and version is not current:
                    over -= version.bytes
                    del side[number]
        if over > 0:
            raise WireError(
                f"weights: {self._limit} bytes are held at most, and one version has more names and ranks than that"
            )

    def has(self, role: str, weight_version: int) -> bool:
        return weight_version in self._sides.get(role, {})

    def latest(self, role: str) -> int | None:
        return max(self._sides.get(role, {}), default=None)

    def breaks(self, weight_version: int) -> tuple[WeightBreak, ...]:
        """Give what is wrong with one version; empty where either side has not reported it at all."""
        engine = self._sides["engine"].get(weight_version)
        trainer = self._sides["trainer"].get(weight_version)
        if engine is None or trainer is None:
            return ()
        found: list[WeightBreak] = []
        names = sorted({*engine.parts, *engine.unknown, *trainer.parts, *trainer.unknown})
        earlier = [self._sides["trainer"][v] for v in sorted(self._sides["trainer"]) if v < weight_version]
        versions = [v for v in sorted(self._sides["trainer"]) if v < weight_version]
        for name in names:
            kind, engine_version = _judge(name, engine, trainer, earlier, versions, weight_version)
            if kind is not None:
                found.append(kind_of(name, kind, engine_version, weight_version))
        if earlier and trainer.parts and not found and _unchanged(trainer, earlier[-1]):
            found.append(kind_of("*", "unchanged", weight_version, weight_version))
        return tuple(found[:_LISTED])


def kind_of(name: str, kind: str, engine_version: int | None, trainer_version: int | None) -> WeightBreak:
    return WeightBreak(
        name=name,
        kind=kind,  # type: ignore[arg-type]  # one of the literals below
        engine_version=engine_version,
        trainer_version=trainer_version,
    )


def _judge(
    name: str,
    engine: _Version,
    trainer: _Version,
    earlier: list[_Version],
    versions: list[int],
    weight_version: int,
) -> tuple[str | None, int | None]:
    if name in engine.unknown or name in trainer.unknown:
        return "unknown", weight_version
    if name not in engine.parts or name not in trainer.parts:
        return "missing", weight_version if name in engine.parts else None
    ours = list(_wholes(trainer.parts[name]))
    wanted = {whole.lanes for whole in ours}
    if None in wanted:
        return "unknown", weight_version
    if len(wanted) > 1:
        return "unequal", weight_version
    for copy in _wholes(engine.parts[name]):
        if copy.lanes is None:
            return "unknown", weight_version
        if copy.lanes in wanted:
            continue
        if copy.zero or any(whole.zero for whole in ours):
            return "zero", weight_version
        for version, past in zip(reversed(versions), reversed(earlier), strict=True):
            if copy.lanes in {whole.lanes for whole in _wholes(past.parts.get(name, {}))}:
                return "stale", version
        return "unequal", weight_version
    return None, None


def _wholes(parts: Mapping[str, _Part]) -> Iterator[_Whole]:
    """Give each copy of a tensor: a source's own, or the sum over the shards of a replica."""
    shards: dict[str, list[_Part]] = {}
    for part in parts.values():
        if part.numel == part.total:
            yield _Whole(part.lanes, part.zero)
        else:
            shards.setdefault(part.replica, []).append(part)
    for group in shards.values():
        total = group[0].total
        covered = sum(part.numel for part in group)
        if covered != total or any(part.total != total for part in group):
            yield _Whole(None, False)
            continue
        low = sum(part.lanes[0] for part in group) & _MASK
        high = sum(part.lanes[1] for part in group) & _MASK
        yield _Whole((low, high), all(part.zero for part in group))


def _unchanged(now: _Version, before: _Version) -> bool:
    """Whether no tensor at all moved: a single one may well stay, when its update rounds away."""
    return now.parts.keys() == before.parts.keys() and all(
        {whole.lanes for whole in _wholes(now.parts[name])}
        == {whole.lanes for whole in _wholes(before.parts[name])}
        for name in now.parts
    )
