# SPDX-License-Identifier: Apache-2.0
"""Rules as data: the default ladders, and files that say clearly what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from isoexec.contracts.detail import BREAKDOWNS, NUMBERS
from isoexec.contracts.errors import ContractError
from isoexec.contracts.rules import DEFAULT_RULES, LADDER, Rule, dump_rules, load_rules, read_rules
from isoexec.contracts.signals import SIGNALS
from isoexec.contracts.window import REGIMES


@pytest.mark.parametrize("regime", REGIMES)
def test_every_regime_has_rules_with_names_of_their_own(regime: str) -> None:
    rules = DEFAULT_RULES(regime)
    names = [rule.name for rule in rules]
    assert len(names) == len(set(names))
    assert all(rule.applies_to(regime) for rule in rules)


def test_every_signal_but_those_of_the_detail_is_bounded_by_the_default_rules_of_some_regime() -> None:
    used = {rule.signal for regime in REGIMES for rule in DEFAULT_RULES(regime)}
    # the reports that the ladders rest on have no bounds for the others: a run sets its own
    of_detail = {one.signal for one in NUMBERS.values()} | {f"worst_{by}_abs_d" for by in BREAKDOWNS}
    assert used & of_detail == {"rho_z_capped"}
    assert used | of_detail == set(SIGNALS)


@pytest.mark.parametrize("regime", REGIMES)
def test_the_contract_itself_halts_in_every_regime(regime: str) -> None:
    halting = {rule.signal for rule in DEFAULT_RULES(regime) if rule.action == "halt" and rule.patience == 1}
    assert {"handshake_differences", "topology_breaks", "region_breaks", "canary_mismatches"} <= halting


def test_the_ladder_is_the_one_that_public_reports_support() -> None:
    rules = {rule.name: rule for rule in DEFAULT_RULES("bf16_dense")}
    assert [rules[f"mean_abs_d.{d}"].bound for d in ("warn", "page", "halt")] == [0.02, 0.05, 0.1]
    assert [rules[f"k3.{d}"].bound for d in ("warn", "page", "halt")] == [1e-3, 5e-3, 1.5e-2]
    assert [rules[f"rho.{d}"].bound for d in ("warn", "page", "halt")] == [5.0, 0.01, 0.05]
    assert [rules[f"baseline.{d}"].bound for d in ("warn", "page", "halt")] == [2.0, 4.0, 8.0]


def test_a_statistical_halt_needs_windows_in_a_row_and_a_bitwise_one_does_not() -> None:
    for regime in LADDER:
        halts = [r for r in DEFAULT_RULES(regime) if r.regime == regime and r.action == "halt"]
        assert halts
        assert all(r.patience == 3 for r in halts)
    unequal, unobserved = [r for r in DEFAULT_RULES("bitwise") if r.signal == "unequal_tokens"]
    assert (unequal.bound, unequal.patience, unequal.action) == (0.0, 1, "halt")
    # equality that cannot be checked is given one late window
    assert (unobserved.patience, unobserved.on_unknown) == (2, "halt")


def test_an_unknown_regime_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ContractError, match=r"unknown regime 'bf17'.*bf16_dense"):
        DEFAULT_RULES("bf17")


@pytest.mark.parametrize("regime", REGIMES)
def test_rules_survive_their_own_yaml(regime: str) -> None:
    rules = DEFAULT_RULES(regime)
    assert read_rules(dump_rules(rules)) == rules


def test_a_file_needs_only_what_differs_from_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("rules:\n  - {name: tight, signal: mean_abs_d, bound: 1e-5, action: halt, patience: 2}\n")
    assert load_rules(path) == (
        Rule(name="tight", signal="mean_abs_d", bound=1e-5, regime="any", action="halt", patience=2),
    )


HEAD = "rules:\n  - name: fine\n    signal: k3\n"

BAD = {
    "no list": ("rules: 3\n", 1, "", "wanted one key"),
    "empty list": ("rules: []\n", 1, "rules", "nothing would ever be judged"),
    "empty file": ("", 1, "", "wanted one key"),
    "other key": ("rulez: []\n", 1, "", "wanted one key"),
    "not yaml": ("rules: [\n", 2, "", "not YAML"),
    "row is no map": (HEAD + "  - oops\n", 4, "rules[1]", "wanted a map, found str"),
    "typo in a field": (
        HEAD + "  - {name: a, signal: k3, bounds: 1}\n",
        4,
        "rules[1].bounds",
        "unknown field",
    ),
    "no name": (HEAD + "  - {signal: k3}\n", 4, "rules[1].name", "wanted a string"),
    "unknown signal": (HEAD + "  - {name: a, signal: k4}\n", 4, "rules[1].signal", "unknown signal 'k4'"),
    "unknown action": (HEAD + "  - {name: a, signal: k3, action: page}\n", 4, "rules[1].action", "'page'"),
    "unknown regime": (HEAD + "  - {name: a, signal: k3, regime: x}\n", 4, "rules[1].regime", "'x'"),
    "bound is no number": (HEAD + "  - {name: a, signal: k3, bound: high}\n", 4, "rules[1].bound", "'high'"),
    "bound is NaN": (HEAD + "  - {name: a, signal: k3, bound: .nan}\n", 4, "rules[1].bound", "nan"),
    "bound below 0": (HEAD + "  - {name: a, signal: k3, bound: -1}\n", 4, "rules[1].bound", "-1"),
    "bound is a bool": (HEAD + "  - {name: a, signal: k3, bound: true}\n", 4, "rules[1].bound", "True"),
    "no patience": (HEAD + "  - {name: a, signal: k3, patience: 0}\n", 4, "rules[1].patience", "found 0"),
    "half a window": (HEAD + "  - {name: a, signal: k3, window: 1.5}\n", 4, "rules[1].window", "found 1.5"),
    "twice the same": (HEAD + "  - {name: fine, signal: k3}\n", 4, "rules[1].name", "a second rule 'fine'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_names_file_line_field_and_what_was_found(case: str, tmp_path: Path) -> None:
    text, line, field, words = BAD[case]
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(ContractError) as caught:
        load_rules(path)
    error = caught.value
    assert (error.path, error.line, error.field) == (str(path), line, field)
    assert words in str(error)


def test_a_file_that_is_not_there_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="cannot be read"):
        load_rules(tmp_path / "none.yaml")
