# SPDX-License-Identifier: Apache-2.0
"""A layout outside the claims is refused by axis, found degree and admitted domain."""

from __future__ import annotations

import pytest

from isoexec.contracts.errors import TopologyError
from isoexec.contracts.schema import Contract, library
from isoexec.contracts.topology import check_topology

SHIPPED = Contract.load(library("qwen3-dense-cpu"))
ONE = {"TP": 1, "EP": 1, "ETP": 1, "SP": 1, "CP": 1, "PP": 1, "DP": 1}


@pytest.mark.parametrize(
    ("role", "degrees"),
    [
        ("engine", {}),
        ("engine", {"TP": 2}),
        ("trainer", {}),
        ("trainer", {"TP": 2}),
        ("trainer", {"TP": 2, "SP": 2, "PP": 2}),
    ],
)
def test_a_claimed_layout_is_admitted(role: str, degrees: dict[str, int]) -> None:
    check_topology(SHIPPED, role, {**ONE, **degrees})


@pytest.mark.parametrize(
    ("role", "degrees", "axis", "found", "admitted"),
    [
        ("engine", {"TP": 4}, "TP", 4, "invariant over {1, 2}"),
        ("engine", {"PP": 2}, "PP", 2, "pinned 1"),
        ("engine", {"TP": 2, "SP": 2}, "SP", 2, "pinned 1"),
        ("trainer", {"CP": 2}, "CP", 2, "pinned 1"),
        ("trainer", {"SP": 2}, "SP", 2, "1 or the TP degree 1"),
        ("trainer", {"TP": 0}, "TP", 0, "invariant over {1, 2}"),
        ("trainer", {"XP": 1}, "XP", 1, "no degree: the axis is not claimed"),
        ("critic", {}, "role", "critic", "claims for engine, trainer"),
    ],
)
def test_another_layout_is_refused(
    role: str, degrees: dict[str, int], axis: str, found: object, admitted: str
) -> None:
    with pytest.raises(TopologyError) as caught:
        check_topology(SHIPPED, role, {**ONE, **degrees})
    error = caught.value
    assert (error.axis, error.found, error.admitted, error.role) == (axis, found, admitted, role)
    assert axis in str(error)
    assert str(found) in str(error)


@pytest.mark.parametrize("axis", ONE)
def test_a_degree_that_is_not_told_is_unknown_and_refused(axis: str) -> None:
    degrees = {name: degree for name, degree in ONE.items() if name != axis}
    with pytest.raises(TopologyError) as caught:
        check_topology(SHIPPED, "trainer", degrees)
    assert (caught.value.axis, caught.value.found) == (axis, "unknown")


@pytest.mark.parametrize("axis", ONE)
def test_an_axis_without_a_claim_is_refused_even_at_one(axis: str) -> None:
    data = SHIPPED.to_dict()
    del data["claims"]["topology"]["trainer"][axis]  # type: ignore[index]
    with pytest.raises(TopologyError, match="not claimed"):
        check_topology(Contract.from_dict(data), "trainer", ONE)


@pytest.mark.parametrize("degree", [True, 1.0, "1", None])
def test_a_degree_that_is_no_integer_is_refused(degree: object) -> None:
    with pytest.raises(TopologyError):
        check_topology(SHIPPED, "engine", {**ONE, "PP": degree})  # type: ignore[dict-item]
