# SPDX-License-Identifier: Apache-2.0
"""Two data-parallel replicas end in the bits of one rank that sums as two; what has no fixed order is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isoexec.adapters.megatron.logprobs import align, model_inputs, output_processor, score
from isoexec.adapters.megatron.model import build
from isoexec.adapters.megatron.replicas import gather_shares, share
from isoexec.adapters.megatron.training import Batch, StepResult, Trainer, group_advantages, grpo_loss
from isoexec.adapters.megatron.weights import WeightError, export_hf
from isoexec.contracts.errors import InstallError
from isoexec.contracts.schema import Contract

pytestmark = pytest.mark.megatron

STEPS, ROWS = 4, 11  # three microbatches of 2 in each of two runs, the last one half padding


def batch_of(tokens: Tensor, model: Any, step: int) -> Batch:
    """Other tokens and rewards each step; old logprobs are the model's own."""
    rows = tokens[step * ROWS : (step + 1) * ROWS, :37]
    mask = torch.zeros_like(rows, dtype=torch.bool)
    for i in range(ROWS):
        mask[i, 8 : 24 + i] = True
    rewards = torch.rand(ROWS, generator=torch.Generator().manual_seed(step))
    return Batch(
        tokens=rows, mask=mask, advantages=group_advantages(rewards, ROWS), old_logprobs=score(model, rows)
    )


def trainer_of(model: Any, **options: Any) -> Trainer:
    return Trainer(model, lr=1e-3, clip_grad=0.5, microbatch=2, **options)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> set[str]:
    assert a.keys() == b.keys() != set()
    return {n for n in a if a[n].dtype != b[n].dtype or not torch.equal(bits(a[n]), bits(b[n]))}


def same_steps(found: list[StepResult], reference: list[StepResult]) -> None:
    for mine, theirs in zip(found, reference, strict=True):
        assert (mine.loss.hex(), mine.grad_norm.hex()) == (theirs.loss.hex(), theirs.grad_norm.hex())
        assert torch.equal(bits(mine.logprobs), bits(theirs.logprobs))


Run = tuple[dict[str, Tensor], dict[str, Tensor], list[StepResult]]


@pytest.fixture(scope="module")
def wider(contract: Contract, replicated: Callable[[Contract], Contract]) -> Contract:
    return replicated(contract)


@pytest.fixture(scope="module")
def trained(launch: Any, make: Any, wider: Contract, tokens: Tensor) -> Callable[..., Run]:
    """trained(layout, dtype, masters, trainer's options) -> master weights, weights, and results of four clipped steps."""

    @cache
    def of(layout: Any, dtype: torch.dtype, masters: bool = True, **options: Any) -> Run:
        def work() -> Any:
            model = make(layout, dtype, wider)
            trainer = trainer_of(model, **options)
            steps = [trainer.train_step(batch_of(tokens, model, step)) for step in range(STEPS)]
            return export_hf(model, masters=True) if masters else {}, export_hf(model), steps

        ranks = launch(work, layout)
        for _, _, steps in ranks[1:]:
            same_steps(steps, ranks[0][2])
        found: Run = ranks[0]
        return found

    return of


REPLICAS = [{"dp": 2}, {"tp": 2, "dp": 2}, {"tp": 2, "sp": True, "dp": 2}, {"pp": 2, "dp": 2}]


@pytest.mark.parametrize("sizes", REPLICAS, ids=lambda s: " ".join(f"{n}{v}" for n, v in s.items()))
def test_four_clipped_steps_of_two_replicas_end_in_the_bits_of_one_that_sums_as_two(
    trained: Any, one: Any, layout_of: Any, sizes: dict[str, Any], dtype: torch.dtype
) -> None:
    masters, weights, steps = trained(layout_of(**sizes), dtype)
    alone, own, reference = trained(one, dtype, as_replicas=2)
    assert differing(masters, alone) == differing(weights, own) == set()
    same_steps(steps, reference)
    assert all(step.grad_norm > 0.5 for step in steps)


def test_a_single_rank_s_own_order_of_summing_ends_in_other_weights(trained: Any, one: Any) -> None:
    summed_as_one, _, steps = trained(one, torch.float32)
    summed_as_two, _, others = trained(one, torch.float32, as_replicas=2)
    assert len(differing(summed_as_one, summed_as_two)) > len(summed_as_one) // 2
    assert torch.equal(bits(steps[0].logprobs), bits(others[0].logprobs))


@pytest.mark.parametrize("order", [1, 2])
def test_the_gradient_is_the_mean_loss_s_whatever_the_number_of_microbatches(
    launch: Any, make: Any, one: Any, tokens: Tensor, order: int
) -> None:
    def work() -> tuple[float, StepResult]:
        model = make(one, torch.float32, None)
        batch = batch_of(tokens, model, 0)
        values = model(**model_inputs(batch.tokens), output_processor=output_processor(model))
        lp = align(values, batch.tokens.shape[1])
        loss = grpo_loss(lp, batch.old_logprobs, batch.advantages, batch.mask, clip=(0.2, 0.2))
        (loss / batch.mask.sum()).backward()
        norm = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()
        model.zero_grad()
        return float(norm), trainer_of(model, as_replicas=order).train_step(batch)

    (wanted, step) = launch(work)[0]
    assert step.grad_norm == pytest.approx(wanted, rel=1e-5)


def test_sharded_optimizers_end_in_the_same_weights_and_their_masters_are_not_read(
    trained: Any, launch: Any, make: Any, wider: Contract, one: Any, layout_of: Any, tokens: Tensor
) -> None:
    layout = layout_of(dp=2)
    _, weights, steps = trained(layout, torch.bfloat16, False, distributed_optimizer=True)
    _, reference, others = trained(one, torch.bfloat16, as_replicas=2)
    assert differing(weights, reference) == set()
    same_steps(steps, others)

    def work() -> str:
        model = make(layout, torch.bfloat16, wider)
        trainer_of(model, distributed_optimizer=True)
        with pytest.raises(WeightError) as refused:
            export_hf(model, masters=True)
        return str(refused.value)

    for said in launch(work, layout):
        assert "wanted whole fp32 master weights" in said
        assert "shards over DP 2; read the weights (masters=False)" in said


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "distributed"])
def test_two_resumed_replicas_end_in_the_bits_of_an_uninterrupted_run(
    trained: Any,
    launch: Any,
    make: Any,
    wider: Contract,
    one: Any,
    layout_of: Any,
    tokens: Tensor,
    tmp_path: Path,
    sharded: bool,
) -> None:
    layout = layout_of(dp=2)

    def first() -> None:
        model = make(layout, torch.bfloat16, wider)
        trainer = trainer_of(model, distributed_optimizer=sharded)
        for step in range(2):
            trainer.train_step(batch_of(tokens, model, step))
        trainer.save_checkpoint(tmp_path)

    def second() -> Any:
        model = make(layout, torch.bfloat16, wider, load=False)
        trainer = trainer_of(model, distributed_optimizer=sharded)
        assert trainer.load_checkpoint(tmp_path) == 2
        steps = [trainer.train_step(batch_of(tokens, model, step)) for step in range(2, STEPS)]
        return export_hf(model), steps

    launch(first, layout)
    weights, steps = launch(second, layout)[0]
    _, reference, whole = trained(one, torch.bfloat16, as_replicas=2)
    assert differing(weights, reference) == set()
    same_steps(steps, whole[2:])


def test_experts_on_each_replica_end_in_the_bits_of_one_rank_that_sums_as_two(
    launch: Any,
    layout_of: Any,
    one: Any,
    moe: Path,
    moe_contract: Contract,
    replicated: Callable[[Contract], Contract],
    tokens: Tensor,
) -> None:
    def run(layout: Any, **options: Any) -> Any:
        def work() -> Any:
            model = build(
                moe, dtype=torch.bfloat16, contract=replicated(moe_contract), sequence_parallel=layout.sp
            )
            trainer = trainer_of(model, **options)
            steps = [trainer.train_step(batch_of(tokens, model, step)) for step in range(2)]
            return export_hf(model, masters=True), steps

        return launch(work, layout)[0]

    masters, steps = run(layout_of(tp=2, sp=True, ep=2, etp=1, dp=2))
    reference, others = run(one, as_replicas=2)
    assert differing(masters, reference) == set()
    same_steps(steps, others)


# -- what is refused -------------------------------------------------------------------------------------------------


def test_more_replicas_than_two_and_other_orders_are_refused(launch: Any, make: Any, layout_of: Any) -> None:
    layout = layout_of(dp=3)

    def work() -> list[str]:
        model = make(layout, torch.bfloat16, None)
        said = []
        for order in (1, 2):
            with pytest.raises(InstallError) as refused:
                Trainer(model, as_replicas=order)
            said.append(str(refused.value))
        return said

    for said in launch(work, layout)[0]:
        assert "wanted DP 1 or 2, found DP 3" in said
        assert "order" in said


def test_an_order_of_three_and_auxiliary_losses_are_refused(
    launch: Any, make: Any, one: Any, moe: Path
) -> None:
    def work() -> list[str]:
        said = []
        balanced = build(moe, moe_aux_loss_coeff=0.01)
        for model, order in (
            (make(one, torch.bfloat16, None), 3),
            (make(one, torch.bfloat16, None), 0),
            (balanced, 1),
        ):
            with pytest.raises(InstallError) as refused:
                Trainer(model, as_replicas=order)
            said.append(str(refused.value))
        return said

    three, none, balanced = launch(work)[0]
    assert "found as_replicas=3" in three
    assert "found as_replicas=0" in none
    assert "moe_aux_loss_coeff=0.01" in balanced


def test_replicas_that_got_other_batches_are_refused_before_anything_is_learnt(
    launch: Any, make: Any, wider: Contract, layout_of: Any, tokens: Tensor
) -> None:
    layout = layout_of(dp=2)

    def work() -> tuple[str, bool]:
        model = make(layout, torch.bfloat16, wider)
        trainer = trainer_of(model)
        batch = batch_of(tokens, model, 0)
        if model.pg_collection.dp.rank() == 1:
            advantages = batch.advantages.clone()
            advantages[3] = torch.nextafter(advantages[3], advantages[4])
            batch = replace(batch, advantages=advantages)
        with pytest.raises(InstallError) as refused:
            trainer.train_step(batch)
        return str(refused.value), trainer.step == 0

    for said, untouched in launch(work, layout):
        assert "wanted the same whole batch on every replica" in said
        assert untouched


# -- shares ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 7, 8])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_are_contiguous_whole_and_even(n: int, size: int) -> None:
    shares = [share(n, size, rank) for rank in range(size)]
    assert [i for s in shares for i in s] == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_shares_of_any_length_come_together_on_every_rank(launch: Any, layout_of: Any) -> None:
    def work() -> list[list[list[int]]]:
        group = torch.distributed.group.WORLD
        assert group is not None
        rows = torch.arange(10).view(5, 2)
        out = []
        for n in (5, 4, 1):
            mine = share(n, group.size(), group.rank())
            out.append(gather_shares(rows[mine.start : mine.stop], n, group).tolist())
        return out

    for found in launch(work, layout_of(dp=2)):
        assert found == [torch.arange(10).view(5, 2)[:n].tolist() for n in (5, 4, 1)]


@pytest.mark.parametrize(
    ("n", "wanted"), [(11, [(0, 6), (6, 11)]), (5, [(0, 4), (4, 5)]), (1, [(0, 1), (1, 1)])]
)
def test_a_replica_s_own_rows_are_those_of_its_run(
    launch: Any, make: Any, wider: Contract, layout_of: Any, n: int, wanted: list[tuple[int, int]]
) -> None:
    layout = layout_of(dp=2)

    def work() -> tuple[int, int]:
        rows = trainer_of(make(layout, torch.bfloat16, wider)).own_rows(n)
        return rows.start, rows.stop

    assert launch(work, layout) == wanted
