# SPDX-License-Identifier: Apache-2.0
"""Every panel and every rule, executed by a real Prometheus on what the daemon's exporter really exports."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any
from wsgiref.simple_server import WSGIServer

import pytest

from isoexec.contracts.detail import NUMBERS, Bucket, PairDetail
from isoexec.contracts.measures import CLAIMS, LABEL_VALUES, MEASURES, PREFIX, Measure
from isoexec.contracts.rules import DEFAULT_RULES
from isoexec.contracts.window import HISTOGRAM_EDGES, PairStats
from isoexec.dashboards.alerts import ALERTS, RECORDINGS
from isoexec.dashboards.build import write
from isoexec.dashboards.config import config_files
from isoexec.dashboards.overview import overview
from isoexec.dashboards.queries import concrete

prometheus_client = pytest.importorskip("prometheus_client", reason="the daemon extra is not installed")
from isoexec.daemon.metrics import Metrics  # noqa: E402  # needs the extra

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not on the PATH"),
]

RUN = "qwen3-grpo"
PAIR = PairStats(
    pair=("engine_decode", "trainer_score"),
    tokens=100,
    bitwise_equal=90,
    nonfinite=1,
    exact_zero=1,
    positive=1,
    id_mismatch=1,
    mean_d=0.001,
    mean_abs_d=0.3,
    max_abs_d=2.0,
    p99_abs_d=1.0,
    k1=-0.001,
    k3=0.01,
    rho_mean=1.2,
    rho_z=30.0,
    histogram=tuple(range(len(HISTOGRAM_EDGES) + 1)),
    detail=PairDetail(
        numbers=dict.fromkeys(NUMBERS, 0.5) | {"rho_z_capped": 30.0},
        buckets=tuple(
            Bucket(
                by=by,
                label=label,
                tokens=50,
                finite=50,
                unequal=5,
                mean_d=0,
                mean_abs_d=0.3,
                std_d=1,
                rho_mean=1,
            )
            for by, label in (("position", "0"), ("from_end", "128+"), ("engine", "e"), ("prefix_hit", "hit"))
        ),
    ),
)
WITNESS = PairStats(pair=("engine_decode", "engine_prefill"), tokens=10, bitwise_equal=9, mean_abs_d=0.1)


def exporter() -> Metrics:
    """An exporter of one broken run in which every measure moves at each scrape."""
    metrics = Metrics(version="test")
    metrics.start_run(RUN, regime="bf16_dense", monitor_only=False, policy="fail_open")
    metrics.start_rules(RUN, [rule.name for rule in DEFAULT_RULES("bf16_dense")])
    metrics.state("verdict", "violation", run=RUN)
    metrics.state("guard_state", "halt", run=RUN)
    metrics.state("rule_outcome", "violation", run=RUN, rule="topology")
    for claim in CLAIMS:
        metrics.state("claim", "violation" if claim == "topology" else "pass", run=RUN, claim=claim)

    def move() -> None:
        for stats in (PAIR, WITNESS):
            metrics.pair(RUN, stats, 30.0, {"e": "0"}.__getitem__)
        for measure in MEASURES.values():
            if measure.kind in ("counter", "gauge"):
                _touch(metrics, measure)

    metrics.before_scrape(move)
    return metrics


def _touch(metrics: Metrics, measure: Measure) -> None:
    values = {"run": RUN, "rule": "topology", "region": "norm"}
    labels = {name: values.get(name) or LABEL_VALUES[name][0] for name in measure.labels}
    short = measure.family.removeprefix(PREFIX)
    variants = [labels]
    for label in ("phase", "value"):
        if label in labels:
            variants = [labels | {label: value} for value in LABEL_VALUES[label]]
    for one in variants:
        if measure.kind == "counter":
            metrics.add(short, 1.0, **one)
        elif "pair" not in one:
            moment = measure.name.endswith("timestamp_seconds")
            metrics.set(short, time.time() - 5 if moment else 1.0, **one)


@pytest.fixture(scope="module")
def served() -> Iterator[int]:
    server, thread = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=exporter().registry())
    assert isinstance(server, WSGIServer)
    yield server.server_port
    server.shutdown()
    server.server_close()
    assert isinstance(thread, threading.Thread)
    thread.join(timeout=10)


class Prometheus:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/api/v1/"

    def get(self, path: str, **query: str) -> Any:
        url = self.url + path + ("?" + urllib.parse.urlencode(query) if query else "")
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310  # loopback
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # still starting; `wait` asks again
                raise
            raise AssertionError(f"{url}: {error.read().decode()}") from error

    def query(self, expr: str) -> list[Any]:
        rows: list[Any] = self.get("query", query=expr)["result"]
        return rows

    def wait(self, expr: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if self.query(expr):
                    return
            except (urllib.error.URLError, ConnectionError):
                pass
            time.sleep(0.2)
        raise AssertionError(f"{expr} had no result within {seconds} s")


@pytest.fixture(scope="module")
def prometheus(served: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    home = tmp_path_factory.mktemp("prometheus")
    write(home, config_files(target=f"127.0.0.1:{served}", out=home, interval_seconds=1, runbook="runbook"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        "prometheus",
        f"--config.file={home / 'prometheus.yml'}",
        f"--storage.tsdb.path={home / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    with (home / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            server = Prometheus(port)
            server.wait(f"{RECORDINGS[0].record} and on (run) rate(isoexec_tokens_total[1m]) > 0")
            yield server
        finally:
            process.terminate()
            process.wait(timeout=20)


TARGETS = [
    pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
    for panel in overview()["panels"]
    for target in panel.get("targets", [])
]


@pytest.mark.parametrize("expr", TARGETS)
def test_every_panel_shows_something(prometheus: Prometheus, expr: str) -> None:
    assert prometheus.query(concrete(expr)) != []


def test_the_run_variable_and_the_annotation_have_values(prometheus: Prometheus) -> None:
    runs = prometheus.get("label/run/values", **{"match[]": "isoexec_run_info"})
    assert runs == [RUN]
    (annotation,) = overview()["annotations"]["list"]
    prometheus.query(concrete(annotation["expr"]))


def test_every_catalogued_metric_is_exported_and_nothing_else_of_ours(prometheus: Prometheus) -> None:
    names = {n for n in prometheus.get("label/__name__/values") if n.startswith(PREFIX)}
    families = {
        name.removesuffix(suffix)
        for name in names
        for suffix in ("_bucket", "_sum", "_count")
        if name.removesuffix(suffix) in MEASURES
    }
    assert {n for n in names if n in MEASURES} | families == set(MEASURES)
    assert {n for n in names if n not in MEASURES} == {
        f"{PREFIX}logprob_abs_diff_nats{suffix}" for suffix in ("_bucket", "_sum", "_count")
    }


def test_every_rule_evaluates_without_an_error(prometheus: Prometheus) -> None:
    for alert in ("IsoexecTopologyClaimBroken", "IsoexecMismatchSevere", "IsoexecHeartbeat"):  # one a group
        prometheus.wait(f"ALERTS{{alertname='{alert}'}}")
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {a.name for a in ALERTS} | {r.record for r in RECORDINGS}
    assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"} == {}


def test_a_broken_run_raises_its_alerts_and_no_alert_of_another_claim(prometheus: Prometheus) -> None:
    for name in (
        *("IsoexecTopologyClaimBroken", "IsoexecMismatchSevere", "IsoexecRhoOff", "IsoexecRunHalted"),
        *("IsoexecBadLogprobs", "IsoexecMessagesDropped", "IsoexecDaemonErrors", "IsoexecHeartbeat"),
    ):
        prometheus.wait(f"ALERTS{{alertname='{name}', alertstate='firing'}}")
    firing = {
        alert["labels"]["alertname"]
        for alert in prometheus.get("alerts")["alerts"]
        if alert["state"] == "firing"
    }
    assert not firing & {
        "IsoexecKernelReplaced",
        "IsoexecDaemonDown",
        "IsoexecWeightsStale",
        "IsoexecSilence",
    }


@pytest.mark.parametrize("rule", RECORDINGS, ids=lambda r: r.record)
def test_every_recording_rule_has_a_value(prometheus: Prometheus, rule: Any) -> None:
    prometheus.wait(rule.record)
