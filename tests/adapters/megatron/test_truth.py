# SPDX-License-Identifier: Apache-2.0
"""Whatever is exchanged behind the adapter's back in a running trainer is named by the next verification."""

from __future__ import annotations

import os
import runpy
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear

from isoexec.adapters.megatron import layers
from isoexec.adapters.megatron.layers import ContractMLP, ContractRMSNorm
from isoexec.adapters.megatron.logprobs import score
from isoexec.adapters.megatron.training import Trainer
from isoexec.kernels import rms_norm as norm_kernel
from isoexec.kernels.linear import naive as linear_naive
from isoexec.kernels.linear import ops as linear_ops
from isoexec.kernels.rope import ops as rope_ops

pytestmark = pytest.mark.megatron

BF16 = torch.bfloat16

Undo = Callable[[], object]
TAMPERING = runpy.run_path(str(Path(__file__).with_name("tampering.py")))
put: Callable[[Any, str, Any], Undo] = TAMPERING["put"]
done: Callable[[Callable[[Any], Undo], Any], AbstractContextManager[None]] = TAMPERING["done"]


def _child(owner: Any, name: str, module: Any) -> Undo:
    before = getattr(owner, name)
    setattr(owner, name, module)
    return lambda: setattr(owner, name, before)


def _native(model: Any) -> Undo:
    native = RowParallelLinear.__new__(RowParallelLinear)
    native.__dict__.update(vars(model.decoder.layers[2].mlp.linear_fc2))
    return _child(model.decoder.layers[2].mlp, "linear_fc2", native)


def _class(model: Any) -> Undo:
    module = model.decoder.layers[1].mlp.linear_fc2
    before, module.__class__ = type(module), RowParallelLinear
    return lambda: setattr(module, "__class__", before)


def _subclass(model: Any) -> Undo:
    class Faithful(ContractRMSNorm):
        """Gives every bit of its base, for now."""

    module = model.decoder.layers[1].pre_mlp_layernorm
    before, module.__class__ = type(module), Faithful
    return lambda: setattr(module, "__class__", before)


def _hook(model: Any) -> Undo:
    """On one module of one layer, and only for long inputs: no canary can see it."""

    def longer(_module: Any, _args: Any, out: Any) -> Any:
        return (out[0] * 1.01, *out[1:]) if out[0].shape[0] > 40 else None

    return model.decoder.layers[1].self_attention.linear_qkv.register_forward_hook(longer).remove


def _every_module(_: Any) -> Undo:
    return torch.nn.modules.module.register_module_forward_hook(lambda *_: None).remove


def _code(_: Any) -> Undo:
    """The code of a method, in the same function object."""
    before = ContractMLP.forward.__code__

    def forward(
        self: Any, hidden_states: Any, per_token_scale: Any = None, **_: Any
    ) -> Any:  # pragma: no cover
        return hidden_states, None

    ContractMLP.forward.__code__ = forward.__code__
    return lambda: setattr(ContractMLP.forward, "__code__", before)


def _implementation(_: Any) -> Undo:
    """The operator's own registration, as any library in the process can replace it."""
    library = torch.library.Library("isoexec", "IMPL")
    name = next(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("isoexec::linear"))
    library.impl(name, lambda *_: None, "CPU", allow_override=True)
    return library._destroy


def _constant(model: Any) -> Undo:
    """In place, in the one mapping that plan, binding and module share."""
    constants = model.decoder.layers[0].self_attention.linear_qkv.binding.constants
    before, constants["k_block"] = constants["k_block"], 32
    return lambda: constants.__setitem__("k_block", before)


def _table(model: Any) -> Undo:
    table = rope_ops._table(int(model.config.kv_channels), float(model.rotary_base))[0]
    before = table[3000, 0].clone()  # a position that no canary asks for
    table[3000, 0] += 2**-20
    return lambda: table[3000, 0].copy_(before)


def _both_bases(model: Any) -> Undo:
    """The base of every layer and of the model, so that nothing disagrees with anything."""
    undos = [put(model, "rotary_base", 5e5)] + [
        put(layer.self_attention.core_attention, "rope_base", 5e5) for layer in model.decoder.layers
    ]

    def undo() -> None:
        for one in undos:
            one()

    return undo


def _switch(set_it: Callable[[], Any], back: Callable[[], Any]) -> Callable[[Any], Undo]:
    def work(_: Any) -> Undo:
        set_it()
        return back

    return work


def _variable(name: str, value: str) -> Callable[[Any], Undo]:
    def work(_: Any) -> Undo:
        before = os.environ.get(name)
        os.environ[name] = value

        def undo() -> None:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before

        return undo

    return work


def _norm_of(model: Any) -> Any:
    return model.decoder.layers[1].input_layernorm


TAMPERED: dict[str, tuple[Callable[[Any], Undo], str, str]] = {
    # what is done -> region, or "" for the process; words of the problem
    "a kernel rebound in its package": (
        lambda _: put(norm_kernel, "rms_norm_grad", lambda x, *_, **__: x.clone()),
        "",
        "isoexec.kernels.rms_norm.rms_norm_grad was replaced",
    ),
    "a kernel's helper rebound, with its bits": (
        lambda _: put(linear_ops, "require_float", lambda *_: None),
        "",
        "isoexec.kernels.linear.ops.require_float was replaced",
    ),
    "an operator registered anew": (_implementation, "", "was registered anew"),
    "a method of one object": (
        lambda m: put(_norm_of(m), "forward", MethodType(ContractRMSNorm.forward, _norm_of(m))),
        "norm",
        "decoder.layers.1.input_layernorm.forward was set on the object",
    ),
    "the code of a method": (_code, "", "ContractMLP.forward was replaced"),
    "a forward hook": (_hook, "column_linear", "linear_qkv.forward_hooks were 0 and are 1"),
    "a hook on every module": (_every_module, "", "global_forward_hooks were"),
    "the class of one module": (_class, "row_linear", "decoder.layers.1.mlp.linear_fc2 is megatron"),
    "a subclass with the same bits": (_subclass, "norm", "Faithful"),
    "one submodule of one layer": (_native, "row_linear", "decoder.layers.2.mlp.linear_fc2 is megatron"),
    "a constant of the binding": (_constant, "column_linear", "constants.k_block was 64 and is 32"),
    "a constant of the kernel": (
        lambda _: put(linear_naive, "ROW_TILE", 8),
        "",
        "naive.ROW_TILE was 16 and is 8",
    ),
    "the epsilon of one norm": (
        lambda m: put(_norm_of(m), "eps", 1e-5),
        "norm",
        "decoder.layers.1.input_layernorm.eps was 1e-06 and is 1e-05",
    ),
    "the scale of attention": (
        lambda m: put(m.decoder.layers[0].self_attention.core_attention, "softmax_scale", 0.125),
        "attention",
        "softmax_scale was",
    ),
    "the base of the rotation, everywhere": (_both_bases, "rope", "rope_base was 10000.0 and is 500000.0"),
    "the table of the rotation": (_table, "rope", "is not the table of the specification"),
    "the residual add": (
        lambda m: put(m.decoder.layers[1], "mlp_bda", layers.contract_residual_add(False, False)),
        "norm",
        "decoder.layers.1.mlp_bda is",
    ),
    "float32_matmul_precision": (
        _switch(
            lambda: torch.set_float32_matmul_precision("medium"),
            lambda: torch.set_float32_matmul_precision("highest"),
        ),
        "",
        "float32_matmul_precision was highest and is medium",
    ),
    "flush_denormal": (
        _switch(lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)),
        "",
        "flush_denormal was False and is True",
    ),
    "the number of threads": (
        _switch(lambda: torch.set_num_threads(2), lambda: torch.set_num_threads(1)),
        "",
        "num_threads was 1 and is 2",
    ),
    "oneDNN": (
        _switch(
            lambda: torch._C._set_mkldnn_enabled(False),
            lambda: torch._C._set_mkldnn_enabled(True),
        ),
        "",
        "mkldnn.enabled was True and is False",
    ),
    "deterministic algorithms": (
        _switch(
            lambda: torch.use_deterministic_algorithms(True),
            lambda: torch.use_deterministic_algorithms(False),
        ),
        "",
        "deterministic_algorithms was False and is True",
    ),
    "a variable": (_variable("OMP_NUM_THREADS", "2"), "", "OMP_NUM_THREADS was 1 and is 2"),
    "a variable that was not set": (
        _variable("CUBLAS_WORKSPACE_CONFIG", ":0:0"),
        "",
        "CUBLAS_WORKSPACE_CONFIG was not set and is :0:0",
    ),
}


@pytest.fixture(scope="module")
def seen(launch: Any, make: Any, contract: Any, one: Any, tokens: torch.Tensor) -> dict[str, Any]:
    def work() -> dict[str, Any]:
        model = make(one, BF16, contract)
        Trainer(model)
        score(model, tokens[:2])
        adapter = model.isoexec_adapter
        found: dict[str, Any] = {"before": adapter.verify()[0].problems()}
        start = time.perf_counter()
        for _ in range(5):
            adapter.verify()
        found["seconds"] = (time.perf_counter() - start) / 5
        start = time.perf_counter()
        for _ in range(5):
            adapter._snapshot.changes()
        found["compare"] = (time.perf_counter() - start) / 5
        for name, (tamper, *_) in TAMPERED.items():
            with done(tamper, model):
                (report,) = adapter.verify()
            found[name] = (
                report.changed or "",
                {r.region: r.problem or "" for r in report.regions if not r.ok},
            )
        found["after"] = adapter.verify()[0].problems()
        return found

    result: dict[str, Any] = launch(work)[0]
    return result


@pytest.mark.parametrize("name", TAMPERED)
def test_what_is_exchanged_is_caught_and_named(seen: dict[str, Any], name: str) -> None:
    _, region, words = TAMPERED[name]
    process, regions = seen[name]
    if region:
        assert words in regions.get(region, ""), (process, regions)
    else:
        assert words in process, (process, regions)


def test_a_trainer_left_alone_has_nothing_to_report_before_or_after(seen: dict[str, Any]) -> None:
    assert seen["before"] == ()
    assert seen["after"] == ()


def test_a_verification_costs_little_of_the_default_period(
    seen: dict[str, Any],
) -> None:
    print(f"verify {seen['seconds'] * 1e3:.1f} ms, of it the comparison {seen['compare'] * 1e3:.1f} ms")
    assert seen["seconds"] < 2.0
