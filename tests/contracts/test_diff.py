# SPDX-License-Identifier: Apache-2.0
"""A disagreement is a list of fields, ordered by what it means."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isoexec.contracts.diff import (
    ABSENT,
    diff,
    diff_dicts,
    disagreements,
    one_line,
    render,
)
from isoexec.contracts.errors import ContractError
from isoexec.contracts.schema import Contract

BASE = Contract.load(Path(__file__).parent / "vectors" / "contract.yaml")
Data = dict[str, Any]


def changed(edit: Callable[[Data], object]) -> Data:
    data: Data = copy.deepcopy(BASE.to_dict())
    edit(data)
    return data


def region(data: Data, name: str) -> Data:
    return next(entry for entry in data["composition"] if entry["region"] == name)


def test_equal_contracts_have_no_difference() -> None:
    assert diff(BASE, Contract.from_dict(BASE.to_dict())) == []
    assert render([]) == "no difference"


@pytest.mark.parametrize(
    ("edit", "path", "a", "b", "identity"),
    [
        (lambda d: region(d, "logprobs")["constants"].update(vocab_leaves=16),
         "composition[logprobs].constants.vocab_leaves", 8, 16, "numerical_policy"),
        (lambda d: region(d, "row_linear")["constants"].update(split_k=0),
         "composition[row_linear].constants.split_k", False, 0, "numerical_policy"),
        (lambda d: d["claims"]["topology"]["engine"].pop("CP"),
         "claims.topology.engine.CP", {"pinned": 1}, ABSENT, "numerical_policy"),
        (lambda d: d["claims"]["tolerances"][0].update(bound="1"),
         "claims.tolerances[engine_prefill+trainer_fwd].bound", "0.001", "1", "numerical_policy"),
        (lambda d: d["claims"]["environment"]["versions"].remove({"name": "triton"}),
         "claims.environment.versions[triton]", {"name": "triton"}, ABSENT, "numerical_policy"),
        (lambda d: d["model"]["facts"].update(head_dim={"fixed": 64}),
         "model.facts.head_dim.fixed", 128, 64, "semantic"),
        (lambda d: d["deployment"].update(numa=1), "deployment.numa", ABSENT, 1, "deployment"),
        (lambda d: d.update(future={"x": 1}), "future", ABSENT, {"x": 1}, "numerical_policy"),
    ],
)  # fmt: skip
def test_a_change_is_named_by_its_field(
    edit: Callable[[Data], object], path: str, a: object, b: object, identity: str
) -> None:
    other = changed(edit)
    found = diff_dicts(BASE.to_dict(), other)
    assert [(one.path, one.a, one.b, one.identity) for one in found] == [(path, a, b, identity)]


def test_differences_come_model_first_deployment_last() -> None:
    def edit(data: Data) -> None:
        data["name"] = "another"
        data["arch"] = "sm90"
        data["model"]["family"] = "other"
        data["cases"][0]["grad"] = "grad"

    found = diff_dicts(BASE.to_dict(), changed(edit))
    assert [one.path for one in found] == ["model.family", "arch", "cases[engine_decode].grad", "name"]
    text = render(found, "theirs", "ours")
    assert "model.family: theirs has tiny, ours has other" in text
    assert text.index("semantic") < text.index("numerical_policy") < text.index("deployment")


def test_a_region_split_by_case_shows_as_entries() -> None:
    def edit(data: Data) -> None:
        entry = region(data, "embedding")
        data["composition"].append({**entry, "cases": ["trainer_fwd"]})
        entry["cases"] = ["engine_decode", "engine_prefill"]

    paths = [one.path for one in diff_dicts(BASE.to_dict(), changed(edit))]
    assert "composition[embedding|trainer_fwd]" in paths
    assert all(path.startswith("composition[embedding|") for path in paths)


def test_a_set_shows_what_only_one_side_has() -> None:
    found = diff_dicts(BASE.to_dict(), changed(lambda data: data["claims"].update(dtypes=["float32"])))
    assert str(found[0]) == 'claims.dtypes: only in a: ["bfloat16"]; only in b: ["float32"]'


def test_differences_are_json() -> None:
    found = diff_dicts(BASE.to_dict(), changed(lambda data: data.pop("deployment")))
    assert json.loads(json.dumps([one.to_dict() for one in found]))[0]["b"] == ABSENT


def test_a_side_without_a_canonical_form_is_refused() -> None:
    with pytest.raises(ContractError, match="raw float"):
        diff_dicts(BASE.to_dict(), {"claims": {"bound": 0.1}})


def test_there_is_a_difference_exactly_when_a_digest_differs() -> None:
    for field, value in {
        "name": "zz",
        "arch": "zz",
        "deployment": {"x": 1},
        "claims": BASE.to_dict()["claims"],
    }.items():
        theirs = Contract.from_dict({**BASE.to_dict(), field: value})
        assert bool(diff(BASE, theirs)) == (theirs.identities.to_dict() != BASE.identities.to_dict())


def test_a_long_value_is_cut_in_a_line_and_whole_in_json() -> None:
    found = diff_dicts(
        BASE.to_dict(), changed(lambda data: data["composition"].remove(region(data, "row_linear")))
    )
    (one,) = found
    assert one.path == "composition[row_linear]"
    assert one.b == ABSENT
    assert "... (" in str(one)
    assert len(str(one)) < 400
    assert one.to_dict()["a"] == region(BASE.to_dict(), "row_linear")


def test_what_keeps_two_processes_apart_leaves_deployment_out() -> None:
    def edit(data: Data) -> None:
        data["name"] = "another"
        data["arch"] = "sm90"

    assert [one.path for one in disagreements(BASE.to_dict(), changed(edit))] == ["arch"]
    assert disagreements(None, None) == []
    (one,) = disagreements(None, BASE.to_dict())
    assert (one.path, one.a, one.b) == (
        "contract",
        ABSENT,
        f"vector, numerical_policy {BASE.numerical_policy}",
    )


def test_one_line_names_so_many_fields_and_counts_the_others() -> None:
    other = changed(
        lambda data: region(data, "row_linear")["constants"].update({f"c{n}": n for n in range(12)})
    )
    line = one_line(diff_dicts(BASE.to_dict(), other), "worker", "driver", limit=3)
    assert line.startswith(
        "12 fields differ: composition[row_linear].constants.c0: worker has (absent), driver has 0; "
    )
    assert line.endswith("; and 9 more")
