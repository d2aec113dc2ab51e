# SPDX-License-Identifier: Apache-2.0
"""How a layer with experts comes under a contract, what is refused, and what is found when it is tampered with."""

from __future__ import annotations

import functools
import json
import runpy
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter

from isoexec.adapters.base import Plan, make_plan
from isoexec.adapters.megatron import moe_exchange
from isoexec.adapters.megatron.adapter import MegatronAdapter
from isoexec.adapters.megatron.logprobs import score
from isoexec.adapters.megatron.model import build, read_hf_config
from isoexec.adapters.megatron.moe import ContractExperts, ContractMoELayer, ContractRouter
from isoexec.adapters.megatron.spec import ContractSpecProvider, rewrite_spec
from isoexec.adapters.megatron.weights import WeightError, weight_partials
from isoexec.contracts.errors import InstallError
from isoexec.contracts.schema import Contract
from isoexec.kernels import grouped_linear as grouped_kernel
from isoexec.kernels.combine import naive as combine_naive

pytestmark = pytest.mark.megatron

BF16 = torch.bfloat16
OWN = ("router", "routing", "dispatch", "expert_linear", "silu_mul", "combine")


@pytest.fixture
def plan(moe_contract: Contract, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """plan(enforce) for one rank, without a model."""

    def of(enforce: str = "install+refuse") -> Plan:
        monkeypatch.setenv("ISOEXEC_ENFORCE", enforce)
        topology = dict.fromkeys(("TP", "SP", "PP", "CP", "EP", "ETP", "DP"), 1)
        return make_plan(moe_contract, "trainer", topology)

    return of


# -- doors -----------------------------------------------------------------------------------------------------------


def test_a_stock_spec_with_experts_is_rewritten_and_its_experts_linears_are_left(
    plan: Callable[..., Plan],
) -> None:
    spec = get_gpt_layer_local_spec(num_experts=16, qk_layernorm=True, normalization="RMSNorm")
    found = rewrite_spec(spec, plan()).submodules.mlp
    parts = found.keywords["submodules"]
    assert found.func is ContractMoELayer
    assert parts.router is ContractRouter
    assert parts.experts.func is ContractExperts
    assert parts.experts.keywords["submodules"].linear_fc1 is ColumnParallelLinear
    stock = spec.submodules.mlp
    assert stock.func is MoELayer
    assert stock.keywords["submodules"].router is TopKRouter
    assert stock.keywords["submodules"].experts.func is SequentialMLP
    off = rewrite_spec(spec, plan(",".join(f"{region}=off" for region in OWN))).submodules.mlp
    assert off.func is MoELayer
    assert off.keywords["submodules"].experts.func is SequentialMLP
    assert off.keywords["submodules"].experts.keywords["submodules"].linear_fc1 is ColumnParallelLinear


def test_the_spec_provider_offers_the_contract_s_experts(plan: Callable[..., Plan]) -> None:
    provider = ContractSpecProvider(plan())
    built = rewrite_spec(get_moe_module_spec_for_backend(provider, num_experts=16), provider.plan)
    assert isinstance(built, functools.partial)
    assert built.func is ContractMoELayer
    assert built.keywords["submodules"].experts.func is ContractExperts


def test_a_model_built_natively_is_taken_over_and_given_back_whole(
    launch: Any, moe: Path, moe_contract: Contract, layout_of: Any, tokens: torch.Tensor
) -> None:
    layout = layout_of(tp=2, sp=True, ep=2, etp=1)

    def work() -> Any:
        model = build(moe, dtype=BF16, sequence_parallel=True)
        names = [n for n, _ in model.named_parameters()]
        adapter = MegatronAdapter(model)
        native = score(model, tokens[:3])
        adapter.install(adapter.plan(moe_contract))
        ours, found = score(model, tokens[:3]), adapter.describe()
        assert [n for n, _ in model.named_parameters()] == names
        adapter.remove()
        layer = model.decoder.layers[0].mlp
        kinds = [type(part) for part in (layer, layer.router, layer.experts)]
        built = build(moe, dtype=BF16, contract=moe_contract, sequence_parallel=True)
        return native, ours, score(model, tokens[:3]), score(built, tokens[:3]), kinds, found

    native, ours, after, built, kinds, found = launch(work, layout)[0]
    assert torch.equal(ours, built)
    assert torch.equal(native, after)
    assert not torch.equal(native, ours)
    assert kinds == [MoELayer, TopKRouter, SequentialMLP]
    assert found.topology == {"TP": 2, "SP": 2, "PP": 1, "CP": 1, "EP": 2, "ETP": 1, "DP": 1}
    experts = "isoexec.adapters.megatron.moe.ContractExperts"
    assert found.modules["expert_linear"] == [f"decoder.layers.{i}.mlp.experts: {experts}" for i in (0, 1)]
    assert set(OWN) <= set(found.modules)


def test_the_regions_of_a_layer_with_experts_are_installed_together_or_left_together(
    launch: Any, moe: Path, moe_contract: Contract, one: Any, tokens: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def work() -> Any:
        model = build(moe, dtype=torch.float32, contract=moe_contract)
        (report,) = model.isoexec_adapter.verify()
        return [r.region for r in report.regions if r.ok], score(model, tokens[:3])

    def refused() -> str:
        with pytest.raises(InstallError) as caught:
            work()
        return str(caught.value)

    everything, ours = launch(work)[0]
    monkeypatch.setenv("ISOEXEC_ENFORCE", ",".join(f"{region}=observe" for region in OWN))
    regions, scores = launch(work)[0]
    assert set(everything) - set(regions) == set(OWN)
    assert 0.0 < float((scores - ours).abs().max()) < 1e-3
    monkeypatch.setenv("ISOEXEC_ENFORCE", "combine=off")
    said = launch(refused)[0]
    assert "combine" in said
    assert "leaves combine to Megatron" in said


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob true"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 1"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"num_experts": None}, "num_experts"),
        ({"shared_expert_intermediate_size": 128}, "shared expert"),
        ({"model_type": "qwen2_moe"}, "model_type"),
    ],
)
def test_a_config_of_another_layer_is_refused_by_name(
    moe: Path, tmp_path: Path, change: dict[str, Any], wanted: str
) -> None:
    config = json.loads((moe / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(WeightError, match=wanted):
        read_hf_config(tmp_path)


UNCOVERED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"moe_z_loss_coeff": 1e-3}, "moe_z_loss_coeff=0.001"),
    ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}, "moe_aux_loss_coeff=0.01"),
    ({"moe_input_jitter_eps": 0.01}, "moe_input_jitter_eps=0.01"),
    ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor=1.0"),
    ({"moe_router_pre_softmax": True}, "router_normalize=False"),
    ({"moe_router_score_function": "sigmoid"}, "router_score=sigmoid"),
    ({"moe_router_topk_scaling_factor": 2.0, "moe_router_pre_softmax": True}, "topk_scaling_factor=2.0"),
    ({"moe_shared_expert_intermediate_size": 64}, "shared_size=64"),
    ({"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing=True"),
    ({"moe_enable_routing_replay": True}, "moe_enable_routing_replay=True"),
    ({"mlp_chunks_for_training": 2}, "mlp_chunks_for_training=2"),
    ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, "recompute_modules with 'moe'"),
)


def test_settings_no_region_covers_are_refused_and_named(
    launch: Any, moe: Path, moe_contract: Contract
) -> None:
    def work() -> list[str]:
        said = []
        for options, _ in UNCOVERED:
            with pytest.raises(InstallError) as caught:
                build(moe, dtype=BF16, contract=moe_contract, load=False, **options)
            said.append(str(caught.value))
        return said

    for found, (_, words) in zip(launch(work)[0], UNCOVERED, strict=True):
        assert words in found


def test_copies_of_experts_among_tensor_parallel_ranks_are_refused(
    launch: Any, moe: Path, moe_contract: Contract, layout_of: Any
) -> None:
    layout = layout_of(tp=2, sp=True, ep=1, etp=1)

    def work() -> str:
        with pytest.raises(InstallError) as caught:
            build(moe, dtype=BF16, contract=moe_contract, sequence_parallel=True)
        return str(caught.value)

    for said in launch(work, layout):
        assert "EP 1 x ETP 1 under TP 2" in said
        assert "copies of experts" in said


def test_models_and_contracts_of_the_other_kind_are_refused(
    launch: Any, moe: Path, checkpoint: Path, moe_contract: Contract, contract: Contract
) -> None:
    def work() -> list[str]:
        said = []
        for folder, use in ((moe, contract), (checkpoint, moe_contract)):
            with pytest.raises(InstallError) as caught:
                build(folder, dtype=BF16, contract=use)
            said.append(str(caught.value))
        return said

    sparse, dense = launch(work)[0]
    assert "num_moe_experts=16, the contract covers None" in sparse
    assert "num_moe_experts=None" in dense


# -- truth -----------------------------------------------------------------------------------------------------------

Undo = Callable[[], object]
TAMPERING = runpy.run_path(str(Path(__file__).with_name("tampering.py")))
put: Callable[[Any, str, Any], Undo] = TAMPERING["put"]
done: Callable[[Callable[[Any], Undo], Any], AbstractContextManager[None]] = TAMPERING["done"]


def _layer(model: Any) -> Any:
    return model.decoder.layers[1].mlp


def _weight(model: Any) -> Undo:
    """The weight of another expert, of the same shape: no shape, class or canary differs."""
    one, other = _layer(model).experts.local_experts[1].linear_fc1, _layer(model).experts.local_experts[2]
    before, one.weight = one.weight, other.linear_fc1.weight
    return lambda: setattr(one, "weight", before)


def _exchanged(model: Any) -> Undo:
    """Two experts in each other's place."""
    experts = _layer(model).experts.local_experts
    before = dict(experts._modules)
    experts._modules["0"], experts._modules["1"] = before["1"], before["0"]
    return lambda: experts._modules.update(before)


def _constant(model: Any) -> Undo:
    constants = _layer(model).experts.binding.constants
    before, constants["k_block"] = constants["k_block"], 32
    return lambda: constants.__setitem__("k_block", before)


def _native(name: str, kind: type) -> Callable[[Any], Undo]:
    def work(model: Any) -> Undo:
        owner = _layer(model) if name != "mlp" else model.decoder.layers[1]
        before = getattr(owner, name)
        native: Any = object.__new__(kind)
        native.__dict__.update(vars(before))
        setattr(owner, name, native)
        return lambda: setattr(owner, name, before)

    return work


def _turned(y: torch.Tensor, weights: torch.Tensor, shared: Any = None) -> torch.Tensor:
    acc = (weights.flip(1).unsqueeze(-1) * y.view(*weights.shape, -1).flip(1).float()).sum(1)
    return (acc if shared is None else acc + shared.float()).to(y.dtype)


TAMPERED: dict[str, tuple[Callable[[Any], Undo], str, str]] = {
    # what is done -> region, or "" for the process; words of the problem
    "the router's choice on one layer": (
        lambda m: put(
            _layer(m).router,
            "compute_routing",
            MethodType(ContractRouter.compute_routing, _layer(m).router),
        ),
        "routing",
        "decoder.layers.1.mlp.router.compute_routing was set on the object",
    ),
    "how many experts a token goes to": (
        lambda m: put(_layer(m).router, "topk", 2),
        "routing",
        "topk was 3 and is 2",
    ),
    "the class of a router": (_native("router", TopKRouter), "router", "mlp.router is megatron"),
    "the class of the experts": (
        _native("experts", SequentialMLP),
        "expert_linear",
        "mlp.experts is megatron",
    ),
    "the class of the layer": (_native("mlp", MoELayer), "dispatch", "decoder.layers.1.mlp is megatron"),
    "one expert's weight": (
        _weight,
        "expert_linear",
        "mlp.experts.local_experts.1.linear_fc1.weight is another parameter than was bound",
    ),
    "two experts exchanged": (_exchanged, "expert_linear", "local_experts.0.linear_fc1.weight is another"),
    "a constant of the experts": (_constant, "expert_linear", "constants.k_block was 64 and is 32"),
    "a hook on the experts": (
        lambda m: _layer(m).experts.register_forward_hook(lambda *_: None).remove,
        "expert_linear",
        "forward_hooks were 0 and are 1",
    ),
    "a hook on one expert": (
        lambda m: _layer(m).experts.local_experts[0].register_forward_hook(lambda *_: None).remove,
        "expert_linear",
        "local_experts.0.forward_hooks were 0 and are 1",
    ),
    "the order of the sum, on one layer": (
        lambda m: put(_layer(m), "compute_combine", _turned),
        "combine",
        "decoder.layers.1.mlp.compute_combine was set on the object",
    ),
    "the order of the sum, in the kernel": (
        lambda _: put(combine_naive, "combine", _turned),
        "",
        "isoexec.kernels.combine.naive.combine was replaced",
    ),
    "the grouped product in its package": (
        lambda _: put(grouped_kernel, "grouped_linear", lambda x, *_, **__: x.clone()),
        "",
        "isoexec.kernels.grouped_linear.grouped_linear was replaced",
    ),
    "the exchange": (
        lambda _: put(moe_exchange.Exchange, "move_out", lambda _self, rows: rows.clone()),
        "",
        "Exchange.move_out was replaced",
    ),
    "the ranks of the exchange": (
        lambda m: put(_layer(m).token_dispatcher, "tp_ep_group", m.pg_collection.expt_dp),
        "dispatch",
        "decoder.layers.1.mlp exchanges rows in another group than the model's",
    ),
}


@pytest.fixture(scope="module")
def seen(launch: Any, moe: Path, moe_contract: Contract, layout_of: Any) -> dict[str, Any]:
    layout = layout_of(tp=2, sp=True, ep=2, etp=1)

    def work() -> dict[str, Any]:
        model = build(moe, dtype=BF16, contract=moe_contract, sequence_parallel=True)
        adapter = model.isoexec_adapter
        (report,) = adapter.verify()
        found: dict[str, Any] = {"before": report.problems(), "topology": report.topology}
        found["regions"] = {r.region: (r.ok, r.reference_canary == r.expected_canary) for r in report.regions}
        for name, (tamper, *_) in TAMPERED.items():
            with done(tamper, model):
                (report,) = adapter.verify()
            found[name] = (
                report.changed or "",
                {r.region: r.problem or "" for r in report.regions if not r.ok},
            )
        found["after"] = adapter.verify()[0].problems()
        before = weight_partials(model)[0]
        with torch.no_grad():
            _layer(model).experts.local_experts[1].linear_fc2.weight.mul_(1.0 + 2**-7)
        after = weight_partials(model)[0]
        found["digests"] = {n for n in before if before[n] != after[n]}
        return found

    ranks = launch(work, layout)
    assert [r["before"] for r in ranks] == [(), ()]
    assert [r["after"] for r in ranks] == [(), ()]
    assert ranks[1]["digests"] == {"model.layers.1.mlp.experts.9.down_proj.weight"}
    result: dict[str, Any] = ranks[0]
    return result


@pytest.mark.parametrize("name", TAMPERED)
def test_what_is_exchanged_is_caught_and_named(seen: dict[str, Any], name: str) -> None:
    _, region, words = TAMPERED[name]
    process, regions = seen[name]
    if region:
        assert words in regions.get(region, ""), (process, regions)
    else:
        assert words in process, (process, regions)


def test_every_region_of_the_contract_is_attested_with_its_canary(
    seen: dict[str, Any], moe_contract: Contract
) -> None:
    assert set(seen["regions"]) == set(moe_contract.regions) - {"grad_norm"}
    assert set(OWN) < set(seen["regions"])
    assert all(ok and known for ok, known in seen["regions"].values())
    assert seen["topology"] == {"TP": 2, "SP": 2, "PP": 1, "CP": 1, "EP": 2, "ETP": 1, "DP": 1}
    assert seen["digests"] == {"model.layers.1.mlp.experts.1.down_proj.weight"}
