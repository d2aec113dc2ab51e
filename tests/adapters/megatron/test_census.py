# SPDX-License-Identifier: Apache-2.0
"""The census of real megatron-core: clean in every case and layout under the contract, and not with anything planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear

from isoexec.adapters.census import Census
from isoexec.adapters.megatron.adapter import MegatronAdapter
from isoexec.adapters.megatron.census import census
from isoexec.adapters.megatron.training import Batch, Trainer

pytestmark = pytest.mark.megatron

BF16 = torch.bfloat16
CASES = {"trainer_fwd", "trainer_recompute", "trainer_score"}


class Shifted(torch.autograd.Function):
    """Leaves the forward alone and rounds the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return gradient * 1.0000001


def _around(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Let a method of one object change what it returns."""
    method = getattr(owner, name)

    def changed(*args: Any, **options: Any) -> Any:
        out = method(*args, **options)
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    object.__setattr__(owner, name, changed)


def _scaled(model: Any) -> None:
    _around(model.decoder.layers[1].self_attention.linear_qkv, "forward", lambda x: x * 1.0000001)


def _in_place(model: Any) -> None:
    _around(model.decoder.layers[1].pre_mlp_layernorm, "forward", lambda x: x.clone().add_(1e-8))


def _gradient(model: Any) -> None:
    _around(model.decoder.layers[0].mlp.linear_fc2, "forward", Shifted.apply)


def _native(model: Any) -> None:
    native = RowParallelLinear.__new__(RowParallelLinear)
    native.__dict__.update(vars(model.decoder.layers[2].mlp.linear_fc2))
    model.decoder.layers[2].mlp.linear_fc2 = native


def _cast(model: Any) -> None:
    _around(model.output_layer, "forward", lambda x: x.bfloat16().float())


def _after(model: Any) -> None:
    _around(model.token_logprobs, "compute", lambda x: x + 0.0)


PLANTED: dict[str, tuple[Callable[[Any], None], str, str, set[str]]] = {
    "a scaled output": (_scaled, "aten::mul", "decoder.layers.1.self_attention.linear_qkv", CASES),
    "an in-place sum": (_in_place, "aten::add_", "decoder.layers.1.pre_mlp_layernorm", CASES),
    "a native layer": (_native, "aten::mm", "decoder.layers.2.mlp.linear_fc2", CASES),
    "a narrowing cast": (_cast, "aten::_to_copy", "output_layer", CASES),
    "arithmetic after the model": (_after, "aten::add", "GPTModel", CASES),
    "a gradient alone": (
        _gradient,
        "aten::mul",
        "decoder.layers.0.mlp.linear_fc2",
        {"trainer_fwd", "trainer_recompute"},
    ),
}


def test_every_case_of_a_contract_model_is_clean_in_every_layout(
    launch: Any, make: Any, contract: Any, other: Any, dtype: torch.dtype
) -> None:
    def work() -> Census:
        return make(other, dtype, contract).isoexec_adapter.census()

    for found in launch(work, other):
        assert found.clean, found.text()
        assert set(found.inside) == CASES
        assert found.inside["trainer_recompute"] > found.inside["trainer_fwd"] > found.inside["trainer_score"]


def test_a_native_model_is_not_nor_are_its_gradients_and_sums_over_ranks(
    launch: Any, make: Any, layout_of: Any
) -> None:
    layout = layout_of(tp=2)
    for found in launch(lambda: census(make(layout, BF16, None), None), layout):
        for case in ("trainer_fwd", "trainer_score"):
            here = {e.operator for e in found.case(case)}
            assert {"aten::mm", "aten::bmm", "aten::_softmax", "c10d::allreduce_"} <= here
        backward = {(e.operator, e.module) for e in found.case("trainer_fwd") if e.node}
        attention = "decoder.layers.0.self_attention.core_attention.scale_mask_softmax[Softmax]"
        assert ("aten::_softmax_backward_data", attention) in backward
        assert any(operator == "aten::silu_backward" for operator, _ in backward)


@pytest.fixture(scope="module")
def planted(launch: Any, make: Any, contract: Any, one: Any) -> dict[str, Census]:
    def work() -> dict[str, Census]:
        found = {}
        for name, (plant, *_) in PLANTED.items():
            model = make(one, BF16, contract)
            plant(model)
            found[name] = model.isoexec_adapter.census()
        return found

    result: dict[str, Census] = launch(work)[0]
    return result


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found_in_every_case_it_runs_in(planted: dict[str, Census], name: str) -> None:
    _, operator, module, cases = PLANTED[name]
    found = planted[name]
    assert not found.clean
    for case in CASES:
        here = [e for e in found.case(case) if e.operator == operator and e.module == module]
        assert bool(here) == (case in cases), found.text()
        if name != "a native layer":
            assert all("test_census.py:" in e.stack[0] for e in here), found.text()


def test_a_census_leaves_weights_gradients_and_settings_as_they_were(
    launch: Any, make: Any, contract: Any, one: Any, tokens: torch.Tensor
) -> None:
    def work() -> None:
        model = make(one, BF16, contract)
        trainer = Trainer(model)
        ids = tokens[:4]
        batch = Batch(
            tokens=ids,
            mask=torch.ones_like(ids, dtype=torch.bool),
            advantages=torch.ones(4),
            old_logprobs=torch.full(ids.shape, -1.0),
        )
        trainer.train_step(batch)
        before = [(p.detach().clone(), p.main_grad.clone()) for p in model.parameters()]
        settings = {k: v for k, v in vars(model.config).items() if not callable(v)}
        found = MegatronAdapter(model)  # an adapter that installed nothing takes a census as well
        assert set(found.census().inside) == CASES
        assert {k: v for k, v in vars(model.config).items() if not callable(v)} == settings
        for (weight, gradient), p in zip(before, model.parameters(), strict=True):
            assert torch.equal(weight, p)
            assert torch.equal(gradient, p.main_grad)
            assert p.grad is None
        assert trainer.train_step(batch).step == 2

    launch(work)
