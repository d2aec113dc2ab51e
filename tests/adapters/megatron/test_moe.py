# SPDX-License-Identifier: Apache-2.0
"""A Qwen3 with experts in the real trainer: the same bits in every layout of tokens and experts, forward and in training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from isoexec.adapters.megatron import moe_exchange
from isoexec.adapters.megatron.logprobs import model_inputs, output_processor, score
from isoexec.adapters.megatron.model import build
from isoexec.adapters.megatron.training import Batch, Trainer, group_advantages
from isoexec.adapters.megatron.weights import export_hf, weight_partials
from isoexec.contracts.errors import InstallError
from isoexec.contracts.schema import Contract
from isoexec.kernels.combine import naive as combine_naive
from isoexec.probes.weights import add_partials, tensor_partial

pytestmark = pytest.mark.megatron

BF16 = torch.bfloat16
EXPERTS = 16  # of the checkpoint in conftest.py
LAYOUTS = {
    "TP2+SP EP1 ETP2": {"tp": 2, "sp": True, "ep": 1, "etp": 2},
    "TP2+SP EP2 ETP1": {"tp": 2, "sp": True, "ep": 2, "etp": 1},
    "TP2 EP1 ETP2": {"tp": 2, "ep": 1, "etp": 2},
    "TP2 EP2 ETP1": {"tp": 2, "ep": 2, "etp": 1},
}


@pytest.fixture(scope="module")
def own(moe_contract: Contract) -> Contract:
    return moe_contract


@pytest.fixture(scope="module")
def rows(tokens: Tensor) -> Tensor:
    return tokens[:10]


def differing(a: Tensor, b: Tensor) -> int:
    return int((a.view(torch.int32) != b.view(torch.int32)).sum())


def poison() -> None:
    """Fresh memory holds NaN from now on in this process, which ends with the launch."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fresh(*args: Any, **options: Any) -> Tensor:
            out = make(*args, **options)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return fresh

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        setattr(owner, name, poisoned(getattr(owner, name)))


def trained(
    model: Any, rows: Tensor, steps: range = range(2), resume: Path | None = None
) -> tuple[Trainer, list[tuple[float, float]]]:
    """The trainer, and (loss, gradient norm) of clipped steps, the model changed by them."""
    trainer = Trainer(model, lr=1e-3, clip_grad=0.5, microbatch=3)
    if resume is not None:
        trainer.load_checkpoint(resume)
    found = []
    for step in steps:
        batch = rows[step * 4 : step * 4 + 4, :37]
        mask = torch.zeros_like(batch, dtype=torch.bool)
        mask[:, 8:30] = True
        rewards = torch.rand(4, generator=torch.Generator().manual_seed(step))
        result = trainer.train_step(
            Batch(
                tokens=batch,
                mask=mask,
                advantages=group_advantages(rewards, 4),
                old_logprobs=score(model, batch),
            )
        )
        found.append((result.loss, result.grad_norm))
    return trainer, found


Run = tuple[Tensor, list[tuple[float, float]], dict[str, Tensor]]


@pytest.fixture(scope="module")
def runs(launch: Any, moe: Path, own: Contract, rows: Tensor) -> Callable[..., Run]:
    """runs(layout, dtype, fault, ...) -> scores [10, 41], two steps' losses and norms, and the master weights after them."""

    @cache
    def of(
        layout: Any, dtype: torch.dtype, fault: Callable[[], None] | None = None, recompute: bool = False
    ) -> Run:
        def work() -> Any:
            poison()
            if fault is not None:
                fault()
            model = build(moe, dtype=dtype, contract=own, sequence_parallel=layout.sp, recompute=recompute)
            scores = score(model, rows, microbatch=4)
            return scores, trained(model, rows)[1], export_hf(model, masters=True)

        ranks = launch(work, layout)
        for scores, steps, _ in ranks[1:]:
            assert differing(scores, ranks[0][0]) == 0
            assert steps == ranks[0][1]
        found: Run = ranks[0]
        return found

    return of


# -- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_scores_and_two_training_steps_have_the_bits_of_one_rank_in_every_layout(
    runs: Any, one: Any, layout_of: Any, name: str
) -> None:
    # one dtype a layout: the kernels round what they give once, in either
    dtype = BF16 if layout_of(**LAYOUTS[name]).sp else torch.float32
    scores, steps, masters = runs(one, dtype)
    found, other_steps, other_masters = runs(layout_of(**LAYOUTS[name]), dtype)
    assert not found.isnan().any()
    assert differing(found, scores) == 0
    assert other_steps == steps
    assert other_masters.keys() == masters.keys()
    assert {n for n in masters if differing(masters[n], other_masters[n])} == set()


def test_every_weight_was_trained_and_every_step_clipped(runs: Any, one: Any, moe: Path) -> None:
    _, steps, masters = runs(one, torch.float32)
    stored = load_file(moe / "model.safetensors")
    assert all(norm > 0.5 for _, norm in steps)
    assert {n for n in stored if differing(masters[n], stored[n]) < stored[n].numel() // 20} == set()


def test_recomputed_layers_exchange_again_and_change_no_bit(runs: Any, one: Any, layout_of: Any) -> None:
    scores, steps, masters = runs(one, BF16)
    found = runs(layout_of(**LAYOUTS["TP2+SP EP2 ETP1"]), BF16, recompute=True)
    assert differing(found[0], scores) == 0
    assert found[1] == steps
    assert {n for n in masters if differing(masters[n], found[2][n])} == set()


def test_a_microbatch_of_one_and_padding_change_no_score(
    launch: Any, runs: Any, one: Any, layout_of: Any, moe: Path, own: Contract, rows: Tensor
) -> None:
    layout = layout_of(**LAYOUTS["TP2+SP EP2 ETP1"])

    def work() -> Any:
        model = build(moe, dtype=BF16, contract=own, sequence_parallel=True)
        padded = torch.nn.functional.pad(rows[:3], (0, 13), value=9)
        return score(model, rows[:3], microbatch=1), score(model, padded)[:, : rows.shape[1]]

    reference = runs(one, BF16)[0][:3]
    for alone, padded in launch(work, layout):
        assert differing(alone, reference) == 0
        assert differing(padded, reference) == 0


def test_replicas_that_share_experts_out_score_their_own_sequences_with_the_bits_of_one_rank(
    launch: Any, runs: Any, one: Any, layout_of: Any, moe: Path, own: Contract, rows: Tensor
) -> None:
    layout = layout_of(ep=2, etp=1, world=2)
    trainer = {**own.claims.topology["trainer"], "DP": own.claims.topology["trainer"]["EP"]}
    claims = dataclasses.replace(own.claims, topology={**own.claims.topology, "trainer": trainer})
    wider = dataclasses.replace(own, claims=claims)

    def work() -> Any:
        model = build(moe, dtype=BF16, contract=wider)
        mine = rows[:2] if model.pg_collection.dp.rank() == 0 else rows[2:7]
        scores = score(model, mine, microbatch=8)
        try:
            Trainer(model)
            said = ""
        except InstallError as error:
            said = str(error)
        return scores, score(model, rows, microbatch=4), said, weight_partials(model)[0], export_hf(model)

    (first, whole, said, one_half, exported), (second, other, _, other_half, _) = launch(work, layout)
    reference = runs(one, BF16)[0]
    assert differing(whole, reference) == differing(other, reference) == 0
    assert differing(torch.cat([first, second]), reference[:7]) == 0
    assert "wanted every expert on each of 2 replicas" in said
    stored = {n: t.bfloat16() for n, t in load_file(moe / "model.safetensors").items()}
    assert exported.keys() == stored.keys()
    assert set(one_half) & set(other_half) == set()
    assert set(one_half) | set(other_half) == set(stored)


# -- and what would differ -------------------------------------------------------------------------------------------


def test_native_megatron_gives_other_bits_in_another_layout(
    launch: Any, one: Any, layout_of: Any, moe: Path, rows: Tensor
) -> None:
    def scored(layout: Any) -> Tensor:
        def work() -> Tensor:
            return score(build(moe, dtype=BF16, sequence_parallel=layout.sp), rows)

        found: Tensor = launch(work, layout)[0]
        return found

    alone = scored(one)
    for name in ("TP2+SP EP1 ETP2", "TP2+SP EP2 ETP1"):
        split = scored(layout_of(**LAYOUTS[name]))
        assert differing(alone, split) > alone.numel() // 10
        assert float((alone - split).abs().median()) < 0.1


def _backwards() -> None:
    """A combine that adds the last choice first."""
    real = combine_naive.combine

    def combine(y: Tensor, weights: Tensor, shared: Tensor | None = None) -> Tensor:
        turned = y.view(*weights.shape, -1).flip(1).reshape(y.shape)
        return real(turned, weights.flip(1), shared)

    combine_naive.combine = combine


def _by_source() -> None:
    """An exchange that leaves an expert's rows in the order in which ranks, counted from the last, sent them."""
    real = moe_exchange.Exchange.of

    def of(offsets: Tensor, group: Any, shards: int) -> Any:
        found = real(offsets, group, shards)
        order = torch.cat([found.order[a:b].flip(0) for a, b in found.offsets.unfold(0, 2, 1).tolist()])
        return dataclasses.replace(found, order=order, inverse=order.argsort())

    moe_exchange.Exchange.of = of  # type: ignore[method-assign]


def test_experts_added_in_another_order_are_seen(
    launch: Any, runs: Any, one: Any, moe: Path, own: Contract, rows: Tensor
) -> None:
    def work() -> Tensor:
        model = build(moe, dtype=torch.float32, contract=own)
        _backwards()
        return score(model, rows)

    found = launch(work)[0]
    reference = runs(one, torch.float32)[0]
    assert differing(found, reference) > reference.numel() // 10
    assert float((found - reference).abs().max()) < 1e-3


def test_rows_of_an_expert_in_another_order_move_no_score_and_every_expert_s_gradient(
    runs: Any, one: Any, layout_of: Any
) -> None:
    scores, _, masters = runs(one, torch.float32)
    found = runs(layout_of(**LAYOUTS["TP2+SP EP2 ETP1"]), torch.float32, _by_source)
    assert differing(found[0], scores) == 0
    moved = {n for n in masters if differing(masters[n], found[2][n])}
    assert len([n for n in moved if ".mlp.experts." in n]) > 3 * EXPERTS


def test_a_resumed_run_ends_in_the_bits_of_an_uninterrupted_one(
    launch: Any, runs: Any, one: Any, layout_of: Any, moe: Path, own: Contract, rows: Tensor, tmp_path: Path
) -> None:
    layout = layout_of(**LAYOUTS["TP2+SP EP2 ETP1"])

    def first() -> None:
        model = build(moe, dtype=BF16, contract=own, sequence_parallel=True)
        trained(model, rows, range(1))[0].save_checkpoint(tmp_path)

    def second() -> Any:
        model = build(moe, dtype=BF16, contract=own, sequence_parallel=True, load=False)
        _, steps = trained(model, rows, range(1, 2), resume=tmp_path)
        return steps, export_hf(model, masters=True)

    launch(first, layout)
    steps, masters = launch(second, layout)[0]
    _, reference, whole = runs(one, BF16)
    assert steps == reference[1:]
    assert {n for n in whole if differing(masters[n], whole[n])} == set()


# -- gradients and weights -------------------------------------------------------------------------------------------


def test_logprobs_and_gradients_are_those_of_transformers_in_fp64(
    launch: Any, moe: Path, own: Contract, layout_of: Any, rows: Tensor
) -> None:
    from transformers import AutoConfig, Qwen3MoeForCausalLM

    layout = layout_of(**LAYOUTS["TP2+SP EP2 ETP1"])
    ids = rows[:3, :40]
    weight = torch.rand(3, 39, generator=torch.Generator().manual_seed(1))

    def work() -> Any:
        model = build(moe, dtype=torch.float32, contract=own, sequence_parallel=True)
        found = model(**model_inputs(ids, 2), output_processor=output_processor(model))
        (found[:, :39] * weight).sum().backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "norm" in name or "router" in name:  # what Megatron's finalize_model_grads does
                    torch.distributed.all_reduce(p.grad, group=model.pg_collection.tp)
                p.copy_(p.grad)
        return found.detach()[:, :39], export_hf(model)

    ours, grads = launch(work, layout)[0]
    config = AutoConfig.from_pretrained(moe)
    config._attn_implementation = config._experts_implementation = "eager"
    reference: Any = Qwen3MoeForCausalLM.from_pretrained(moe, config=config, dtype=torch.float64)
    logits = reference(ids).logits.log_softmax(-1)
    theirs = logits[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    (theirs * weight.double()).sum().backward()
    assert float((ours.double() - theirs.detach()).abs().max()) < 1e-4
    named = dict(reference.named_parameters())
    compared = 0
    for name, gradient in grads.items():
        if name in named:
            expected = named[name].grad
        else:  # transformers keeps the experts of a layer in one tensor
            at, index, part, _ = name.rsplit(".", 3)
            if part == "down_proj":
                expected = named[f"{at}.down_proj"].grad[int(index)]
            else:
                both = named[f"{at}.gate_up_proj"].grad[int(index)].chunk(2, 0)
                expected = both[0 if part == "gate_proj" else 1]
        error = float((gradient.double() - expected).norm() / expected.norm().clamp_min(1e-12))
        assert error < 2e-5, f"{name}: relative error {error}"
        compared += 1
    assert compared == len(load_file(moe / "model.safetensors"))


@pytest.mark.parametrize("name", ["TP2+SP EP1 ETP2", "TP2+SP EP2 ETP1"])
def test_shards_come_from_a_checkpoint_and_go_back_whole_and_their_digests_add_up(
    launch: Any, moe: Path, own: Contract, layout_of: Any, name: str
) -> None:
    layout = layout_of(**LAYOUTS[name])

    def work() -> Any:
        model = build(moe, dtype=BF16, contract=own, sequence_parallel=True)
        return weight_partials(model), export_hf(model)

    ranks = launch(work, layout)
    stored = {n: t.bfloat16() for n, t in load_file(moe / "model.safetensors").items()}
    assert ranks[0][1].keys() == stored.keys()
    for tensor, whole in stored.items():
        assert torch.equal(ranks[0][1][tensor].view(torch.int16), whole.view(torch.int16)), tensor
        parts = [p[tensor] for (p, *_), _ in ranks if tensor in p]
        assert add_partials(parts) == tensor_partial(whole, whole.shape, [0] * whole.dim())
        assert sum(numel.get(tensor, 0) for (_, numel, *_), _ in ranks) == whole.numel()


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
