# SPDX-License-Identifier: Apache-2.0
"""The detailed statistics on their way: from what senders say, through window, rules and series, to status and replay."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.exposition import generate_latest

from isoexec.contracts.detail import NUMBERS
from isoexec.contracts.measures import LABEL_VALUES, PROCESSES
from isoexec.contracts.modes import Mode, write_mode
from isoexec.contracts.window import PairStats, Window
from isoexec.contracts.wire import Hello, Logprobs, encode_frame
from isoexec.daemon.attributes import Attributes, labels_of
from isoexec.daemon.cli import check, status
from isoexec.daemon.config import Config
from isoexec.daemon.detail import pair_detail
from isoexec.daemon.diagnosis.window import diagnose_step
from isoexec.daemon.journal import Journal
from isoexec.daemon.judge import Judge
from isoexec.daemon.metrics import Metrics
from isoexec.daemon.runs import Run
from isoexec.daemon.statistics import FROM_END, POSITIONS, PairAccumulator
from isoexec.daemon.window import StepBuilder

MANY, LENGTH = 60, 20
PAIR = ("engine_decode", "trainer_score")


def logprobs(case: str, values: Any, **known: Any) -> Logprobs:
    count, length = values.shape
    columns: dict[str, Any] = {name: np.asarray(column, np.int32) for name, column in known.items()}
    return Logprobs(
        run="r",
        role=case.partition("_")[0],
        source="host:1:" + case,
        case=case,
        step=1,
        weight_version=1,
        digests=np.repeat(np.arange(count, dtype=np.uint8), 16).reshape(count, 16),
        lengths=np.full(count, length, np.int32),
        starts=np.zeros(count, np.int32),
        logprobs=values.astype(np.float32).reshape(-1),
        tokens=np.zeros(count * length, np.int32),
        **columns,
    )


def both_sides() -> tuple[Any, Any]:
    """Rollout and trainer, clean in the first half of the sequences and far off in the second."""
    rng = np.random.default_rng(4)
    rollout = -rng.exponential(1.0, (MANY, LENGTH)).astype(np.float32)
    trained = rollout + rng.normal(0, 0.002, rollout.shape)
    trained[MANY // 2 :] -= rng.exponential(0.4, (MANY - MANY // 2, LENGTH))
    return rollout, trained.astype(np.float32)


HALVES = [0] * (MANY // 2) + [3] * (MANY - MANY // 2)


@pytest.mark.parametrize(
    ("attribute", "side", "cause", "labels"),
    [
        ("prefix_hit", "engine", "prefix_cache", ("hit", "miss")),
        ("pack_index", "trainer", "pack_boundary", ("2-3", "0")),
        ("padding", "trainer", "padding", ("padded", "none")),
    ],
)
def test_what_a_sender_knows_of_its_sequences_breaks_the_mismatch_down_and_names_the_cause(
    attribute: str, side: str, cause: str, labels: tuple[str, str]
) -> None:
    rollout, trained = both_sides()
    known: dict[str, dict[str, Any]] = {"engine": {}, "trainer": {}} | {side: {attribute: HALVES}}
    steps = StepBuilder(Config(state_dir=Path()), pending_tokens=10_000)
    steps.logprobs(logprobs("engine_decode", rollout, **known["engine"]), 0.0)
    steps.logprobs(logprobs("trainer_score", trained, **known["trainer"]), 0.0)
    state = steps.close(steps.open[1], 1.0)
    (stats,) = state.stats()
    assert stats.detail is not None
    bad, good = labels
    rows = {one.label: one for one in stats.detail.breakdown(attribute)}
    assert rows.keys() == {bad, good}
    assert rows[bad].mean_abs_d > 100 * rows[good].mean_abs_d
    assert stats.detail.worst(attribute) == rows[bad]
    found, _ = diagnose_step(state, (stats,), "bf16_dense", ())
    assert [one.cause for one in found] == [cause]
    assert found[0].evidence["tokens_there"] == rows[bad].tokens


def test_a_sender_that_says_nothing_of_its_sequences_is_broken_down_by_nothing() -> None:
    rollout, trained = both_sides()
    old = b"".join(map(bytes, encode_frame(logprobs("engine_decode", rollout))))
    assert b"prefix_hit" not in old  # what an older daemon reads, too
    steps = StepBuilder(Config(state_dir=Path()), pending_tokens=10_000)
    steps.logprobs(logprobs("engine_decode", rollout), 0.0)
    steps.logprobs(logprobs("trainer_score", trained), 0.0)
    (stats,) = steps.open[1].stats()
    assert stats.detail is not None
    assert {one.by for one in stats.detail.buckets} == {"position", "from_end", "engine", "trainer"}


def test_a_sequence_said_to_be_two_things_is_known_to_be_neither_and_is_forgotten_with_its_step() -> None:
    values = np.full((3, 1), -1.0)
    known = Attributes()
    known.note(logprobs("engine_decode", values, prefix_hit=[0, 16, -1]))
    known.note(logprobs("engine_decode", values[:1], prefix_hit=[16]))
    digests = [bytes([place]) * 16 for place in range(4)]
    found = known.of(PAIR, digests)
    assert {name: column.tolist() for name, column in found.items()} == {"prefix_hit": [-1, 16, -1, -1]}
    assert labels_of(found) == {"prefix_hit": ["unknown", "hit", "unknown", "unknown"]}
    known.forget(0)
    assert known.of(PAIR, digests)
    known.forget(1)
    assert known.of(PAIR, digests) == {}


def test_a_window_keeps_every_number_and_every_token_of_a_breakdown() -> None:
    rollout, trained = both_sides()
    sums = PairAccumulator(PAIR)
    engines = [f"host:{place % 3}:engine" for place in range(MANY)]
    sums.add(
        rollout.reshape(-1),
        trained.reshape(-1),
        np.full(MANY, LENGTH),
        attributes={"engine": engines},
    )
    found, kept = sums.detail(), pair_detail(sums.detail())
    assert kept.numbers.keys() == NUMBERS.keys()
    assert kept.numbers["ess_share"] == found.ess_share
    assert kept.numbers["p999_abs_d"] == found.quantiles[0.999]
    assert kept.numbers["sequence_worst_abs_d"] == found.worst_sequences[0]
    for by in ("position", "from_end", "engine"):
        assert sum(one.tokens for one in kept.breakdown(by)) == MANY * LENGTH
    assert len(kept.breakdown("engine")) == 3
    # the labels of series are those of the statistics
    empty = pair_detail(PairAccumulator(PAIR).detail())
    for by, edges in (("position", POSITIONS), ("from_end", FROM_END)):
        assert len(LABEL_VALUES[by]) == len(edges)
        assert {one.label for one in kept.breakdown(by)} == set(LABEL_VALUES[by])
        assert not any(one.finite for one in empty.breakdown(by))


def run_of(**settings: Any) -> Run:
    config = Config(state_dir=Path(), **settings)
    hello = Hello(run="r", role="driver", source="d", regime="bf16_dense", monitor_only=True)
    return Run(
        name="r", config=config, reference=hello, contract=None, judge=Judge(()), session=1,
        builder=StepBuilder(config, pending_tokens=1000),
    )  # fmt: skip


def test_processes_that_call_themselves_anything_make_no_more_series() -> None:
    run, metrics = run_of(), Metrics(version="1")
    metrics.start_run("r", regime="bf16_dense", monitor_only=True, policy="fail_open")

    def windows(first: int, last: int) -> str:
        sums = PairAccumulator(PAIR)
        for place in range(first, last):
            name = f"evil\"{place}\\n'{{}}"
            hello = Hello(
                run="r",
                role="engine",
                source=name,
                replica=f"x{place}",
                regime="bf16_dense",
                monitor_only=True,
            )
            assert run.greet(hello, 0.0).accepted
            values = np.full(30, -1.0, np.float32)
            sums.add(values, values - np.float32(place / 10), np.asarray([30]), attributes={"engine": [name]})
        metrics.pair("r", _with_detail(sums), sums.sum_abs, run.place)
        return generate_latest(metrics.registry()).decode()

    text = windows(0, 300)
    rows = [line for line in text.splitlines() if line.startswith("isoexec_logprob_abs_diff_process_nats{")]
    assert len(rows) == PROCESSES + 1
    assert "evil" not in text
    assert {row.split('process="')[1].split('"')[0] for row in rows} == set(LABEL_VALUES["process"])
    # the next window holds one of them: what the others had is gone
    text = windows(3, 4)
    rows = [line for line in text.splitlines() if line.startswith("isoexec_logprob_abs_diff_process_nats{")]
    assert [row.rpartition(" ")[2][:5] for row in rows] == ["0.299"]
    assert 'process="3"' in rows[0]


def _with_detail(sums: PairAccumulator) -> PairStats:
    values = vars(sums.result()) | {"detail": pair_detail(sums.detail())}
    return PairStats(**values)


def test_a_process_keeps_the_place_of_the_one_it_replaces_and_shares_it_with_nobody_alive() -> None:
    run = run_of()

    def greet(source: str, rank: int) -> str:
        hello = Hello(
            run="r", role="engine", source=source, rank=rank, regime="bf16_dense", monitor_only=True
        )
        run.greet(hello, 0.0)
        return run.place(source)

    assert [greet("a:1", 1), greet("b:1", 0), greet("c:1", 0), greet("d:1", 1 << 40)] == [
        "1",
        "0",
        "2",
        "other",
    ]
    run.processes["b:1"].connected = False
    assert greet("b:2", 0) == "0"
    assert run.place("nobody") == "other"


RULES = """
rules:
  - {name: engines, signal: worst_engine_abs_d, bound: 0.05, action: halt, patience: 1}
  - {name: hits, signal: worst_prefix_hit_abs_d, bound: 0.05, action: warn}
  - {name: sample, signal: ess_loss, bound: 0.5, action: dryrun}
  - {name: packs, signal: worst_pack_index_abs_d, bound: 0.05, action: warn}
"""


def test_detail_reaches_rules_series_status_page_and_a_replay_says_the_same(
    start: Callable[..., Any],
    peer: Callable[..., Any],
    wait_until: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    daemon = start(rules=str(rules))
    rollout, trained = both_sides()
    half = MANY // 2
    ids = np.random.default_rng(5).integers(0, 1000, (MANY, LENGTH + 4))

    def rows(values: Any) -> list[tuple[list[int], int, Any]]:
        return [(ids[i].tolist(), 4, values[i]) for i in range(len(values))]

    good = peer(daemon, "engine", regime="bf16_dense")
    bad = peer(daemon, "engine", rank=1, regime="bf16_dense")
    trainer = peer(daemon, "trainer", regime="bf16_dense")
    good.logprobs("engine_decode", 1, rows(rollout)[:half], prefix_hit=np.zeros(half, np.int32))
    bad.logprobs("engine_decode", 1, rows(rollout)[half:], prefix_hit=np.full(MANY - half, 16, np.int32))
    trainer.logprobs("trainer_score", 1, rows(trained))
    trainer.step(1)
    daemon.windows()

    said = {one["rule"]: one for one in daemon.json("/api/v1/runs/r/verdicts")["verdicts"]}
    assert {name: one["outcome"] for name, one in said.items()} == {
        "engines": "violation", "hits": "violation", "sample": "pass", "packs": "unknown",
    }  # fmt: skip
    assert said["engines"]["evidence"]["label"] == bad.source
    assert said["engines"]["action"] == "warn"  # a run that is only monitored
    worst = said["engines"]["value"]

    def series(**labels: str) -> Any:
        return daemon.metric("isoexec_logprob_abs_diff_process_nats", run="r", role="engine", **labels)

    assert series(process="1") == worst
    assert series(process="0") < 0.01
    assert series(process="other") is None
    pair = "engine_decode:trainer_score"
    assert daemon.metric("isoexec_logprob_abs_diff_group_nats", group="prefix_hit") == worst
    assert daemon.metric("isoexec_tokens_clipped_total", pair=pair) > MANY * LENGTH / 8
    assert 0 < daemon.metric("isoexec_tokens_effective_total", pair=pair) < MANY * LENGTH

    write_mode(daemon.state, "r", Mode.OFF, by="alice", reason="a test")
    status(["--state-dir", str(daemon.state_dir)])
    told = capsys.readouterr().out
    assert f"engine {bad.source} {worst:.3g}" in told
    assert ", by alice: a test" in told
    assert "  off: engines, hits, sample, packs" in told
    write_mode(daemon.state, "r", Mode.ENFORCE, by="bob", reason="")
    page = daemon.text("/runs/r")
    assert "mode enforce, set by bob" in page
    assert "<td>engines<td>" in page
    assert f"<td>engine<td>{bad.source}" in page

    journal = Journal.open(daemon.state.journal)
    kept = [one["window"] for one in journal.windows("r")]
    journal.close()
    assert [Window.from_dict(one).to_dict() for one in kept] == kept
    numbers = kept[0]["pairs"][0]["detail"]["numbers"]
    percentile = daemon.metric("isoexec_logprob_abs_diff_percentile_nats", pair=pair, percentile="99.9")
    assert percentile == numbers["p999_abs_d"]
    check([str(daemon.state_dir), "--json"])
    again = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    now = [{k: v for k, v in said[one["rule"]].items() if k != "time"} for one in again]
    assert [{k: v for k, v in one.items() if k != "run"} for one in again] == now
