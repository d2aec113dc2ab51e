# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isoexec.contracts.discharge import Live, families_for, refusals, unproven
from isoexec.contracts.evidence import EvidenceRecord, Store, stamp
from isoexec.contracts.schema import Contract, library
from isoexec.contracts.signing import load_key, make_key, sign

FUNCTION, PROVIDER = "linear.chain/1", "isoexec.kernels.linear"
Make = Callable[[Contract, str, str], EvidenceRecord]
Prove = Callable[..., Contract]


@pytest.fixture
def contract() -> Contract:
    return Contract.load(library("qwen3-dense-cpu"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store([tmp_path / "evidence"])


def live_of(contract: Contract, **more: str) -> Live:
    sources = {p.function: str(p.source) for p in contract.providers}
    return Live(arch="cpu", sources=sources, environment={"torch": "2.13.0", **more})


def rules(found: list[Any]) -> set[str]:
    return {one.rule for one in found}


def test_a_proven_contract_has_no_refusal(
    contract: Contract, store: Store, make_proven: Prove, now: float
) -> None:
    ready = make_proven(contract, store)
    assert refusals(ready, store, now=now) == []
    assert refusals(ready, store, now=now, live=live_of(ready)) == []
    assert unproven(ready, store, now=now) == {}


def test_a_discharge_of_kind_none_leaves_its_regions_unproven(
    contract: Contract, store: Store, make_proven: Prove, now: float
) -> None:
    data = make_proven(contract, store).to_dict()
    for entry in data["composition"]:  # type: ignore[attr-defined]
        if entry["region"] == "rope":
            entry["discharge"] = {"kind": "none"}
    found = unproven(Contract.from_dict(data), store, now=now)
    assert list(found) == ["rope"]
    assert rules(found["rope"]) == {"IX011"}


def test_a_provider_without_evidence_takes_all_its_regions_with_it(
    contract: Contract, store: Store, make_proven: Prove, now: float
) -> None:
    data = make_proven(contract, store).to_dict()
    for entry in data["providers"]:  # type: ignore[attr-defined]
        if entry["function"] == FUNCTION:
            entry["discharge"] = {"kind": "none"}
    assert list(unproven(Contract.from_dict(data), store, now=now)) == [
        "column_linear",
        "lm_head",
        "row_linear",
    ]


def test_a_missing_record_is_named(contract: Contract, store: Store, make_proven: Prove, now: float) -> None:
    ready = make_proven(contract, store)
    digest = str(ready.region("rope").discharge.evidence)
    path = store.path(digest)
    assert path is not None
    path.unlink()
    found = refusals(ready, store, now=now)
    assert {(one.rule, one.path, one.name) for one in found} == {
        ("IX040", "composition[rope]", "discharge.evidence"),
        ("IX040", "providers[rope.neox_fp32/1|isoexec.kernels.rope]", "discharge.evidence"),
    }
    assert digest in found[0].wanted


def test_one_edited_byte_makes_a_record_no_evidence(
    contract: Contract, store: Store, make_proven: Prove, now: float
) -> None:
    ready = make_proven(contract, store)
    path = store.path(str(ready.region("rope").discharge.evidence))
    assert path is not None
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    found = refusals(ready, store, now=now)
    assert rules(found) == {"IX040"}
    assert all("whose bytes are sha256:" in one.found for one in found)


CHANGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "another source": ("IX041", "provider.source", {"provider": {"source": "sha256:" + "1" * 64}}),
    "another provider": ("IX041", "provider.name", {"provider": {"name": "elsewhere"}}),
    "other settings": ("IX041", "provider.settings", {"provider": {"settings": {"split_k": True}}}),
    "another function": ("IX041", "function", {"function": "linear.chain/2"}),
    "another arch": ("IX042", "arch", {"arch": "sm90"}),
    "expired": ("IX043", "expires", {"expires": stamp(1_800_000_000.0 - 1)}),
    "of the future": ("IX043", "made", {"made": stamp(1_800_000_000.0 + 2 * 86400)}),
    "quick": ("IX048", "profile", {"profile": "quick"}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_record_of_something_else_is_refused_by_field(
    contract: Contract, store: Store, make_record: Make, make_proven: Prove, now: float, name: str
) -> None:
    rule, field, change = CHANGES[name]
    record = make_record(contract, FUNCTION, PROVIDER)
    provider = dataclasses.replace(record.provider, **change.get("provider", {}))
    other = dataclasses.replace(record, **{**change, "provider": provider})
    store.write(other)
    data = make_proven(contract, store).to_dict()
    for entry in (*data["providers"], *data["composition"]):  # type: ignore[misc]
        if entry["function"] == FUNCTION:
            entry["discharge"]["evidence"] = other.digest
    found = refusals(Contract.from_dict(data), store, now=now)
    assert (rule, field) in {(one.rule, one.name) for one in found}
    assert rules(found) == {rule}


@pytest.mark.parametrize("family", ["conformance", "batch_invariance", "partition_invariance", "case_parity"])
def test_a_family_that_is_not_in_the_record_is_refused(
    contract: Contract, store: Store, make_record: Make, make_proven: Prove, now: float, family: str
) -> None:
    record = make_record(contract, FUNCTION, PROVIDER)
    other = dataclasses.replace(record, checks=tuple(c for c in record.checks if c.family != family))
    found = refusals(make_proven(contract, store, [other]), store, now=now)
    assert {(one.rule, one.name) for one in found} == {("IX044", f"checks.{family}")}


def test_a_check_under_other_constants_is_no_check(
    contract: Contract, store: Store, make_record: Make, make_proven: Prove, now: float
) -> None:
    record = make_record(contract, "logprobs.leaves/1", "isoexec.kernels.logprobs")
    checks = tuple(dataclasses.replace(c, constants={"vocab_leaves": 16}) for c in record.checks)
    found = refusals(
        make_proven(contract, store, [dataclasses.replace(record, checks=checks)]), store, now=now
    )
    assert rules(found) == {"IX044"}


@pytest.mark.parametrize(
    ("family", "domain", "rule", "name"),
    [
        ("partition_invariance", {"dtype": ("bfloat16", "float32"), "TP": (1,), "SP": (1, 2)}, "IX045", "TP"),
        ("batch_invariance", {"dtype": ("float32",)}, "IX046", "dtype"),
        ("case_parity", {"dtype": ("bfloat16", "float32"), "case": ("engine_decode",)}, "IX046", "case"),
    ],
)
def test_what_the_domain_leaves_out_is_refused(
    contract: Contract,
    store: Store,
    make_record: Make,
    make_proven: Prove,
    now: float,
    family: str,
    domain: dict[str, Any],
    rule: str,
    name: str,
) -> None:
    record = make_record(contract, FUNCTION, PROVIDER)
    checks = tuple(dataclasses.replace(c, domain=domain) if c.family == family else c for c in record.checks)
    found = refusals(
        make_proven(contract, store, [dataclasses.replace(record, checks=checks)]), store, now=now
    )
    assert {(one.rule, one.name) for one in found} == {(rule, f"checks.{family}.domain.{name}")}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"differing": 3}, "3 of 1000 elements differ"),
        ({"elements": 0}, "no element was compared"),
        ({"controls": ()}, "no control was planted"),
    ],
)
def test_a_check_that_proves_nothing_is_refused(
    contract: Contract,
    store: Store,
    make_record: Make,
    make_proven: Prove,
    now: float,
    change: dict[str, Any],
    words: str,
) -> None:
    record = make_record(contract, FUNCTION, PROVIDER)
    checks = tuple(dataclasses.replace(c, **change) for c in record.checks)
    found = refusals(
        make_proven(contract, store, [dataclasses.replace(record, checks=checks)]), store, now=now
    )
    assert rules(found) == {"IX047"}
    assert {one.found for one in found} == {words}


def test_a_control_that_passes_makes_its_check_blind(
    contract: Contract, store: Store, make_record: Make, make_proven: Prove, now: float
) -> None:
    record = make_record(contract, FUNCTION, PROVIDER)
    blind = tuple(dataclasses.replace(one, differing=0) for one in record.checks[0].controls)
    checks = (dataclasses.replace(record.checks[0], controls=blind), *record.checks[1:])
    found = refusals(
        make_proven(contract, store, [dataclasses.replace(record, checks=checks)]), store, now=now
    )
    assert {one.found for one in found} == {"control one_bit passed: 1000 elements, none differs"}


def test_a_process_with_another_source_arch_or_torch_is_refused(
    contract: Contract, store: Store, make_proven: Prove, now: float
) -> None:
    ready = make_proven(contract, store)
    sources = {**live_of(ready).sources, FUNCTION: "sha256:" + "3" * 64}
    edited = refusals(ready, store, now=now, live=dataclasses.replace(live_of(ready), sources=sources))
    assert {(one.rule, one.name) for one in edited} == {("IX041", "provider.source")}
    assert "sha256:3333" in edited[0].wanted
    other = refusals(ready, store, now=now, live=dataclasses.replace(live_of(ready), arch="sm90"))
    assert {(one.rule, one.name) for one in other} == {("IX042", "arch")}
    torch = refusals(ready, store, now=now, live=live_of(ready, torch="2.14.0"))
    assert {(one.rule, one.name) for one in torch} == {("IX050", "environment.torch")}
    nothing = Live(arch="cpu", sources=live_of(ready).sources)
    assert rules(refusals(ready, store, now=now, live=nothing)) == {"IX050"}


def test_a_contract_may_ask_for_younger_evidence(
    contract: Contract, store: Store, make_proven: Prove, now: float
) -> None:
    data = make_proven(contract, store).to_dict()
    data["claims"]["evidence"] = {"max_age_days": 30}  # type: ignore[index]
    asking = Contract.from_dict(data)
    assert refusals(asking, store, now=now) == []
    assert rules(refusals(asking, store, now=now + 30 * 86400)) == {"IX043"}


def test_demanded_signers_must_have_signed_each_record(
    contract: Contract, store: Store, make_proven: Prove, now: float, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography")
    public = make_key(tmp_path / "key.pem")
    assert (tmp_path / "key.pem").stat().st_mode & 0o777 == 0o600
    data = make_proven(contract, store).to_dict()
    data["claims"]["evidence"] = {"signers": [public]}  # type: ignore[index]
    asking = Contract.from_dict(data)
    assert rules(refusals(asking, store, now=now)) == {"IX049"}
    key = load_key(tmp_path / "key.pem")
    for digest in store.digests():
        assert sign(store, digest, key) == public
    assert refusals(asking, store, now=now) == []
    stranger = {"claims": {**data["claims"], "evidence": {"signers": ["ab" * 32]}}}  # type: ignore[dict-item]
    assert rules(refusals(Contract.from_dict({**data, **stranger}), store, now=now)) == {"IX049"}


def test_a_signature_of_another_record_is_refused(
    contract: Contract, store: Store, make_proven: Prove, now: float, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography")
    public = make_key(tmp_path / "key.pem")
    data = make_proven(contract, store).to_dict()
    data["claims"]["evidence"] = {"signers": [public]}  # type: ignore[index]
    first, second, *_ = store.digests()
    for digest in store.digests():
        sign(store, digest, load_key(tmp_path / "key.pem"))
    one, other = store.path(first), store.path(second)
    assert one is not None
    assert other is not None
    one.with_suffix(".sig").write_bytes(other.with_suffix(".sig").read_bytes())
    found = refusals(Contract.from_dict(data), store, now=now)
    assert rules(found) == {"IX049"}
    assert {one.found for one in found} == {"one that does not verify"}


def test_step_operators_need_no_rows_and_no_cases(contract: Contract) -> None:
    binding = next(b for b in contract.composition if b.region == "grad_norm")
    assert families_for(contract, binding) == (
        "degenerate_shapes",
        "partition_invariance",
        "rerun_determinism",
    )
    attention = next(b for b in contract.composition if b.region == "attention")
    assert set(families_for(contract, attention)) == {
        "backward",
        "batch_invariance",
        "case_parity",
        "degenerate_shapes",
        "partition_invariance",
        "rerun_determinism",
        "resume_exactness",
    }
