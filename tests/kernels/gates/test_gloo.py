# SPDX-License-Identifier: Apache-2.0
"""Eight ranks of checks on CPU are real processes, the pool of four stays what it is, and shipped records cover every degree."""

from __future__ import annotations

import os
from types import ModuleType

import pytest

from isoexec.contracts.evidence import default_store
from isoexec.contracts.parts import AXES
from isoexec.kernels.gates import gloo, ranks
from isoexec.kernels.gates.found import contracts_for
from isoexec.kernels.gates.verifying import names


def test_eight_processes_of_one_group_beside_the_pool_of_four(workers: ModuleType) -> None:
    found = {size: gloo.on_ranks(size, workers.total, 10) for size in gloo.DEGREES[1:]}
    for size, several in found.items():
        assert [int(r["sum"]) for r in several] == [sum(range(size)) + size * 10] * size
    pids = [int(r["pid"]) for r in found[8]]
    assert len({*pids, os.getpid()}) == 9
    assert [int(r["pid"]) for r in found[4]] == pids[:4]
    assert ranks.WORLD == 4
    four = ranks.launch(4, workers.total, (0,))
    assert {int(r["pid"]) for r in four}.isdisjoint(pids)
    with pytest.raises(ranks.RankError, match="a group of 8"):
        ranks.launch(8, workers.total, (0,))


def test_one_rank_is_this_process_without_a_group() -> None:
    assert gloo.on_ranks(1, lambda *args: args, "given") == [(0, 1, None, "given")]


def test_a_rank_that_dies_is_named_and_the_next_check_gets_a_new_group(workers: ModuleType) -> None:
    with pytest.raises(ranks.RankError, match=r"rank 1 .*its process ended"):
        gloo.on_ranks(8, workers.dies_on_one)
    assert [int(r["sum"]) for r in gloo.on_ranks(2, workers.total, 0)] == [1, 1]


def test_records_of_the_cpu_cover_every_degree_of_each_axis_they_know() -> None:
    store, seen = default_store(), set()
    for digest in {digest for contract in contracts_for("cpu") for digest in names(contract)}:
        record = store.read(digest)
        for check in record.checks:
            if check.family == "partition_invariance":
                axes = {axis: held for axis, held in check.domain.items() if axis in AXES}
                assert axes == dict.fromkeys(axes, gloo.DEGREES), record.function
                seen.add(record.function)
    assert len(seen) == 12
