# SPDX-License-Identifier: Apache-2.0
"""`isoexec gate run --extend` on a gate of its own: one rank's record, then two real processes, and what must not extend it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from isoexec.contracts.evidence import Check, EvidenceRecord, Store, Subject
from isoexec.kernels.gates import Gate, Run, degrees, found, ranks, running
from isoexec.kernels.gates.cli import run as command
from isoexec.kernels.gates.inputs import fill, nudged
from isoexec.kernels.grad_norm import exact_sq_sum
from isoexec.kernels.grad_norm.gate import shards

FUNCTION = "grad_norm.exact/1"
FAULTY = "replicas"  # an unsharded tensor counted on every rank


class Bench:
    """A gate over the function that notes what it runs, the store it proves into, and how many ranks this machine has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ran: Counter[str] = Counter()
        self.fault = ""
        self.most = 1
        self.gate = Gate(FUNCTION, "cpu")

        @self.gate.check("conformance")
        def conformance(run: Run) -> None:
            self.ran["conformance"] += 1
            x = fill(40, 8, salt=1)
            run.equal(exact_sq_sum([x]), exact_sq_sum(list(x.split(7))))
            run.control("one_ulp", exact_sq_sum([nudged(x)]), exact_sq_sum([x]))

        @self.gate.check("partition_invariance")
        def partition(run: Run) -> None:
            (whole,) = run.ranks(1, shards, "TP", torch.float32, "")
            for size in degrees.degrees(run, "TP", (1, 2)):
                self.ran[f"TP {size}"] += 1
                for got in run.ranks(size, shards, "TP", torch.float32, self.fault):
                    run.equal(got, whole)
            run.control("a_sum_more", whole + 1, whole)

    def run(self, *more: str, quick: bool = True) -> int:
        places = ("--store", str(self.folder / "store"), "--work", str(self.folder / "work"))
        self.ran.clear()
        return command(["run", "--function", FUNCTION, *(["--quick"] if quick else []), *places, *more])

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.folder / "store").iterdir()}

    def records(self) -> list[EvidenceRecord]:
        return list(Store([self.folder / "store"]).records())


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(tmp_path)
    monkeypatch.setattr(degrees, "_WANTED", {})
    degrees.wants(made.gate, "partition_invariance", TP=(1, 2))
    monkeypatch.setattr(degrees, "most_ranks", lambda _: made.most)
    monkeypatch.setattr(running, "gate_for", lambda *_: made.gate)
    return made


@pytest.fixture(scope="module", autouse=True)
def _ends() -> Iterator[None]:
    yield
    ranks.close()


@pytest.fixture
def one_rank(bench: Bench, capsys: pytest.CaptureFixture[str]) -> Bench:
    """A machine with one rank has proven the function; from now on it has two."""
    assert bench.run() == 0
    assert "NOT COVERED: TP 2" in capsys.readouterr().out
    assert bench.ran == {"conformance": 1, "TP 1": 1}
    bench.most = 2
    return bench


def partition(record: EvidenceRecord) -> Check:
    check = record.check("partition_invariance", {"bits": 62})
    assert check is not None
    return check


def test_a_record_of_one_rank_is_extended_by_two_and_what_held_is_not_run_again(
    one_rank: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    (old,) = one_rank.records()
    assert partition(old).domain == {"TP": (1,)}
    kept = one_rank.files()
    assert one_rank.run("--extend") == 0
    out = capsys.readouterr().out
    assert "2 of 2 checks taken over" in out
    assert "1 checks kept from an earlier run" in out
    assert "NOT COVERED" not in out
    assert one_rank.ran == {"TP 1": 1, "TP 2": 1}
    (new,) = [one for one in one_rank.records() if one.digest != old.digest]
    assert partition(new).domain == {"TP": (1, 2)}
    assert partition(new).elements == 3 * partition(old).elements, "one result, and one of each of two ranks"
    assert [one for one in new.checks if one.family == "conformance"] == [
        one for one in old.checks if one.family == "conformance"
    ]
    assert one_rank.files().items() > kept.items(), "a record is never written over"
    assert list((one_rank.folder / "work").glob("*.json")) == []

    assert one_rank.run("--extend") == 0
    assert f"{FUNCTION}: proven by {new.digest}" in capsys.readouterr().out
    assert one_rank.ran == {}


def test_without_being_asked_a_run_takes_nothing_from_a_record(one_rank: Bench) -> None:
    assert one_rank.run() == 0
    assert one_rank.ran == {"conformance": 1, "TP 1": 1, "TP 2": 1}


def test_a_degree_that_fails_leaves_the_record_as_it_was(
    one_rank: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = one_rank.files()
    one_rank.fault = FAULTY
    assert one_rank.run("--extend") == 1
    assert one_rank.ran == {"TP 1": 1, "TP 2": 1}, "two ranks did run"
    assert f"{FUNCTION}: fails, no evidence is written" in capsys.readouterr().out
    assert one_rank.files() == kept
    # and the failure is not remembered as a result: the next run goes on from the record
    one_rank.fault = ""
    assert one_rank.run("--extend") == 0
    assert one_rank.ran == {"TP 1": 1, "TP 2": 1}
    assert max(one_rank.records(), key=lambda one: one.elements).elements > 2


def test_ranks_that_cannot_be_had_leave_the_record_as_it_was(
    one_rank: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = one_rank.files()
    monkeypatch.setattr(Run, "ranks", lambda *_: ranks.launch(3, shards, ("TP", torch.float32, "")))
    assert one_rank.run("--extend") == 1
    assert "FAILS: partition_invariance: RankError" in capsys.readouterr().out
    assert one_rank.files() == kept


def _another_source(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    other = Subject(name="isoexec.kernels.grad_norm", kind="kernel", source="sha256:" + "1" * 64)
    patch.setattr(running, "subject", lambda *_: other)


def _another_gate(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Gate, "digest", lambda _: "sha256:" + "2" * 64)


def _another_environment(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    here = found.environment("cpu")
    patch.setattr(running, "environment", lambda _: {**here, "torch": "9.9"})


def _past_its_time(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    (record,) = bench.records()
    for path in (bench.folder / "store").iterdir():
        path.unlink()
    early = replace(record, made="2020-01-01T00:00:00Z", expires="2020-01-02T00:00:00Z")
    Store([bench.folder / "store"]).write(early)


@pytest.mark.parametrize(
    "changed",
    [_another_source, _another_gate, _another_environment, _past_its_time],
    ids=lambda one: one.__name__,
)
def test_a_record_of_something_else_is_not_extended(
    changed: Callable[[Bench, pytest.MonkeyPatch], None],
    one_rank: Bench,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed(one_rank, monkeypatch)
    kept = one_rank.files()
    assert one_rank.run("--extend") == 0
    assert "0 of 2 checks taken over" in capsys.readouterr().out
    assert one_rank.ran == {"conformance": 1, "TP 1": 1, "TP 2": 1}, "all of it is run"
    assert one_rank.files().items() > kept.items()


def test_a_quick_record_is_not_extended_to_a_full_one(
    one_rank: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert one_rank.run("--extend", quick=False) == 0
    assert "0 of 2 checks taken over" in capsys.readouterr().out
    assert one_rank.ran == {"conformance": 1, "TP 1": 1, "TP 2": 1}
    assert sorted(one.profile for one in one_rank.records()) == ["full", "quick"]


def test_a_full_record_is_not_extended_to_a_quick_one(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run(quick=False) == 0
    bench.most = 2
    capsys.readouterr()
    assert bench.run("--extend") == 0
    assert "0 of 2 checks taken over" in capsys.readouterr().out
    assert bench.ran == {"conformance": 1, "TP 1": 1, "TP 2": 1}


def test_the_newest_record_of_the_same_profile_is_extended(
    one_rank: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    one_rank.most = 1
    assert one_rank.run(quick=False) == 0
    one_rank.most = 2
    capsys.readouterr()
    assert one_rank.run("--extend") == 0
    assert "2 of 2 checks taken over" in capsys.readouterr().out
    assert one_rank.ran == {"TP 1": 1, "TP 2": 1}
