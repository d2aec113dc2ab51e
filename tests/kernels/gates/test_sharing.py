# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a device: what they exchange has gloo's bits, a lost one is named, and a record counts their GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from isoexec.contracts.evidence import Check
from isoexec.kernels.gates import Gate, Run, degrees, ranks, sharing


@pytest.fixture(scope="module")
def workers() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        ranks.close()  # ranks take the path of the moment they start
        yield importlib.import_module("staged_workers")
    ranks.close()


@pytest.fixture
def run() -> Run:
    return Run(constants={}, full=True, device=torch.device("cpu"))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_call_that_kernels_make_has_the_bits_of_gloo(size: int, workers: ModuleType, run: Run) -> None:
    assert [int(one) for one in sharing.on_ranks(run, size, workers.counted)] == [size] * size
    # the group that the pool is joined by is gloo's own
    found = ranks.launch(size, workers.compared, (), "cpu, shared")
    assert len({int(one["pid"]) for one in found}) == size
    for one in found:
        assert bool(one["staged"])
        assert int(one["count"]) == 70
        assert int(one["unlike"]) == 0
    assert run.result("partition_invariance").domain == {"gpus": (0,)}


def test_one_rank_is_this_process_and_has_no_group(run: Run) -> None:
    given: list[object] = sharing.on_ranks(run, 1, lambda *args: args, "and what it is given")
    assert given == [(0, 1, None, "and what it is given")]
    assert run.result("partition_invariance").domain == {}


def test_a_rank_that_dies_is_named_whoever_notices_first_and_the_next_check_has_others(
    workers: ModuleType, run: Run
) -> None:
    with pytest.raises(ranks.RankError, match=r"rank 3 of a check failed: its process ended"):
        sharing.on_ranks(run, 4, workers.dies_while_others_wait)
    assert run.result("partition_invariance").domain == {}, "nothing was run on any GPU"
    assert [int(one) for one in sharing.on_ranks(run, 2, workers.counted)] == [2, 2]


@pytest.mark.parametrize(
    ("gpus", "name", "why"),
    [(4, "owner", ""), (3, "plain", "owner: 4 ranks on 3 GPUs, and it needs one a rank"), (1, "plain", "")],
)
def test_ranks_on_one_gpu_do_not_take_a_transport_that_wants_one_each(
    gpus: int, name: str, why: str, workers: ModuleType, run: Run
) -> None:
    for one in sharing.on_ranks(run, 4, workers.chosen, gpus):
        chosen, reason, *able = (bytes(part.tolist()).decode().strip() for part in one["said"])
        assert chosen == name
        assert why in reason
        assert (able[0] == "") == (name == "owner"), able
        assert able[-1] == "", "plain works everywhere"


def test_a_check_on_fewer_gpus_than_there_are_is_not_all_that_can_be_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, here = Gate("embedding.lookup/1", "sm90"), [1]
    monkeypatch.setattr(degrees, "_WANTED", {})
    monkeypatch.setattr(degrees, "gpus_for", lambda _, size: min(size, here[0]))
    degrees.wants(gate, "partition_invariance", TP=(1, 2, 4, 8))

    def made(*gpus: int) -> Check:
        domain = {"TP": (1, 2, 4, 8), **({"gpus": gpus} if gpus else {})}
        return Check(
            family="partition_invariance", constants={}, domain=domain, elements=1, differing=0, controls=()
        )

    assert degrees.possible(gate, made(1)) == degrees.beyond(gate, made(1)) == {}
    assert degrees.beyond(gate, made(2, 4)) == {"gpus": (2, 4)}
    assert degrees.possible(gate, made(2, 4)) == {}, "one GPU adds nothing to four"
    here[0] = 4
    assert degrees.possible(gate, made(1)) == {"gpus": (2, 4)}
    assert degrees.said(degrees.beyond(gate, made(1))) == "gpus 1"
    assert degrees.possible(gate, made()) == degrees.beyond(gate, made()) == {}, "no ranks, no GPUs"
