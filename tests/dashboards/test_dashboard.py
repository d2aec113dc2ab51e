# SPDX-License-Identifier: Apache-2.0
"""The dashboard: free of lint, every expression parses, and the lint can fail."""

from __future__ import annotations

import copy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from isoexec.contracts.measures import MEASURES
from isoexec.dashboards.alerts import ALERTS, RECORDINGS
from isoexec.dashboards.lint import lint
from isoexec.dashboards.overview import ROWS, overview
from isoexec.dashboards.queries import QUERIES, concrete, measure_of, metrics_of, series

Json = dict[str, Any]


def panel(dashboard: Json, title: str) -> Json:
    found: Json = next(p for p in dashboard["panels"] if p["title"] == title)
    return found


def test_the_overview_has_no_fault() -> None:
    assert lint(overview()) == []


def test_every_query_is_drawn_and_every_measure_is_seen_somewhere() -> None:
    drawn = {target.expr for row in ROWS for one in row.panels for target in one.targets}
    assert drawn == set(QUERIES.values())
    expressions = [*drawn, *(a.expr for a in ALERTS), *(r.expr for r in RECORDINGS)]
    seen = {measure_of(name) for expr in expressions for name in metrics_of(expr)}
    assert set(MEASURES) - seen == set()


def test_a_query_cannot_name_a_metric_that_nobody_exports() -> None:
    with pytest.raises(KeyError, match="isoexec_tokens_lost_total is not in the catalogue"):
        series("tokens_lost_total")


@pytest.mark.parametrize(
    ("expr", "names"),
    [
        ('sum by (run) (rate(isoexec_tokens_total{run=~"x(y)"}[5m])) > 1e-5', {"isoexec_tokens_total"}),
        ("time() - max(up) unless on (run) a:b:c == 1", {"up", "a:b:c"}),
        ("histogram_quantile(0.99, sum by (le) (rate(x_bucket[1m])))", {"x_bucket"}),
        ("a * on (run) group_left (regime) b or vector(1)", {"a", "b"}),
    ],
)
def test_the_metrics_of_an_expression_are_found(expr: str, names: set[str]) -> None:
    assert metrics_of(expr) == names


def test_the_dashboard_has_the_parts_that_users_expect() -> None:
    dashboard = overview()
    assert dashboard["uid"] == "isoexec-overview"
    assert [v["name"] for v in dashboard["templating"]["list"]] == ["datasource", "run"]
    assert len([p for p in dashboard["panels"] if p["type"] == "row"]) == 6
    assert {p["type"] for p in dashboard["panels"]} == {
        *("row", "stat", "timeseries", "state-timeline", "table", "heatmap")
    }


MUTANTS: dict[str, Callable[[Json], object]] = {
    "uid": lambda d: d.update(uid="Has Spaces"),
    "server-state": lambda d: d.update(id=7),
    "text": lambda d: d.update(description=""),
    "template-datasource": lambda d: d["templating"]["list"].pop(0),
    "template-run": lambda d: d["templating"]["list"].pop(1),
    "template-promql": lambda d: d["templating"]["list"][1].update(definition="label_values(run)"),
    "panel-id": lambda d: panel(d, "Mean abs d").update(id=1),
    "panel-text": lambda d: panel(d, "Mean abs d").update(description=""),
    "panel-datasource": lambda d: panel(d, "Mean abs d").update(datasource={"uid": "abc"}),
    "panel-unit": lambda d: panel(d, "Mean abs d")["fieldConfig"]["defaults"].update(unit="nats"),
    "panel-target": lambda d: panel(d, "Mean abs d").update(targets=[]),
    "target-id": lambda d: panel(d, "Messages")["targets"][1].update(refId="A"),
    "target-datasource": lambda d: panel(d, "Messages")["targets"][1].update(datasource={}),
    "metric-exists": lambda d: panel(d, "Mean abs d")["targets"][0].update(expr='isoexec_mean{run=~"$run"}'),
    "rate-interval": lambda d: panel(d, "Messages")["targets"][0].update(
        expr='rate(isoexec_messages_sent_total{run=~"$run"}[5m])'
    ),
    "counter-rate": lambda d: panel(d, "Messages")["targets"][0].update(
        expr='isoexec_messages_sent_total{run=~"$run"}'
    ),
    "run-matcher": lambda d: panel(d, "Step")["targets"][0].update(expr="isoexec_step"),
    "legend": lambda d: panel(d, "Step")["targets"][0].update(legendFormat="{{rank}}"),
    "grid": lambda d: panel(d, "Mean abs d")["gridPos"].update(x=20),
}


@pytest.mark.parametrize("rule", MUTANTS)
def test_the_lint_finds_a_planted_fault(rule: str) -> None:
    dashboard = copy.deepcopy(overview())
    MUTANTS[rule](dashboard)
    assert rule in {fault.rule for fault in lint(dashboard)}


@pytest.mark.prometheus
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on the PATH")
def test_every_expression_parses_and_a_broken_one_does_not(tmp_path: Path) -> None:
    def check(expressions: list[str]) -> subprocess.CompletedProcess[str]:
        rules = [{"record": f"check:e{i}", "expr": concrete(e)} for i, e in enumerate(expressions)]
        path = tmp_path / "rules.yml"
        path.write_text(yaml.safe_dump({"groups": [{"name": "check", "rules": rules}]}))
        return subprocess.run(
            ["promtool", "check", "rules", str(path)], capture_output=True, text=True, timeout=60
        )

    dashboard = overview()
    expressions = [t["expr"] for p in dashboard["panels"] for t in p.get("targets", [])]
    expressions += [a["expr"] for a in dashboard["annotations"]["list"]]
    assert len(expressions) > 40
    result = check(expressions)
    assert result.returncode == 0, result.stdout + result.stderr
    assert check([*expressions, "sum by (run (isoexec_step)"]).returncode == 1
