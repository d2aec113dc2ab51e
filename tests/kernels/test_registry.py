# SPDX-License-Identifier: Apache-2.0
"""The registry: every name it gives exists, every kernel answers its canary as the specification does."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isoexec.contracts.lint.tables import FUNCTIONS as LINTED
from isoexec.contracts.schema import Contract, library
from isoexec.kernels import registry
from isoexec.kernels.attention import attention_varlen
from isoexec.kernels.bias import bias_add
from isoexec.kernels.canaries import chosen, fill
from isoexec.kernels.combine import combine
from isoexec.kernels.dispatch import dispatch, plan
from isoexec.kernels.domain import DomainError
from isoexec.kernels.embedding import embedding
from isoexec.kernels.grad_norm import exact_sq_sum
from isoexec.kernels.grouped_linear import grouped_linear
from isoexec.kernels.linear import column_linear
from isoexec.kernels.logprobs import token_logprobs
from isoexec.kernels.rms_norm import rms_norm
from isoexec.kernels.rope import rope
from isoexec.kernels.router import sigmoid_topk, softmax_topk
from isoexec.kernels.silu_mul import silu_mul

_PAIRS = {"reduce": "pair_tree", "accumulate": "float32"}
_TABLE = {"table": "float64_to_float32", "length": 8192}
_ROUTER = {"accumulate": "float32", "ties": "lowest_expert", "normalize": "chosen"}
CONSTANTS: dict[str, dict[str, Any]] = {
    "embedding.lookup/1": {},
    "rms_norm.tree/1": {"reduce": "halving_tree", "accumulate": "float32"},
    "linear.chain/1": {"k_block": 64, "row_tile": 16, "accumulate": "float32", "boundary": "model"},
    "rope.neox_fp32/1": {"table": "float64_to_float32", "length": 8192},
    "attention.segments/1": {"kv_segment": 32, "query_tile": 16},
    "linear.grouped_chain/1": {"k_block": 64, "row_tile": 16, "accumulate": "float32"},
    "router.softmax_topk/1": _ROUTER,
    "router.sigmoid_topk/1": {**_ROUTER, "bias": "selection_only", "group_score": "sum_of_two_best"},
    "moe.dispatch/1": {"order": "expert_then_token"},
    "moe.combine/1": {"order": "routing", "accumulate": "float32"},
    "bias.add/1": {},
    "silu_mul.exp/1": {},
    "logprobs.leaves/1": {"vocab_leaves": 8},
    "grad_norm.exact/1": {"bits": 62},
}
SM90: dict[str, dict[str, Any]] = {
    "rms_norm.pairs/1": _PAIRS,
    "rms_norm.pairs_centred/1": _PAIRS,
    "rms_norm.pairs_gated/1": _PAIRS,
    "l2_norm.pairs/1": _PAIRS,
    "rope.neox_fp32/1": _TABLE,
    "rope.interleaved_fp32/1": _TABLE,
    "rope.yarn_interleaved_fp32/1": _TABLE,
    "gate.sigmoid_mul/1": {},
    "linear.mma_chain/1": {"step": 16, "accumulate": "float32", "boundary": "model"},
    "attention.mma_segments/1": {"kv_segment": 4096},
    "attention.mma_segments_cudnn/1": {"gradient": "cudnn_deterministic", "kv_segment": 4096},
    "attention.mma_window/1": {"kv_segment": 4096, "window": 1024},
    "attention.latent_segments/1": {"kv_segment": 4096},
    "silu_mul.poly/1": {},
    "linear.grouped_mma_chain/1": {"step": 16, "accumulate": "float32"},
    "moe.shared_gate/1": {"step": 16, "accumulate": "float32"},
    **{
        name: CONSTANTS[name]
        for name in (
            *("router.softmax_topk/1", "router.sigmoid_topk/1", "moe.dispatch/1", "moe.combine/1"),
            *("bias.add/1", "embedding.lookup/1", "grad_norm.exact/1"),
        )
    },
    "logprobs.blocks/2": {"block": 128, "vocab_leaves": 8},
    "linear_logprobs.mma_blocks/1": {"step": 16, "accumulate": "float32", "block": 128, "vocab_leaves": 8},
}
KERNELS: dict[str, Callable[..., Tensor]] = {
    "embedding.lookup/1": embedding,
    "rms_norm.tree/1": rms_norm,
    "linear.chain/1": lambda x, w: column_linear(x, w, k_block=64),
    "rope.neox_fp32/1": rope,
    "attention.segments/1": lambda q, k, v, scale: attention_varlen(q, k, v, scale, kv_segment=32),
    "linear.grouped_chain/1": lambda x, w, offsets: grouped_linear(x, w, offsets, k_block=64),
    "router.softmax_topk/1": lambda logits, k: chosen(*softmax_topk(logits, k)),
    "router.sigmoid_topk/1": lambda **inputs: chosen(*sigmoid_topk(**inputs)),
    "moe.dispatch/1": lambda x, experts, count: dispatch(x, plan(experts, 0, count)),
    "moe.combine/1": combine,
    "bias.add/1": bias_add,
    "silu_mul.exp/1": silu_mul,
    "logprobs.leaves/1": lambda logits, target: token_logprobs(logits, target, vocab_leaves=8),
    "grad_norm.exact/1": exact_sq_sum,
}


GOLDEN = [-6325493, 6796182, 694299, -7419, 6751196, -1196485]


def _stock_linear(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, w)


def _stock_embedding(ids: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.embedding(ids, w)


def _stock_router(logits: Tensor, k: int) -> Tensor:
    weights, experts = torch.softmax(logits, -1).topk(k)
    return chosen(weights / weights.sum(-1, keepdim=True), experts)


def _stock_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    attend: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    out = attend(*list(heads_first), is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def test_every_function_names_what_its_package_exports() -> None:
    assert set(registry.FUNCTIONS) == {*CONSTANTS, *SM90}
    for name, function in registry.FUNCTIONS.items():
        assert name == function.name
        for kernel in function.kernels:
            assert name in {"cpu": CONSTANTS, "sm90": SM90}[kernel.arch]
            if kernel.arch == "sm90":
                pytest.importorskip(
                    "triton", reason="the sm90 ops need it; their names are checked where it is"
                )
            inside = {  # a folder hands on what the folders in it compute
                op
                for other in registry.FUNCTIONS.values()
                for one in other.kernels
                if one.arch == kernel.arch and f"{one.module}.".startswith(f"{kernel.module}.")
                for op in one.ops
            }
            assert inside == set(importlib.import_module(kernel.module).__all__)


def test_naming_the_functions_needs_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; from isoexec.kernels import registry as r; "
    code += "print(*(r.source_digest(n, a) for n, f in r.FUNCTIONS.items() for a in f.arch))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) == len(CONSTANTS) + len(SM90)


def test_a_kernel_is_asked_for_by_its_arch() -> None:
    assert registry.FUNCTIONS["rope.neox_fp32/1"].arch == ("cpu", "sm90")
    assert registry.source_digest("rope.neox_fp32/1", "sm90") != registry.source_digest("rope.neox_fp32/1")
    with pytest.raises(DomainError, match=r"arch 'sm90'.*\['cpu'\]"):
        registry.source_digest("silu_mul.exp/1", "sm90")


def test_a_gate_or_a_tuner_is_no_part_of_a_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("hopper", "linear/hopper"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("x = 1\n")
    (tmp_path / "domain.py").write_text("")
    monkeypatch.setattr(registry, "_ROOT", tmp_path)
    digests = [registry.source_digest.__wrapped__("linear.mma_chain/1")]
    for name in ("linear/hopper/gate.py", "linear/hopper/tuning.py", "hopper/timing.py"):
        (tmp_path / name).write_text("anything")
    digests.append(registry.source_digest.__wrapped__("linear.mma_chain/1"))
    assert digests[0] == digests[1]
    for name in ("linear/hopper/table.json", "linear/hopper/b.py", "hopper/b.py", "domain.py"):
        (tmp_path / name).write_text("{}")
        digests.append(registry.source_digest.__wrapped__("linear.mma_chain/1"))
    assert len(set(digests)) == 5


_OF_EXPERTS = {"linear.grouped_chain/1", "router.softmax_topk/1", "moe.dispatch/1", "moe.combine/1"}


@pytest.mark.parametrize(
    ("shipped", "without"), [("qwen3-dense-cpu", _OF_EXPERTS), ("qwen3-moe-cpu", set[str]())]
)
def test_the_shipped_contract_binds_these_functions_with_admitted_constants(
    shipped: str, without: set[str]
) -> None:
    contract = Contract.load(library(shipped))
    names = {binding.function for binding in contract.composition}
    assert names == set(CONSTANTS) - without - {"bias.add/1", "router.sigmoid_topk/1"}  # Qwen3 has neither
    for binding in contract.composition:
        registry.check_constants(binding.function, dict(binding.constants))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONSTANTS)
def test_every_kernel_answers_its_canary_as_the_specification_does(name: str, dtype: torch.dtype) -> None:
    found = registry.canary_digest(KERNELS[name], name, CONSTANTS[name], dtype=dtype)
    assert found == registry.expected_digest(name, CONSTANTS[name], dtype=dtype)


@pytest.mark.parametrize(
    ("name", "stock"),
    [
        ("rms_norm.tree/1", lambda x, w, eps: torch.nn.functional.rms_norm(x, w.shape, w, eps)),
        ("linear.chain/1", _stock_linear),
        ("silu_mul.exp/1", lambda gate, up: torch.nn.functional.silu(gate) * up),
        ("attention.segments/1", _stock_attention),
        ("embedding.lookup/1", _stock_embedding),
        ("router.softmax_topk/1", _stock_router),
        (
            "logprobs.leaves/1",
            lambda logits, target: torch.log_softmax(logits, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1),
        ),
    ],
)
def test_a_stock_kernel_does_not_pass_for_the_contracts(name: str, stock: Callable[..., Tensor]) -> None:
    expected = registry.expected_digest(name, CONSTANTS[name])
    assert registry.canary_digest(stock, name, CONSTANTS[name]) != expected


def test_a_canary_sees_another_constant() -> None:
    narrow = {**CONSTANTS["attention.segments/1"], "kv_segment": 16}
    name = "attention.segments/1"
    assert registry.expected_digest(name, narrow) != registry.expected_digest(name, CONSTANTS[name])


def test_a_canary_takes_the_sizes_of_the_bound_object() -> None:
    sizes = {"heads": 8, "kv_heads": 1, "head_dim": 64}
    inputs = registry.canary("attention.segments/1", {}, sizes=sizes)
    assert inputs["q"].shape == (1, 75, 8, 64)
    with pytest.raises(DomainError, match="layers"):
        registry.canary("attention.segments/1", {}, sizes={"layers": 2})


def test_canary_input_is_made_of_integers_and_never_changes() -> None:
    torch.manual_seed(1)
    x = fill(3, 2, salt=5)
    torch.manual_seed(2)
    assert x.tolist() == fill(3, 2, salt=5).tolist()
    assert [round(v * 2**23) for v in x.view(-1).tolist()] == GOLDEN


def test_a_source_digest_names_the_source_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "elsewhere"
    for folder in ("", "silu_mul"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for path in (registry._ROOT / folder).glob("*.py"):
            (root / folder / path.name).write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    here = registry.source_digest("silu_mul.exp/1")
    monkeypatch.setattr(registry, "_ROOT", root)
    assert registry.source_digest.__wrapped__("silu_mul.exp/1") == here
    (root / "silu_mul" / "ops.py").write_text("changed")
    assert registry.source_digest.__wrapped__("silu_mul.exp/1") != here


def test_no_two_functions_share_a_source_digest() -> None:
    digests = [registry.source_digest(n, a) for n, f in registry.FUNCTIONS.items() for a in f.arch]
    assert len(set(digests)) == len(digests)


def test_unknown_functions_and_constants_this_code_does_not_compute_with_are_refused() -> None:
    with pytest.raises(DomainError, match=r"linear\.tree/1"):
        registry.source_digest("linear.tree/1")
    with pytest.raises(DomainError, match="row_tile 32"):
        registry.check_constants("linear.chain/1", {**CONSTANTS["linear.chain/1"], "row_tile": 32})
    with pytest.raises(DomainError, match="k_block"):
        registry.check_constants(
            "linear.chain/1", {"row_tile": 16, "accumulate": "float32", "boundary": "model"}
        )
    with pytest.raises(DomainError, match="leaves"):
        registry.check_constants("silu_mul.exp/1", {"leaves": 4})


def test_the_linter_knows_every_function_with_its_constants() -> None:
    for name, one in registry.FUNCTIONS.items():
        assert set(LINTED[name].constants) == {*dict(one.fixed), *one.free}, name
