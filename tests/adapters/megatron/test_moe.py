# SPDX-License-Identifier: Apache-2.0
"""A Qwen3 with experts in the real trainer: the same bits in every layout of tokens and experts, forward and in training."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from isoexec.adapters.demo.tiny import make_qwen3_moe
from isoexec.adapters.megatron.logprobs import score
from isoexec.adapters.megatron.model import build
from isoexec.adapters.megatron.training import Batch, Trainer, group_advantages
from isoexec.adapters.megatron.weights import export_hf
from isoexec.contracts.schema import Contract, library
from isoexec.kernels import registry

pytestmark = pytest.mark.megatron

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_moe(tmp_path_factory.mktemp("moe"), seed=13, experts=16, chosen=3)


@pytest.fixture(scope="module")
def own() -> Contract:
    """The contract of a Qwen3 with experts, pinned to the kernels as they are here."""
    found = Contract.load(library("qwen3-moe-cpu"))
    pinned = (dataclasses.replace(p, source=registry.source_digest(p.function)) for p in found.providers)
    return dataclasses.replace(found, providers=tuple(pinned))


@pytest.fixture(scope="module")
def rows(tokens: torch.Tensor) -> torch.Tensor:
    return tokens[:12]


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.view(torch.int32) != b.view(torch.int32)).sum())


def trained(model: Any, rows: torch.Tensor, steps: int = 2) -> list[tuple[float, float]]:
    """(loss, gradient norm) of clipped steps, the model changed by them."""
    trainer = Trainer(model, lr=1e-3, clip_grad=0.5, microbatch=3)
    found = []
    for step in range(steps):
        batch = rows[step * 5 : step * 5 + 5, :37]
        mask = torch.zeros_like(batch, dtype=torch.bool)
        mask[:, 8:30] = True
        rewards = torch.rand(5, generator=torch.Generator().manual_seed(step))
        result = trainer.train_step(
            Batch(
                tokens=batch,
                mask=mask,
                advantages=group_advantages(rewards, 5),
                old_logprobs=score(model, batch),
            )
        )
        found.append((result.loss, result.grad_norm))
    return found


@pytest.fixture(scope="module")
def runs(launch: Any, moe: Path, own: Contract, rows: torch.Tensor) -> Any:
    """runs(layout, dtype) -> scores [12, 41], two steps' losses and norms, and the master weights after them; once each."""

    @cache
    def of(layout: Any, dtype: torch.dtype) -> Any:
        def work() -> Any:
            model = build(moe, dtype=dtype, contract=own, sequence_parallel=layout.sp)
            scores = score(model, rows, microbatch=7)
            return scores, trained(model, rows), export_hf(model, masters=True)

        ranks = launch(work, layout)
        for scores, steps, _ in ranks[1:]:
            assert differing(scores, ranks[0][0]) == 0
            assert steps == ranks[0][1]
        return ranks[0]

    return of


LAYOUTS = {
    "TP2+SP EP1 ETP2": {"tp": 2, "sp": True, "ep": 1, "etp": 2},
    "TP2+SP EP2 ETP1": {"tp": 2, "sp": True, "ep": 2, "etp": 1},
    "TP2 EP1 ETP2": {"tp": 2, "ep": 1, "etp": 2},
    "TP2 EP2 ETP1": {"tp": 2, "ep": 2, "etp": 1},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_scores_and_two_training_steps_have_the_bits_of_one_rank_in_every_layout(
    runs: Any, one: Any, layout_of: Any, name: str, dtype: torch.dtype
) -> None:
    scores, steps, masters = runs(one, dtype)
    found, other_steps, other_masters = runs(layout_of(**LAYOUTS[name]), dtype)
    assert differing(found, scores) == 0
    assert other_steps == steps
    assert other_masters.keys() == masters.keys()
    assert {n for n in masters if differing(masters[n], other_masters[n])} == set()


def test_nothing_is_computed_outside_a_region_forward_or_backward(
    launch: Any, moe: Path, own: Contract, layout_of: Any
) -> None:
    layout = layout_of(**LAYOUTS["TP2+SP EP2 ETP1"])

    def work() -> Any:
        census = build(moe, dtype=BF16, contract=own, sequence_parallel=True).isoexec_adapter.census()
        return census.clean, census.text(), census.inside

    for clean, text, inside in launch(work, layout):
        assert clean, text
        assert min(inside.values()) > 0
