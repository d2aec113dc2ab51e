# SPDX-License-Identifier: Apache-2.0
"""A MiMo, and a Qwen2 of the same layers, in the real trainer: the bias of query, key and value in every layout."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isoexec.adapters.demo.tiny import make_mimo
from isoexec.adapters.megatron.layers import ContractColumnParallelLinear
from isoexec.adapters.megatron.logprobs import model_inputs, output_processor, score
from isoexec.adapters.megatron.model import build, read_hf_config
from isoexec.adapters.megatron.training import Batch, Trainer, group_advantages
from isoexec.adapters.megatron.weights import WeightError, export_hf, weight_partials
from isoexec.contracts.errors import InstallError
from isoexec.contracts.schema import Contract, library
from isoexec.kernels import registry
from isoexec.probes.weights import add_partials, tensor_partial

pytestmark = pytest.mark.megatron

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mimo(tmp_path_factory.mktemp("mimo"), seed=12)


@pytest.fixture(scope="module")
def own() -> Contract:
    """MiMo's contract, pinned to the kernels as they are here."""
    found = Contract.load(library("mimo-dense-cpu"))
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
def runs(launch: Any, mimo: Path, own: Contract, rows: torch.Tensor) -> Any:
    """runs(layout, dtype) -> scores [12, 41], two steps' losses and norms, and the master weights after them; once each."""

    @cache
    def of(layout: Any, dtype: torch.dtype) -> Any:
        def work() -> Any:
            model = build(mimo, dtype=dtype, contract=own, sequence_parallel=layout.sp)
            scores = score(model, rows, microbatch=7)
            return scores, trained(model, rows), export_hf(model, masters=True)

        ranks = launch(work, layout)
        for scores, steps, _ in ranks[1:]:
            assert differing(scores, ranks[0][0]) == 0
            assert steps == ranks[0][1]
        return ranks[0]

    return of


def test_scores_and_two_training_steps_have_the_bits_of_one_rank_in_every_layout(
    runs: Any, one: Any, other: Any, dtype: torch.dtype, mimo: Path
) -> None:
    scores, steps, masters = runs(one, dtype)
    found, other_steps, other_masters = runs(other, dtype)
    assert differing(found, scores) == 0
    assert other_steps == steps
    assert other_masters.keys() == masters.keys()
    assert {n for n in masters if differing(masters[n], other_masters[n])} == set()
    stored = load_file(mimo / "model.safetensors")
    biases = [n for n in masters if n.endswith(("q_proj.bias", "v_proj.bias"))]
    assert len(biases) == 6
    for name in biases:
        assert differing(masters[name], stored[name]) > masters[name].numel() // 2, f"{name} was not trained"


def test_nothing_is_computed_outside_a_region_forward_or_backward(
    launch: Any, mimo: Path, own: Contract, layout_of: Any
) -> None:
    layout = layout_of(tp=2, sp=True)

    def work() -> Any:
        census = build(mimo, dtype=BF16, contract=own, sequence_parallel=True).isoexec_adapter.census()
        return census.clean, census.text(), census.inside

    for clean, text, inside in launch(work, layout):
        assert clean, text
        assert min(inside.values()) > 0


def test_an_untied_qwen2_of_the_same_weights_has_the_same_scores(
    launch: Any, runs: Any, one: Any, own: Contract, rows: torch.Tensor, mimo: Path, tmp_path: Path
) -> None:
    config = json.loads((mimo / "config.json").read_text())
    for field in ("auto_map", "head_dim", "attention_bias", "num_nextn_predict_layers"):
        del config[field]
    config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(mimo / "model.safetensors")
    found = launch(lambda: score(build(tmp_path, dtype=BF16, contract=own), rows, microbatch=12))[0]
    assert differing(found, runs(one, BF16)[0]) == 0


def test_digests_of_the_shards_add_up_to_the_checkpoint_s_and_its_draft_layers_are_left_out(
    launch: Any, mimo: Path, own: Contract, layout_of: Any
) -> None:
    layout = layout_of(tp=2)

    def work() -> Any:
        model = build(mimo, dtype=BF16, contract=own)
        return weight_partials(model)[0], export_hf(model)

    ranks = launch(work, layout)
    stored = {n: t.bfloat16() for n, t in load_file(mimo / "model.safetensors").items()}
    drafts = {n for n in stored if n.startswith("model.mtp_layers.")}
    assert drafts
    assert ranks[0][1].keys() == stored.keys() - drafts
    for name in stored.keys() - drafts:
        parts = [p[name] for p, _ in ranks if name in p]
        assert add_partials(parts) == tensor_partial(
            stored[name], stored[name].shape, [0] * stored[name].dim()
        )
        assert torch.equal(ranks[0][1][name].view(torch.int16), stored[name].view(torch.int16)), name


def test_logprobs_and_gradients_are_those_of_transformers_in_fp64(
    launch: Any, mimo: Path, own: Contract, layout_of: Any, rows: torch.Tensor
) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    layout = layout_of(tp=2, sp=True)
    ids = rows[:3, :40]
    weight = torch.rand(3, 39, generator=torch.Generator().manual_seed(1))

    def work() -> Any:
        model = build(mimo, dtype=torch.float32, contract=own, sequence_parallel=True)
        found = model(**model_inputs(ids, 2), output_processor=output_processor(model))
        (found[:, :39] * weight).sum().backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "norm" in name:  # what Megatron's finalize_model_grads does
                    torch.distributed.all_reduce(p.grad, group=model.pg_collection.tp)
                p.copy_(p.grad)
        return found.detach()[:, :39], export_hf(model)

    ours, grads = launch(work, layout)[0]
    config = json.loads((mimo / "config.json").read_text())
    config = {k: v for k, v in config.items() if k not in ("auto_map", "model_type", "architectures")}
    reference: Any = Qwen2ForCausalLM(Qwen2Config(**config, attn_implementation="eager")).double()
    stored = load_file(mimo / "model.safetensors")
    kept = {n: t.double() for n, t in stored.items() if not n.startswith("model.mtp_layers.")}
    reference.load_state_dict(kept)
    logits = reference(ids).logits.log_softmax(-1)
    theirs = logits[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    (theirs * weight.double()).sum().backward()
    assert float((ours.double() - theirs.detach()).abs().max()) < 1e-4
    for name, p in reference.named_parameters():
        error = float((grads[name].double() - p.grad).norm() / p.grad.norm())
        assert error < 2e-5, f"{name}: relative error {error}"


def test_a_bias_that_is_lost_or_replaced_behind_the_back_is_found(
    launch: Any, mimo: Path, own: Contract, rows: torch.Tensor
) -> None:
    def work() -> Any:
        model = build(mimo, dtype=BF16, contract=own)
        adapter = model.isoexec_adapter
        linear = model.decoder.layers[1].self_attention.linear_qkv
        good, before = score(model, rows), weight_partials(model)[0]
        said = [adapter.verify()[0].problems()]
        linear.compute_bias = lambda x, _bias: x
        dropped = score(model, rows)
        said.append(adapter.verify()[0].problems())
        del linear.compute_bias
        original = ContractColumnParallelLinear.compute_bias
        ContractColumnParallelLinear.compute_bias = lambda self, x, bias: x + bias  # type: ignore[method-assign]  # noqa: ARG005
        said.append(adapter.verify()[0].problems())
        ContractColumnParallelLinear.compute_bias = original  # type: ignore[method-assign]
        bias, linear.bias = linear.bias, None
        said.append(adapter.verify()[0].problems())
        linear.bias = bias
        with torch.no_grad():
            bias.zero_()
        zeroed, after = score(model, rows), weight_partials(model)[0]
        return said, (good, dropped, zeroed), {n for n in before if before[n] != after[n]}

    said, (good, dropped, zeroed), changed = launch(work)[0]
    fine, instance, cls, absent = said
    assert fine == ()
    assert "qkv_bias: decoder.layers.1.self_attention.linear_qkv.compute_bias was set" in " ".join(instance)
    assert "qkv_bias: ContractColumnParallelLinear.compute_bias was replaced" in " ".join(cls)
    assert "qkv_bias: decoder.layers.1.self_attention.linear_qkv has no bias" in " ".join(absent)
    assert differing(dropped, good) > good.numel() // 2
    assert differing(zeroed, dropped) == 0
    assert changed == {f"model.layers.1.self_attn.{part}_proj.bias" for part in "qkv"}


@pytest.mark.parametrize(
    ("enforce", "ours"),
    [("qkv_bias=off", "column_linear"), ("column_linear=off", "qkv_bias")],
)
def test_either_of_a_linear_s_two_regions_can_be_left_to_megatron(
    launch: Any, runs: Any, one: Any, mimo: Path, own: Contract, rows: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch, enforce: str, ours: str,
) -> None:  # fmt: skip
    def work() -> Any:
        model = build(mimo, dtype=torch.float32, contract=own)
        (report,) = model.isoexec_adapter.verify()
        return [r.region for r in report.regions if r.ok], score(model, rows)

    monkeypatch.setenv("ISOEXEC_ENFORCE", enforce)
    regions, scores = launch(work)[0]
    assert (ours in regions, enforce.partition("=")[0] in regions) == (True, False)
    assert float((scores - runs(one, torch.float32)[0]).abs().max()) < 1e-4


def test_models_and_contracts_of_the_other_family_are_refused_by_their_parts(
    launch: Any, mimo: Path, checkpoint: Path, own: Contract, contract: Contract
) -> None:
    def work() -> list[str]:
        said = []
        for folder, use in ((mimo, contract), (checkpoint, own)):
            with pytest.raises(InstallError) as caught:
                build(folder, dtype=BF16, contract=use)
            said.append(str(caught.value))
        return said

    biased, normed = launch(work)[0]
    assert "add_qkv_bias=True, the contract covers False" in biased
    assert "qk_layernorm=True, the contract covers False" in normed
    assert "add_qkv_bias=False, the contract covers True" in normed


def test_a_config_whose_heads_do_not_fill_the_width_is_no_such_model(mimo: Path, tmp_path: Path) -> None:
    config = json.loads((mimo / "config.json").read_text())
    for change in ({"head_dim": 64}, {"attention_bias": False}, {"use_sliding_window": True}):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(WeightError, match="wanted"):
            read_hf_config(tmp_path)
