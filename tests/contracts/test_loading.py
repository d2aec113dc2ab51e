# SPDX-License-Identifier: Apache-2.0
"""What the loader refuses, and that it names file, line, field and fix."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from isoexec.contracts import loading
from isoexec.contracts.canonical import encode
from isoexec.contracts.errors import ContractError
from isoexec.contracts.loading import MAX_BYTES, parse
from isoexec.contracts.schema import Contract, library

VECTORS = Path(__file__).parent / "vectors"
TEXT = (VECTORS / "contract.yaml").read_text(encoding="utf-8")


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
        ("family: tiny", "<<: {family: tiny}", "model", "merge key '<<'"),
        ("family: tiny", "family: tiny\n  <<: *base", "model", "merge key '<<'"),
        ("name: vector", "name: &x vector\nname: *x", "name", "anchor or alias 'x'"),
        ("name: vector", "? [name]\n: vector", "", "a key that is not text"),
        ("name: vector", "? name\n: vector\nname: vector", "name", "duplicate key"),
        ("name: vector", "name: vector\n'name': vector", "name", "duplicate key"),
        ("facts:", "facts: {family: 1, family: 2}\n  fact:", "model.facts.family", "duplicate key"),
        ("role: engine, grad", "role: critic, grad", "cases[0].role", "expected one of engine, trainer, found text"),
        ("name: trainer_fwd", "name: trainer_eval", "cases[2].name", "expected one of engine_prefill"),
        ("name: engine_prefill, role: engine", "name: engine_prefill, role: trainer", "cases[1]", "with role trainer"),
        ("grad: grad", "grad: recompute", "cases[2]", "trainer_fwd with grad recompute"),
        ("route: canonical", "route: fast", "composition[0].route", "expected one of reference_preserving"),
        ("variables: {OMP_NUM_THREADS: \"1\"}", "variables: {OMP_NUM_THREADS: 1}",
         "claims.environment.variables.OMP_NUM_THREADS", "expected text of at most 200 characters, found an integer 1"),
        ("k_block: 64", "k_block: [64]", "composition[1].constants.k_block", "expected an integer, text or a boolean"),
        ("roles: [engine]", "roles: engine", "providers[1].roles", "expected a list, found text 'engine'"),
        ("state: paged_kv, domain", "state: {paged_kv: true}, domain", "cases[0].state", "found a mapping"),
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
    # the line is that of the value, or of the record that is wrong as a whole
    changed = TEXT[: TEXT.index(old)].count("\n") + 1
    assert error.line == changed + LINES_AWAY.get(new, 0)
    assert (
        str(error)
        == f"a.yaml:{error.line}: " + (f"{field}: " if field else "") + f"{error.problem}; {error.fix}"
    )


LINES_AWAY = {
    "name: vector\nname: other": 1,  # the second of the two
    "? name\n: vector\nname: vector": 2,
    "name: vector\n'name': vector": 1,
    "arch: cpu\ncolour: red\nmodel": 1,
    "family: tiny\n  <<: *base": 1,
    "schema_version: 2": -2,  # the contract begins with its comment
    "artifact: null": -3,  # the provider begins with its name
}


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


def test_a_huge_file_is_refused_at_once_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.write(TEXT.encode())
        file.truncate(100 * 2**20)
    tracemalloc.start()
    with pytest.raises(ContractError, match="larger than 262144 bytes") as caught:
        Contract.load(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * MAX_BYTES
    assert (caught.value.path, caught.value.fix) == (str(path), "give a contract: it has a few kilobytes")


@pytest.mark.parametrize(
    ("text", "line", "field", "words"),
    [
        ('{"name": "x",\n "name": "y"}', 2, "name", "duplicate key"),
        ('{"a": 0.5}', 1, "a", "raw float 0.5"),
        ('{"a": {"b": [1,\n 1e3]}}', 2, "a.b[1]", "raw float 1e3"),
        ('{"a": 1,}\n{"b": 2}', 2, "", "not YAML"),
        ("a: &x {b: 1}\nc: {<<: *x, b: 2}", 1, "a", "anchor or alias 'x'"),
        ("c: {<<: {b: 1}, b: 2}", 1, "c", "merge key"),
        ("a:\n  - b: 1\n    c: 2\n    b: 3\n", 4, "a[0].b", "duplicate key"),
        ("a: [1, 2\nb: 3\n", 2, "", "not YAML: expected ',' or ']'"),
        ("a: 'b\n", 2, "", "not YAML"),
        ("a: b: c\n", 1, "", "not YAML: mapping values are not allowed here"),
        ("a:\tb\n\t- c\n", 1, "", "not YAML"),
        ("a: 1\nb: \x00\n", 2, "", "not YAML: character #x0000 is not text"),
        ("%YAML 3.0\n---\na: 1\n", 1, "", "not YAML: found incompatible YAML document"),
        ("a: 1\n...\n---\nb: 2\n", 3, "", "more than one document"),
        ("a: !python/object/apply:os.system [echo]", 1, "a", "explicit YAML tag"),
        ('a:\n  "b": "x\\ud800y"', 2, "a.b", "is not valid Unicode"),
        ('{"\\udc00": 1}', 1, "", "is not valid Unicode"),
        ("a: " + "[" * 70 + "]" * 70, 1, "a" + "[0]" * 63, "nested deeper than 64"),
        (
            "a:\n" + "".join("  " * n + "- \n" for n in range(1, 70)),
            64,
            "a" + "[0]" * 63,
            "nested deeper than 64",
        ),
    ],
    ids=range(19),
)
def test_what_is_refused_is_refused_by_line_field_and_fix(
    text: str, line: int, field: str, words: str
) -> None:
    with pytest.raises(ContractError) as caught:
        parse(text, path="b.yaml")
    error = caught.value
    assert (error.path, error.line, error.field) == ("b.yaml", line, field)
    assert words in error.problem
    assert error.fix


def test_a_character_escaped_in_two_halves_is_one_character() -> None:
    assert parse(json.dumps({"a": "😀 é"})).value == parse("a: 😀 é").value == {"a": "😀 é"}


def test_a_text_from_the_wire_that_is_not_unicode_is_refused_by_its_field() -> None:
    data: dict[str, Any] = Contract.from_document(parse(TEXT)).to_dict()
    data["deployment"]["transport"] = "\ud800"
    with pytest.raises(ContractError) as caught:
        Contract.from_dict(data)
    assert (caught.value.field, caught.value.fix) == ("deployment.transport", "write whole characters")


def test_a_contract_may_be_a_json_file(tmp_path: Path) -> None:
    contract = Contract.from_document(parse(TEXT))
    path = tmp_path / "contract.json"
    path.write_bytes(encode(contract.to_dict()))
    assert Contract.load(path).identities.to_dict() == contract.identities.to_dict()
    path.write_text(json.dumps(contract.to_dict(), indent=2))
    assert Contract.load(path).identities.to_dict() == contract.identities.to_dict()


PIECES = ["\n", " ", "\t", "?", "%", "é", "e\u0301", "😀", ":", ": ", " #c", "#", "- ", "[", "]", "{", "}", ",", "&a ",
          "*a", "!!str ", "|\n  x\n", ">\n  y\n", "'", '"', "\\", "---\n", "...\n", "<<: ", "~", "0x1", "\r\n", "\u2028",
          "\ufeff", "\x85", "\\u00e9", "''", "- - a", "? k\n: v\n", "|2-\n", "|#c\n  x\n", ">-#\n  y\n",
          "@", "`", "a:b"]  # fmt: skip
SMALL = 'a: "é"\nb:\n  - {x: [1, "2", \'3\'], "y": z}\n  - |\n    text\n  - >-\n    fold\n    ed\n\nc:\n"d": -1 # e\n'


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML was built without libyaml: there is one parser")
@settings(max_examples=300, deadline=None)
@given(
    base=st.sampled_from([SMALL, TEXT[:900], '{"a": [1, {"b": null}], "c": "\\u00e9"}']),
    edits=st.lists(st.tuples(st.integers(0, 900), st.integers(0, 12), st.sampled_from(PIECES)), max_size=3),
)
def test_both_parsers_give_one_answer(base: str, edits: list[tuple[int, int, str]]) -> None:
    text = base
    for place, cut, piece in edits:
        at = place % (len(text) + 1)
        text = text[:at] + piece + text[at + cut :]
    fast = loading._fast(text, "")
    if fast is not None:  # else the other parser is asked, and its answer is the answer
        exact = loading._exact(text, "")
        assert (fast.value, fast.documents, fast.spans) == (exact.value, exact.documents, exact.spans)


@pytest.mark.parametrize("text", ["- |#\n  a\n", "b: >2-#c\n    a\n", "--- |#c\n a\n"])
def test_a_comment_that_touches_a_block_scalar_s_indicators_is_refused(text: str) -> None:
    with pytest.raises(ContractError, match="not YAML"):
        parse(text)


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML was built without libyaml: there is one parser")
@pytest.mark.parametrize(
    "path", [VECTORS / "full.yaml", library("qwen3-dense-cpu")], ids=lambda path: path.stem
)
def test_shipped_contracts_are_read_by_the_fast_parser(path: Path) -> None:
    assert loading._fast(path.read_text(encoding="utf-8"), "") is not None


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
