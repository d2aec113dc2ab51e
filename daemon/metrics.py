# SPDX-License-Identifier: Apache-2.0
"""Exports the catalogue of measures to Prometheus from plain dictionaries; nothing is observed token by token."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import structlog
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector, CollectorRegistry

from isoexec.contracts.detail import Bucket, PairDetail, mean_abs_d
from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.measures import LABEL_VALUES, MEASURES, PREFIX, Measure
from isoexec.contracts.window import PairStats

__all__ = ["Metrics", "MetricsError"]

_log = structlog.get_logger("isoexec.daemon")

Labels = tuple[str, ...]


class MetricsError(IsoExecError):
    """A measure or label that the catalogue does not have."""


class _Histogram:
    __slots__ = ("counts", "total")

    def __init__(self, size: int) -> None:
        self.counts = [0] * size
        self.total = 0.0


class Metrics(Collector):
    """Values by measure name (without `isoexec_`) and labels, and the collector that shows them."""

    def __init__(self, *, version: str) -> None:
        self._values: dict[str, dict[Labels, float]] = {name: {} for name in MEASURES}
        self._histograms: dict[str, dict[Labels, _Histogram]] = {}
        self._hooks: list[Callable[[], None]] = []
        for measure in MEASURES.values():
            if not measure.labels and measure.kind in ("counter", "gauge"):
                self._values[measure.name][()] = 0.0
        self.set("build_info", 1.0, version=version, python_version=platform.python_version())

    def registry(self) -> CollectorRegistry:
        registry = CollectorRegistry()
        registry.register(self)
        return registry

    def before_scrape(self, hook: Callable[[], None]) -> None:
        """Call `hook` at each scrape, to set what is cheaper to read than to keep."""
        self._hooks.append(hook)

    def _place(self, name: str, labels: Mapping[str, str]) -> tuple[Measure, Labels]:
        measure = MEASURES.get(PREFIX + name) or MEASURES.get(f"{PREFIX}{name}_total")
        if measure is None:
            raise MetricsError(f"{PREFIX}{name} is not in the catalogue of measures")
        wanted = measure.labels
        if labels.keys() != set(wanted):
            raise MetricsError(f"{measure.name}: wanted labels {wanted}, found {tuple(labels)}")
        for label, value in labels.items():
            if label in LABEL_VALUES and value not in LABEL_VALUES[label]:
                raise MetricsError(f"{measure.name}: {label} cannot be {value!r}")
        return measure, tuple(labels[label] for label in wanted)

    def add(self, name: str, amount: float, /, **labels: str) -> None:
        """Raise a counter."""
        measure, key = self._place(name, labels)
        values = self._values[measure.name]
        values[key] = values.get(key, 0.0) + amount

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Set a gauge, or an info to 1."""
        measure, key = self._place(name, labels)
        self._values[measure.name][key] = float(value)

    def get(self, name: str, /, **labels: str) -> float | None:
        measure, key = self._place(name, labels)
        return self._values[measure.name].get(key)

    def state(self, name: str, state: str, /, **labels: str) -> None:
        """Put a state set into one of its states; the others become 0."""
        measure = MEASURES[PREFIX + name]
        label = measure.labels[-1]
        for one in measure.states:
            self.set(name, float(one == state), **labels, **{label: one})

    def observe(self, name: str, counts: Sequence[int], total: float, /, **labels: str) -> None:
        """Add counts per bucket (and above the last) and their sum to a histogram."""
        measure, key = self._place(name, labels)
        held = self._histograms.setdefault(measure.name, {}).setdefault(
            key, _Histogram(len(measure.buckets) + 1)
        )
        for index, count in enumerate(counts):
            held.counts[index] += int(count)
        held.total += total

    def start_run(self, run: str, *, regime: str, monitor_only: bool, policy: str) -> None:
        """Create every known series of a run: counters at 0, state sets at unknown."""
        self._drop_series("run_info", run)
        self.set(
            "run_info",
            1.0,
            run=run,
            regime=regime,
            mode="monitor" if monitor_only else "contract",
            policy=policy,
        )
        for measure in MEASURES.values():
            names = [label for label in measure.labels if label != "run"]
            if "run" not in measure.labels or any(label not in LABEL_VALUES for label in names):
                continue
            if measure.kind == "info":
                continue
            short = measure.family.removeprefix(PREFIX)
            for values in _product([LABEL_VALUES[label] for label in names]):
                labels = {"run": run, **dict(zip(names, values, strict=True))}
                if measure.kind == "counter":
                    self.add(short, 0.0, **labels)
                elif measure.kind == "histogram":
                    self.observe(short, (), 0.0, **labels)
                elif measure.kind == "stateset":
                    self.set(short, float(values[-1] == "unknown"), **labels)
        self.set("halted", 0.0, run=run)

    def start_rules(self, run: str, rules: Iterable[str]) -> None:
        """Create the series of a run's rules."""
        for rule in rules:
            self.state("rule_outcome", "unknown", run=run, rule=rule)
            for action in LABEL_VALUES["action"]:
                self.add("decisions", 0.0, run=run, rule=rule, action=action)

    def end_run(self, run: str) -> None:
        """Remove every series of a run."""
        for name in MEASURES:
            self._drop_series(name.removeprefix(PREFIX), run)

    def finish_run(self, run: str) -> None:
        """Remove what says when a run was last heard of: nobody waits for it any more, and its age is no silence."""
        for name in ("last_message_timestamp_seconds", "last_verdict_timestamp_seconds"):
            self._drop_series(name, run)

    def _drop_series(self, name: str, *first: str) -> None:
        """Remove the series whose first labels have these values; the run is the first one wherever there is one."""
        measure = MEASURES.get(PREFIX + name)
        if measure is None or measure.labels[:1] != ("run",):
            return
        count = len(first)
        series: tuple[dict[Labels, Any], ...] = (
            self._values[measure.name],
            self._histograms.get(measure.name, {}),
        )
        for held in series:
            for key in [key for key in held if key[:count] == first]:
                held.pop(key)

    def pair(self, run: str, stats: PairStats, total_abs: float, place: Callable[[str], str]) -> None:
        """Add one window's statistics of a pair; `place` gives the label of a process by its source."""
        labels = {"run": run, "pair": stats.label}
        for name in ("tokens", "bitwise_equal", "nonfinite", "exact_zero", "positive", "id_mismatch"):
            self.add(name if name == "tokens" else f"tokens_{name}", getattr(stats, name), **labels)
        if stats.histogram:
            self.observe("logprob_abs_diff_nats", stats.histogram, total_abs, **labels)
        for name, value in (
            ("logprob_abs_diff_mean_nats", stats.mean_abs_d),
            ("logprob_abs_diff_max_nats", stats.max_abs_d),
            ("logprob_diff_mean_nats", stats.mean_d),
            ("rho_mean", stats.rho_mean),
            ("rho_z", stats.rho_z),
        ):
            self.set(name, value, **labels)
        self.set("kl_nats", stats.k1, **labels, estimator="k1")
        self.set("kl_nats", stats.k3, **labels, estimator="k3")
        if stats.detail is not None:
            self._detail(labels, stats, stats.detail, place)

    def _detail(
        self, labels: dict[str, str], stats: PairStats, detail: PairDetail, place: Callable[[str], str]
    ) -> None:
        self.set("kl_nats", detail.number("k2"), **labels, estimator="k2")
        self.set("rho_z_capped", detail.number("rho_z_capped"), **labels)
        for percentile in LABEL_VALUES["percentile"]:
            value = detail.number(f"p{percentile.replace('.', '')}_abs_d")
            self.set("logprob_abs_diff_percentile_nats", value, **labels, percentile=percentile)
        if stats.finite:
            self.add("tokens_effective", detail.number("ess_share") * stats.finite, **labels)
            self.add("tokens_clipped", round(detail.number("clip_share") * stats.finite), **labels)
        rows: dict[tuple[str, Labels], list[Bucket]] = {}
        for bucket in detail.buckets:
            if (key := _series_of(bucket, place)) is not None:
                rows.setdefault(key, []).append(bucket)
        for name in {name for name, _ in _BREAKDOWNS.values()}:
            self._drop_series(name, labels["run"], labels["pair"])
        for (name, values), buckets in rows.items():
            measure = MEASURES[PREFIX + name]
            where = dict(zip(measure.labels[2:], values, strict=True))
            self.set(name, mean_abs_d(buckets), **labels, **where)

    def collect(self) -> Iterator[Metric]:
        """Yield every family; a part that fails is left out, counted and logged, and the rest is shown."""
        for hook in self._hooks:
            try:
                hook()
            except Exception:  # noqa: BLE001 - one broken reading must not blind the whole scrape
                self._failed("a hook")
        for measure in MEASURES.values():
            try:
                family = self._family(measure)
            except Exception:  # noqa: BLE001
                self._failed(measure.name)
                continue
            yield family

    def _failed(self, what: str) -> None:
        self.add("collector_errors", 1.0)
        _log.exception("collector failed", what=what)

    def _family(self, measure: Measure) -> Metric:
        names = measure.labels
        values = dict(self._values[measure.name])
        if measure.kind == "histogram":
            family: Any = HistogramMetricFamily(measure.name, measure.help, labels=names)
            for key, held in list(self._histograms.get(measure.name, {}).items()):
                running, buckets = 0, []
                for edge, count in zip(
                    [*map(str, map(float, measure.buckets)), "+Inf"], held.counts, strict=True
                ):
                    running += count
                    buckets.append((edge, running))
                family.add_metric(key, buckets, held.total)
            return family  # type: ignore[no-any-return]
        if measure.kind == "counter":
            family = CounterMetricFamily(measure.family, measure.help, labels=names)
        elif measure.kind == "info":
            family = InfoMetricFamily(measure.family, measure.help, labels=())
            for key in values:
                family.add_metric((), dict(zip(names, key, strict=True)))
            return family  # type: ignore[no-any-return]
        else:
            family = GaugeMetricFamily(measure.name, measure.help, labels=names)
        for key, value in values.items():
            family.add_metric(key, value)
        return family  # type: ignore[no-any-return]

    def describe(self) -> Iterator[Metric]:
        """Name no family in advance: registering must not run a scrape."""
        return iter(())


# breakdown of a window -> measure, and the label of each bucket where it is another one than the window's
_BREAKDOWNS: dict[str, tuple[str, Mapping[str, str]]] = {
    "position": ("logprob_abs_diff_position_nats", {}),
    "from_end": ("logprob_abs_diff_from_end_nats", {}),
    "prefix_hit": ("logprob_abs_diff_group_nats", {"miss": "prefix_miss", "hit": "prefix_hit"}),
    "pack_index": (
        "logprob_abs_diff_group_nats",
        {"0": "pack_0", "1": "pack_1", "2-3": "pack_2_3", "4-7": "pack_4_7", "8+": "pack_8"},
    ),
    "padding": ("logprob_abs_diff_group_nats", {"none": "unpadded", "padded": "padded"}),
    "engine": ("logprob_abs_diff_process_nats", {}),
    "trainer": ("logprob_abs_diff_process_nats", {}),
}


def _series_of(bucket: Bucket, place: Callable[[str], str]) -> tuple[str, Labels] | None:
    """Give measure and labels, after run and pair, under which a bucket is exported; None where it is not."""
    if not bucket.finite or bucket.by not in _BREAKDOWNS:
        return None
    name, labels = _BREAKDOWNS[bucket.by]
    if bucket.by in ("engine", "trainer"):
        return name, (bucket.by, place(bucket.label))
    label = labels.get(bucket.label) if labels else bucket.label
    return None if label is None else (name, (label,))


def _product(sets: Sequence[Sequence[str]]) -> Iterator[Labels]:
    if not sets:
        yield ()
        return
    for first in sets[0]:
        for rest in _product(sets[1:]):
            yield (first, *rest)
