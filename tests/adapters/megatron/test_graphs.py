# SPDX-License-Identifier: Apache-2.0
"""When a microbatch is called, recorded and replayed; what a real graph computes is asked by tests/gpu/trainer.py on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isoexec.adapters.megatron.graphs import MOST, Graphs
from isoexec.contracts.errors import InstallError

pytestmark = pytest.mark.megatron


class Weight:
    device = torch.device("cuda", 0)
    main_grad = None

    def __init__(self) -> None:
        self.place = 1

    def data_ptr(self) -> int:
        return self.place


class Calls:
    """A call that notes the inputs it is made with."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.given.append(x)
        return [x * 2]


def model(**changed: Any) -> Any:
    config = {
        "num_moe_experts": None,
        "recompute_granularity": None,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    group = SimpleNamespace(size=lambda: 1)
    weight = Weight()
    return SimpleNamespace(
        config=SimpleNamespace(**(config | changed)),
        pg_collection=SimpleNamespace(tp=group, pp=group, cp=group),
        weight=weight,
        parameters=lambda: iter([weight]),
    )


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stands in for the device: nothing is recorded, a replay is counted."""
    done: list[int] = []

    class Graph:
        def replay(self) -> None:
            done.append(1)

    @contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        yield

    stream = SimpleNamespace(wait_stream=lambda _other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return done


def test_a_shape_is_called_then_recorded_then_replayed_with_what_is_given(replays: list[int]) -> None:
    graphs, call = Graphs(model()), Calls()
    for value in range(5):
        graphs("train", call, torch.full((2, 3), float(value)))
    assert (len(call.given), len(replays)) == (2, 4)
    assert call.given[1].unique().tolist() == [4.0]  # the graph's own input holds what came last


def test_other_shapes_and_other_calls_are_graphs_of_their_own(replays: list[int]) -> None:
    graphs, call = Graphs(model()), Calls()
    for name, width in (("train", 3), ("train", 4), ("score", 3)) * 3:
        graphs(name, call, torch.ones(2, width))
    assert (len(call.given), len(replays)) == (6, 6)


def test_the_oldest_graph_goes_where_there_are_too_many(replays: list[int]) -> None:
    graphs, call = Graphs(model()), Calls()
    for width in range(1, MOST + 2):
        for _ in range(2):
            graphs("train", call, torch.ones(width))
    recorded = len(call.given)
    graphs("train", call, torch.ones(MOST + 1))
    assert len(call.given) == recorded
    graphs("train", call, torch.ones(1))
    assert len(call.given) == recorded + 1


def test_graphs_are_recorded_anew_where_a_weight_has_moved_or_another_contract_is_bound(
    replays: list[int],
) -> None:
    made = model()
    graphs, call = Graphs(made), Calls()

    def three() -> int:
        before = len(call.given)
        for _ in range(3):
            graphs("train", call, torch.ones(2))
        return len(call.given) - before

    assert three() == 2
    assert three() == 0
    made.weight.place = 2
    assert three() == 2
    made.isoexec_adapter = SimpleNamespace(contract=SimpleNamespace(numerical_policy="sha256:1"))
    assert three() == 2
    made.isoexec_adapter.contract.numerical_policy = "sha256:2"
    assert three() == 2
    made.weight.main_grad = Weight()
    assert three() == 2


def test_a_call_that_cannot_be_recorded_is_refused_with_its_cause(replays: list[int]) -> None:
    graphs = Graphs(model())

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        if calls:
            raise RuntimeError("operation not permitted when stream is capturing")
        calls.append(1)
        return [x]

    calls: list[int] = []
    graphs("train", call, torch.ones(2))
    with pytest.raises(InstallError, match="found operation not permitted when stream is capturing"):
        graphs("train", call, torch.ones(2))
    assert not replays


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_moe_experts": 4}, "a model without experts.*found 4 experts"),
        ({"recompute_granularity": "full"}, "recompute_granularity None.*found full"),
        ({"attention_dropout": 0.1}, "no dropout.*'attention_dropout': 0.1"),
    ],
)
def test_a_model_that_graphs_do_not_take_is_refused(
    replays: list[int], changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(InstallError, match=said):
        Graphs(model(**changed))


def test_a_model_that_ranks_share_is_refused(replays: list[int]) -> None:
    made = model()
    made.pg_collection.tp = SimpleNamespace(size=lambda: 2)
    with pytest.raises(InstallError, match=r"TP, PP and CP 1.*'TP': 2"):
        Graphs(made)
