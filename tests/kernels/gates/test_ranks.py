# SPDX-License-Identifier: Apache-2.0
"""Process groups of checks are real ones, serve many checks, and one that fails says which rank and why."""

from __future__ import annotations

import os
from types import ModuleType

import pytest

from isoexec.kernels.gates import ranks


def test_ranks_are_other_processes_of_one_group_and_stay(workers: ModuleType) -> None:
    pair = ranks.launch(2, workers.total, (10,))
    four = ranks.launch(4, workers.total, (0,))
    assert [int(r["sum"]) for r in pair] == [21, 21]
    assert [int(r["sum"]) for r in four] == [6] * 4
    pids = [int(r["pid"]) for r in four]
    assert len({*pids, os.getpid()}) == 5
    assert [int(r["pid"]) for r in pair] == pids[:2]


@pytest.mark.parametrize(
    ("worker", "said"), [("fails_on_one", "this rank is ill"), ("dies_on_one", "its process ended")]
)
def test_a_rank_that_fails_is_named_and_the_next_check_gets_a_new_group(
    workers: ModuleType, worker: str, said: str
) -> None:
    with pytest.raises(ranks.RankError, match=f"rank 1 .*{said}"):
        ranks.launch(2, getattr(workers, worker), ())
    assert [int(r["sum"]) for r in ranks.launch(2, workers.total, (0,))] == [1, 1]


def test_a_group_the_pool_cannot_make_is_refused(workers: ModuleType) -> None:
    for size in (3, 8):
        with pytest.raises(ranks.RankError, match=f"a group of {size}"):
            ranks.launch(size, workers.total, (0,))
