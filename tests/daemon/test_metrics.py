# SPDX-License-Identifier: Apache-2.0
"""The exporter and the catalogue: every measure is exported, nothing else is, and states start as unknown."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from isoexec.contracts.measures import LABEL_VALUES, MEASURES, Measure, series_names
from isoexec.contracts.window import HISTOGRAM_EDGES, PairStats
from isoexec.daemon.metrics import Metrics, MetricsError


def scrape(metrics: Metrics) -> dict[str, list[Any]]:
    text = generate_latest(metrics.registry()).decode()
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def fill(metrics: Metrics) -> None:
    """Put something into every measure."""
    metrics.start_run("r", regime="bitwise", monitor_only=False, policy="fail_open")
    metrics.start_rules("r", ["unequal"])
    stats = PairStats(pair=("engine_decode", "trainer_score"), tokens=1, histogram=(1, *[0] * 21))
    metrics.pair("r", stats, 0.5, str)
    for measure in MEASURES.values():
        if measure.kind == "gauge":
            labels = {name: value(measure, name) for name in measure.labels}
            metrics.set(measure.name.removeprefix("isoexec_"), 1.0, **labels)


def value(measure: Measure, label: str) -> str:
    return LABEL_VALUES[label][0] if label in LABEL_VALUES else "r"


def test_every_measure_is_exported_and_nothing_that_is_not_listed() -> None:
    metrics = Metrics(version="1")
    fill(metrics)
    assert set(scrape(metrics)) == series_names()


def test_state_sets_start_as_unknown_with_every_state_there() -> None:
    metrics = Metrics(version="1")
    metrics.start_run("r", regime="bitwise", monitor_only=True, policy="fail_open")
    guard = {s.labels["state"]: s.value for s in scrape(metrics)["isoexec_guard_state"]}
    assert guard == {"ok": 0, "warn": 0, "halt": 0, "unknown": 1}
    metrics.state("guard_state", "ok", run="r")
    assert {s.labels["state"]: s.value for s in scrape(metrics)["isoexec_guard_state"]} == {
        "ok": 1,
        "warn": 0,
        "halt": 0,
        "unknown": 0,
    }


def test_counters_start_at_zero_and_gauges_that_nobody_set_are_absent() -> None:
    metrics = Metrics(version="1")
    metrics.start_run("r", regime="bitwise", monitor_only=True, policy="fail_open")
    found = scrape(metrics)
    assert {s.value for s in found["isoexec_tokens_total"]} == {0.0}
    assert {s.labels["pair"] for s in found["isoexec_tokens_total"]} == set(LABEL_VALUES["pair"])
    assert "isoexec_logprob_abs_diff_max_nats" not in found  # 0 would say that the sides agree


def test_buckets_are_cumulative_and_the_sum_is_the_sum() -> None:
    metrics = Metrics(version="1")
    counts = [0] * (len(HISTOGRAM_EDGES) + 1)
    counts[0], counts[3], counts[-1] = 2, 3, 1
    for _ in range(2):
        metrics.observe("logprob_abs_diff_nats", counts, 7.5, run="r", pair="engine_decode:trainer_score")
    found = scrape(metrics)
    buckets = [s.value for s in found["isoexec_logprob_abs_diff_nats_bucket"]]
    assert buckets[0] == 4
    assert buckets[3] == 10
    assert buckets[-2:] == [10, 12]
    assert [s.value for s in found["isoexec_logprob_abs_diff_nats_sum"]] == [15.0]
    assert [s.value for s in found["isoexec_logprob_abs_diff_nats_count"]] == [12.0]


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("nothing_such", {}),
        ("tokens", {"run": "r"}),
        ("tokens", {"run": "r", "pair": "engine_decode:trainer_score", "step": "1"}),
        ("tokens", {"run": "r", "pair": "a:b"}),
    ],
)
def test_what_the_catalogue_does_not_have_cannot_be_exported(name: str, labels: dict[str, str]) -> None:
    with pytest.raises(MetricsError):
        Metrics(version="1").add(name, 1.0, **labels)


def test_a_run_that_is_gone_leaves_no_series() -> None:
    metrics = Metrics(version="1")
    fill(metrics)
    metrics.end_run("r")
    left = [s for samples in scrape(metrics).values() for s in samples if s.labels.get("run")]
    assert not left


def test_a_part_that_fails_is_counted_and_the_rest_is_shown() -> None:
    metrics = Metrics(version="1")

    def broken() -> None:
        raise RuntimeError("no")

    metrics.before_scrape(broken)
    assert scrape(metrics)["isoexec_collector_errors_total"][0].value == 1
    assert scrape(metrics)["isoexec_build_info"][0].labels["version"] == "1"


@pytest.mark.prometheus
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_has_nothing_to_say() -> None:
    metrics = Metrics(version="1")
    fill(metrics)
    found = subprocess.run(
        ["promtool", "check", "metrics"],
        input=generate_latest(metrics.registry()),
        capture_output=True,
        timeout=60,
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, b"", b"")
