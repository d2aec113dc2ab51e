# SPDX-License-Identifier: Apache-2.0
"""Find what is wrong with a dashboard before Grafana shows it as an empty panel.

The rules are those of Grafana's dashboard linter, with some of our own: every metric is in the catalogue,
ids are unique, panels do not overlap, nothing carries an `id` or a `version` of some server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isoexec.contracts.measures import MEASURES
from isoexec.dashboards.queries import measure_of, metrics_of

__all__ = ["UNITS", "Fault", "lint"]

UNITS = frozenset({"none", "short", "s", "percentunit", "ops", "Bps", "bytes"})
_COUNTER_CALL = re.compile(r"\b(?:rate|increase|irate)\(")
_RANGE = re.compile(r"\[([^\]]*)\]")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One finding: the rule, the place, and what to do."""

    rule: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.where}: {self.message}"


def lint(dashboard: Mapping[str, Any], recordings: Sequence[str] = ()) -> list[Fault]:
    """Return every fault of a classic dashboard; `recordings` are series that recording rules add."""
    return [*_whole(dashboard), *_variables(dashboard), *_panels(dashboard, recordings)]


def _whole(dashboard: Mapping[str, Any]) -> Iterator[Fault]:
    if not re.fullmatch(r"[a-z0-9-]{1,40}", str(dashboard.get("uid", ""))):
        yield Fault(rule="uid", where="dashboard", message="needs a stable uid of at most 40 characters")
    for name in ("id", "version"):
        if name in dashboard:
            yield Fault(
                rule="server-state", where="dashboard", message=f"{name} belongs to a server, drop it"
            )
    for name in ("title", "description"):
        if not dashboard.get(name):
            yield Fault(rule="text", where="dashboard", message=f"needs a {name}")


def _variables(dashboard: Mapping[str, Any]) -> Iterator[Fault]:
    variables = {v["name"]: v for v in dashboard.get("templating", {}).get("list", [])}
    if variables.get("datasource", {}).get("type") != "datasource":
        yield Fault(rule="template-datasource", where="dashboard", message="needs a data source variable")
    if "run" not in variables:
        yield Fault(rule="template-run", where="dashboard", message="needs a variable named run")
    for name, variable in variables.items():
        if variable["type"] != "query":
            continue
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable.get("definition", ""))
        if found is None:
            yield Fault(rule="template-promql", where=f"${name}", message="wants label_values(metric, label)")
            continue
        yield from _metrics(found.group(1), f"${name}", ())
        for metric in metrics_of(found.group(1)):
            if found.group(2) not in _labels(metric):
                message = f"{metric} has no label {found.group(2)}"
                yield Fault(rule="template-promql", where=f"${name}", message=message)


def _panels(dashboard: Mapping[str, Any], recordings: Sequence[str]) -> Iterator[Fault]:
    panels: list[Mapping[str, Any]] = list(dashboard.get("panels", []))
    ids = [panel.get("id") for panel in panels]
    for panel in panels:
        where = panel.get("title") or f"panel {panel.get('id')}"
        if not isinstance(panel.get("id"), int) or ids.count(panel.get("id")) > 1:
            yield Fault(rule="panel-id", where=where, message="needs an id of its own")
        if panel["type"] == "row":
            continue
        for name in ("title", "description"):
            if not panel.get(name):
                yield Fault(rule="panel-text", where=where, message=f"needs a {name}")
        if panel.get("datasource", {}).get("uid") != "${datasource}":
            yield Fault(rule="panel-datasource", where=where, message="must use ${datasource}")
        unit = panel["fieldConfig"]["defaults"].get("unit", "")
        if unit not in UNITS and not unit.startswith("suffix: "):
            yield Fault(
                rule="panel-unit", where=where, message=f"unit {unit!r} is not one of {sorted(UNITS)}"
            )
        targets = panel.get("targets", [])
        if not targets:
            yield Fault(rule="panel-target", where=where, message="asks for nothing")
        if len({t.get("refId") for t in targets}) != len(targets):
            yield Fault(rule="target-id", where=where, message="two targets share a refId")
        for target in targets:
            yield from _target(target, where, recordings)
    yield from _overlaps(panels)


def _target(target: Mapping[str, Any], where: str, recordings: Sequence[str]) -> Iterator[Fault]:
    expr = target["expr"]
    if target.get("datasource", {}).get("uid") != "${datasource}":
        yield Fault(rule="target-datasource", where=where, message="must use ${datasource}")
    yield from _metrics(expr, where, recordings)
    for span in _RANGE.findall(expr):
        if span != "$__rate_interval":
            yield Fault(
                rule="rate-interval", where=where, message=f"wants [$__rate_interval], found [{span}]"
            )
    for name in metrics_of(expr):
        measure = MEASURES.get(measure_of(name))
        if measure is None:
            continue
        counts = measure.kind in ("counter", "histogram")
        if counts and not re.search(_COUNTER_CALL.pattern + re.escape(name), expr):
            yield Fault(rule="counter-rate", where=where, message=f"{name} only grows: use rate or increase")
        if "run" in measure.labels and f'{name}{{run=~"$run"' not in expr:
            yield Fault(rule="run-matcher", where=where, message=f'{name} wants run=~"$run"')
    for label in re.findall(r"\{\{\s*(\w+)\s*\}\}", target.get("legendFormat", "")):
        if not any(label in _labels(name) for name in metrics_of(expr)):
            yield Fault(rule="legend", where=where, message=f"no metric of the query has the label {label}")


def _metrics(expr: str, where: str, recordings: Sequence[str]) -> Iterator[Fault]:
    for name in metrics_of(expr):
        if not measure_of(name) and name not in recordings:
            yield Fault(rule="metric-exists", where=where, message=f"{name} is not in the catalogue")


def _labels(name: str) -> tuple[str, ...]:
    measure = MEASURES.get(measure_of(name))
    if measure is None:
        return ()
    return (*measure.labels, "le") if name.endswith("_bucket") else measure.labels


def _overlaps(panels: Sequence[Mapping[str, Any]]) -> Iterator[Fault]:
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        grid = panel["gridPos"]
        if grid["x"] + grid["w"] > 24:
            yield Fault(rule="grid", where=panel["title"], message="leaves the 24 columns")
        cells = [
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        ]
        hit = next((taken[cell] for cell in cells if cell in taken), None)
        if hit is not None:
            yield Fault(rule="grid", where=panel["title"], message=f"lies on {hit}")
        taken.update(dict.fromkeys(cells, panel["title"]))
