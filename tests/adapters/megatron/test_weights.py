# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isoexec.adapters.megatron.model import build, read_hf_config
from isoexec.adapters.megatron.weights import WeightError, export_hf, save_hf, weight_partials
from isoexec.probes.weights import add_partials, tensor_partial

pytestmark = pytest.mark.megatron


def test_a_checkpoint_goes_through_every_layout_unchanged(
    launch: Any, make: Any, contract: Any, other: Any, checkpoint: Path, tmp_path: Path
) -> None:
    def work() -> dict[str, torch.Tensor]:
        model = make(other, torch.float32, contract)
        save_hf(model, tmp_path / "saved")
        return export_hf(model)

    first, *rest = launch(work, other)
    stored = load_file(checkpoint / "model.safetensors")
    for found in (first, load_file(tmp_path / "saved/model.safetensors")):
        assert found.keys() == stored.keys()
        assert all(torch.equal(found[n].view(torch.int32), stored[n].view(torch.int32)) for n in stored)
    assert all(r == {} for r in rest)
    assert [p.name for p in (tmp_path / "saved").iterdir() if p.name.startswith(".")] == []
    assert json.loads((tmp_path / "saved/config.json").read_text())["model_type"] == "qwen3"


def test_partial_digests_of_all_ranks_add_up_to_each_whole_tensor(
    launch: Any, make: Any, contract: Any, other: Any, checkpoint: Path
) -> None:
    found = launch(lambda: weight_partials(make(other, torch.bfloat16, contract)), other)
    stored = {n: t.bfloat16() for n, t in load_file(checkpoint / "model.safetensors").items()}
    for name, whole in stored.items():
        parts = [p[name] for p, *_ in found if name in p]
        assert add_partials(parts) == tensor_partial(whole, whole.shape, [0] * whole.dim()), name
        assert sum(numel.get(name, 0) for _, numel, *_ in found) == whole.numel()
        assert {one.total[name] for one in found if name in one.total} == {whole.numel()}
    assert set().union(*(p for p, *_ in found)) == set(stored)


def test_one_changed_element_on_one_rank_changes_only_its_tensor_s_digest(
    launch: Any, make: Any, contract: Any, layout_of: Any
) -> None:
    layout = layout_of(tp=2)

    def work() -> Any:
        model = make(layout, torch.bfloat16, contract)
        before = weight_partials(model)[0]
        if model.pg_collection.tp.rank() == 1:
            with torch.no_grad():
                model.decoder.layers[1].self_attention.linear_qkv.weight[-1, -1] += 1.0  # a value row
        after = weight_partials(model)[0]
        return {n for n in before if before[n] != after[n]}

    assert launch(work, layout) == [set(), {"model.layers.1.self_attn.v_proj.weight"}]


def test_a_tied_head_is_loaded_once_and_exported_once(
    launch: Any, make: Any, contract: Any, layout_of: Any, checkpoint: Path, tmp_path: Path
) -> None:
    tied = tmp_path / "tied"
    shutil.copytree(checkpoint, tied)
    config = json.loads((tied / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tied / "config.json").write_text(json.dumps(config))
    weights = load_file(tied / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tied / "model.safetensors")

    def work(layout: Any, use: Any) -> Any:
        model = build(tied, dtype=torch.float32, contract=use)
        return export_hf(model), weight_partials(model)[1]

    for layout in (layout_of(tp=2), layout_of(pp=2)):
        ranks = launch(lambda layout=layout: work(layout, contract if layout.pp == 1 else None), layout)
        assert ranks[0][0].keys() == weights.keys()
        assert torch.equal(ranks[0][0]["model.embed_tokens.weight"], weights["model.embed_tokens.weight"])
        assert (
            sum(n.get("model.embed_tokens.weight", 0) for _, n in ranks)
            == weights["model.embed_tokens.weight"].numel()
        )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.norm.weight": None}, "model.norm.weight: not in"),
        (
            {"model.layers.3.mlp.up_proj.weight": torch.zeros(2, 2)},
            "no place for: model.layers.3.mlp.up_proj.weight",
        ),
        (
            {"lm_head.weight": torch.zeros(8, 128)},
            r"lm_head.weight: wanted shape \(512, 128\), found \(8, 128\)",
        ),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    launch: Any, checkpoint: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(checkpoint, bad)
    weights = load_file(bad / "model.safetensors") | change
    save_file({n: t for n, t in weights.items() if t is not None}, bad / "model.safetensors")

    def work() -> None:
        with pytest.raises(WeightError, match=said):
            build(bad, dtype=torch.float32)

    launch(work)


def test_a_model_that_is_no_dense_qwen3_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    for change in (
        {"model_type": "qwen3_moe"},
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "yarn"}},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(WeightError, match="wanted"):
            read_hf_config(tmp_path)
