# SPDX-License-Identifier: Apache-2.0
"""The catalogue keeps to the conventions that Prometheus users expect, and stays small."""

from __future__ import annotations

import re

import numpy as np
import pytest

from isoexec.contracts.measures import LABEL_VALUES, MEASURES, PREFIX, PROCESSES, Measure, series_names

ALL = list(MEASURES.values())
OPEN_LABELS = {"run", "rule", "region", "regime", "version", "python_version"}


@pytest.mark.parametrize("measure", ALL, ids=lambda m: m.name)
def test_names_follow_prometheus(measure: Measure) -> None:
    assert re.fullmatch(PREFIX + "[a-z0-9_]+", measure.name)
    assert measure.name.endswith("_total") == (measure.kind == "counter")
    assert measure.name.endswith("_info") == (measure.kind == "info")
    assert not measure.name.endswith(("_count", "_sum", "_bucket"))
    if measure.unit:
        assert measure.family.endswith(measure.unit)
    assert measure.help
    assert not measure.help.endswith(".")


@pytest.mark.parametrize("measure", ALL, ids=lambda m: m.name)
def test_labels_are_the_run_and_small_fixed_sets(measure: Measure) -> None:
    assert set(measure.labels) <= OPEN_LABELS | set(LABEL_VALUES)
    assert len(measure.labels) <= 4
    sets = {name: LABEL_VALUES[name] for name in measure.labels if name in LABEL_VALUES}
    assert all(len(values) <= (PROCESSES + 1 if name == "process" else 10) for name, values in sets.items())


@pytest.mark.parametrize("measure", ALL, ids=lambda m: m.name)
def test_only_state_sets_have_states_and_their_last_label_takes_them(measure: Measure) -> None:
    assert bool(measure.states) == (measure.kind == "stateset")
    if measure.states:
        assert LABEL_VALUES[measure.labels[-1]] == measure.states
        assert "unknown" in measure.states
    assert bool(measure.buckets) == (measure.kind == "histogram")


def test_mismatch_buckets_are_half_decades_from_1e_9_to_10() -> None:
    (histogram,) = [m for m in ALL if m.kind == "histogram"]
    edges = np.array(histogram.buckets)
    assert (edges[0], edges[-1], len(edges)) == (1e-9, 10.0, 21)
    assert np.all((np.diff(np.log10(edges)) > 0.45) & (np.diff(np.log10(edges)) < 0.53))


def test_series_names_are_what_a_scrape_shows() -> None:
    names = series_names()
    assert "isoexec_logprob_abs_diff_nats_bucket" in names
    assert "isoexec_logprob_abs_diff_nats" not in names
    assert "isoexec_tokens_total" in names


def test_a_run_costs_a_bounded_number_of_series() -> None:
    """Three pairs, three roles, eight processes of each, fifty rules, ten regions: what one run really has."""
    size = {name: len(values) for name, values in LABEL_VALUES.items()} | {
        "pair": 3,
        "process": 8,
        "rule": 50,
        "region": 10,
    }
    total = 0
    for measure in ALL:
        series = 1
        for label in measure.labels:
            series *= size.get(label, 1)
        total += series * (len(measure.buckets) + 3 if measure.buckets else 1)
    assert total < 1000
