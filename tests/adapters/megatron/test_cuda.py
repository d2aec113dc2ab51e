# SPDX-License-Identifier: Apache-2.0
"""The sm90 binding on a CPU, by real megatron-core and gloo: its kernels are the specifications here, all else is as on a GPU."""

from __future__ import annotations

import json
import math
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from isoexec.adapters.demo.tiny import WEIGHTS, make_qwen3, qwen3_weights, save_weights
from isoexec.adapters.megatron.census import census
from isoexec.adapters.megatron.kinds import kinds_of
from isoexec.adapters.megatron.logprobs import (
    BOUNDS,
    model_inputs,
    output_processor,
    packed_inputs,
    score,
    score_packed,
)
from isoexec.adapters.megatron.model import build
from isoexec.adapters.megatron.training import Batch, Trainer
from isoexec.adapters.megatron.weights import export_hf
from isoexec.contracts.errors import InstallError
from isoexec.kernels.linear.hopper import cublaslt

pytestmark = pytest.mark.megatron

SPECIFIED = runpy.run_path(str(Path(__file__).with_name("specified.py")))
LENGTHS = (23, 9, 17)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


SIZES: dict[str, Any] = {"layers": 2, "ffn": 128, "heads": 8, "head_dim": 64, "vocab": 256}


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 whose head is its embedding, as Qwen3-0.6B's, of sizes that the contract admits."""
    folder = make_qwen3(tmp_path_factory.mktemp("sm90"), seed=3, **SIZES)
    weights = qwen3_weights(seed=3, **SIZES)
    del weights["lm_head.weight"]
    return written(folder, weights, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2, with a bias on query, key and value and a head of its own."""
    folder = make_qwen3(tmp_path_factory.mktemp("sm90"), seed=4, **SIZES | {"hidden": 512})
    weights = qwen3_weights(seed=4, mimo=True, **SIZES | {"hidden": 512})
    return written(folder, weights, model_type="qwen2", architectures=["Qwen2ForCausalLM"])


def written(folder: Path, weights: dict[str, torch.Tensor], **changed: Any) -> Path:
    save_weights(folder / WEIGHTS, {n: t.bfloat16() for n, t in weights.items()})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


def sequences() -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(5)
    return [torch.randint(3, 256, (n,), generator=made) for n in LENGTHS]


def rows() -> torch.Tensor:
    return torch.stack([torch.nn.functional.pad(s, (0, max(LENGTHS) - len(s))) for s in sequences()])


def made(folder: Path, layout: Any, name: str = "qwen3-dense-sm90", **options: Any) -> Any:
    SPECIFIED["install"]()
    return build(folder, contract=SPECIFIED["contract"](name), sequence_parallel=layout.sp, **options)


def steps(model: Any, old: torch.Tensor, count: int, **options: Any) -> dict[str, Any]:
    """Clipped optimizer steps; after each the master weights, and its gradient norm and logprobs."""
    trainer = Trainer(model, lr=1e-3, clip_grad=0.01, ratio_clip=(1.0, 1e9), microbatch=2, **options)
    tokens = rows()
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for i, length in enumerate(LENGTHS):
        mask[i, 4:length] = True
    masters, found = [], []
    for step in range(count):
        advantages = torch.linspace(-1, 1, len(LENGTHS)) * (step + 1)
        batch = Batch(tokens=tokens, mask=mask, advantages=advantages, old_logprobs=old)
        found.append(trainer.train_step(batch))
        masters.append({n: t.clone() for n, t in export_hf(model, masters=True).items()})
    return {
        "masters": masters,
        "norms": [s.grad_norm for s in found],
        "logprobs": [s.logprobs for s in found],
    }


@pytest.fixture(scope="module")
def run(launch: Any, tied: Path, biased: Path) -> Any:
    """run(layout, **options) -> what the first rank has of a model: scores, and what training steps made of it."""
    kinds_of("sm90")  # imported once for all ranks
    from isoexec.adapters.megatron.cuda import cuda_deferred_add, cuda_residual_add

    @cache
    def of(
        layout: Any,
        name: str = "qwen3-dense-sm90",
        count: int = 1,
        optimizer: tuple[str, ...] = (),
        apart: bool = False,
        **options: Any,
    ) -> Any:
        def work() -> Any:
            model = made(biased if "mimo" in name else tied, layout, name, **options)
            found: dict[str, Any] = {
                "rows": score(model, rows(), microbatch=2),
                "packed": score_packed(model, sequences()),
            }
            for layer in model.decoder.layers:
                assert layer.self_attn_bda is cuda_deferred_add
                layer.self_attn_bda = cuda_residual_add if apart else cuda_deferred_add
            if layout.ranks == 1:
                report = model.isoexec_adapter.verify()
                found["bound"] = [r.region for r in report[0].regions if r.ok]
                found["census"] = count == 2 and census(model, model.isoexec_adapter.contract).clean
            return found | steps(model, found["rows"], count, **dict.fromkeys(optimizer, True))

        first, *others = launch(work, layout)
        for other in others:
            assert torch.equal(bits(other["rows"]), bits(first["rows"]))
        return first

    return of


def the_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Scores, and as many steps as both have."""
    assert torch.equal(bits(a["rows"]), bits(b["rows"]))
    for x, y in zip(a["packed"], b["packed"], strict=True):
        assert torch.equal(bits(x), bits(y))
    for mine, theirs, *rest in zip(a["masters"], b["masters"], a["logprobs"], b["logprobs"], strict=False):
        assert torch.equal(bits(rest[0]), bits(rest[1]))
        assert mine.keys() == theirs.keys()
        assert [n for n, t in mine.items() if not torch.equal(bits(t), bits(theirs[n]))] == []
    assert all(x == y for x, y in zip(a["norms"], b["norms"], strict=False))


def test_every_region_is_bound_and_its_canary_holds(run: Any, one: Any) -> None:
    assert run(one, count=2)["bound"] == [
        *("embedding", "norm", "qk_norm", "column_linear", "row_linear", "rope", "attention", "silu_mul"),
        "head_logprobs",
    ]
    assert run(one, count=2)["census"]


def test_a_pack_has_the_bits_of_rows(run: Any, one: Any) -> None:
    found = run(one, count=2)
    for i, packed in enumerate(found["packed"]):
        assert torch.equal(bits(packed), bits(found["rows"][i, : len(packed)]))
        assert bool(packed.isfinite().all())
        assert len(set(packed.tolist())) > 4


def test_tensor_and_sequence_parallel_ranks_train_to_the_bits_of_one(
    run: Any, one: Any, layout_of: Any
) -> None:
    the_same(run(layout_of(tp=2, sp=True), count=2), run(one, count=2))
    assert min(run(one, count=2)["norms"]) > 0.01  # clipping was at work
    first, second = run(one, count=2)["masters"]
    assert all(not torch.equal(bits(t), bits(second[n])) for n, t in first.items())


def test_recomputing_layers_under_the_distributed_optimizer_changes_no_bit(run: Any, one: Any) -> None:
    the_same(run(one, recompute=True, optimizer=("distributed_optimizer",)), run(one, count=2))


def test_a_norm_that_makes_the_sum_before_it_has_the_bits_of_two_steps(run: Any, one: Any) -> None:
    the_same(run(one, apart=True), run(one, count=2))


def test_recomputing_attention_alone_changes_no_bit(run: Any, one: Any, layout_of: Any) -> None:
    the_same(run(layout_of(tp=2), recompute_granularity="selective"), run(one, count=2))


def test_biases_and_pipeline_stages_have_the_bits_of_one_rank(run: Any, one: Any, layout_of: Any) -> None:
    alone = run(one, "mimo-dense-sm90")
    assert "qkv_bias" in alone["bound"]
    the_same(run(layout_of(pp=2), "mimo-dense-sm90"), alone)


def test_a_switch_that_is_flipped_later_is_seen(launch: Any, one: Any, tied: Path) -> None:
    def work() -> list[str]:
        model = made(tied, one)
        cublaslt.restore(cublaslt.SHIPPED)
        return [r.region for r in model.isoexec_adapter.verify()[0].regions if not r.ok]

    assert launch(work)[0] == ["column_linear", "row_linear", "head_logprobs"]


def test_the_head_has_a_temperature_and_entropies_and_refuses_logits(
    launch: Any, one: Any, tied: Path
) -> None:
    def work() -> tuple[list[torch.Tensor], list[str]]:
        model = made(tied, one)
        inputs = model_inputs(rows()[1:2, :9])
        each = torch.full(inputs["labels"].shape, 0.5)
        options: list[dict[str, Any]] = [{"temperature": 0.5, "entropy": True}, {"temperature": each}, {}]
        with torch.no_grad():
            found = [model(**inputs, output_processor=output_processor(model, **o)) for o in options]
        torn = packed_inputs(sequences())
        setattr(torn["packed_seq_params"], BOUNDS, [0, 9, 40])
        refused = []
        for call in (
            lambda: model(**inputs | {"labels": None}),
            lambda: model(**torn, output_processor=output_processor(model)),
        ):
            with pytest.raises(InstallError) as raised:
                call()
            refused.append(str(raised.value))
        return found, refused

    (both, again, plain), refused = launch(work)[0]
    assert both.shape == (2, *plain.shape)
    assert torch.equal(bits(both[0]), bits(again))
    assert not torch.equal(bits(again), bits(plain))
    assert 0.0 <= float(both[1].min()) < float(both[1].max()) <= math.log(256)
    assert "asks the head for logits" in refused[0]
    assert "from 0 to 40" in refused[1]
