# SPDX-License-Identifier: Apache-2.0
"""The contract's bits in the real engine: whatever way it comes to a logprob, on one rank or on two, it is the same integer.

What two ranks do, and what the engine does without a contract, is in this file because it is compared with one rank: an engine's
findings are kept by the process that asked, and a file is one process's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from isoexec.adapters.base import REGIONS
from isoexec.adapters.census import Census

pytestmark = pytest.mark.vllm

Run = Callable[..., dict[str, Any]]
DTYPES = ("bfloat16", "float32")
AMX = torch.cpu._is_amx_tile_supported()  # where the engine has a kernel of its own for small linears
FUSED = {"qkv_proj": {"q_proj", "k_proj", "v_proj"}, "gate_up_proj": {"gate_proj", "up_proj"}}
FORWARD = set(REGIONS) - {
    "qkv_bias",
    "head_logprobs",
    "router",
    "routing",
    "dispatch",
    "expert_linear",
    "combine",
}


@pytest.fixture(scope="module", params=DTYPES)
def found(request: pytest.FixtureRequest, one_rank: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return one_rank(request.param)


@pytest.fixture(scope="module")
def processed(one_rank: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return one_rank("bfloat16")


def test_rescoring_a_rollout_gives_the_bits_it_was_sampled_with(found: dict[str, Any]) -> None:
    assert sum(map(len, found["decode"])) == 64 * 16
    assert found["prefill"] == found["decode"]


def test_one_request_at_a_time_gives_the_bits_of_sixty_four_together(found: dict[str, Any]) -> None:
    assert len(found["alone"]) == 5
    assert found["alone_tokens"] == found["synced_tokens"][:5]
    assert found["alone"] == found["synced"][:5]


def test_prompts_read_in_chunks_give_the_bits_of_whole_prompts(found: dict[str, Any]) -> None:
    assert found["chunked"] == found["decode"]


def test_a_prompt_from_the_prefix_cache_gives_the_bits_of_one_that_was_read(found: dict[str, Any]) -> None:
    assert found["missed"] == [0, 0, 0]
    assert all(hit >= 96 for hit in found["hits"])
    assert found["warm_tokens"] == found["cold_tokens"]
    assert found["warm"] == found["cold"]


def test_a_reset_of_the_prefix_cache_is_seen_and_not_believed(found: dict[str, Any]) -> None:
    flushes = found["flushes"]
    assert flushes["reset"] == flushes["again"] == "empty"
    assert "64 of 65 tokens of a probe still come from it" in flushes["only said"]
    assert "64 of 65 tokens" in flushes["attested"]
    assert "nobody can see whether it is empty" in flushes["blind"]
    assert flushes["then attested"] == "None"


def test_processed_logprobs_at_temperature_one_are_the_raw_ones(processed: dict[str, Any]) -> None:
    assert processed["processed_at_one_tokens"] == processed["tokens"]
    assert processed["processed_at_one"] == processed["decode"]
    assert processed["processed_report"]["ok"]


def test_processed_logprobs_at_another_temperature_are_those_sampled_from(processed: dict[str, Any]) -> None:
    assert processed["processed"] != processed["processed_prefill"]
    assert all(abs(total - 1.0) < 1e-5 for total in processed["processed_sums"])


def test_every_region_answers_the_canary_of_its_function(found: dict[str, Any]) -> None:
    (report,) = found["reports"]
    assert set(report["regions"]) == FORWARD
    assert report["problems"] == []
    assert all(r["ok"] and r["canary"].startswith("sha256:") for r in report["regions"].values())
    assert report["topology"] == {"TP": 1, "EP": 1, "ETP": 1, "SP": 1, "CP": 1, "PP": 1, "DP": 1}


def test_no_arithmetic_of_either_case_runs_outside_a_region(found: dict[str, Any]) -> None:
    census = Census.from_dict(found["census"])
    assert census.clean, census.text()
    assert set(census.inside) == {"engine_prefill", "engine_decode"}
    assert {(e.operator, e.module) for e in census.allowed} == {
        ("aten::div_", "sampler"),
        ("_C::fused_gumbel_argmax", "sampler.topk_topp_sampler"),
    }


def test_the_census_of_the_native_engine_is_not_clean_and_names_its_closed_kernels(
    native: dict[str, Any],
) -> None:
    census = Census.from_dict(native["bfloat16"]["census"])
    for case in ("engine_prefill", "engine_decode"):
        here = {(e.operator, e.module) for e in census.case(case)}
        products = {operator for operator, module in here if module == "model.layers.2.mlp.down_proj"}
        assert products, "the native product runs outside every region"
        assert ("_C::weight_packed_linear" in products) == AMX
        assert any(operator == "_C::rotary_embedding" for operator, _ in here) or len(here) > 10
    assert census.inside == {"engine_prefill": 0, "engine_decode": 0}


def test_loaded_weights_have_the_digests_of_the_checkpoint(
    found: dict[str, Any], models: dict[str, str]
) -> None:
    assert found["weights"] == checkpoint_digests(models["first"], found["dtype"])
    assert found["synced_weights"] == checkpoint_digests(models["second"], found["dtype"])
    assert not set(map(tuple, found["weights"].values())) & set(map(tuple, found["synced_weights"].values()))
    assert found["synced_version"] == 1


def test_handles_are_refused_by_an_engine_that_was_not_started_for_them(native: dict[str, Any]) -> None:
    said = native["bfloat16"]["handles"]
    assert "wanted an engine with the weight transfer backend 'isoexec', found None" in said


def test_after_a_sync_the_engine_is_one_started_from_the_new_checkpoint(found: dict[str, Any]) -> None:
    assert found["synced"] != found["decode"]
    assert found["alone"] == found["synced"][:5]


def test_weights_written_in_place_past_every_reload_call_are_packed_anew(found: dict[str, Any]) -> None:
    assert found["written_in_place"] == found["decode"]


def test_a_packed_copy_that_is_no_longer_its_weight_is_found(found: dict[str, Any]) -> None:
    (problem,) = found["unseen_write"]
    assert "model.layers.1.mlp.down_proj computes with a packed copy of an older weight" in problem


def test_every_region_ran_in_the_steps_themselves(found: dict[str, Any]) -> None:
    assert all(found["calls"].get(region, 0) > 0 for region in FORWARD)


def test_the_native_engine_has_other_bits(native: dict[str, Any], found: dict[str, Any]) -> None:
    assert native[found["dtype"]]["decode"] != found["decode"]


def checkpoint_digests(folder: str, dtype: str) -> dict[str, list[int]]:
    """Digest of every tensor of a checkpoint, whole, in the engine's dtype."""
    import torch
    from safetensors.torch import load_file

    from isoexec.probes.weights import tensor_partial

    return {
        name: list(tensor_partial(t.to(getattr(torch, dtype)), t.shape, [0] * t.dim()))
        for name, t in load_file(Path(folder) / "model.safetensors").items()
    }


# -- two ranks, in processes of their own, each of which proves for itself what it binds -------------------------------


@pytest.fixture(scope="module")
def two(run: Run, models: dict[str, str], pinned: str) -> dict[str, Any]:
    return run("contract_ranks", contract=pinned, first=models["first"], second=models["second"], tp=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_ranks_sample_and_score_with_the_bits_of_one(
    one_rank: Callable[[str], dict[str, Any]], two: dict[str, Any], dtype: str
) -> None:
    one = one_rank(dtype)
    assert two[dtype]["tokens"] == one["tokens"]
    assert two[dtype]["decode"] == one["decode"]
    assert two[dtype]["prefill"] == one["decode"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_rank_proves_what_it_binds_with_its_own_canaries(two: dict[str, Any], dtype: str) -> None:
    reports = two[dtype]["reports"]
    assert [(r["rank"], r["world"]) for r in reports] == [(0, 2), (1, 2)]
    assert all(r["topology"]["TP"] == 2 for r in reports)
    assert all(region["ok"] for r in reports for region in r["regions"].values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_shards_of_two_ranks_add_up_to_the_digests_of_one(
    one_rank: Callable[[str], dict[str, Any]], two: dict[str, Any], dtype: str
) -> None:
    assert two[dtype]["weights"] == one_rank(dtype)["weights"]


def test_a_sync_of_two_ranks_gives_the_bits_of_a_fresh_engine(
    one_rank: Callable[[str], dict[str, Any]], two: dict[str, Any]
) -> None:
    assert two["bfloat16"]["synced_weights"] == one_rank("bfloat16")["synced_weights"]
    assert two["bfloat16"]["synced"] == one_rank("bfloat16")["synced"]


def test_a_layer_that_one_rank_lost_is_found_by_both_and_nobody_waits_for_ever(two: dict[str, Any]) -> None:
    for report in two["float32"]["swapped"]:
        (problem,) = report["problems"]
        assert (
            "row_linear: the ranks bind different objects: rank 0 has model.layers.2.mlp.down_proj" in problem
        )
        assert "vllm.model_executor.layers.linear.RowParallelLinear" in problem


# -- without a contract the engine is only watched: nothing is claimed -------------------------------------------------


@pytest.fixture(scope="module")
def watched(native: dict[str, Any]) -> dict[str, Any]:
    return native["bfloat16"]


def test_a_monitored_engine_is_recorded(watched: dict[str, Any]) -> None:
    assert sum(map(len, watched["decode"])) == 64 * 16


def test_no_region_of_a_native_engine_is_reported_as_the_contracts(watched: dict[str, Any]) -> None:
    (report,) = watched["reports"]
    assert not any(r["ok"] for r in report["regions"].values())
    assert all(r["enforcement"] == "off" for r in report["regions"].values())
    assert report["regions"]["norm"]["object"] == "vllm.model_executor.layers.layernorm.RMSNorm"


def test_weights_packed_where_nobody_can_read_them_are_named_unknown(watched: dict[str, Any]) -> None:
    # by AMX or by oneDNN; a processor with neither leaves them all
    emptied = set().union(*(FUSED.get(name, {name}) for name in watched["emptied"]))
    assert {name.split(".")[-2] for name in watched["unknown"]} == emptied
    assert not set(watched["unknown"]) & set(watched["readable"])
    assert len(watched["unknown"]) + len(watched["readable"]) == 3 * 11 + 3


def test_a_reload_gives_the_bits_of_an_engine_started_from_the_new_checkpoint(
    watched: dict[str, Any],
) -> None:
    assert watched["synced"] != watched["decode"]
    assert watched["synced"] == watched["fresh"]
