# SPDX-License-Identifier: Apache-2.0
"""The digests of fixed values never change, and the shipped JSON Schema is the generated one."""

from __future__ import annotations

import hashlib
import json
import runpy
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import isoexec.contracts.schema as schema
from isoexec.contracts.errors import ContractError
from isoexec.contracts.evidence import EvidenceRecord

HERE = Path(__file__).parent
VECTORS = HERE / "vectors"
SPEC = Path(schema.__file__).parent / "spec"


def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((VECTORS / "vectors.json").read_text(encoding="utf-8"))
    return found


def test_the_golden_vectors_are_what_the_script_makes() -> None:
    made = runpy.run_path(str(VECTORS / "make.py"))
    assert made["vectors"]() == (VECTORS / "vectors.json").read_text(encoding="utf-8")


def test_a_digest_is_the_sha256_of_the_canonical_bytes() -> None:
    found = golden()
    for entry in found["values"].values():
        assert entry["digest"] == sha256(entry["canonical"])
    for contract in found["contracts"].values():
        assert contract["identities"] == {name: sha256(text) for name, text in contract["sections"].items()}
    assert found["evidence"]["digest"] == sha256(found["evidence"]["canonical"])
    # told by others: the digest of "abc" is FIPS 180's own example
    assert found["bytes"]["abc"] == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert found["values"]["empty_map"]["digest"].startswith("sha256:44136fa355b3678a")


def sha256(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def test_canonical_bytes_are_written_out() -> None:
    values = {name: entry["canonical"] for name, entry in golden()["values"].items()}
    assert values["keys_sort_by_code_point"] == '{"10":5,"9":6,"B":3,"a":2,"b":1,"é":4}'
    assert values["integers"] == "[0,-1,9223372036854775807,-9223372036854775808]"
    assert values["text_is_nfc"] == '"é"'
    assert values["text_is_nfc_hangul"] == '"한"'
    assert values["text_is_not_nfkc"] == '"ﬁ ²"'
    assert values["booleans"] == "[true,false]"
    # above the plane of UTF-16's surrogates code points and code units sort differently
    assert list(json.loads(values["keys_sort_by_code_point_not_utf16"])) == [
        "\r",
        "1",
        "\x80",
        "€",
        "\uff21",
        "😀",
    ]


def test_decimals_have_one_spelling_each() -> None:
    found = golden()["decimals"]
    for text, canonical in found.items():
        assert Fraction(text) == Fraction(canonical)
    assert len(set(found.values())) == len({Fraction(text) for text in found})
    assert {found[text] for text in ("0.001", "1e-3", "10e-4", "0.0010")} == {"0.001"}


def test_the_evidence_of_the_vectors_is_read_back_from_its_bytes() -> None:
    found = golden()["evidence"]
    record = EvidenceRecord.from_bytes(found["canonical"].encode())
    assert (record.digest, record.to_bytes().decode()) == (found["digest"], found["canonical"])


@pytest.mark.parametrize("of", ["contract", "evidence"])
def test_the_committed_json_schema_is_the_generated_one(of: str) -> None:
    committed = (SPEC / f"{of}-v1.schema.json").read_text(encoding="utf-8")
    made = json.dumps(schema.json_schema(of), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert made == committed, f"run: isoexec contract schema --of {of} > contracts/spec/{of}-v1.schema.json"


@pytest.mark.parametrize(
    "path",
    [*sorted(schema.library().glob("*.yaml")), VECTORS / "contract.yaml", VECTORS / "full.yaml"],
    ids=lambda p: p.stem,
)
def test_contracts_are_valid_by_the_json_schema(path: Path) -> None:
    validator = jsonschema.Draft202012Validator(schema.json_schema())
    validator.check_schema(schema.json_schema())
    validator.validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    validator.validate(schema.Contract.load(path).to_dict())


def test_evidence_is_valid_by_its_json_schema_and_a_raw_float_is_not() -> None:
    validator = jsonschema.Draft202012Validator(schema.json_schema("evidence"))
    validator.check_schema(schema.json_schema("evidence"))
    record = json.loads(golden()["evidence"]["canonical"])
    validator.validate(record)
    for path in sorted((SPEC.parent / "evidence").glob("*.json")):
        validator.validate(json.loads(path.read_bytes()))
    record["checks"][0]["elements"] = 0.5
    assert not validator.is_valid(record)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("extra",), 1),
        (("model", "facts", "head_dim"), 1.5),
        (("cases", 0, "role"), "critic"),
        (("providers", 0, "source"), "sha256:12"),
        (("claims", "topology", "engine", "XP"), {"pinned": 1}),
        (("claims", "tolerances", 0, "bound"), 0.001),
    ],
)
def test_the_json_schema_refuses_what_the_loader_refuses(path: tuple[str | int, ...], value: object) -> None:
    data = yaml.safe_load((VECTORS / "contract.yaml").read_text(encoding="utf-8"))
    here = data
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = value
    assert not jsonschema.Draft202012Validator(schema.json_schema()).is_valid(data)
    with pytest.raises(ContractError):
        schema.Contract.from_dict(data)
