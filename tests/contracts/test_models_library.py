# SPDX-License-Identifier: Apache-2.0
"""The shipped contracts are what the families say, keep what was pinned, and leave unproven exactly what is listed here."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from isoexec.contracts.discharge import unproven
from isoexec.contracts.evidence import default_store, moment
from isoexec.contracts.lint import lint
from isoexec.contracts.models.families import FAMILIES, Family
from isoexec.contracts.models.library import check, pins_of, render, write
from isoexec.contracts.models.regions import PROVIDERS
from isoexec.contracts.models.resolve import region_states
from isoexec.contracts.operators import axes_of
from isoexec.contracts.pinning import pinned_text
from isoexec.contracts.schema import Contract, library

BY_NAME = {family.name: family for family in FAMILIES}
SOURCE = "sha256:" + "a" * 64
RECORD = "sha256:" + "b" * 64

# Regions of today's shipped contracts that nothing may be installed for, by why.
_GDN = {"gdn_conv", "gdn_gating", "gdn_rule"}
UNPROVEN: Mapping[str, Mapping[str, set[str]]] = {
    "qwen3.5-dense-sm90": {"no kernel": _GDN},
    "qwen3.5-moe-sm90": {"no kernel": _GDN},
    "qwen3-next-sm90": {"no kernel": _GDN},
}
"""Shipped contract -> kind -> regions; a contract that is not listed is wholly proven."""


@pytest.fixture(scope="module")
def today() -> float:
    """A day after the newest shipped record was made, so that this file says the same next year."""
    return max(moment(record.made) for record in default_store().records()) + 86400.0


@pytest.fixture(scope="module")
def contracts() -> dict[str, Contract]:
    return {path.stem: Contract.load(path) for path in library().glob("*.yaml")}


def test_the_files_that_are_checked_in_are_what_the_families_say() -> None:
    # after a change of contracts/models/families.py: python -m isoexec.contracts.models.library
    assert check(library()) == []


def test_the_script_checks_writes_and_refuses_other_arguments() -> None:
    def script(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "isoexec.contracts.models.library", *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert (script("--check").returncode, script("--check").stdout) == (0, "")
    assert script("--chekc").returncode == 2


def test_stale_missing_and_foreign_files_are_told_and_written_anew(tmp_path: Path) -> None:
    folder = tmp_path / "library"
    shutil.copytree(library(), folder)
    assert check(folder) == []
    (folder / "qwen3-moe-sm90.yaml").unlink()
    stale = folder / "qwen3-dense-sm90.yaml"
    stale.write_text(stale.read_text().replace("kv_segment: 4096", "kv_segment: 2048"))
    (folder / "llama.yaml").write_text("name: llama\n")
    assert check(folder) == [
        "qwen3-moe-sm90.yaml is missing",
        "qwen3-dense-sm90.yaml is out of date",
        "llama.yaml is of no family",
    ]
    assert sorted(write(folder)) == ["qwen3-dense-sm90.yaml", "qwen3-moe-sm90.yaml"]
    assert check(folder) == ["llama.yaml is of no family"]


def pinned(family: Family) -> str:
    """The shipped file of a family with a source and a record for every function that has a provider."""
    text = library(family.name).read_text(encoding="utf-8")
    providers = Contract.load(library(family.name)).providers
    kernels = {one.function for one in providers if one.kind == "kernel"}
    return pinned_text(
        text, dict.fromkeys(kernels, SOURCE), dict.fromkeys({one.function for one in providers}, RECORD)
    )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_was_pinned_survives_generation(family: Family) -> None:
    text = pinned(family)
    assert text != library(family.name).read_text(encoding="utf-8")
    assert text.count(SOURCE) >= 4
    assert text.count(RECORD) > text.count(SOURCE)
    assert render(family, pins_of(text)) == text


def test_evidence_of_other_constants_or_another_function_is_dropped() -> None:
    family = BY_NAME["qwen3-dense-cpu"]
    held = pins_of(pinned(family))
    moved = dataclasses.replace(
        family,
        parts=tuple(
            dataclasses.replace(part, constants={**part.constants, "kv_segment": 64})
            if part.region == "attention"
            else dataclasses.replace(part, function="silu_mul.exp/2")
            if part.region == "silu_mul"
            else part
            for part in family.parts
        ),
    )
    lines = render(moved, held)
    for region in ("attention", "silu_mul"):
        entry = lines[lines.index(f"- region: {region}\n") :]
        assert entry[entry.index("discharge: ") :].startswith("discharge: {kind: none}\n")
    provider = lines[lines.index("- name: isoexec.kernels.attention\n") :]
    assert f"source: {SOURCE}" in provider[:200]  # the kernel is the same; what was shown of it is not
    assert provider[provider.index("discharge: ") :].startswith("discharge: {kind: none}\n")
    assert lines.count(RECORD) == pinned(family).count(RECORD) - 4


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_a_shipped_contract_leaves_unproven_exactly_what_is_listed(
    name: str, contracts: dict[str, Contract], today: float
) -> None:
    found: dict[str, set[str]] = {}
    for state in region_states(contracts[name], default_store(), now=today):
        if not state.proven:
            found.setdefault(state.kind, set()).add(state.region)
    assert found == UNPROVEN.get(name, {})


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_lint_finds_nothing_else_in_a_shipped_contract(
    name: str, contracts: dict[str, Contract], today: float
) -> None:
    contract = contracts[name]
    found = [one for one in lint(contract, store=default_store(), now=today) if one.severity == "error"]
    assert {one.rule for one in found} <= {"IX005", "IX009", "IX011", "IX044", "IX045", "IX046"}
    named = {one.path.partition("[")[2].partition("]")[0] for one in found if one.path.startswith("comp")}
    for one in found:
        if one.path.startswith("providers["):
            function = one.path[len("providers[") :].partition("|")[0]
            named |= {binding.region for binding in contract.composition if binding.function == function}
    assert named == set(unproven(contract, default_store(), now=today))


def test_every_architecture_has_one_contract_an_arch() -> None:
    seen = [(name, family.arch) for family in FAMILIES for name in family.architectures]
    assert len(seen) == len(set(seen))


def test_one_function_has_one_name_and_one_kind_of_constants(contracts: dict[str, Contract]) -> None:
    names: dict[str, set[str]] = {}
    for contract in contracts.values():
        for binding in contract.composition:
            constants = set(binding.constants)
            assert names.setdefault(binding.function, constants) == constants


def test_a_provider_of_the_table_is_bound_by_some_contract(contracts: dict[str, Contract]) -> None:
    for arch, table in PROVIDERS.items():
        bound = {b.function for c in contracts.values() if c.arch == arch for b in c.composition}
        assert set(table) <= bound


def test_no_operator_of_a_shipped_contract_is_a_stranger_to_the_axes(contracts: dict[str, Contract]) -> None:
    strange = axes_of("an operator nobody has heard of")
    ops = {op for contract in contracts.values() for op in contract.model.ops}
    assert {op for op in ops if axes_of(op) == strange} == set()
