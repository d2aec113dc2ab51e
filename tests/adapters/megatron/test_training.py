# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isoexec.adapters.megatron.logprobs import model_inputs, output_processor, score
from isoexec.adapters.megatron.training import (
    Batch,
    CheckpointError,
    StepResult,
    Trainer,
    group_advantages,
    grpo_loss,
)
from isoexec.adapters.megatron.weights import export_hf
from isoexec.contracts.errors import InstallError

pytestmark = pytest.mark.megatron

STEPS = 4


def batch_of(tokens: torch.Tensor, model: Any, step: int) -> Batch:
    """Other tokens, two attention segments long, and other rewards each step; old logprobs are the model's own."""
    rows = tokens[step * 5 : step * 5 + 5, :37]
    mask = torch.zeros_like(rows, dtype=torch.bool)
    for i in range(len(rows)):
        mask[i, 8 : 26 + i] = True
    rewards = torch.rand(5, generator=torch.Generator().manual_seed(step))
    return Batch(
        tokens=rows, mask=mask, advantages=group_advantages(rewards, 5), old_logprobs=score(model, rows)
    )


def train(
    model: Any, tokens: torch.Tensor, *, exact_norm: bool = True, **options: Any
) -> tuple[Trainer, list[StepResult]]:
    trainer = Trainer(model, lr=1e-3, clip_grad=0.5, microbatch=3, **options)
    if not exact_norm:
        for part in (trainer.optimizer, *trainer.optimizer.chained_optimizers):
            vars(part).pop("get_grad_norm", None)
            vars(part).pop("clip_grad_norm", None)
    return trainer, [trainer.train_step(batch_of(tokens, model, step)) for step in range(STEPS)]


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, int]:
    """Elements that differ as integers, by tensor; tensors that do not are left out."""
    assert a.keys() == b.keys()
    counts = {n: int((a[n].view(torch.int32) != b[n].view(torch.int32)).sum()) for n in a}
    return {n: c for n, c in counts.items() if c}


@pytest.fixture(scope="module")
def trained(launch: Any, make: Any, contract: Any, tokens: torch.Tensor) -> Any:
    """trained(layout, dtype, under_contract, exact_norm) -> (fp32 master weights by name, step results), computed once."""

    @cache
    def of(layout: Any, dtype: torch.dtype, under_contract: bool = True, exact_norm: bool = True) -> Any:
        def work() -> Any:
            model = make(layout, dtype, contract if under_contract else None)
            _, steps = train(model, tokens, exact_norm=exact_norm)
            return export_hf(model, masters=True), [vars(s) for s in steps]

        ranks = launch(work, layout)
        for _, steps in ranks[1:]:
            for mine, first in zip(steps, ranks[0][1], strict=True):
                assert mine["loss"] == first["loss"]
                assert torch.equal(mine["logprobs"], first["logprobs"])
        return ranks[0]

    return of


def test_four_clipped_steps_end_in_the_master_weights_of_one_rank(
    trained: Any, one: Any, other: Any, dtype: torch.dtype, checkpoint: Path
) -> None:
    reference, steps = trained(one, dtype)
    masters, other_steps = trained(other, dtype)
    assert all(t.dtype is torch.float32 for t in masters.values())
    assert differing(masters, reference) == {}
    for mine, theirs in zip(steps, other_steps, strict=True):
        assert mine["loss"] == theirs["loss"]
        assert mine["grad_norm"] == theirs["grad_norm"]
        assert torch.equal(mine["logprobs"].view(torch.int32), theirs["logprobs"].view(torch.int32))
    moved = differing(masters, {n: t.float() for n, t in load_file(checkpoint / "model.safetensors").items()})
    assert moved.keys() == masters.keys()


def test_clipping_was_at_work_in_every_step(trained: Any, one: Any, dtype: torch.dtype) -> None:
    assert all(step["grad_norm"] > 0.5 for step in trained(one, dtype)[1])


def test_native_training_ends_in_other_weights_for_two_ranks(trained: Any, one: Any, layout_of: Any) -> None:
    native, split = (trained(layout, torch.bfloat16, False)[0] for layout in (one, layout_of(tp=2)))
    assert len(differing(native, split)) == len(native)


def test_megatron_s_own_gradient_norm_breaks_the_bits(trained: Any, one: Any, layout_of: Any) -> None:
    alone = trained(one, torch.bfloat16, True, False)
    split = trained(layout_of(tp=2, sp=True), torch.bfloat16, True, False)
    assert [s["grad_norm"] for s in alone[1]] != [s["grad_norm"] for s in split[1]]
    assert differing(alone[0], split[0])


def test_trainer_forward_logprobs_are_the_trainer_scores_bitwise(
    launch: Any, make: Any, contract: Any, layout_of: Any, tokens: torch.Tensor
) -> None:
    layout = layout_of(tp=2, sp=True)

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        model = make(layout, torch.bfloat16, contract)
        trainer = Trainer(model, microbatch=3)
        batch = batch_of(tokens, model, 0)
        return trainer.train_step(batch).logprobs, batch.old_logprobs

    for forward, scored in launch(work, layout):
        assert torch.equal(forward.view(torch.int32), scored.view(torch.int32))


def test_a_step_is_deterministic_and_recompute_changes_no_bit(
    trained: Any, launch: Any, make: Any, contract: Any, one: Any, tokens: torch.Tensor
) -> None:
    def work() -> Any:
        model = make(one, torch.bfloat16, contract, recompute=True)
        _, steps = train(model, tokens)
        return export_hf(model, masters=True), [s.loss for s in steps]

    masters, losses = launch(work)[0]
    reference, steps = trained(one, torch.bfloat16)
    assert differing(masters, reference) == {}
    assert losses == [s["loss"] for s in steps]


def test_gradients_taken_again_and_a_look_before_the_update_change_no_bit(
    trained: Any, launch: Any, make: Any, contract: Any, one: Any, tokens: torch.Tensor
) -> None:
    def work() -> Any:
        model = make(one, torch.bfloat16, contract)
        trainer = Trainer(model, lr=1e-3, clip_grad=0.5, microbatch=3)
        norms = []
        for step in range(STEPS):
            batch = batch_of(tokens, model, step)
            trainer.accumulate(replace(batch, old_logprobs=batch.old_logprobs - 1))
            trainer.accumulate(batch)
            model.isoexec_adapter.verify()
            norms.append(trainer.update())
        with pytest.raises(InstallError, match="wanted the gradients of a batch, found none"):
            trainer.update()
        return export_hf(model, masters=True), norms

    masters, norms = launch(work)[0]
    reference, steps = trained(one, torch.bfloat16)
    assert differing(masters, reference) == {}
    assert norms == [s["grad_norm"] for s in steps]


def test_tokens_behind_every_row_change_no_bit(
    trained: Any, launch: Any, make: Any, contract: Any, one: Any, tokens: torch.Tensor
) -> None:
    def work() -> Any:
        model = make(one, torch.bfloat16, contract)
        trainer = Trainer(model, lr=1e-3, clip_grad=0.5, microbatch=3)
        found = []
        for step in range(STEPS):
            batch = batch_of(tokens, model, step)
            wider = {
                name: torch.nn.functional.pad(getattr(batch, name), (0, 27))
                for name in ("tokens", "mask", "old_logprobs")
            }
            found.append(trainer.train_step(replace(batch, **wider)))
        return export_hf(model, masters=True), found

    masters, found = launch(work)[0]
    reference, steps = trained(one, torch.bfloat16)
    assert differing(masters, reference) == {}
    for mine, theirs in zip(found, steps, strict=True):
        assert mine.grad_norm == theirs["grad_norm"]
        assert torch.equal(mine.logprobs[:, :37].view(torch.int32), theirs["logprobs"].view(torch.int32))


def test_graphs_are_refused_where_there_is_no_gpu(
    launch: Any, make: Any, contract: Any, one: Any, tokens: torch.Tensor
) -> None:
    def work() -> torch.Tensor:
        model = make(one, torch.bfloat16, contract)
        with pytest.raises(
            InstallError, match="wanted a model on a GPU, for microbatches as CUDA graphs, found one on cpu"
        ):
            Trainer(model, graphs=True)
        return Trainer(model, microbatch=3).score(tokens[:4]) - score(model, tokens[:4])

    assert not launch(work)[0].any()


def test_a_resumed_run_ends_in_the_bits_of_an_uninterrupted_one(
    trained: Any, launch: Any, make: Any, contract: Any, layout_of: Any, tokens: torch.Tensor, tmp_path: Path
) -> None:
    layout = layout_of(pp=2)

    def first() -> None:
        model = make(layout, torch.bfloat16, contract)
        trainer = Trainer(model, lr=1e-3, clip_grad=0.5, microbatch=3)
        for step in range(2):
            trainer.train_step(batch_of(tokens, model, step))
        trainer.save_checkpoint(tmp_path)

    def second() -> Any:
        model = make(layout, torch.bfloat16, contract, load=False)
        trainer = Trainer(model, lr=1e-3, clip_grad=0.5, microbatch=3)
        assert trainer.load_checkpoint(tmp_path) == 2
        for step in range(2, STEPS):
            trainer.train_step(batch_of(tokens, model, step))
        return export_hf(model, masters=True)

    launch(first, layout)
    assert differing(launch(second, layout)[0], trained(layout, torch.bfloat16)[0]) == {}


def test_a_checkpoint_of_another_layout_or_none_is_refused(
    launch: Any, make: Any, contract: Any, one: Any, tmp_path: Path
) -> None:
    def work() -> list[str]:
        trainer = Trainer(make(one, torch.float32, contract))
        said = []
        for folder in (tmp_path / "none", tmp_path / "other", tmp_path / "torn"):
            try:
                trainer.load_checkpoint(folder)
            except CheckpointError as error:
                said.append(str(error))
        return said

    (tmp_path / "other").mkdir()
    (tmp_path / "other/latest").write_text(json.dumps({"step": 1, "folder": "step1", "layout": {"TP": 2}}))
    (tmp_path / "torn").mkdir()

    def torn() -> None:
        trainer = Trainer(make(one, torch.float32, contract))
        trainer.save_checkpoint(tmp_path / "torn")

    launch(torn)
    (tmp_path / "torn/step00000000/rank00000.pt").unlink()
    none, other, lost = launch(work)[0]
    assert "no checkpoint was completed" in none
    assert "'TP': 2" in other
    assert "missing" in lost


def test_the_loss_is_the_clipped_surrogate() -> None:
    logprobs = torch.tensor([[0.0, 0.5, -0.5, 0.1]])
    mask = torch.tensor([[False, True, True, True]])
    for sign in (1.0, -1.0):
        ratios = torch.exp(logprobs)[0, 1:]
        wanted = -sum(min(float(r) * sign, min(max(float(r), 0.8), 1.3) * sign) for r in ratios)
        found = grpo_loss(logprobs, torch.zeros(1, 4), torch.tensor([sign]), mask, clip=(0.2, 0.3))
        assert float(found) == pytest.approx(wanted, rel=1e-6)


def test_advantages_are_centred_and_scaled_within_each_group() -> None:
    found = group_advantages(torch.tensor([1.0, 0.0, 1.0, 0.0, 5.0, 5.0, 5.0, 5.0]), 4)
    assert found.tolist() == pytest.approx([1.0, -1.0, 1.0, -1.0, 0.0, 0.0, 0.0, 0.0], abs=1e-4)


# -- gradients against an independent model --------------------------------------------------------------------------


def qwen3(weights: dict[str, torch.Tensor], ids: torch.Tensor, layers: int = 3) -> torch.Tensor:
    """Log p of each next token, [b, s - 1], by a plain Qwen3 in the dtype of the weights (heads 4, groups 2, width 32)."""
    H, KV, D, base = 4, 2, 32, 10000.0
    b, s = ids.shape

    def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w

    angle = torch.outer(
        torch.arange(s, dtype=torch.float64), base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    )
    cos, sin = (f(angle).repeat(1, 2).view(1, 1, s, D) for f in (torch.cos, torch.sin))

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    h = weights["model.embed_tokens.weight"][ids]
    for i in range(layers):
        w = {n.split(".", 3)[3]: t for n, t in weights.items() if n.startswith(f"model.layers.{i}.")}
        x = norm(h, w["input_layernorm.weight"])
        q, k, v = (
            (x @ w[f"self_attn.{n}_proj.weight"].t()).view(b, s, heads, D).transpose(1, 2)
            for n, heads in (("q", H), ("k", KV), ("v", KV))
        )
        q, k = rotate(norm(q, w["self_attn.q_norm.weight"])), rotate(norm(k, w["self_attn.k_norm.weight"]))
        k, v = (t.repeat_interleave(H // KV, 1) for t in (k, v))
        a = (q @ k.transpose(2, 3) * D**-0.5).masked_fill(
            torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf")
        )
        o = (a.softmax(-1) @ v).transpose(1, 2).reshape(b, s, H * D)
        h = h + o @ w["self_attn.o_proj.weight"].t()
        x = norm(h, w["post_attention_layernorm.weight"])
        gate, up = x @ w["mlp.gate_proj.weight"].t(), x @ w["mlp.up_proj.weight"].t()
        h = h + (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj.weight"].t()
    logits = norm(h, weights["model.norm.weight"]) @ weights["lm_head.weight"].t()
    return logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)], ids=["fp32", "bf16"]
)
def test_gradients_are_those_of_an_independent_fp64_model(
    launch: Any,
    make: Any,
    contract: Any,
    layout_of: Any,
    tokens: torch.Tensor,
    checkpoint: Path,
    dtype: torch.dtype,
    bound: float,
) -> None:
    layout = layout_of(tp=2, sp=True)
    ids = tokens[:3, :40]
    weight = torch.rand(3, 39, generator=torch.Generator().manual_seed(1))

    def work() -> dict[str, torch.Tensor]:
        model = make(layout, dtype, contract)
        found = model(**model_inputs(ids), output_processor=output_processor(model))
        (found[:, :-1] * weight).sum().backward()
        group = model.pg_collection.tp
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "norm" in name:  # what Megatron's finalize_model_grads does
                    torch.distributed.all_reduce(p.grad, group=group)
                p.copy_(p.grad)
        return export_hf(model)

    grads = launch(work, layout)[0]
    weights = {
        n: t.to(dtype).double().requires_grad_()
        for n, t in load_file(checkpoint / "model.safetensors").items()
    }
    (qwen3(weights, ids) * weight.double()).sum().backward()
    for name, t in weights.items():
        error = float((grads[name].double() - t.grad).norm() / t.grad.norm())
        assert error < bound, f"{name}: relative error {error}"
