# SPDX-License-Identifier: Apache-2.0
"""The digests of fixed values never change, and the shipped JSON Schema is the generated one."""

from __future__ import annotations

import hashlib
import json
import runpy
from pathlib import Path

import jsonschema
import pytest
import yaml

import isoexec.contracts.schema as schema
from isoexec.contracts.errors import ContractError
from isoexec.contracts.parts import ROUTES, STATES

HERE = Path(__file__).parent
VECTORS = HERE / "vectors"
SPEC = Path(schema.__file__).parent / "spec"


def test_the_golden_vectors_are_what_the_script_makes() -> None:
    made = runpy.run_path(str(VECTORS / "make.py"))
    assert made["vectors"]() == (VECTORS / "vectors.json").read_text(encoding="utf-8")


def test_a_digest_is_the_sha256_of_the_canonical_bytes() -> None:
    values = json.loads((VECTORS / "vectors.json").read_text(encoding="utf-8"))["values"]
    for entry in values.values():
        assert entry["digest"] == "sha256:" + hashlib.sha256(entry["canonical"].encode()).hexdigest()
    assert values["empty_map"]["digest"].startswith("sha256:44136fa355b3678a")
    assert values["keys_sort_by_code_point"]["canonical"] == '{"10":5,"9":6,"B":3,"a":2,"b":1,"é":4}'


def test_the_committed_json_schema_is_the_generated_one() -> None:
    committed = (SPEC / "contract-v1.schema.json").read_text(encoding="utf-8")
    made = json.dumps(schema.json_schema(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert made == committed, "run: isoexec contract schema > contracts/spec/contract-v1.schema.json"


@pytest.mark.parametrize(
    "path", [schema.library("qwen3-dense-cpu"), VECTORS / "contract.yaml"], ids=lambda p: p.stem
)
def test_contracts_are_valid_by_the_json_schema(path: Path) -> None:
    validator = jsonschema.Draft202012Validator(schema.json_schema())
    validator.check_schema(schema.json_schema())
    validator.validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    validator.validate(schema.Contract.load(path).to_dict())


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


def test_the_specification_mentions_every_top_level_field_and_route() -> None:
    text = (SPEC / "contract-v1.md").read_text(encoding="utf-8")
    properties = schema.json_schema()["properties"]
    assert isinstance(properties, dict)
    for word in [*properties, *ROUTES, *STATES]:
        assert f"`{word}" in text, word
