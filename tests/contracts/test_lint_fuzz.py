# SPDX-License-Identifier: Apache-2.0
"""The linter answers for every contract that loads, however odd, and its findings do not depend on the order of entries."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isoexec.contracts.errors import ContractError
from isoexec.contracts.lint import SEVERITIES, all_rules, lint
from isoexec.contracts.lint.report import Report, line_of, render
from isoexec.contracts.loading import read
from isoexec.contracts.schema import Contract

TABLE = runpy.run_path(str(Path(__file__).parent / "broken.py"))
NOW = TABLE["NOW"]
Keys = tuple[str | int, ...]
_ODD = st.one_of(
    st.sampled_from([0, 1, 2, 3, 7, 64, 8192, True, False, "", "1", "bfloat16", "float16", "engine", "trainer_score"]),
    st.sampled_from(["grad", "paged_kv", "recurrent", "linear.chain/1", "rope/2", "TP", {}, [], ["rope"], {"fixed": 3}]),
    st.integers(-(2**63), 2**63 - 1),
)  # fmt: skip
QUIET = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return TABLE["bench"](tmp_path_factory.mktemp("base"))


def places(value: object, keys: Keys = ()) -> Iterator[Keys]:
    """Yield the address of every value of a document but the root."""
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, entry in entries:
        yield (*keys, key)
        yield from places(entry, (*keys, key))


def edited(data: Any, pick: Callable[[Any], Any]) -> Any:
    """Drop, replace, double or copy a few values of a contract."""
    data = copy.deepcopy(data)
    for _ in range(pick(st.integers(1, 4))):
        *around, last = pick(st.sampled_from(sorted(places(data), key=repr)))
        holder = data
        for key in around:
            holder = holder[key]
        action = pick(st.sampled_from(["drop", "replace", "copy"]))
        if action == "drop":
            del holder[last]
        elif action == "replace":
            holder[last] = pick(_ODD)
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(holder[last]))
    return data


@QUIET
@given(st.data())
def test_every_contract_that_loads_is_judged(base: Any, data: st.DataObject) -> None:
    try:
        contract = Contract.from_dict(edited(base.data, data.draw))
    except ContractError:
        return
    findings = lint(contract, store=base.store, now=NOW)
    for finding in findings:
        assert finding.rule in all_rules()
        assert finding.severity in SEVERITIES
        assert finding.message
        assert finding.fix
    for form in ("text", "json", "sarif"):
        assert render([Report(file="odd.yaml", findings=tuple(findings))], form)


@QUIET
@given(st.data())
def test_the_order_of_entries_changes_no_finding(base: Any, data: st.DataObject) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shuffled(value[key]) for key in data.draw(st.permutations(list(value)))}
        return (
            [shuffled(one) for one in data.draw(st.permutations(value))] if isinstance(value, list) else value
        )

    spoilt = edited(base.data, data.draw)
    try:
        contract = Contract.from_dict(spoilt)
    except ContractError:
        return
    again = Contract.from_dict(shuffled(spoilt))
    assert {(one.rule, one.severity) for one in lint(again)} == {
        (one.rule, one.severity) for one in lint(contract)
    }


@QUIET
@given(st.text(alphabet="abcTP.[]|+/_ 019", max_size=40))
def test_any_path_has_a_line(path: str) -> None:
    document = read(TABLE["BASE"])
    line = line_of(document, path)
    assert line is not None
    assert 1 <= line <= document.text.count("\n")
