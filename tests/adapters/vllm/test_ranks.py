# SPDX-License-Identifier: Apache-2.0
"""Two ranks in processes of their own have the bits of one, and each proves for itself what it binds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

Run = Callable[..., dict[str, Any]]
DTYPES = ("bfloat16", "float32")


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
