# SPDX-License-Identifier: Apache-2.0
"""Each route says what comes of a region that fails, at every enforcement; none lets anything else stand in."""

from __future__ import annotations

import pytest

from isoexec.contracts.parts import ROUTES
from isoexec.contracts.routes import ENFORCEMENTS, OUTCOMES, ROUTE_RULES, on_failure


def test_every_route_has_a_rule_and_every_outcome_comes_of_one() -> None:
    assert tuple(sorted(ROUTE_RULES)) == tuple(sorted(ROUTES))
    reached = {on_failure(route, mode) for route in ROUTES for mode in ENFORCEMENTS}
    assert reached == set(OUTCOMES)


@pytest.mark.parametrize("route", ROUTES)
def test_a_failed_region_that_must_refuse_stops_the_process_whatever_its_route(route: str) -> None:
    assert on_failure(route, "install+refuse") == "refused"


def test_more_enforcement_never_lets_more_through() -> None:
    order = ("unseen", "attested", "violation", "refused")
    for route in ROUTES:
        found = [on_failure(route, mode) for mode in ENFORCEMENTS]
        kept = [order.index(one) for one in found if one != "no_plan"]
        assert kept == sorted(kept)
        # what is refused for being too low is refused below what is admitted
        assert "no_plan" not in found[ENFORCEMENTS.index(ROUTE_RULES[route].least) :]


def test_a_protected_region_is_never_lowered() -> None:
    assert {on_failure("protected", mode) for mode in ENFORCEMENTS[:-1]} == {"no_plan"}


def test_a_route_or_an_enforcement_there_is_not_is_an_error() -> None:
    with pytest.raises(KeyError):
        on_failure("fast", "off")
    with pytest.raises(ValueError, match="strict"):
        on_failure("canonical", "strict")
