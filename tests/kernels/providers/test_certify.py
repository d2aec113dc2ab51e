# SPDX-License-Identifier: Apache-2.0
"""Certification: a library with the function's bits gets a record, one with others is refused by the elements that differ."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from isoexec.contracts.errors import EvidenceError
from isoexec.contracts.evidence import Store, moment
from isoexec.contracts.parts import Provider as Admitted
from isoexec.contracts.schema import Contract, library
from isoexec.kernels.providers import catalogue
from isoexec.kernels.providers.catalogue import Provider, provider_for, providers
from isoexec.kernels.providers.certify import CertificationError, certify, certify_for, constants_for

LINEAR: dict[str, Any] = {"k_block": 64, "row_tile": 16, "accumulate": "float32", "boundary": "model"}


@pytest.fixture
def embedding() -> Provider:
    return provider_for("torch.embedding", "embedding.lookup/1", "cpu")


@pytest.fixture
def contract() -> Contract:
    return Contract.load(library("qwen3-dense-cpu"))


def admitted(one: Provider, **changes: Any) -> Admitted:
    identity = one.subject()
    found = Contract.load(library("qwen3-dense-cpu")).providers[0]
    facts = {
        "name": one.name,
        "function": one.function,
        "kind": one.kind,
        "source": identity.source,
        "version": identity.version,
        "settings": dict(identity.settings),
    }
    return dataclasses.replace(found, **{**facts, **changes})


def policy(contract: Contract, **changes: Any) -> Contract:
    evidence = dataclasses.replace(contract.claims.evidence, **changes)
    return dataclasses.replace(contract, claims=dataclasses.replace(contract.claims, evidence=evidence))


def test_a_lookup_of_torch_has_the_functions_bits(embedding: Provider) -> None:
    record = certify(embedding, [{}], full=False)
    (check,) = record.checks
    assert check.failures() == []
    assert check.elements > 100_000
    assert {c.name for c in check.controls} == {"one_bit_of_the_result", "the_next_row"}
    assert check.domain["dtype"] == ("bfloat16", "float32")
    assert record.provider.version == f"torch {torch.__version__} git {torch.version.git_version[:12]}"
    assert record.environment["switches.num_threads"] == "1"
    assert record.profile == "quick"


def test_one_that_keeps_minus_zero_is_refused_by_the_elements_that_differ() -> None:
    bare = provider_for("torch.embedding.bare", "embedding.lookup/1", "cpu")
    with pytest.raises(CertificationError, match="elements differ") as caught:
        certify(bare, [{}], full=False)
    assert any("-0.0, wanted 0.0 (bits 0x8000, wanted 0x0)" in one for one in caught.value.examples)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("torch.linear", "linear.chain/1"),
        ("torch.rms_norm", "rms_norm.tree/1"),
        ("torch.silu_mul", "silu_mul.exp/1"),
        ("torch.log_softmax", "logprobs.leaves/1"),
    ],
)
def test_stock_kernels_with_another_order_of_sums_are_refused(name: str, function: str) -> None:
    one = provider_for(name, function, "cpu")
    with pytest.raises(CertificationError, match=r"wanted the bits of .* found .* elements differ"):
        certify(one, constants_for(function, "cpu"), full=False)


def test_a_provider_that_ignores_its_input_does_not_pass(embedding: Provider) -> None:
    def make(constants: Mapping[str, Any]) -> Any:
        right = embedding.make
        assert right is not None
        return lambda ids, w: right(constants)(ids.clamp(max=3), w)

    with pytest.raises(CertificationError):
        certify(dataclasses.replace(embedding, make=make), [{}], full=False)


def test_a_switch_that_moves_while_it_runs_makes_the_comparison_count_for_nothing(
    embedding: Provider,
) -> None:
    def make(constants: Mapping[str, Any]) -> Any:
        torch.set_float32_matmul_precision("medium")
        assert embedding.make is not None
        return embedding.make(constants)

    try:
        with pytest.raises(CertificationError, match=r"switch switches.float32_matmul_precision was highest"):
            certify(dataclasses.replace(embedding, make=make), [{}], full=False)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_an_own_kernel_is_certified_by_its_gate() -> None:
    own = provider_for("isoexec.kernels.embedding", "embedding.lookup/1", "cpu")
    record = certify(own, [{}], full=False)
    assert record.provider.source is not None
    assert [check.family for check in record.checks] == ["conformance"]


def test_at_install_a_missing_record_is_made_where_the_contract_lets_it(
    embedding: Provider, contract: Contract, tmp_path: Path
) -> None:
    store = Store([tmp_path])
    with pytest.raises(EvidenceError, match=r"isoexec provider certify torch.embedding") as caught:
        certify_for(
            policy(contract, certify="refuse"), admitted(embedding), embedding.function, [{}], store=store
        )
    assert caught.value.found.startswith("none of this build")
    assert store.digests() == []
    lets = policy(contract, certify="install")
    made = certify_for(lets, admitted(embedding), embedding.function, [{}], store=store)
    assert store.digests() == [made]
    # from now on it is there, whatever the policy
    strict = policy(contract, certify="refuse")
    assert certify_for(strict, admitted(embedding), embedding.function, [{}], store=store) == made


def test_a_record_too_old_or_expired_is_made_anew(
    embedding: Provider, contract: Contract, tmp_path: Path
) -> None:
    store, lets = Store([tmp_path]), policy(contract, certify="install", max_age_days=30)
    made = certify_for(lets, admitted(embedding), embedding.function, [{}], store=store)
    later = time.time() + 31 * 86400
    again = certify_for(lets, admitted(embedding), embedding.function, [{}], store=store, now=later)
    assert again != made
    assert moment(store.read(again).made) > moment(store.read(made).made)


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", "torch 1.0 git 0"), ("settings", {}), ("kind", "kernel")],
)
def test_another_build_than_the_admitted_one_is_refused_by_the_field(
    embedding: Provider, contract: Contract, tmp_path: Path, field: str, value: Any
) -> None:
    lets = policy(contract, certify="install")
    wanted = admitted(embedding, **{field: value})
    with pytest.raises(EvidenceError, match="installed here") as caught:
        certify_for(lets, wanted, embedding.function, [{}], store=Store([tmp_path]))
    assert caught.value.field == f"providers[embedding.lookup/1|torch.embedding].{field}"


def test_a_failing_library_leaves_no_record(contract: Contract, tmp_path: Path) -> None:
    stock = provider_for("torch.linear", "linear.chain/1", "cpu")
    lets = policy(contract, certify="install")
    with pytest.raises(CertificationError):
        certify_for(lets, admitted(stock), stock.function, [LINEAR], store=Store([tmp_path]))
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_provider_is_refused_with_those_there_are(contract: Contract) -> None:
    with pytest.raises(EvidenceError, match=r"the providers isoexec\.kernels\.embedding, torch\.embedding"):
        provider_for("jax.embedding", "embedding.lookup/1", "cpu")


def test_every_function_of_ours_is_in_the_catalogue_once() -> None:
    seen = [(one.name, one.function, one.arch) for one in providers()]
    assert len(seen) == len(set(seen))
    assert ("isoexec.kernels.rope.hopper", "rope.neox_fp32/1", "sm90") in seen
    assert all(one.version is not None for one in catalogue.LIBRARIES if one.kind == "library")
