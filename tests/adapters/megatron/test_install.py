# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from isoexec.adapters.base import Adapter, Enforcement, Plan, make_plan
from isoexec.adapters.megatron import clipping, verifying
from isoexec.adapters.megatron.adapter import MegatronAdapter
from isoexec.adapters.megatron.attention import ContractCoreAttention
from isoexec.adapters.megatron.layers import (
    ContractColumnParallelLinear,
    ContractMLP,
    ContractQKNorm,
    ContractRMSNorm,
    ContractRowParallelLinear,
    contract_residual_add,
)
from isoexec.adapters.megatron.logprobs import score
from isoexec.adapters.megatron.model import SequenceParallelRMSNorm
from isoexec.adapters.megatron.spec import KEYS_MAP, ContractSpecProvider, rewrite_spec
from isoexec.adapters.megatron.training import Trainer
from isoexec.contracts.errors import InstallError, IsoExecError, TopologyError
from isoexec.kernels import linear as linear_kernel

pytestmark = pytest.mark.megatron

BF16 = torch.bfloat16


@pytest.fixture
def plan(contract: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """plan(enforce) for one rank, without a model."""

    def of(enforce: str = "install+refuse") -> Plan:
        monkeypatch.setenv("ISOEXEC_ENFORCE", enforce)
        topology = dict.fromkeys(("TP", "SP", "PP", "CP", "EP", "ETP", "DP"), 1)
        return make_plan(contract, "trainer", topology)

    return of


# -- specs -----------------------------------------------------------------------------------------------------------


def test_a_stock_layer_spec_is_rewritten_in_every_slot_and_left_as_it_was(plan: Callable[..., Plan]) -> None:
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    block = TransformerBlockSubmodules(layer_specs=[spec, spec], layer_norm=SequenceParallelRMSNorm)
    found = rewrite_spec(block, plan())
    layer = found.layer_specs[1].submodules
    heads = layer.self_attention.submodules
    assert found.layer_norm is layer.input_layernorm is layer.pre_mlp_layernorm is ContractRMSNorm
    assert heads.q_layernorm is heads.k_layernorm is ContractQKNorm
    assert heads.linear_qkv is ContractColumnParallelLinear
    assert heads.linear_proj is ContractRowParallelLinear
    assert heads.core_attention is ContractCoreAttention
    assert layer.self_attn_bda is layer.mlp_bda is contract_residual_add
    assert layer.mlp.func.__self__ is ContractMLP
    assert layer.mlp.keywords["submodules"].linear_fc1 is ContractColumnParallelLinear
    assert layer.sharded_state_dict_keys_map == spec.submodules.sharded_state_dict_keys_map == KEYS_MAP
    assert spec.submodules.self_attention.submodules.linear_qkv is ColumnParallelLinear
    assert spec.submodules.self_attn_bda is get_bias_dropout_add


def test_an_mlp_given_as_a_module_spec_becomes_a_builder_of_the_contract_s(plan: Callable[..., Plan]) -> None:
    spec = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    found = rewrite_spec(spec, plan())
    assert isinstance(found, functools.partial)
    assert getattr(found.func, "__self__", None) is ContractMLP
    assert found.keywords["submodules"].linear_fc2 is ContractRowParallelLinear


def test_only_the_regions_a_plan_installs_are_rewritten(plan: Callable[..., Plan]) -> None:
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    found = rewrite_spec(spec, plan("off,row_linear=install,rope=install+refuse,norm=observe")).submodules
    heads = found.self_attention.submodules
    assert heads.linear_proj is ContractRowParallelLinear
    assert heads.core_attention is ContractCoreAttention
    assert heads.linear_qkv is ColumnParallelLinear
    assert found.self_attn_bda is get_bias_dropout_add
    assert found.mlp.func.__self__ is MLP


def test_a_fused_norm_becomes_a_norm_of_its_own_under_the_same_checkpoint_names(
    plan: Callable[..., Plan],
) -> None:
    class TELayerNormColumnParallelLinear(ColumnParallelLinear):
        """Stands in for Transformer Engine's, which is not installed here."""

    stock = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    sub = stock.submodules
    heads = dataclasses.replace(sub.self_attention.submodules, linear_qkv=TELayerNormColumnParallelLinear)
    fused = dataclasses.replace(
        sub,
        input_layernorm=IdentityOp,
        self_attention=dataclasses.replace(sub.self_attention, submodules=heads),
        sharded_state_dict_keys_map={},
    )
    found = rewrite_spec(fused, plan())
    assert found.input_layernorm is ContractRMSNorm
    assert found.self_attention.submodules.linear_qkv is ContractColumnParallelLinear
    assert found.sharded_state_dict_keys_map["input_layernorm."] == "self_attention.linear_qkv.layer_norm_"


def test_the_spec_provider_offers_the_plan_s_modules(plan: Callable[..., Plan]) -> None:
    provider = ContractSpecProvider(plan("install,attention=off,rope=off"))
    assert provider.column_parallel_linear() is ContractColumnParallelLinear
    assert provider.row_parallel_linear() is ContractRowParallelLinear
    assert provider.layer_norm(rms_norm=True) is ContractRMSNorm
    assert provider.layer_norm(rms_norm=True, for_qk=True) is ContractQKNorm
    assert provider.core_attention() is DotProductAttention
    mlp = rewrite_spec(get_mlp_module_spec_for_backend(backend=provider), provider.plan)
    assert mlp.keywords["submodules"].linear_fc1 is ContractColumnParallelLinear


# -- doors -----------------------------------------------------------------------------------------------------------


def test_a_model_built_natively_is_taken_over_and_given_back_whole(
    launch: Any, make: Any, contract: Any, layout_of: Any, tokens: torch.Tensor
) -> None:
    layout = layout_of(tp=2)

    def work() -> list[torch.Tensor]:
        model = make(layout, BF16, None)
        names = [n for n, _ in model.named_parameters()]
        adapter = MegatronAdapter(model)
        native = score(model, tokens[:4])
        adapter.install(adapter.plan(contract))
        ours = score(model, tokens[:4])
        assert [n for n, _ in model.named_parameters()] == names
        adapter.remove()
        assert model.isoexec_adapter is None
        return [native, ours, score(model, tokens[:4]), score(make(layout, BF16, contract), tokens[:4])]

    native, ours, after, built = launch(work, layout)[0]
    assert torch.equal(ours, built)
    assert torch.equal(native, after)
    assert not torch.equal(native, ours)


def test_a_model_from_a_rewritten_spec_does_not_run_before_install_nor_after_remove(
    launch: Any, make: Any, contract: Any, one: Any, tokens: torch.Tensor
) -> None:
    def work() -> None:
        model = make(one, BF16, contract)
        adapter = model.isoexec_adapter
        plan = adapter._plan
        adapter.remove()
        with pytest.raises(InstallError, match="never installed"):
            score(model, tokens[:2])
        MegatronAdapter(model).install(plan)
        assert torch.isfinite(score(model, tokens[:2])).all()

    launch(work)


def test_the_description_names_versions_live_degrees_and_modules(
    launch: Any, make: Any, contract: Any, layout_of: Any
) -> None:
    layout = layout_of(tp=2, sp=True)

    def describe() -> Any:
        return make(layout, BF16, contract).isoexec_adapter.describe()

    found = launch(describe, layout)[1]
    assert found.topology == {"TP": 2, "SP": 2, "PP": 1, "CP": 1, "EP": 1, "ETP": 1, "DP": 1}
    assert found.versions["megatron-core"].startswith("0.19")
    assert len(found.modules["column_linear"]) == 6
    assert found.modules["lm_head"] == ["output_layer: isoexec.adapters.megatron.layers.ContractHead"]


# -- refusals --------------------------------------------------------------------------------------------------------


def test_an_unproven_topology_is_refused_naming_axis_degree_and_domain(
    launch: Any, make: Any, contract: Any, layout_of: Any
) -> None:
    def work(layout: Any) -> str:
        with pytest.raises(TopologyError) as caught:
            make(layout, BF16, contract)
        native = make(layout, BF16, None)
        with pytest.raises(TopologyError):
            MegatronAdapter(native).plan(contract)
        return f"{caught.value.axis} {caught.value.found} | {caught.value.admitted}"

    dp, tp = (layout_of(world=3), layout_of(tp=4, world=4))
    assert launch(lambda: work(dp), dp)[0] == "DP 3 | invariant over {1, 2, 4, 8}"
    narrow = contract.claims.topology["trainer"]["TP"]
    assert not narrow.admits(4)

    def wide() -> str:
        with pytest.raises(TopologyError) as caught:
            make(tp, BF16, contract)
        return caught.value.axis

    assert launch(wide, tp) == ["TP"] * 4


def test_a_plan_for_another_topology_is_refused_at_install(
    launch: Any, make: Any, contract: Any, layout_of: Any
) -> None:
    layout = layout_of(tp=2)

    def work() -> str:
        model = make(layout, BF16, None)
        adapter = MegatronAdapter(model)
        claims = contract.claims
        only_one = dataclasses.replace(claims.topology["trainer"]["TP"], invariant=(), pinned=1)
        axes = {**claims.topology["trainer"], "TP": only_one}
        topology = {**claims.topology, "trainer": axes}
        narrow = dataclasses.replace(contract, claims=dataclasses.replace(claims, topology=topology))
        plan = dataclasses.replace(adapter.plan(contract), contract=narrow)
        with pytest.raises(TopologyError, match="TP is 2"):
            adapter.install(plan)
        return type(model.output_layer).__name__

    assert launch(work, layout) == ["ColumnParallelLinear"] * 2


def test_settings_no_region_covers_are_refused_and_named(
    launch: Any, make: Any, contract: Any, one: Any
) -> None:
    def work() -> list[str]:
        said = []
        for options in (
            {"hidden_dropout": 0.1},
            {"fp32_residual_connection": True, "pipeline_dtype": torch.float32},
        ):
            model = make(one, torch.float32, None)
            for name, value in options.items():
                setattr(model.config, name, value)
            adapter = MegatronAdapter(model)
            with pytest.raises(InstallError) as caught:
                adapter.install(adapter.plan(contract))
            said.append(str(caught.value))
        model = make(one, torch.float32, None)
        model.position_embedding_type = "yarn"
        adapter = MegatronAdapter(model)
        with pytest.raises(InstallError) as caught:
            adapter.install(adapter.plan(contract))
        said.append(str(caught.value))
        return said

    dropout, residual, yarn = launch(work)[0]
    assert "hidden_dropout=0.1" in dropout
    assert "fp32_residual_connection=True" in residual
    assert "yarn" in yarn


def test_a_module_the_adapter_cannot_take_over_is_refused_and_nothing_is_left_behind(
    launch: Any, make: Any, contract: Any, one: Any, tokens: torch.Tensor
) -> None:
    class Foreign(RowParallelLinear):
        pass

    def work() -> None:
        model = make(one, BF16, None)
        before = score(model, tokens[:2])
        model.decoder.layers[1].mlp.linear_fc2.__class__ = Foreign
        adapter = MegatronAdapter(model)
        with pytest.raises(InstallError, match=r"layers.1.mlp.linear_fc2.*Foreign"):
            adapter.install(adapter.plan(contract))
        assert type(model.embedding.word_embeddings).__name__ == "VocabParallelEmbedding"
        assert model.position_embedding_type == "rope"
        assert torch.equal(score(model, tokens[:2]), before)

    launch(work)


def test_a_kernel_of_another_source_or_a_dtype_not_claimed_is_refused(
    launch: Any, make: Any, contract: Any, one: Any
) -> None:
    stale = dataclasses.replace(contract.providers[0], source="sha256:" + "1" * 64)
    old = dataclasses.replace(contract, providers=(stale, *contract.providers[1:]))
    half = dataclasses.replace(contract, claims=dataclasses.replace(contract.claims, dtypes=("bfloat16",)))

    def work() -> None:
        with pytest.raises(InstallError, match=r"of source sha256:1111"):
            make(one, BF16, old)
        with pytest.raises(InstallError, match="dtype"):
            make(one, torch.float32, half)

    launch(work)


def test_another_megatron_version_is_refused(
    launch: Any, make: Any, contract: Any, one: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isoexec.adapters.megatron.adapter.version", lambda _: "0.20.1")

    def work() -> None:
        with pytest.raises(InstallError, match=r">=0.19.2,<0.20.0.*0.20.1"):
            make(one, BF16, contract)

    launch(work)


# -- enforcement -----------------------------------------------------------------------------------------------------


def test_regions_left_out_stay_megatron_s_and_are_not_judged(
    launch: Any, make: Any, contract: Any, one: Any, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "ISOEXEC_ENFORCE", "install,rope=observe,attention=observe,silu_mul=off,logprobs=off,grad_norm=off"
    )

    def work() -> Any:
        model = make(one, torch.float32, contract)
        return score(model, tokens[:4]), model.isoexec_adapter.verify()[0], model.isoexec_adapter.census()

    partly, report, census = launch(work)[0]
    monkeypatch.setenv("ISOEXEC_ENFORCE", "")
    whole = launch(lambda: score(make(one, torch.float32, contract), tokens[:4]))[0]
    regions = {r.region: r for r in report.regions}
    assert regions["attention"].enforcement is Enforcement.OBSERVE
    assert regions["attention"].canary is None
    assert "DotProductAttention" in regions["attention"].object
    assert "silu_mul" not in regions
    assert regions["row_linear"].ok
    assert report.problems() == ()
    assert {"aten::silu", "aten::bmm"} & {e.operator for e in census.outside}
    assert float((partly - whole).abs().max()) < 1e-4


def test_rope_alone_can_be_installed_over_megatron_s_attention(
    launch: Any, make: Any, contract: Any, one: Any, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = launch(lambda: score(make(one, torch.float32, None), tokens[:4]))[0]
    for alone in ("rope", "attention"):
        monkeypatch.setenv("ISOEXEC_ENFORCE", f"off,{alone}=install+refuse")

        def work() -> Any:
            model = make(one, torch.float32, contract)
            return score(model, tokens[:4]), model.isoexec_adapter.verify()[0]

        values, report = launch(work)[0]
        assert [r.region for r in report.regions if r.ok] == [alone]
        assert 0 < float((values - native).abs().max()) < 1e-4


def test_install_without_refuse_reports_what_it_could_not_do(
    launch: Any, make: Any, contract: Any, one: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOEXEC_ENFORCE", "install")

    def work() -> Any:
        model = make(one, BF16, None)
        model.config.hidden_dropout = 0.1
        adapter = MegatronAdapter(model)
        adapter.install(adapter.plan(contract))
        return adapter.verify()[0].problems()

    problems = launch(work)[0]
    assert len(problems) == 10
    assert all("hidden_dropout=0.1" in p for p in problems)


# -- verify ----------------------------------------------------------------------------------------------------------

Tamper = Callable[[Any], None]


def _evil(*args: Any, **options: Any) -> Any:
    return linear_kernel.ops.column_linear(*args, **options) * 1.01


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name, None)
    setattr(owner, name, value)
    yield
    if before is None:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


def _tampers(model: Any) -> dict[str, tuple[Any, str, Any, str]]:
    """name -> (owner, attribute, value, the region that must be reported)."""
    layer = model.decoder.layers[2]
    stock = RowParallelLinear.__new__(RowParallelLinear)
    stock.__dict__.update(vars(layer.mlp.linear_fc2))
    binding = layer.self_attention.linear_qkv.binding
    other = dataclasses.replace(binding, constants={**binding.constants, "k_block": 32})
    return {
        "forward set on one object": (layer.input_layernorm, "forward", lambda x: x, "norm"),
        "compute set on one object": (
            layer.self_attention.k_layernorm,
            "compute",
            lambda *a: a[0],
            "qk_norm",
        ),
        "method of the class replaced": (ContractMLP, "forward", MLP.forward, "silu_mul"),
        "kernel rebound in its package": (linear_kernel, "column_linear", _evil, "column_linear"),
        "Megatron's own module put back": (layer.mlp, "linear_fc2", stock, "row_linear"),
        "bound with other constants": (layer.self_attention.linear_qkv, "binding", other, "column_linear"),
        "residual add replaced": (layer, "mlp_bda", get_bias_dropout_add, "norm"),
        "rotary embedding applied twice": (model, "position_embedding_type", "rope", "rope"),
        "another rotary base": (layer.self_attention.core_attention, "rope_base", 5e5, "rope"),
        "logprobs taken away": (model, "token_logprobs", None, "logprobs"),
        "norm of the optimizer replaced": (model.optimizer, "get_grad_norm", lambda: 1.0, "grad_norm"),
        "exact sum replaced": (clipping, "exact_sq_sum", lambda *_: torch.tensor(4.0), "grad_norm"),
    }


def test_verify_reports_exactly_the_region_that_was_tampered_with(
    launch: Any, make: Any, contract: Any, one: Any
) -> None:
    def work() -> Any:
        model = make(one, BF16, contract)
        trainer = Trainer(model)
        adapter = model.isoexec_adapter
        object.__setattr__(model, "optimizer", trainer.optimizer)
        assert adapter.verify()[0].problems() == ()
        found = {}
        for name, (owner, attribute, value, region) in _tampers(model).items():
            put = _child if attribute in getattr(owner, "_modules", {}) else _attribute
            with put(owner, attribute, value):
                report = adapter.verify()[0]
            found[name] = (region, [r.region for r in report.regions if not r.ok], report.problems())
            with pytest.raises(InstallError, match="wanted"):
                report.require()
        assert adapter.verify()[0].problems() == ()
        return found

    for name, (region, seen, problems) in launch(work)[0].items():
        # lm_head is a column linear as well: a rebound kernel shows in both
        assert seen == ([region, "lm_head"] if name.startswith("kernel") else [region]), (name, problems)


@contextlib.contextmanager
def _child(owner: Any, name: str, module: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, module)
    yield
    setattr(owner, name, before)


def test_every_region_is_attested_on_every_rank_of_every_layout(
    launch: Any, make: Any, contract: Any, other: Any
) -> None:
    def work() -> Any:
        model = make(other, BF16, contract)
        Trainer(model)
        return model.isoexec_adapter.verify()[0]

    for rank, report in enumerate(launch(work, other)):
        assert report.rank == rank
        assert len(report.regions) == 11
        assert all(r.ok for r in report.regions), report.problems()


def test_a_moved_topology_is_a_problem_of_the_process_and_of_no_region(
    launch: Any, make: Any, contract: Any, one: Any
) -> None:
    def work() -> Any:
        model = make(one, BF16, contract)
        adapter = model.isoexec_adapter
        adapter._plan = dataclasses.replace(adapter._plan, topology={**adapter._plan.topology, "TP": 2})
        (report,) = adapter.verify()
        return report.topology["TP"], report.problems(), [r.ok for r in report.regions]

    degree, problems, regions = launch(work)[0]
    assert degree == 1
    (problem,) = problems
    assert "planned for" in problem
    assert all(regions)


def test_an_adapter_without_a_model_or_plan_says_so() -> None:
    empty = MegatronAdapter()
    assert isinstance(empty, Adapter)
    with pytest.raises(InstallError, match="neither"):
        empty.describe()
    with pytest.raises(InstallError, match="no"):
        empty.verify()
    with pytest.raises(IsoExecError, match="built GPTModel"):
        _ = empty.model
    assert verifying.name_of(contract_residual_add).endswith("contract_residual_add")
