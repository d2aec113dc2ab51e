# SPDX-License-Identifier: Apache-2.0
"""The benchmarks without a GPU: what they would time is called at tiny sizes, and their reports are made of that."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

BENCH = Path(__file__).resolve().parents[2] / "bench"
# what `subjects.vllm` is asked for, and how many arguments it gets
OF_VLLM = {
    "matmul_persistent": 2,
    "log_softmax": 2,
    "softmax_batch_invariant": 2,
    "rms_norm_batch_invariant": 4,
}


@pytest.fixture(scope="module")
def found(script: Callable[..., Any]) -> dict[str, Any]:
    result: dict[str, Any] = script("bench_interpreted.py")
    return result


def test_every_call_runs_and_gives_what_the_native_op_gives(found: dict[str, Any]) -> None:
    rows = dict(found["rows"])
    assert "differs" in rows.pop("planted")
    rows.pop("broken")
    assert len(rows) > 45
    assert {op: why for op, why in rows.items() if why} == {}
    assert [why.partition(" 5: ")[2] for why in found["troubles"]] == [
        "ours fails: ZeroDivisionError('division by zero')"
    ]
    assert set(found["absent"]) - {"grouped_linear"} == {"broken"}


def test_every_function_of_the_benchmark_is_called_and_peers_where_there_are_some(
    found: dict[str, Any],
) -> None:
    assert found["functions"] == []
    theirs = set(found["peers"]["vllm"])
    assert {
        "linear",
        "row_linear",
        "linear_weight_gradient",
        "rms_norm",
        "logprobs",
        "router",
        "attention",
    } <= theirs
    if importlib.util.find_spec("vllm") is not None:  # of which the kernel's own text is taken
        assert "grouped_linear" in theirs
    assert {"linear", "row_linear"} <= set(found["peers"]["leaf tree"])
    assert {"rms_norm", "silu_mul", "rope", "combine"} <= set(found["copied"])


def test_the_page_has_every_row_and_the_goals_their_worst(found: dict[str, Any]) -> None:
    assert found["lines"] == found["written"] > 60
    goals = {line.split(" | ")[0].strip("| "): line for line in found["goals"][2:]}
    few = goals["linear, up to 128 rows, to the native op"]
    assert "| <= 1.05 | 1.20 |" in few
    assert " 0 of " in few
    assert "not measured" in goals["RoPE, 8192 rows, share of a copy's bandwidth"]


def test_a_run_that_is_cut_says_so_and_runs_are_put_together_without_what_has_changed(
    found: dict[str, Any],
) -> None:
    assert found["cut"].endswith("rows, time was over")
    assert {why.partition(":")[2] for why in found["left"]} == {" silu_mul.poly/1 has changed since"}
    assert found["merged"] == found["written"] - len(found["left"])


def _report() -> Any:
    spec = importlib.util.spec_from_file_location("report", BENCH / "report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def test_pieces_of_one_machine_are_merged_and_of_two_are_not(tmp_path: Path) -> None:
    run = {"device": "one", "torch": "2", "cuda": "13", "triton": "3"}
    times = {
        "op": "rope",
        "shape": "8B",
        "rows": 1,
        "function": "rope.neox_fp32/1",
        "nbytes": 48e6,
        "flops": 0.0,
        "provider": "",
        "absent": {"vllm": "not installed"},
        "us": {"native": 20.0, "again": 20.0, "ours": 10.0},
    }
    sources = {"rope.neox_fp32/1": "now"}
    first = {"runs": [run], "sources": sources, "times": [times, times | {"rows": 64}]}
    second = {"runs": [run], "sources": sources, "times": [times | {"us": times["us"] | {"ours": 40.0}}]}  # type: ignore[operator]
    report = _report()
    kept, left = report.merged([first, second])
    assert left == []
    report.write(tmp_path, kept)
    assert [(row["rows"], row["us"]["ours"]) for row in kept["times"]] == [(1, 40.0), (64, 10.0)]
    assert json.loads((tmp_path / "kernels-h200.json").read_text()) == kept
    page = (tmp_path / "kernels-h200.md").read_text()
    assert (
        "| rope | 8B | 64 | 20.00 | 1.00 | 10.00 | 0.50 | not installed |  |  |  | 1.00 | bandwidth |" in page
    )
    assert (
        "| RMSNorm, SiLU-mul, RoPE, up to 256 rows, to the native op | <= 1.00 | 2.00 | rope 8B, 1 rows |"
        in page
    )
    later = second | {"sources": {"rope.neox_fp32/1": "later"}}
    kept, left = report.merged([first, later])
    assert [(row["rows"], row["us"]["ours"]) for row in kept["times"]] == [(1, 40.0)]
    assert left == [f"rope 8B {rows}: rope.neox_fp32/1 has changed since" for rows in (1, 64)]
    kept, left = report.merged([first, later], older=True)
    assert [row.get("older", False) for row in kept["times"]] == [False, True]
    assert left == []
    assert report.line(kept["times"][1]).endswith("| bandwidth, an older source |")
    with pytest.raises(ValueError, match="different machines"):
        report.merged([first, second | {"runs": [run | {"torch": "3"}]}])


def test_only_takes_ops_and_sections_and_refuses_the_rest(found: dict[str, Any]) -> None:
    assert found["chosen"] == ["rope", "rope+grad", "silu_mul+grad"]
    assert found["refused"].startswith("no op or section softmax; there are add_rms_norm")


def test_a_trial_of_gradients_is_a_table_that_is_read_back(found: dict[str, Any]) -> None:
    anything = 2**31 - 1
    assert found["tuned"]["steps"] == {
        "input 32 64": [[1, 16], [anything, 16]],
        "input 64 32": [[1, 16], [16, 16]],
        "weight 32 64": [[16, 64], [anything, 64]],
        "weight 64 32": [[16, 64]],
        "continue 32 64": [[1, 16], [anything, 16]],
    }
    tuned, left = found["tuned"]["said"][:-1], found["tuned"]["said"][-1]
    assert [line.split(" M")[0] for line in tuned] == [
        "tuned input tiny o",
        "tuned input tiny head",
        "tuned weight tiny o",
        "tuned weight tiny head",
        "tuned continue tiny o",
    ]
    assert left == "time is over before input other o, weight other o, continue other o,"


@pytest.fixture(scope="module")
def trials(script: Callable[..., Any]) -> dict[str, Any]:
    result: dict[str, Any] = script("trials_interpreted.py")
    return result


def test_trials_of_rows_logprobs_and_experts_call_their_kernels(trials: dict[str, Any]) -> None:
    assert len(trials["rows"]) > 20
    assert min(trials["rows"].values()) > 1
    assert {name: len(rows) for name, rows in trials["logprobs"].items()} == {
        "from logits": 4,
        "gradient of logits": 6,
        "from hidden states": 5,
    }
    experts = trials["experts"]
    assert set(experts["same"].values()) == {0}
    assert experts["wrong"]["forward"] > 200
    assert experts["tried"] == [[10.0, 11.0, True]] * 2


def test_the_hand_offs_trial_reports_goals_and_a_table_that_is_read_back(trials: dict[str, Any]) -> None:
    handed = trials["handed"]
    assert len(handed["chosen"]) == 8 * 10 * 2
    assert handed["tried"] > 100
    goal = "| shared by GPUs, {}, to the library and NCCL | <= {} |".format
    assert goal("8192 rows, whole results", 1.05) + " 1.04 | row_parallel 8B o " in handed["page"]
    assert goal("up to 256 rows", "1.20") + " 1.30 | row_parallel 8B o " in handed["page"]
    assert goal("8192 rows, each its rows", "1.10") + " not measured |" in handed["page"]
    assert "| row_parallel | 8B o 4096x4096 on 2 GPUs | 8192 | 100.00 |  | 104.00 | 1.04 |" in handed["page"]
    assert "two" not in handed["page"].split("| op |")[1], (
        "a schedule whose bits changed in a replay is no best"
    )
    assert handed["products"] == 7
    assert handed["back"] == [True, True]


def test_what_is_taken_of_vllm_is_there() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed here")
    places = [
        Path(root) / "model_executor" / folder / "batch_invariant.py"
        for root in spec.submodule_search_locations
        for folder in ("layers", "determinism")
    ]
    tree = ast.parse(next(place for place in places if place.is_file()).read_text())
    taken = {one.name: one.args for one in tree.body if isinstance(one, ast.FunctionDef)}
    for name, count in OF_VLLM.items():
        arguments = taken[name]
        most = len(arguments.args)
        assert most - len(arguments.defaults) <= count <= most, name
