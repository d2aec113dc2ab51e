# SPDX-License-Identifier: Apache-2.0
"""What `isoexec contract lint` prints, in which line, as which format, and how it exits."""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from isoexec.contracts.cli import run
from isoexec.contracts.evidence import Store, moment, shipped, stamp
from isoexec.contracts.lint import all_rules
from isoexec.contracts.lint.report import check, line_of
from isoexec.contracts.loading import read
from isoexec.contracts.schema import library

HERE = Path(__file__).parent
TABLE = runpy.run_path(str(HERE / "broken.py"))
BROKEN, NOW, BASE = {one.name: one for one in TABLE["BROKEN"]}, TABLE["NOW"], TABLE["BASE"]
found: Callable[..., Any] = TABLE["found"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], list[str]]:
    """Write a broken contract (or `base`) with its records; return the arguments that lint it."""

    def make(name: str) -> list[str]:
        folder = tmp_path / name
        folder.mkdir()
        found(folder, BROKEN.get(name))
        return [str(folder / f"{name}.yaml"), "--evidence", str(folder / "evidence"), "--at", stamp(NOW)]

    return make


def lint(*args: str) -> int:
    return run(["lint", *args])


@pytest.mark.parametrize(
    ("name", "flags", "code"),
    [
        ("base", [], 0),
        ("base", ["--strict"], 0),
        ("cp_unclaimed", [], 1),
        ("record_edited", [], 1),
        ("quick_record", [], 0),
        ("quick_record", ["--strict"], 1),
        ("invariant_over_one_degree", ["--strict"], 0),
        ("raw_float", [], 2),
        ("not_yaml", ["--strict"], 2),
    ],
)
@pytest.mark.parametrize("form", ["text", "json", "sarif"])
def test_the_exit_code_says_clean_breach_or_no_contract(
    write: Callable[[str], list[str]], name: str, flags: list[str], code: int, form: str, capsys: Capture
) -> None:
    assert lint(*write(name), *flags, "--format", form) == code
    out = capsys.readouterr().out
    if form != "text":
        assert json.loads(out)


def test_several_files_are_linted_in_one_call_and_the_worst_decides(
    write: Callable[[str], list[str]], capsys: Capture
) -> None:
    good, bad = write("base"), write("cp_unclaimed")
    assert lint(good[0], *bad) == 1  # the records of both have the same bytes
    out = capsys.readouterr().out
    assert f"{good[0]}: 0 errors, 0 warnings, 0 notes" in out
    assert f"{bad[0]}: 1 error, 0 warnings, 0 notes" in out
    assert lint(good[0], "no-such.yaml", *bad, "--format", "json") == 2
    value = json.loads(capsys.readouterr().out)
    assert [one["readable"] for one in value["files"]] == [True, False, True]
    assert [one["rule"] for one in value["findings"]] == ["IX000", "IX020"]
    assert (value["errors"], value["warnings"], value["notes"]) == (2, 0, 0)


def test_an_unknown_name_is_a_finding_that_lists_the_shipped_contracts(capsys: Capture) -> None:
    assert lint("qwen9") == 2
    assert "qwen9: IX000 error: no shipped contract 'qwen9'; use one of" in capsys.readouterr().out


def test_expiry_is_judged_at_the_time_given(write: Callable[[str], list[str]], capsys: Capture) -> None:
    args = write("base")
    assert lint(*args[:3], "--at", stamp(NOW + 400 * 86400)) == 1
    assert "IX043" in capsys.readouterr().out
    assert lint(*args[:3], "--at", "tomorrow") == 2
    assert "--at 'tomorrow' is no time" in capsys.readouterr().err


def test_the_users_own_folders_of_records_are_looked_into(
    write: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    path, _, folder, *at = write("base")
    monkeypatch.setenv("ISOEXEC_EVIDENCE", os.pathsep.join(["/nowhere", folder]))
    assert lint(path, *at) == 0
    monkeypatch.delenv("ISOEXEC_EVIDENCE")
    monkeypatch.setenv("ISOEXEC_STATE_DIR", "/nowhere")
    assert lint(path, *at) == 1
    assert "IX040" in capsys.readouterr().out


def test_a_finding_names_its_line_in_text_json_and_sarif(
    write: Callable[[str], list[str]], capsys: Capture
) -> None:
    args = write("tolerance_blames_nothing")
    lines = Path(args[0]).read_text().splitlines()
    line = lines.index("    regions: []") + 1
    start = max(n for n in range(1, line + 1) if lines[n - 1].startswith("  - "))
    lint(*args)
    assert f"{args[0]}:{start}: IX031 error: claims.tolerances" in capsys.readouterr().out
    lint(*args, "--format", "json")
    assert json.loads(capsys.readouterr().out)["findings"][0]["line"] == start
    lint(*args, "--format", "sarif")
    result = json.loads(capsys.readouterr().out)["runs"][0]["results"][0]
    assert result["locations"][0]["physicalLocation"]["region"] == {"startLine": start}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("arch", "arch: cpu"),
        ("cases[trainer_fwd]", "  - {name: trainer_fwd, role: trainer"),
        ("cases[trainer_fwd].domain.length", "  - {name: trainer_fwd, role: trainer"),
        ("composition[rope].constants.length", "    constants: {table: float64_to_float32, length: 8192}"),
        ("composition[rope].constants.rows", "    constants: {table: float64_to_float32, length: 8192}"),
        ("composition[lm_head|trainer_score].function", "    function: linear.library/1"),
        ("providers[linear.library/1|onednn.linear].settings", "    settings: {threads: 1}"),
        ("model.facts.kv_heads", "    kv_heads: {multiple_of: 2}"),
        ("claims.topology.trainer.PP", "      PP: {invariant: [1, 2]}"),
        (
            "claims.tolerances[engine_decode+trainer_score].cases",
            "    - cases: [engine_decode, trainer_score]",
        ),
        ("claims.environment.versions[onednn].name", "      - name: onednn"),
        ("claims.environment.variables.OMP_NUM_THREADS", '    variables: {OMP_NUM_THREADS: "1"}'),
        ("deployment.kv_page_size", "deployment: {kv_page_size: 16}"),
    ],
)
def test_a_path_is_found_in_the_file(path: str, text: str) -> None:
    document = read(BASE)
    line = line_of(document, path)
    assert line is not None
    assert document.text.splitlines()[line - 1].startswith(text)


@pytest.mark.parametrize("path", ["", "nothing", "composition[nothing].cases", "claims.topology.nobody.TP"])
def test_a_path_that_is_not_there_has_the_line_of_what_is_around_it(path: str) -> None:
    document = read(BASE)
    line = line_of(document, path)
    assert line is not None
    assert 1 <= line <= len(document.text.splitlines())


# the part of the SARIF 2.1.0 schema that the log uses, and nothing besides
_MESSAGE = {
    "type": "object",
    "required": ["text"],
    "properties": {"text": {"type": "string", "minLength": 1}},
    "additionalProperties": False,
}
_LEVEL = {"enum": ["none", "note", "warning", "error"]}
_PLACE = {"type": "object", "required": ["uri"], "properties": {"uri": {"type": "string", "format": "uri-reference"}},
          "additionalProperties": False}  # fmt: skip
_RULE = {
    "type": "object",
    "required": ["id", "shortDescription", "fullDescription", "help", "defaultConfiguration"],
    "properties": {
        "id": {"type": "string"},
        "shortDescription": _MESSAGE,
        "fullDescription": _MESSAGE,
        "help": _MESSAGE,
        "defaultConfiguration": {
            "type": "object",
            "properties": {"level": _LEVEL},
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}
_LOCATION = {
    "type": "object",
    "required": ["physicalLocation"],
    "properties": {
        "physicalLocation": {
            "type": "object",
            "required": ["artifactLocation"],
            "properties": {
                "artifactLocation": _PLACE,
                "region": {
                    "type": "object",
                    "required": ["startLine"],
                    "properties": {"startLine": {"type": "integer", "minimum": 1}},
                    "additionalProperties": False,
                },
            },
            "additionalProperties": False,
        },
        "logicalLocations": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"fullyQualifiedName": {"type": "string"}},
                "additionalProperties": False,
            },
        },
    },
    "additionalProperties": False,
}
_RESULT = {
    "type": "object",
    "required": ["ruleId", "ruleIndex", "level", "message", "locations"],
    "properties": {
        "ruleId": {"type": "string"},
        "ruleIndex": {"type": "integer", "minimum": 0},
        "level": _LEVEL,
        "message": _MESSAGE,
        "locations": {"type": "array", "minItems": 1, "items": _LOCATION},
    },
    "additionalProperties": False,
}
_RUN = {
    "type": "object",
    "required": ["tool", "results"],
    "properties": {
        "tool": {
            "type": "object",
            "required": ["driver"],
            "properties": {
                "driver": {
                    "type": "object",
                    "required": ["name", "rules"],
                    "properties": {
                        "name": {"const": "isoexec"},
                        "version": {"type": "string"},
                        "rules": {"type": "array", "items": _RULE, "uniqueItems": True},
                    },
                    "additionalProperties": False,
                }
            },
            "additionalProperties": False,
        },
        "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
        "artifacts": {
            "type": "array",
            "items": {"type": "object", "properties": {"location": _PLACE}, "additionalProperties": False},
        },
        "results": {"type": "array", "items": _RESULT},
    },
    "additionalProperties": False,
}
SARIF = {
    "type": "object",
    "required": ["version", "runs"],
    "properties": {
        "$schema": {"type": "string", "format": "uri"},
        "version": {"const": "2.1.0"},
        "runs": {"type": "array", "minItems": 1, "items": _RUN},
    },
    "additionalProperties": False,
}


@pytest.fixture
def log(write: Callable[[str], list[str]], capsys: Capture) -> Any:
    """The SARIF log of files that break many rules, at every severity, one of them no contract."""
    names = [
        "base",
        "op_unowned",
        "pair_unclaimed",
        "invariant_over_one_degree",
        "raw_float",
        "two_functions",
    ]
    paths = [write(name)[0] for name in names if name in BROKEN or name == "base"]
    lint(*paths, "--format", "sarif")
    return json.loads(capsys.readouterr().out)


def test_the_sarif_log_has_the_shape_of_sarif(log: Any) -> None:
    jsonschema.Draft202012Validator(SARIF).validate(log)


def test_the_sarif_log_is_valid_by_the_official_schema(log: Any) -> None:
    # OASIS does not license the schema for redistribution, so it is not kept here
    path = os.environ.get("SARIF_SCHEMA")
    if not path:
        pytest.skip("set SARIF_SCHEMA to a copy of the OASIS sarif-schema-2.1.0.json")
    jsonschema.Draft4Validator(json.loads(Path(path).read_text())).validate(log)


def test_the_sarif_log_names_every_rule_and_each_result_its_rule(log: Any) -> None:
    (sarif,) = log["runs"]
    rules = sarif["tool"]["driver"]["rules"]
    assert [one["id"] for one in rules] == sorted(all_rules())
    assert {one["ruleId"] for one in sarif["results"]} >= {"IX000", "IX001", "IX032", "IX040", "IX062"}
    assert {one["level"] for one in sarif["results"]} == {"error", "warning", "note"}
    for result in sarif["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert rules[result["ruleIndex"]]["defaultConfiguration"]["level"] == result["level"]


def test_a_uri_is_relative_where_the_path_is_and_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my contract.yaml").write_text("")
    lint("my contract.yaml", str(tmp_path / "my contract.yaml"), "--format", "sarif")
    places = [one["location"]["uri"] for one in json.loads(capsys.readouterr().out)["runs"][0]["artifacts"]]
    assert places == ["my%20contract.yaml", (tmp_path / "my contract.yaml").as_uri()]


def test_explain_prints_a_rule_all_rules_or_the_page(capsys: Capture) -> None:
    assert run(["explain", "IX020"]) == 0
    assert "parallel axis" in capsys.readouterr().out
    assert run(["explain"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(all_rules())
    assert run(["explain", "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("# Lint rules\n")


@pytest.mark.parametrize("name", ["mimo-dense-cpu", "qwen3-dense-cpu"])
def test_a_shipped_dense_contract_is_clean_with_the_shipped_records(name: str) -> None:
    store = Store([shipped()])
    now = max(moment(record.made) for record in store.records())
    report = check(library(name), store=store, now=now)
    assert (report.readable, report.findings) == (True, ())
