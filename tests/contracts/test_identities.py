# SPDX-License-Identifier: Apache-2.0
"""Order and layout never reach a digest; every field that can change a bit does."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from isoexec.contracts.canonical import encode
from isoexec.contracts.errors import ContractError
from isoexec.contracts.identities import identity_of_field
from isoexec.contracts.loading import parse
from isoexec.contracts.schema import Contract, library

BASE = Contract.load(Path(__file__).parent / "vectors" / "contract.yaml")
PLAIN = BASE.to_dict()
Path_ = tuple[str | int, ...]


def shuffled(value: object, rng: random.Random) -> object:
    if isinstance(value, dict):
        items = [(key, shuffled(entry, rng)) for key, entry in value.items()]
        rng.shuffle(items)
        return dict(items)
    if isinstance(value, list):
        entries = [shuffled(entry, rng) for entry in value]
        rng.shuffle(entries)
        return entries
    return value


def leaves(value: object, path: Path_ = ()) -> Iterator[Path_]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from leaves(entry, (*path, key))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from leaves(entry, (*path, index))
    else:
        yield path


def entries(value: object, path: Path_ = ()) -> Iterator[Path_]:
    """Addresses of everything that can be left out: list entries and mapping keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in pairs:
        yield (*path, key)
        yield from entries(entry, (*path, key))


def at(value: object, path: Path_) -> object:
    for key in path:
        value = value[key]  # type: ignore[index]
    return value


def others(value: object) -> list[object]:
    """Values a field might hold instead, the first one that the schema admits is taken."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1, value + 6]
    text = str(value)
    if text.startswith("sha256:"):
        return ["sha256:" + "a" * 64]
    words = ["engine", "trainer", "grad", "recompute", "no_grad", "stateless", "recurrent", "canonical", "protected",
             "kernel", "library", "none", "reference", "mean_abs_d", "float32", "2e-3", "changed", "changed/2"]  # fmt: skip
    return [word for word in words if word != text]


@settings(max_examples=60, deadline=None)
@given(
    rng=st.randoms(use_true_random=False),
    flow=st.sampled_from([None, True, False]),
    width=st.integers(20, 200),
)
def test_entry_order_and_layout_never_change_a_digest(
    rng: random.Random, flow: bool | None, width: int
) -> None:
    text = yaml.safe_dump(
        shuffled(PLAIN, rng), sort_keys=False, default_flow_style=flow, width=width, indent=rng.choice([2, 4])
    )
    other = Contract.from_document(parse("# a comment\n" + text))
    assert other.identities.to_dict() == BASE.identities.to_dict()
    assert encode(other.to_dict()) == encode(PLAIN)


@pytest.mark.parametrize("path", list(leaves(PLAIN)), ids=lambda path: ".".join(map(str, path)))
def test_every_field_changes_the_identity_it_belongs_to_and_no_other(path: Path_) -> None:
    if path == ("schema_version",):
        with pytest.raises(ContractError):
            Contract.from_dict({**PLAIN, "schema_version": 2})
        return
    changed = None
    for value in others(at(PLAIN, path)):
        data = copy.deepcopy(PLAIN)
        at(data, path[:-1])[path[-1]] = value  # type: ignore[index]
        try:
            changed = Contract.from_dict(data)
        except ContractError:
            continue
        break
    if changed is None:
        # a field that no other value fits while its neighbours stay: a kind, or a set that holds every role
        assert path[-1] == "kind" or path[-2] == "roles", path
        return
    mine, theirs = BASE.identities.to_dict(), changed.identities.to_dict()
    assert {name for name in mine if mine[name] != theirs[name]} == {identity_of_field(str(path[0]))}


@pytest.mark.parametrize("path", list(entries(PLAIN)), ids=lambda path: ".".join(map(str, path)))
def test_nothing_can_be_left_out_unnoticed(path: Path_) -> None:
    data = copy.deepcopy(PLAIN)
    del at(data, path[:-1])[path[-1]]  # type: ignore[attr-defined]
    try:
        left = Contract.from_dict(data)
    except ContractError:
        return
    assert left.identities.to_dict() != BASE.identities.to_dict()


def test_loosening_a_tolerance_changes_the_policy_and_nothing_else() -> None:
    data = copy.deepcopy(PLAIN)
    at(data, ("claims", "tolerances", 0))["bound"] = "2e-3"  # type: ignore[index]
    loose = Contract.from_dict(data)
    assert loose.numerical_policy != BASE.numerical_policy
    assert (loose.semantic, loose.deployment) == (BASE.semantic, BASE.deployment)
    assert not loose.identities.agrees_with(BASE.identities)


def test_dropping_a_state_claim_changes_the_policy() -> None:
    data = copy.deepcopy(PLAIN)
    at(data, ("claims", "state")).pop()  # type: ignore[attr-defined]
    assert Contract.from_dict(data).numerical_policy != BASE.numerical_policy


@pytest.mark.parametrize("bound", ["0.001", "0.0010", "1e-3", "1E-3", "10e-4", "1.0e-3", "0.1e-2"])
def test_spellings_of_one_decimal_are_one_bound(bound: str) -> None:
    data = copy.deepcopy(PLAIN)
    at(data, ("claims", "tolerances", 0))["bound"] = bound  # type: ignore[index]
    assert Contract.from_dict(data).numerical_policy == BASE.numerical_policy


def test_a_deployment_may_differ() -> None:
    other = Contract.from_dict({**PLAIN, "deployment": {"kv_page_size": 32}})
    assert other.identities.agrees_with(BASE.identities)
    assert other.deployment != BASE.deployment


def test_the_sections_hold_every_field_once_and_make_the_digests() -> None:
    from isoexec.contracts.digests import digest_of

    found = BASE.identities
    fields = [field for section in found.sections.values() for field in section]
    assert sorted(fields) == sorted(PLAIN)
    assert found.to_dict() == {name: digest_of(section) for name, section in found.sections.items()}


def test_a_contract_survives_its_canonical_dict() -> None:
    shipped = Contract.load(library("qwen3-dense-cpu"))
    assert Contract.from_dict(shipped.to_dict()).to_dict() == shipped.to_dict()
