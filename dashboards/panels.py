# SPDX-License-Identifier: Apache-2.0
"""A small typed builder for classic Grafana dashboard JSON: panels, rows, variables, and where each one lies.

Ids and positions are given by order, so the same dashboard always builds to the same bytes. Nothing of
Grafana is imported: file provisioning of every Grafana since 9 reads this form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["DATASOURCE", "Panel", "Row", "Target", "Threshold", "dashboard", "value_mapping"]

DATASOURCE: dict[str, str] = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH = 24  # columns of a Grafana row

Kind = Literal["stat", "timeseries", "state-timeline", "table", "heatmap"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One query of a panel. `instant` asks for the last value only, as tables do."""

    expr: str
    legend: str = ""
    instant: bool = False
    format: Literal["time_series", "table", "heatmap"] = "time_series"


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """From `value` up (None: from minus infinity) a value has this colour."""

    color: str
    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel: what it shows, in which unit, and a description that says how to read it."""

    title: str
    description: str
    kind: Kind
    targets: tuple[Target, ...]
    unit: str = "none"
    width: int = 8
    height: int = 8
    decimals: int | None = None
    minimum: float | None = None
    maximum: float | None = None
    log_scale: bool = False
    stacked: bool = False
    thresholds: tuple[Threshold, ...] = (Threshold(color="green"),)
    mappings: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """A titled group of panels, filled from left to right."""

    title: str
    panels: tuple[Panel, ...] = field(default_factory=tuple)


def value_mapping(values: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Map exact values to a text and a colour: `{"1": ("kept", "green")}`."""
    options = {
        value: {"text": text, "color": color, "index": index}
        for index, (value, (text, color)) in enumerate(values.items())
    }
    return {"type": "value", "options": options}


def _target(target: Target, index: int) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + index),
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": target.expr,
        "format": target.format,
        "instant": target.instant,
        "range": not target.instant,
        "legendFormat": target.legend,
    }


def _custom(panel: Panel) -> dict[str, Any]:
    if panel.kind == "timeseries":
        return {
            "drawStyle": "line",
            "lineInterpolation": "linear",
            "lineWidth": 1,
            "fillOpacity": 20 if panel.stacked else 0,
            "showPoints": "auto",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "scaleDistribution": {"type": "log", "log": 10} if panel.log_scale else {"type": "linear"},
            "thresholdsStyle": {"mode": "off"},
        }
    if panel.kind == "state-timeline":
        return {"fillOpacity": 80, "lineWidth": 0}
    return {}


_LEGEND = {"displayMode": "list", "placement": "bottom", "showLegend": True}


def _options(panel: Panel) -> dict[str, Any]:
    match panel.kind:
        case "stat":
            return {
                "colorMode": "background",
                "graphMode": "none",
                "justifyMode": "auto",
                "orientation": "auto",
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                "textMode": "auto",
            }
        case "timeseries":
            return {"legend": _LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}}
        case "state-timeline":
            return {
                "alignValue": "left",
                "legend": _LEGEND,
                "mergeValues": True,
                "rowHeight": 0.8,
                "showValue": "auto",
                "tooltip": {"mode": "single", "sort": "none"},
            }
        case "table":
            return {"cellHeight": "sm", "showHeader": True, "footer": {"show": False}}
        case "heatmap":
            return {
                "calculate": False,
                "cellGap": 1,
                "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5},
                "filterValues": {"le": 1e-9},
                "legend": {"show": True},
                "rowsFrame": {"layout": "auto"},
                "tooltip": {"mode": "single", "yHistogram": False},
                "yAxis": {"axisPlacement": "left", "reverse": False, "unit": panel.unit},
            }


def _panel(panel: Panel, panel_id: int, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "color": {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"},
        "custom": _custom(panel),
        "mappings": list(panel.mappings),
        "thresholds": {
            "mode": "absolute",
            "steps": [{"color": t.color, "value": t.value} for t in panel.thresholds],
        },
    }
    limits = {"decimals": panel.decimals, "min": panel.minimum, "max": panel.maximum}
    defaults |= {name: value for name, value in limits.items() if value is not None}
    built: dict[str, Any] = {
        "id": panel_id,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel),
        "targets": [_target(target, index) for index, target in enumerate(panel.targets)],
    }
    if panel.kind == "table":
        # one row a series with its labels as columns; the time says nothing there
        built["transformations"] = [
            {"id": "organize", "options": {"excludeByName": {"Time": True, "Value": True}}}
        ]
    return built


def _layout(rows: Sequence[Row]) -> list[dict[str, Any]]:
    placed: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        placed.append(
            {
                "id": len(placed) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1},
                "panels": [],
            }
        )
        y += 1
        x = tallest = 0
        for panel in row.panels:
            if x + panel.width > _WIDTH:
                y += tallest
                x = tallest = 0
            placed.append(_panel(panel, len(placed) + 1, x, y))
            x += panel.width
            tallest = max(tallest, panel.height)
        y += tallest
    return placed


def dashboard(
    *,
    uid: str,
    title: str,
    description: str,
    rows: Sequence[Row],
    run_query: str,
    annotation_expr: str,
    annotation_title: str,
) -> dict[str, Any]:
    """Return a classic dashboard with the variables `datasource` and `run`; no `id`, no `version`."""
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["isoexec"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "links": [],
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                    "hide": 0,
                    "refresh": 1,
                    "regex": "",
                    "multi": False,
                    "includeAll": False,
                    "options": [],
                    "current": {},
                },
                {
                    "name": "run",
                    "label": "Run",
                    "type": "query",
                    "datasource": DATASOURCE,
                    "definition": run_query,
                    "query": {"query": run_query, "refId": "run"},
                    "hide": 0,
                    "refresh": 2,
                    "regex": "",
                    "sort": 1,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".+",
                    "options": [],
                    "current": {},
                },
            ]
        },
        "annotations": {
            "list": [
                {
                    "name": annotation_title,
                    "datasource": DATASOURCE,
                    "enable": True,
                    "hide": False,
                    "iconColor": "red",
                    "expr": annotation_expr,
                    "titleFormat": annotation_title,
                    "textFormat": "{{run}}",
                    "step": "15s",
                }
            ]
        },
        "panels": _layout(rows),
    }
