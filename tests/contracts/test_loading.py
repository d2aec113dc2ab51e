# SPDX-License-Identifier: Apache-2.0
"""What the loader refuses, and that it names file, line, field and fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from isoexec.contracts.errors import ContractError
from isoexec.contracts.loading import MAX_BYTES, parse
from isoexec.contracts.schema import Contract

TEXT = (Path(__file__).parent / "vectors" / "contract.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "field", "words"),
    [
        ("name: vector", "name: vector\nname: other", "name", "duplicate key"),
        ("arch: cpu\nmodel", "arch: cpu\ncolour: red\nmodel", "colour", "unknown field"),
        ("head_dim: 128", "head_dim: 128.0", "model.facts.head_dim", "raw float 128.0"),
        ("head_dim: 128", "head_dim: 1e-6", "model.facts.head_dim", "raw float 1e-6"),
        ("head_dim: 128", "head_dim: .inf", "model.facts.head_dim", "raw float .inf"),
        ("head_dim: 128", "head_dim: 0x80", "model.facts.head_dim", "different things"),
        ("head_dim: 128", "head_dim: 0200", "model.facts.head_dim", "different things"),
        ("head_dim: 128", "head_dim: yes", "model.facts.head_dim", "different things"),
        ("head_dim: 128", "head_dim: 2026-01-01", "model.facts.head_dim", "different things"),
        ("head_dim: 128", "head_dim: 9223372036854775808", "model.facts.head_dim", "64 bits"),
        ("head_dim: 128", "head_dim: !!str 128", "model.facts.head_dim", "explicit YAML tag"),
        ("head_dim: 128", "head_dim: &x 128", "model.facts.head_dim", "anchor or alias"),
        ("head_dim: 128", "head_dim: *x", "model.facts.head_dim", "anchor or alias"),
        ("head_dim: 128", "head_dim: [128]", "model.facts.head_dim", "expected a mapping"),
        ("head_dim: 128", "head_dim: {fixed: 1, minimum: 1}", "model.facts.head_dim", "mixes"),
        ("head_dim: 128", "1: 128", "model.facts", "is not text"),
        ("family: tiny", "family: 3", "model.family", "expected a name, found an integer"),
        ("family: tiny", "family:", "model.family", "is missing"),
        ("family: tiny", "<<: {family: tiny}", "model", "different things"),
        ("schema_version: 1", "schema_version: 2", "", "schema_version 2"),
        ("schema_version: 1", "schema_version: true", "schema_version", "found a boolean"),
        ("pinned: 1", "pinned: 0", "claims.topology.engine.EP.pinned", "at least 1"),
        ("TP: {invariant: [1, 2]}", "XP: {pinned: 1}", "claims.topology.engine.XP", "unknown field"),
        ("ETP: {pinned: 1}", "ETP: {}", "claims.topology.engine.ETP", "either pinned or invariant"),
        ('bound: "1e-3"', "bound: 0.001", "claims.tolerances[0].bound", "raw float"),
        ('bound: "1e-3"', 'bound: "-1"', "claims.tolerances[0].bound", "quoted decimal"),
        ("dtypes: [bfloat16]", "dtypes: [bfloat16, bfloat16]", "claims.dtypes[1]", "listed twice"),
        ("dtypes: [bfloat16]", "dtypes: []", "claims.dtypes", "has 0 entries"),
        ("function: linear.chain/1", "function: linear.chain", "composition[1].function", "linear.chain/1"),
        ("name: engine_prefill", "name: engine_decode", "cases[1]", "listed twice"),
        ("version: 13.0.1.2 build 7", "artifact: null", "providers[1]", "library without a version"),
        ("evidence: sha256:1", "evidence: sha256:x", "composition[1].discharge.evidence", "64 lower-case"),
        ("discharge:\n      kind: evidence", "discharge:\n      kind: none", "composition[1].discharge", "with an evidence"),
    ],
)  # fmt: skip
def test_a_bad_contract_is_refused_by_line_field_and_fix(old: str, new: str, field: str, words: str) -> None:
    assert old in TEXT
    text = TEXT.replace(old, new, 1)
    with pytest.raises(ContractError) as caught:
        Contract.from_document(parse(text, path="a.yaml"))
    error = caught.value
    assert error.field == field
    assert words in error.problem
    assert error.path == "a.yaml"
    assert error.fix
    # the line is that of the changed text, or of the record around it
    changed = TEXT[: TEXT.index(old)].count("\n") + 1
    assert error.line is not None
    assert changed - 9 <= error.line <= changed + new.count("\n") or field == ""
    assert str(error).startswith(f"a.yaml:{error.line}: ")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"# nothing\n", "is empty"),
        (b"a: 1\n---\nb: 2\n", "more than one document"),
        (b"a: [1, 2\n", "not YAML"),
        (b"a: \x07\n", "not YAML"),
        (b"a: \xff\n", "not UTF-8"),
        (b"? [a]\n: 1\n", "not text"),
        (b"[" * 65 + b"]" * 65, "nested deeper than 64"),
        (b"a: " + b"{a: " * 60_000, "nested deeper than 64"),
        (b"#" * (MAX_BYTES + 1), "larger than"),
        (b"just text", "expected a mapping"),
        (b"- 1\n", "expected a mapping"),
    ],
    ids=range(12),
)
def test_a_file_outside_the_subset_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(data)
    with pytest.raises(ContractError, match=words) as caught:
        Contract.load(path)
    assert caught.value.path == str(path)
    assert caught.value.fix


def test_64_levels_are_admitted() -> None:
    assert parse(b"[" * 64 + b"]" * 64).value


def test_a_file_that_is_not_there_is_a_contract_error(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="cannot be read"):
        Contract.load(tmp_path / "none.yaml")


def test_the_line_of_an_error_is_the_line_of_the_value() -> None:
    text = TEXT.replace("workspace: 0", "workspace: 0.5")
    with pytest.raises(ContractError) as caught:
        parse(text)
    assert text.splitlines()[(caught.value.line or 0) - 1].endswith("workspace: 0.5}")


def test_text_is_normalised_so_two_spellings_of_one_letter_are_one() -> None:
    assert parse('a: "e\\u0301"').value == parse('a: "\\u00e9"').value
    with pytest.raises(ContractError, match="duplicate key"):
        parse('"e\\u0301": 1\n"\\u00e9": 2\n')
