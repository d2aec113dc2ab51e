# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from isoexec.adapters.megatron.logprobs import model_inputs, output_processor, score
from isoexec.adapters.megatron.model import FusedCoreAttention
from isoexec.contracts.errors import InstallError
from isoexec.kernels.domain import DomainError

pytestmark = pytest.mark.megatron

MICROBATCHES = {1: 5, 7: 20, 64: 70}
"""Microbatch -> rows scored with it; one row a forward is slow on two ranks."""


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.int32)


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((bits(a) != bits(b)).sum())


@pytest.fixture(scope="module")
def scores(launch: Any, make: Any, contract: Any, tokens: torch.Tensor) -> Any:
    """scores(layout, dtype, under_contract) -> {microbatch: logprobs [rows, L]} of every rank, computed once."""

    @cache
    def of(layout: Any, dtype: torch.dtype, under_contract: bool) -> list[dict[int, torch.Tensor]]:
        def work() -> dict[int, torch.Tensor]:
            model = make(layout, dtype, contract if under_contract else None)
            return {m: score(model, tokens[:rows], microbatch=m) for m, rows in MICROBATCHES.items()}

        return launch(work, layout)

    return of


def test_scores_have_the_bits_of_one_rank_in_every_layout_and_microbatch(
    scores: Any, one: Any, other: Any, dtype: torch.dtype
) -> None:
    reference = scores(one, dtype, True)[0][64]
    for found in scores(other, dtype, True):
        for microbatch, rows in MICROBATCHES.items():
            assert found[microbatch].shape == (rows, reference.shape[1])
            assert differing(found[microbatch], reference[:rows]) == 0, f"microbatch {microbatch}"


def test_one_rank_gives_the_same_bits_for_every_microbatch(scores: Any, one: Any, dtype: torch.dtype) -> None:
    values = scores(one, dtype, True)[0]
    assert differing(values[1], values[64][: MICROBATCHES[1]]) == 0
    assert differing(values[7], values[64][: MICROBATCHES[7]]) == 0
    assert bool((values[64][:, 1:] < 0).all())
    assert bool((values[64][:, 0] == 0).all())


def test_native_megatron_gives_other_bits_for_two_ranks(
    scores: Any, one: Any, layout_of: Any, dtype: torch.dtype
) -> None:
    native, split = scores(one, dtype, False)[0][64], scores(layout_of(tp=2), dtype, False)[0][64]
    assert differing(native, split) > native.numel() // 10
    assert float((native - split).abs().max()) < (0.5 if dtype is torch.bfloat16 else 1e-4)


def test_a_native_model_with_fused_attention_scores_as_the_local_one_within_rounding(
    launch: Any, make: Any, one: Any, tokens: torch.Tensor
) -> None:
    def work() -> dict[str, torch.Tensor]:
        rows = tokens[:6]
        later = rows.clone()
        later[:, -1] = (later[:, -1] + 1) % 200
        models = {fused: make(one, torch.float32, None, fused_attention=fused) for fused in (False, True)}
        found = {str(fused): score(model, rows) for fused, model in models.items()}
        found["other end"] = score(models[True], later)
        return found | {"kinds": torch.tensor([_fused(model) for model in models.values()])}

    found = launch(work, one)[0]
    assert found["kinds"].tolist() == [False, True]
    assert float((found["True"] - found["False"]).abs().max()) < 1e-4
    assert differing(found["True"][:, :-1], found["other end"][:, :-1]) == 0  # nobody sees what comes behind
    assert differing(found["True"][:, -1], found["other end"][:, -1]) > 0


def _fused(model: Any) -> bool:
    layers = model.decoder.layers
    return all(isinstance(layer.self_attention.core_attention, FusedCoreAttention) for layer in layers)


def test_contract_and_native_scores_agree_within_rounding(scores: Any, one: Any) -> None:
    ours, native = scores(one, torch.float32, True)[0][64], scores(one, torch.float32, False)[0][64]
    assert float((ours - native).abs().max()) < 1e-4
    assert differing(ours, native) > 0


def test_padding_on_the_right_changes_no_score(
    launch: Any, make: Any, contract: Any, tokens: torch.Tensor, one: Any
) -> None:
    def work() -> tuple[torch.Tensor, torch.Tensor]:
        model = make(one, torch.bfloat16, contract)
        padded = torch.nn.functional.pad(tokens[:5], (0, 31), value=9)
        return score(model, tokens[:5]), score(model, padded)[:, : tokens.shape[1]]

    alone, padded = launch(work)[0]
    assert differing(alone, padded) == 0


def test_sequences_the_contract_has_no_case_for_are_refused(
    launch: Any, make: Any, contract: Any, one: Any, tokens: torch.Tensor
) -> None:
    def work() -> list[str]:
        model = make(one, torch.float32, contract)
        inputs = model_inputs(tokens[:2])
        seen = []
        s = tokens.shape[1]
        causal = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1)
        left_padded = causal.clone()
        left_padded[..., :3] = True
        for change in (
            {"attention_mask": left_padded},
            {"attention_mask": causal},
            {"runtime_gather_output": True},
        ):
            try:
                model(**{**inputs, **change}, output_processor=output_processor(model))
                seen.append("ran")
            except InstallError as error:
                seen.append(str(error))
        try:
            model(**{**inputs, "runtime_gather_output": True, "labels": None})
        except InstallError as error:
            seen.append(str(error))
        try:
            score(model, torch.zeros(1, 8194, dtype=torch.int64))
        except DomainError as error:
            seen.append(str(error))
        try:
            score(model, tokens[0])
        except InstallError as error:
            seen.append(str(error))
        return seen

    left, causal, _, gathered, long, flat = launch(work)[0]
    assert "not causal" in left
    assert causal == "ran"
    assert "runtime_gather_output" in gathered
    assert "8191" in long
    assert "[41]" in flat
