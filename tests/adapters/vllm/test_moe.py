# SPDX-License-Identifier: Apache-2.0
"""A Qwen3 with experts in the engine under its contract, and what the engine sampled scored by real megatron-core."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from isoexec.adapters.base import REGIONS
from isoexec.adapters.census import Census

pytestmark = pytest.mark.vllm

Run = Callable[..., dict[str, Any]]
DTYPES = ("bfloat16", "float32")
LAYOUTS = {"TP2 EP2": ("bfloat16", True), "TP2 ETP2": ("float32", False)}
FORWARD = set(REGIONS) - {"qkv_bias", "head_logprobs"}
TRAINER = Path(__file__).with_name("trainer_script.py")


@pytest.fixture(scope="module")
def folders(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two checkpoints whose tokens go to three experts each: of two, no order of their sum would show."""
    from isoexec.adapters.demo.tiny import make_qwen3_moe

    del models
    root = tmp_path_factory.mktemp("experts")
    return {n: str(make_qwen3_moe(root / n, seed=s, chosen=3)) for n, s in (("first", 13), ("second", 14))}


@pytest.fixture(scope="module")
def one(run: Run, folders: dict[str, str], pinned_moe: str) -> Callable[[str], dict[str, Any]]:
    return lambda dtype: run("moe", contract=pinned_moe, dtype=dtype, **folders)


@pytest.fixture(scope="module")
def two(run: Run, folders: dict[str, str], pinned_moe: str) -> Callable[[str], dict[str, Any]]:
    def of(name: str) -> dict[str, Any]:
        dtype, whole = LAYOUTS[name]
        return run("moe", contract=pinned_moe, dtype=dtype, tp=2, whole_experts=whole, **folders)

    return of


@pytest.fixture(scope="module")
def native(run: Run, folders: dict[str, str]) -> dict[str, Any]:
    return run("native_moe", dtype="bfloat16", **folders)


def stored(folder: str, dtype: str) -> dict[str, list[int]]:
    """Digests of a checkpoint's tensors in a dtype."""
    import torch
    from safetensors.torch import load_file

    from isoexec.probes.weights import tensor_partial

    tensors = load_file(Path(folder) / "model.safetensors")
    return {
        name: list(tensor_partial(t.to(getattr(torch, dtype)), t.shape, [0] * t.dim()))
        for name, t in tensors.items()
    }


def scored(contract: str, tp: int, ep: int, sets: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Logprobs of each set's sequences by the trainer, as integers."""
    asked = {"contract": contract, "tp": tp, "ep": ep, "sets": sets, "folder": str(folder)}
    ours = ("ISOEXEC_CONTRACT", "ISOEXEC_ENFORCE", "ISOEXEC_RUN", "ISOEXEC_STATE_DIR")
    done = subprocess.run(
        [sys.executable, "-P", str(TRAINER)],
        input=json.dumps(asked),
        text=True,
        capture_output=True,
        env={k: v for k, v in os.environ.items() if k not in ours} | {"OMP_NUM_THREADS": "1"},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: list[Any] = json.loads((folder / "out.json").read_text())
    return answer


@pytest.fixture(scope="module")
def scores(
    one: Callable[[str], dict[str, Any]],
    native: dict[str, Any],
    folders: dict[str, str],
    pinned_moe: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[int, int], dict[str, Any]]:
    """scores(tp, ep) -> what that trainer gives the engine's sequences: by dtype, and those of the native engine."""
    pytest.importorskip("megatron.core")
    kept: dict[tuple[int, int], dict[str, Any]] = {}

    def of(tp: int, ep: int) -> dict[str, Any]:
        if (tp, ep) not in kept:
            sampled = {"native": (native, "bfloat16"), **{d: (one(d), d) for d in DTYPES}}
            sets = [
                {
                    "model": folders["first"],
                    "dtype": d,
                    "prompts": found["prompts"],
                    "tokens": found["tokens"],
                }
                for found, d in sampled.values()
            ]
            got = scored(pinned_moe, tp, ep, sets, tmp_path_factory.mktemp("trainer"))
            kept[tp, ep] = dict(zip(sampled, got, strict=True))
        return kept[tp, ep]

    return of


# -- engine and trainer ------------------------------------------------------------------------------------------------


@pytest.mark.megatron
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 2)])
def test_the_trainer_scores_what_the_engine_sampled_with_the_engine_s_bits(
    one: Callable[[str], dict[str, Any]], scores: Callable[[int, int], dict[str, Any]], tp: int, ep: int
) -> None:
    for dtype in DTYPES:
        sampled = one(dtype)["decode"]
        assert sum(map(len, sampled)) == 16 * 16
        assert scores(tp, ep)[dtype] == sampled, dtype


@pytest.mark.megatron
def test_the_native_engine_s_logprobs_are_not_the_trainer_s(
    native: dict[str, Any], scores: Callable[[int, int], dict[str, Any]]
) -> None:
    mine = [v for row in native["decode"] for v in row]
    theirs = [v for row in scores(1, 1)["native"] for v in row]
    assert len(mine) == len(theirs) == 16 * 16
    assert sum(a != b for a, b in zip(mine, theirs, strict=True)) > len(mine) // 2


# -- the engine --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_chunks_cached_prefixes_and_one_request_alone_have_the_bits_of_decode(
    one: Callable[[str], dict[str, Any]], dtype: str
) -> None:
    found = one(dtype)
    assert found["prefill"] == found["decode"]
    assert found["chunked"] == found["decode"]
    assert all(hit >= 96 for hit in found["hits"])
    assert (found["warm_tokens"], found["warm"]) == (found["cold_tokens"], found["cold"])
    assert found["alone"] == found["synced"][:3]


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_with_whole_experts_or_slices_of_each_have_the_bits_of_one(
    one: Callable[[str], dict[str, Any]], two: Callable[[str], dict[str, Any]], name: str
) -> None:
    found, alone = two(name), one(LAYOUTS[name][0])
    for what in ("tokens", "decode", "prefill", "weights", "synced_weights", "synced"):
        assert found[what] == alone[what], what
    degrees = {"TP2 EP2": {"TP": 2, "EP": 2, "ETP": 1}, "TP2 ETP2": {"TP": 2, "EP": 1, "ETP": 2}}[name]
    for report in found["reports"]:
        assert report["problems"] == []
        assert {axis: report["topology"][axis] for axis in degrees} == degrees


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_digests_of_experts_and_routers_are_the_checkpoint_s_before_and_after_a_sync(
    one: Callable[[str], dict[str, Any]], folders: dict[str, str], dtype: str
) -> None:
    found = one(dtype)
    assert found["weights"] == stored(folders["first"], dtype)
    assert found["synced_weights"] == stored(folders["second"], dtype)
    assert sum(".experts." in name for name in found["weights"]) == 2 * 16 * 3


def test_each_region_is_served_by_objects_that_answer_its_canary(
    one: Callable[[str], dict[str, Any]],
) -> None:
    found = one("bfloat16")
    (report,) = found["reports"]
    assert report["problems"] == []
    assert set(report["regions"]) == FORWARD
    assert all(region["ok"] for region in report["regions"].values())
    assert report["regions"]["router"]["object"].endswith("[isoexec.adapters.vllm.moe.GateMethod]")
    assert report["regions"]["routing"]["object"] == "isoexec.adapters.vllm.moe.IsoExecRouter"
    assert all(found["calls"].get(region, 0) > 0 for region in FORWARD)
    assert found["left_alone"] == []


def test_a_rank_that_lost_a_part_of_its_experts_is_found_by_both(
    two: Callable[[str], dict[str, Any]],
) -> None:
    for name in LAYOUTS:
        for report in two(name)["swapped"]:
            (problem,) = (p for p in report["problems"] if p.startswith("combine: "))
            assert "the ranks bind different objects" in problem


EXCHANGED = {
    # what is done (engine_moe.exchanged) -> region, or "" for the process; words of the problem
    "a kernel rebound where it is used": ("", "isoexec.adapters.vllm.moe.combine was replaced"),
    "a method of the class": ("", "ExpertDispatch.back was replaced"),
    "the engine's choice": ("routing", "experts.router._compute_routing was set on the object"),
    "the engine's own router": ("routing", "experts.router was of class"),
    "one expert fewer a token": ("routing", "experts.router.top_k was 3 and is 2"),
    "the engine's own runner": ("routing", "experts was of class isoexec.adapters.vllm.moe.IsoExecMoERunner"),
    "the engine's own experts": ("expert_linear", "does not take the canary"),
    "the engine's own gate": ("router", "gate.quant_method was of class"),
    "a hook that waits": ("dispatch", "dispatch.forward_hooks were 0 and are 1"),
    "other experts than the rank's": ("dispatch", "dispatch.first was 0 and is 1"),
    "the block of one product": ("expert_linear", "down.isoexec_packed.k_block was 64 and is 32"),
    "the products of one layer": ("expert_linear", "gate_up.forward was set on the object"),
    "the order of the sum": ("combine", "combine.forward was set on the object"),
    "the activation": ("", "act_fn was of class"),
}
ANSWERS = {
    "the engine's choice",
    "the engine's own router",
    "the order of the sum",
    "the products of one layer",
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_what_is_exchanged_is_caught_and_named(one: Callable[[str], dict[str, Any]], name: str) -> None:
    region, words = EXCHANGED[name]
    found = one("bfloat16")["exchanged"][name]
    said = found["regions"].get(region, "") if region else found["process"]
    assert words in said, found
    if name in ANSWERS:  # by its canary as well, not by the comparison of objects alone
        assert "computes something else" in said or "does not take the canary" in said, found


def test_a_write_that_no_loader_sees_is_found_in_experts_and_router(
    one: Callable[[str], dict[str, Any]],
) -> None:
    for region, problems in zip(("expert_linear", "router"), one("bfloat16")["unseen_write"], strict=True):
        assert [p for p in problems if p.startswith(f"{region}: ")], problems
        assert "a packed copy of an older weight" in problems[0]


PLANTED = {
    "a scaled combine": ("aten::mul", "model.layers.1.mlp.experts*"),
    "a cast of the logits": ("aten::*to*", "model.layers.1.mlp*"),
    "a native activation": ("*", "model.layers.1.mlp.experts.routed_experts.act_fn"),
    "other products": ("aten::add", "model.layers.1.mlp.experts*"),
    "the engine's choice": ("aten::softmax", "model.layers.1.mlp*"),
}


def test_nothing_of_the_experts_runs_outside_a_region(one: Callable[[str], dict[str, Any]]) -> None:
    census = Census.from_dict(one("bfloat16")["census"])
    assert census.clean, census.text()
    assert min(census.inside.values()) > 0


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_among_the_experts_is_found_in_both_cases(
    one: Callable[[str], dict[str, Any]], name: str
) -> None:
    operator, module = PLANTED[name]
    census = Census.from_dict(one("bfloat16")["planted"][name])
    assert not census.clean
    for case in ("engine_prefill", "engine_decode"):
        here = [e for e in census.case(case) if fnmatchcase(e.operator, operator)]
        assert [e for e in here if fnmatchcase(e.module, module)], census.text()


def test_natively_the_report_says_who_computes_and_the_digests_what_nobody_can_read(
    native: dict[str, Any],
) -> None:
    (report,) = native["reports"]
    assert report["regions"]["expert_linear"]["provider"] == "native"
    assert "CPURouter" in report["regions"]["routing"]["object"]
    assert sum(".experts." in name for name in native["unknown"]) == 2 * 16 * 3
    assert not Census.from_dict(native["census"]).clean


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no_runner", "combine: wanted the contract's objects in model.layers.0.mlp.experts"),
        ("a_part", "dispatch, expert_linear, combine installed together"),
        ("experts_under_dense", r"architecture of \['Qwen3ForCausalLM'\]"),
        ("dense_under_experts", r"architecture of \['Qwen3MoeForCausalLM'\]"),
        ("biased_choice", "router_normalize"),
        ("eight_experts", "experts"),
        ("three_ranks", "engine TP is 3"),
    ],
)
def test_a_way_around_the_contract_ends_in_a_refusal(
    run: Run,
    models: dict[str, str],
    folders: dict[str, str],
    pinned: str,
    pinned_moe: str,
    case: str,
    words: str,
) -> None:
    found = run(
        "refusals",
        contract=pinned_moe,
        dense_contract=pinned,
        first=folders["first"],
        dense=models["first"],
    )
    assert re.search(words, found[case]), found[case]
    assert found["experts_natively"] == "sampled"  # what is only observed may run as the engine likes
