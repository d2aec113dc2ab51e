# SPDX-License-Identifier: Apache-2.0
"""The demo's own parts: its task, its processes, its edits and its sums."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from isoexec.adapters.demo.cli import run
from isoexec.adapters.demo.faults import FAULTS, edited_contract
from isoexec.adapters.demo.job import Layout, pad
from isoexec.adapters.demo.processes import Remote, RemoteError, call_all
from isoexec.adapters.demo.report import mismatch_of
from isoexec.adapters.demo.task import Task
from isoexec.contracts.rules import DEFAULT_RULES
from isoexec.contracts.schema import library


def test_a_step_has_the_same_prompts_each_time_and_other_steps_others() -> None:
    task = Task(prompts=3, group=2)
    assert task.batch_prompts(4) == task.batch_prompts(4)
    assert task.batch_prompts(4) != task.batch_prompts(5)
    assert task.batch_prompts(4)[0] == task.batch_prompts(4)[1]
    assert len(task.batch_prompts(4)) == task.batch


def test_the_reward_is_the_share_of_wanted_tokens() -> None:
    assert Task().rewards([[4, 8, 5, 6], [4], [1, 2]]).tolist() == [0.5, 1.0, 0.0]


def test_rows_are_padded_on_the_right() -> None:
    tokens, prompts, lengths = pad([[1, 2], [3]], [[4], [5, 6, 7]])
    assert tokens.tolist() == [[1, 2, 4, 0], [3, 5, 6, 7]]
    assert (prompts, lengths) == ([2, 1], [3, 4])


def test_a_layout_names_its_replicas() -> None:
    assert str(Layout(trainer_tp=2, sequence_parallel=True, trainer_dp=2)) == "TP1 x TP2+SP+DP2"
    assert str(Layout(trainer_pp=2, as_replicas=2)) == "TP1 x TP1+PP2"


def test_an_edit_changes_one_value_of_the_shipped_contract(tmp_path: Path) -> None:
    source = library("qwen3-dense-cpu")
    edited = edited_contract(
        source, tmp_path / "c.yaml", {"composition.region=attention.constants.kv_segment": 64}
    )
    before, after = yaml.safe_load(source.read_text()), yaml.safe_load(edited.read_text())
    changed = next(b for b in after["composition"] if b["region"] == "attention")
    assert changed["constants"]["kv_segment"] == 64
    changed["constants"]["kv_segment"] = 32
    assert before == after


def test_every_fault_names_rules_that_exist() -> None:
    known = {r.name for r in DEFAULT_RULES("bitwise")} | {"lease_lost"}
    assert {rule for f in FAULTS.values() for rule in f.rules} <= known


def window(tokens: int, equal: int, mean: float, largest: float) -> dict[str, object]:
    pair = {
        "pair": ["engine_decode", "trainer_score"],
        "tokens": tokens,
        "bitwise_equal": equal,
        "mean_abs_d": mean,
        "max_abs_d": largest,
        "k1": 0.0,
        "k3": mean / 2,
    }
    other = {**pair, "pair": ["engine_decode", "engine_prefill"], "bitwise_equal": 0}
    return {"step": 0, "pairs": [pair, other]}


def test_windows_add_up_by_tokens() -> None:
    found = mismatch_of([window(10, 10, 0.0, 0.0), window(30, 15, 0.4, 2.0)])
    assert (found.tokens, found.bitwise_equal, found.max_abs_d) == (40, 25, 2.0)
    assert found.mean_abs_d == pytest.approx(0.3)
    assert found.share == 25 / 40


def test_no_window_is_not_equality() -> None:
    assert math.isnan(mismatch_of([]).share)


HOST = """
import os

class Host:
    def __init__(self, fail=False):
        if fail:
            raise LookupError("no such model")

    def pid(self):
        return os.getpid()

    def double(self, values):
        return values * 2

    def variable(self, name):
        return os.environ.get(name)

    def boom(self):
        raise ValueError("step 3 went wrong")

    def die(self):
        os._exit(3)

    def close(self):
        print("closed")
"""
TARGET = "isoexec_demo_host:Host"


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Remote]]:
    (tmp_path / "isoexec_demo_host.py").write_text(HOST)
    monkeypatch.syspath_prepend(tmp_path)
    made: list[Remote] = []

    def make(name: str = "host", **arguments: object) -> Remote:
        made.append(
            Remote(name, TARGET, env={"WHO": name}, log=tmp_path / f"{name}.log", arguments=arguments)
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_objects_run_in_processes_of_their_own_with_their_own_environment(
    remote: Callable[..., Remote], tmp_path: Path
) -> None:
    a, b = remote("a"), remote("b")
    a.wait_ready()
    b.wait_ready()
    pids = call_all([a, b], "pid")
    assert len({*pids, os.getpid()}) == 3
    assert call_all([a, b], "variable", "WHO") == ["a", "b"]
    assert a.call("double", np.array([1, 2])).tolist() == [2, 4]
    a.close()
    assert "closed" in (tmp_path / "a.log").read_text()


def test_errors_come_back_with_their_kind_and_place(remote: Callable[..., Remote]) -> None:
    with pytest.raises(RemoteError, match=r"host.start: LookupError: no such model"):
        remote(fail=True).wait_ready()
    other = remote("other")
    other.wait_ready()
    with pytest.raises(RemoteError, match=r"other.boom: ValueError: step 3 went wrong"):
        other.call("boom")
    with pytest.raises(RemoteError, match=r"other.die: process ended"):
        other.call("die")


@pytest.mark.parametrize(
    "argv", [["--phases", "dance"], ["--phases", ""], ["--steps", "1"], ["--fault", "rain"]]
)
def test_bad_arguments_name_the_field(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(argv)
    assert stop.value.code == 2
    assert argv[0] in capsys.readouterr().err
