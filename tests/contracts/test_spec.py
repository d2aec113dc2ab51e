# SPDX-License-Identifier: Apache-2.0
"""The specification pages: every type has one, its tables are the code's, its examples are read, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isoexec.contracts import kinds, specification
from isoexec.contracts.evidence import EvidenceRecord
from isoexec.contracts.identities import IDENTITIES
from isoexec.contracts.kinds import read_record, wire_fields, write_record
from isoexec.contracts.loading import MAX_BYTES, MAX_DEPTH, parse
from isoexec.contracts.parts import AXES, CASES, ROUTES, STATES
from isoexec.contracts.schema import Contract
from isoexec.contracts.specification import PAGES, SPEC, TYPES, examples, regenerated

PAGE = pytest.mark.parametrize("name", PAGES)


def text_of(name: str) -> str:
    return (SPEC / name).read_text(encoding="utf-8")


def reachable(kind: kinds.Kind) -> set[type]:
    if isinstance(kind, kinds.Record):
        return {kind.cls}.union(*(reachable(inner) for _, _, inner, *_ in wire_fields(kind.cls)))
    return reachable(kind.item) if isinstance(kind, (kinds.ListOf, kinds.MapOf)) else set()


def test_every_type_of_a_contract_and_of_a_record_has_a_page() -> None:
    wanted = reachable(kinds.Record(Contract)) | reachable(kinds.Record(EvidenceRecord))
    assert wanted == set(TYPES.values())


def test_every_page_is_in_the_index_and_there_are_no_others() -> None:
    index = text_of("contract-v1.md")
    there = {path.name for path in SPEC.glob("*.md")}
    assert there == {*PAGES, "lint.md"}
    assert {name for name in there - {"contract-v1.md"} if f"({name})" not in index} == set()


@PAGE
def test_the_committed_tables_are_the_types(name: str) -> None:
    assert regenerated(text_of(name)) == text_of(name), "run: python -m isoexec.contracts.specification"


@PAGE
def test_a_page_has_a_table_of_every_field_of_its_types(name: str) -> None:
    found = dict(re.findall(r"<!-- fields: (\w+) -->\n(.*?)<!-- end -->", text_of(name), re.DOTALL))
    for cls in PAGES[name]:
        rows = [line.split("|")[1].strip() for line in found[cls.__name__].splitlines()[2:]]
        assert rows == [f"`{field}`" for field, *_ in wire_fields(cls)]
    assert set(found) == {cls.__name__ for cls in PAGES[name]}


@PAGE
def test_a_page_says_purpose_rules_and_what_changed(name: str) -> None:
    heads = re.findall(r"^## (.*)$", text_of(name), re.MULTILINE)
    assert heads[-1] == "Changelog"
    assert "Example" in heads
    if name not in ("contract-v1.md", "canonical.md"):
        assert heads[0] == "Purpose"
        assert "Parsing rules" in heads
    assert "- **1**: first version." in text_of(name)


@PAGE
def test_examples_are_read_as_what_they_say_they_are(name: str) -> None:
    found = examples(text_of(name))
    for cls, body in found:
        document = parse(body, path=name)
        made = read_record(cls, document.value, document.place)
        assert isinstance(made, cls)
        assert write_record(read_record(cls, write_record(made), document.place)) == write_record(made)
    fences = re.findall(r"^```(\S* ?\w*)$", text_of(name), re.MULTILINE)
    assert [fence for fence in fences if fence.startswith("yaml") and fence.split()[-1] not in TYPES] == []
    # a type whose fields are told has an example; checks and controls are in the record's
    told = {cls.__name__ for cls in PAGES[name]} - {"Subject", "Check", "Control"}
    assert {cls.__name__ for cls, _ in found} == told


@pytest.mark.parametrize("name", [*PAGES, "lint.md"])
def test_links_between_pages_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text_of(name)):
        assert (SPEC / target).exists(), target


def test_pages_name_every_word_of_their_vocabularies() -> None:
    for name, words in {
        "case.md": (*CASES, *STATES),
        "composition.md": ROUTES,
        "topology.md": AXES,
        "identities.md": IDENTITIES,
        "contract-v1.md": tuple(field for field, *_ in wire_fields(Contract)),
    }.items():
        for word in words:
            assert f"`{word}`" in text_of(name), f"{name} does not name {word}"
    for number in (MAX_BYTES, MAX_DEPTH):
        assert f"{number:,}" in text_of("canonical.md")


def test_the_generator_rewrites_a_table_that_is_not_the_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in PAGES:
        (tmp_path / name).write_text(text_of(name).replace("| `roles` |", "| `rolls` |"), encoding="utf-8")
    monkeypatch.setattr(specification, "SPEC", tmp_path)
    assert specification.main() == 0
    assert capsys.readouterr().out == f"{tmp_path / 'provider.md'}\n"
    assert (tmp_path / "provider.md").read_text(encoding="utf-8") == text_of("provider.md")
