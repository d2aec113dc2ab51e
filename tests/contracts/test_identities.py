# SPDX-License-Identifier: Apache-2.0
"""Order and layout never reach a digest; every field that can change a bit, or what is claimed of it, does.

The fields are not listed here: they are walked by the schema itself, so that a new one cannot be forgotten.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from isoexec.contracts import kinds
from isoexec.contracts.canonical import encode
from isoexec.contracts.diff import diff, disagreements
from isoexec.contracts.errors import ContractError
from isoexec.contracts.identities import identity_of_field
from isoexec.contracts.kinds import wire_fields
from isoexec.contracts.loading import Place, parse
from isoexec.contracts.schema import Contract, library

VECTORS = Path(__file__).parent / "vectors"
BASE = Contract.load(VECTORS / "contract.yaml")
FULL = Contract.load(VECTORS / "full.yaml")
PLAIN = BASE.to_dict()
Address = tuple[str | int, ...]
PLACE = Place()


# layout


def text_of(value: str, rng: random.Random) -> str:
    """One of the ways in which YAML writes a text."""
    ways = [json.dumps(value), json.dumps(value, ensure_ascii=False)]
    if value.isprintable():
        ways.append("'" + value.replace("'", "''") + "'")
    if plain_is_text(value):
        ways.append(value)
    return rng.choice(ways)


@cache
def plain_is_text(value: str) -> bool:
    try:
        return bool(parse(f"a: {value}\n").value == {"a": value} and parse(f"[{value}]").value == [value])
    except ContractError:
        return False


def flow(value: object, rng: random.Random) -> str:
    pad = rng.choice(["", " "])
    if isinstance(value, dict):
        items = list(value.items())
        rng.shuffle(items)
        inside = ", ".join(f"{text_of(str(key), rng)}: {flow(entry, rng)}" for key, entry in items)
        return "{" + pad + inside + pad + "}"
    if isinstance(value, list):
        entries = list(value)
        rng.shuffle(entries)
        return "[" + pad + ", ".join(flow(entry, rng) for entry in entries) + pad + "]"
    return text_of(value, rng) if isinstance(value, str) else json.dumps(value)


def noise(rng: random.Random) -> str:
    return rng.choice(["", "", "", "\n", "# a comment: {not read}\n", "    # indented\n"])


def block(value: object, rng: random.Random, indent: int = 0) -> str:
    """Write a value as YAML, entries in any order, by every style there is; ends a line."""
    step = rng.choice([1, 2, 4])
    pad = " " * indent
    tail = rng.choice(["", "", "  # why"]) + "\n"
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.25:
        return f" {flow(value, rng)}{tail}"
    out = "\n" if indent else ""
    if isinstance(value, dict):
        items = list(value.items())
        rng.shuffle(items)
        for key, entry in items:
            out += noise(rng) + pad + text_of(str(key), rng) + ":" + block(entry, rng, indent + step)
        return out
    entries = list(value)
    rng.shuffle(entries)
    for entry in entries:
        out += noise(rng) + pad + "-" + block(entry, rng, indent + step)
    return out


def rewritten(value: object, rng: random.Random) -> object:
    """The same contract in other words: nulls for what is absent, other spellings of decimals and of fixed values."""
    if isinstance(value, dict):
        out = {str(key): rewritten(entry, rng) for key, entry in value.items()}
        if out.keys() == {"fixed"} and rng.random() < 0.5:
            return out["fixed"]
        if "bound" in out:
            out["bound"] = rng.choice([str(out["bound"]), f"{out['bound']}0"])  # each has a point
        if {"kind", "roles"} <= out.keys():
            out.setdefault("arch", None)
        return out
    return [rewritten(entry, rng) for entry in value] if isinstance(value, list) else value


@pytest.mark.parametrize("contract", [BASE, FULL], ids=lambda one: one.name)
@settings(max_examples=25, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_entry_order_and_layout_never_change_a_digest(contract: Contract, rng: random.Random) -> None:
    plain = contract.to_dict()
    text = rng.choice(["", "---\n", "# a comment\n"]) + block(rewritten(plain, rng), rng)
    other = Contract.from_document(parse(text))
    assert other.identities.to_dict() == contract.identities.to_dict(), text
    assert encode(other.to_dict()) == encode(plain)


@pytest.mark.parametrize("contract", [BASE, FULL], ids=lambda one: one.name)
@settings(max_examples=25, deadline=None)
@given(
    rng=st.randoms(use_true_random=False),
    style=st.sampled_from([None, True, False]),
    width=st.integers(20, 200),
    indent=st.integers(2, 9),
)
def test_what_other_tools_write_is_the_same_contract(
    contract: Contract, rng: random.Random, style: bool | None, width: int, indent: int
) -> None:
    def shuffled(value: object) -> object:
        if isinstance(value, dict):
            items = [(key, shuffled(entry)) for key, entry in value.items()]
            rng.shuffle(items)
            return dict(items)
        if isinstance(value, list):
            return rng.sample([shuffled(entry) for entry in value], len(value))
        return value

    plain = shuffled(contract.to_dict())
    for text in (
        # allow_unicode: PyYAML breaks a line inside an escaped text so that not even itself reads it back
        yaml.safe_dump(
            plain, sort_keys=False, default_flow_style=style, width=width, indent=indent, allow_unicode=True
        ),
        json.dumps(plain, indent=rng.choice([None, indent]), ensure_ascii=bool(width % 2)),
    ):
        other = Contract.from_document(parse(text))
        assert other.identities.to_dict() == contract.identities.to_dict(), text


# every field


def records(value: Any, path: Address = ()) -> Iterator[tuple[Address, Any]]:
    """Every record in a contract, with its address in attributes, indices and keys."""
    if dataclasses.is_dataclass(value):
        yield path, value
        for _, attribute, *_ in wire_fields(type(value)):
            yield from records(getattr(value, attribute), (*path, attribute))
    elif isinstance(value, tuple):
        for index, entry in enumerate(value):
            yield from records(entry, (*path, index))
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from records(entry, (*path, key))


def types_of(kind: kinds.Kind) -> Iterator[type]:
    """Record types that a kind holds, and those that they hold."""
    if isinstance(kind, kinds.Record):
        yield kind.cls
        for _, _, inner, *_ in wire_fields(kind.cls):
            yield from types_of(inner)
    elif isinstance(kind, (kinds.ListOf, kinds.MapOf)):
        yield from types_of(kind.item)


EVERY_FIELD = {(cls, name) for cls in types_of(kinds.Record(Contract)) for name, *_ in wire_fields(cls)}


def others(kind: kinds.Kind, value: Any) -> Iterator[Any]:
    """Values of a kind other than `value`, each of which the kind itself reads."""
    match kind:
        case kinds.Text(choices=choices) if choices:
            yield from (one for one in choices if one != value)
        case kinds.Text():
            yield from (
                one
                for one in (f"{value}0", f"a{value}", "a" * 63 + "0", "sm1")
                if _reads(kind, one) and one != value
            )
        case kinds.Digest():
            yield "sha256:" + "a" * 64
        case kinds.Int():
            yield value + 1 if value is not None else 7
        case kinds.Amount():
            yield "0.125"
        case kinds.Scalar():
            for one in (True, False, 0, 1, -1, 2**63 - 1, "1", "true", "é"):
                if type(one) is not type(value) or one != value:
                    yield one
        case kinds.ListOf():
            for index, entry in enumerate(value):
                yield (*value[:index], *value[index + 1 :])
                yield from (
                    (*value[:index], one, *value[index + 1 :])
                    for one in others(kind.item, entry)
                    if one not in value
                )
        case kinds.MapOf():
            for key, entry in value.items():
                left = {name: one for name, one in value.items() if name != key}
                yield left
                if not kind.keys:
                    yield {**left, f"{key}0": entry}
                yield from ({**value, key: one} for one in others(kind.item, entry))
        case kinds.Record():
            for _, attribute, inner, _, default in wire_fields(type(value)):
                held = getattr(value, attribute)
                if held is not None:
                    yield from (dataclasses.replace(value, **{attribute: one}) for one in others(inner, held))
                if default is None and held is not None:
                    yield dataclasses.replace(value, **{attribute: None})
        case _:
            raise AssertionError(f"{type(kind).__name__} has no values here: teach this test")


def _reads(kind: kinds.Kind, value: object) -> bool:
    try:
        kind.read(value, PLACE)
    except ContractError:
        return False
    return True


def test_the_full_contract_has_every_field_at_a_value_of_its_own() -> None:
    met = {
        (type(record), name)
        for _, record in records(FULL)
        for name, attribute, _, _, default in wire_fields(type(record))
        if getattr(record, attribute) not in (None, default)
    }
    assert met == EVERY_FIELD, f"add to vectors/full.yaml: {EVERY_FIELD - met}"
    assert len(EVERY_FIELD) > 60


@pytest.mark.parametrize("field", [name for name, *_ in wire_fields(Contract)])
def test_every_change_of_a_field_changes_its_identity_and_no_other_and_is_named_by_the_diff(
    field: str,
) -> None:
    attribute, kind = next((at, kind) for name, at, kind, *_ in wire_fields(Contract) if name == field)
    before = FULL.identities.to_dict()
    digests = set()
    changes = 0
    for value in others(kind, getattr(FULL, attribute)):
        changed = dataclasses.replace(FULL, **{attribute: value})
        after = changed.identities.to_dict()
        wanted = identity_of_field(field)
        assert {name for name in before if before[name] != after[name]} == {wanted}, value
        found = diff(FULL, changed)
        assert found, value
        assert {one.identity for one in found} == {wanted}
        assert bool(disagreements(FULL.to_dict(), changed.to_dict())) == (wanted != "deployment")
        digests.add(after[wanted])
        changes += 1
    assert changes > 0
    # two changes have one digest only where they are one contract: a set whose entry became another of its entries
    assert len(digests) == changes or field in {"claims", "providers", "composition", "cases", "model"}
    assert len(digests) > 0.9 * changes


def test_every_field_of_every_type_is_among_those_changes() -> None:
    reached = {(type(record), name) for _, record in records(FULL) for name, *_ in wire_fields(type(record))}
    assert reached == EVERY_FIELD


def entries(value: object, path: Address = ()) -> Iterator[Address]:
    """Addresses of everything that can be left out: list entries and mapping keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in pairs:
        yield (*path, key)
        yield from entries(entry, (*path, key))


def at(value: Any, path: Address) -> Any:
    for key in path:
        value = value[key]
    return value


def test_nothing_can_be_left_out_of_a_file_unnoticed() -> None:
    plain = FULL.to_dict()
    for path in entries(plain):
        data = copy.deepcopy(plain)
        del at(data, path[:-1])[path[-1]]
        try:
            left = Contract.from_dict(data)
        except ContractError:
            continue
        assert left.identities.to_dict() != FULL.identities.to_dict(), path


def test_loosening_a_tolerance_changes_the_policy_and_nothing_else() -> None:
    data = copy.deepcopy(PLAIN)
    at(data, ("claims", "tolerances", 0))["bound"] = "2e-3"
    loose = Contract.from_dict(data)
    assert loose.numerical_policy != BASE.numerical_policy
    assert (loose.semantic, loose.deployment) == (BASE.semantic, BASE.deployment)
    assert not loose.identities.agrees_with(BASE.identities)


@pytest.mark.parametrize("claim", ["state", "tolerances", "bitwise"])
def test_dropping_a_claim_changes_the_policy(claim: str) -> None:
    data = copy.deepcopy(PLAIN)
    at(data, ("claims", claim)).pop()
    assert Contract.from_dict(data).numerical_policy != BASE.numerical_policy


@pytest.mark.parametrize("bound", ["0.001", "0.0010", "1e-3", "1E-3", "10e-4", "1.0e-3", "0.1e-2"])
def test_spellings_of_one_decimal_are_one_bound(bound: str) -> None:
    data = copy.deepcopy(PLAIN)
    at(data, ("claims", "tolerances", 0))["bound"] = bound
    assert Contract.from_dict(data).numerical_policy == BASE.numerical_policy


@given(
    st.from_regex(kinds.Amount().pattern, fullmatch=True),
    st.from_regex(kinds.Amount().pattern, fullmatch=True),
)
@settings(deadline=None)
def test_two_decimals_are_one_text_exactly_when_they_are_one_number(one: str, other: str) -> None:
    from fractions import Fraction

    kind = kinds.Amount()
    try:
        left, right = kind.read(one, PLACE), kind.read(other, PLACE)
    except ContractError as error:
        assume("too many digits" not in error.problem)
        raise
    assert kind.read(left, PLACE) == left
    assert (left == right) == (Fraction(one) == Fraction(other))


@pytest.mark.parametrize("text", ["9" * 40 + ".55e1", "10" * 20 + "e999", "0." + "0" * 39 + "1e-999"])
def test_a_decimal_that_its_one_spelling_cannot_hold_is_refused(text: str) -> None:
    with pytest.raises(ContractError, match="too many digits"):
        kinds.Amount().read(text, PLACE)


def test_a_deployment_may_differ() -> None:
    other = Contract.from_dict({**PLAIN, "deployment": {"kv_page_size": 32}})
    assert other.identities.agrees_with(BASE.identities)
    assert other.deployment != BASE.deployment


def test_the_sections_hold_every_field_once_and_make_the_digests() -> None:
    from isoexec.contracts.digests import digest_of

    found = FULL.identities
    fields = [field for section in found.sections.values() for field in section]
    assert sorted(fields) == sorted(FULL.to_dict())
    assert found.to_dict() == {name: digest_of(section) for name, section in found.sections.items()}


@pytest.mark.parametrize("path", sorted(library().glob("*.yaml")), ids=lambda path: path.stem)
def test_a_contract_survives_its_canonical_dict(path: Path) -> None:
    shipped = Contract.load(path)
    again = Contract.from_dict(shipped.to_dict())
    assert again.to_dict() == shipped.to_dict()
    assert again.identities.to_dict() == shipped.identities.to_dict()
