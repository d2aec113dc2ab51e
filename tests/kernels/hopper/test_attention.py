# SPDX-License-Identifier: Apache-2.0
"""The sm90 attention without a GPU: in Triton's interpreter, compiled, its shapes, and a library that is missing or unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

from isoexec.contracts.evidence import default_store
from isoexec.kernels.attention.hopper import fa3
from isoexec.kernels.attention.hopper.ops import MOST_SEGMENTS, attention, plan, split_for
from isoexec.kernels.domain import DomainError
from isoexec.kernels.gates.checking import subject
from isoexec.kernels.gates.found import gate_for

INTERPRETED = "interpreted_attention.py"
FUNCTION = "attention.mma_segments/1"


@pytest.fixture(scope="module")
def interpreted(script: Callable[..., Any]) -> dict[str, str]:
    found: dict[str, str] = script(INTERPRETED, interpreted=True)
    return found


@pytest.fixture(scope="module")
def built(script: Callable[..., Any]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = script("compiled_attention.py")
    return found


@pytest.fixture
def nothing_loaded() -> Iterator[None]:
    fa3.load.cache_clear()
    yield
    fa3.load.cache_clear()


def test_in_the_interpreter(check: str, interpreted: dict[str, str]) -> None:
    assert interpreted[check] == ""


def test_nothing_spills_and_registers_leave_room(built: dict[str, dict[str, int]]) -> None:
    assert len(built) == 42
    own = ("tiles prefill", "gradient")  # whole tiles of sums: they take what there is
    full = {n for n, b in built.items() if b["registers"] > 224}
    assert {n for n in full if not n.startswith(own)} == set()
    spilled = {n: b["stack"] for n, b in built.items() if b["stack"] or b["local"]}
    # gradients of keys hold two sums of whole tiles: of all walks that were timed, the fastest keep a little of them in memory
    gradients = {f"gradient keys {D} 0": spilled.pop(f"gradient keys {D} 0", 0) for D in (64, 128, 256)}
    assert max(gradients.values()) <= 640
    # blocks of 80 keys at head dim 256, padded to 128, are the library's; the own kernel stands in for it there
    assert spilled.keys() <= {"tiles prefill 256"}
    assert max(spilled.values(), default=0) <= 128


def test_only_what_names_the_chip_s_own_functions_is_approximate(built: dict[str, dict[str, int]]) -> None:
    exact = {n: b for n, b in built.items() if n.startswith(("merge prefill", "merge decode, 32", "table"))}
    assert len(exact) == 5
    assert {n: b for n, b in exact.items() if b["approximate"] or b["flushing"]} == {}
    others = {n: b["approximate"] for n, b in built.items() if n.startswith(("segment", "split weights"))}
    assert min(others.values()) > 0


def test_scores_and_values_use_the_tensor_cores(built: dict[str, dict[str, int]]) -> None:
    found = {
        n: b["matrix"]
        for n, b in built.items()
        if n.startswith(
            ("segment", "split scores", "split values", "tiles p", "tiles d", "gradient k", "gradient q")
        )
    }
    assert len(found) == 24
    assert min(found.values()) > 0


def test_a_fake_output_has_the_shape_and_dtype_of_a_real_one() -> None:
    step = plan(requests=2, tokens=5, most_rows=4, most_keys=9000, kv_segment=4096, page=16, device="meta")
    q = torch.empty(5, 4, 128, dtype=torch.bfloat16, device="meta")
    keys = torch.empty(99, 16, 2, 128, dtype=torch.bfloat16, device="meta")
    out = attention(q, keys, keys, torch.empty(5, dtype=torch.int32, device="meta"), step, scale=0.1)
    assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, torch.bfloat16, True)


def test_a_gradient_is_refused_instead_of_missing() -> None:
    step = plan(requests=1, tokens=2, most_rows=2, most_keys=2, kv_segment=4096, device="meta")
    q = torch.empty(2, 4, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    out = attention(q, q, q, torch.empty(2, dtype=torch.int32, device="meta"), step, scale=0.1)
    with pytest.raises(DomainError, match="sm90_attention refuses a backward pass"):
        out.sum().backward()


def test_a_plan_with_gradients_returns_gradients_of_the_inputs_shapes() -> None:
    sizes = {"requests": 1, "tokens": 5, "most_rows": 5, "most_keys": 5, "kv_segment": 4096}
    for provider in ("fa3", "triton"):
        step = plan(**sizes, gradients=True, provider=provider, device="meta")  # type: ignore[arg-type]
        q, k = (
            torch.empty(5, n, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (4, 2)
        )
        sinks = torch.empty(4, device="meta", requires_grad=True)
        position = torch.empty(5, dtype=torch.int32, device="meta")
        attention(q, k, k, position, step, scale=0.1, sinks=sinks).sum().backward()
        for x in (q, k, sinks):
            assert x.grad is not None
            assert (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype)


def test_windows_need_the_own_kernel_and_gradients_contiguous_keys() -> None:
    sizes = {"requests": 1, "tokens": 4, "most_rows": 4, "most_keys": 64, "kv_segment": 64, "device": "meta"}
    with pytest.raises(DomainError, match="the library starts its blocks"):
        plan(**sizes, window=8)  # type: ignore[arg-type]
    with pytest.raises(DomainError, match="gradients through pages"):
        plan(**sizes, page=16, gradients=True)  # type: ignore[arg-type]
    assert plan(**sizes, window=8, provider="triton").window == 8  # type: ignore[arg-type]


def test_tables_have_an_entry_a_request_and_segment() -> None:
    sizes = {"requests": 3, "tokens": 700, "kv_segment": 256, "most_keys": 1000, "device": "meta"}
    prefill = plan(most_rows=600, **sizes)  # type: ignore[arg-type]
    assert (prefill.own.shape, prefill.past.shape, prefill.single) == ((5, 3 * 4 + 1), (5, 3 * 3 + 1), False)
    chunk = plan(most_rows=2, **sizes)  # type: ignore[arg-type]
    assert (chunk.own.shape, chunk.past.shape) == ((5, 3 * 2 + 1), (5, 3 * 3 + 1))
    decode = plan(most_rows=1, page=16, **sizes)  # type: ignore[arg-type]
    assert (decode.own.shape, decode.past.numel(), decode.single) == ((5, 3 * 4 + 1), 0, True)
    assert decode.own_pages is not None
    assert decode.own_pages.shape == (12, 16)
    with pytest.raises(DomainError, match=f"at most {MOST_SEGMENTS} segments"):
        plan(most_rows=1, **{**sizes, "most_keys": 256 * MOST_SEGMENTS + 1})  # type: ignore[arg-type]


def test_few_entries_are_split_and_large_groups_never() -> None:
    assert split_for(4, 8, 4, 128) is not None
    assert split_for(5, 8, 4, 128) is None
    assert split_for(8, 8, 4, 64) is not None
    assert split_for(9, 8, 4, 64) is None
    assert split_for(1, 1, 17, 128) is None


def test_a_missing_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_loaded: None
) -> None:
    monkeypatch.setenv(fa3.WHERE, str(tmp_path / "none.so"))
    with pytest.raises(fa3.LibraryMissingError, match=r"which is no file.*Install vLLM for CUDA"):
        fa3.load()


def test_a_library_that_no_evidence_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_loaded: None
) -> None:
    other = tmp_path / "_vllm_fa3_C.abi3.so"
    other.write_bytes(b"another build")
    monkeypatch.setenv(fa3.WHERE, str(other))
    with pytest.raises(fa3.UncertifiedLibraryError, match=r"wanted one of the certified builds.*vLLM 0.25.1"):
        fa3.load()
    monkeypatch.setattr(fa3, "_admitted", {fa3._build(other)})
    with pytest.raises(fa3.LibraryMissingError, match="does not load"):  # admitted, and no library
        fa3.load()


def test_shipped_evidence_is_of_this_source_this_gate_and_a_certified_library() -> None:
    store = default_store()
    records = [store.read(digest) for digest in store.digests()]
    found = [r for r in records if r.function == FUNCTION and r.arch == "sm90"]
    ours = [r for r in found if r.provider == subject(FUNCTION, "sm90")]
    assert len(ours) == len(found), "the source changed: run the gate again on a GPU"
    for record in ours:
        assert record.gate == gate_for(FUNCTION, "sm90").digest()
        assert {check.family for check in record.checks} == set(gate_for(FUNCTION, "sm90").families)
        for check in record.checks:
            assert set(check.domain["library"]) <= fa3.BUILDS.keys()
