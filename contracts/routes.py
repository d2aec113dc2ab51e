# SPDX-License-Identifier: Apache-2.0
"""What a route of a composition entry promises, and what an adapter does where a region of that route fails.

A region fails in two ways: it is `unbound` (the adapter cannot put the contract's function there) or `broken` (what is there
answers the canary with other bits). Whether that stops the process is said by the enforcement asked for, region by region; a
route only says how low that may be set. No route has a substitute: where the function cannot be bound, nothing else is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ENFORCEMENTS", "FAILURES", "OUTCOMES", "ROUTE_RULES", "RouteRule", "on_failure"]

FAILURES = ("unbound", "broken")
ENFORCEMENTS = ("off", "observe", "install", "install+refuse")
"""How far an adapter goes in a region, from nothing to stopping the process."""
OUTCOMES: Mapping[str, str] = {
    "unseen": "the adapter does not look: the region runs as the runtime likes and is not attested",
    "attested": "the attestation shows what is there; no claim of the region is judged by the adapter",
    "violation": "the process goes on, its attestation says so, and the daemon's rules judge it a violation; only a "
    "kernel of another source than the contract's is refused here already, for it is never planned",
    "refused": "the process stops with InstallError, before a logprob is computed or at the next verification",
    "no_plan": "nothing is planned: the enforcement asked for is lower than the route admits, and InstallError says so",
}
"""What comes of a failure, each with what it means."""


@dataclass(frozen=True, kw_only=True)
class RouteRule:
    """One route: what its bits are, which discharge its entries need, and the `least` enforcement it admits."""

    meaning: str
    discharge: str
    least: str
    why: str


ROUTE_RULES: Mapping[str, RouteRule] = {
    "canonical": RouteRule(
        meaning="the plain composition of the operators; no freedom was taken",
        discharge="evidence of the entry and of its providers, as everywhere",
        least="off",
        why="a region may be watched before it is owned; its bits are unknown until then",
    ),
    "composition_defining": RouteRule(
        meaning="the schedule is its own definition (blocked, fused, reordered); nothing else has its bits",
        discharge="evidence of the entry and of its providers, as everywhere",
        least="off",
        why="a region may be watched before it is owned; its bits are unknown until then",
    ),
    "reference_preserving": RouteRule(
        meaning="a faster schedule with the bits of the canonical one",
        discharge="evidence, and a reference in the contract to compare with: an own kernel, or a canonical entry",
        least="off",
        why="what it replaces has the same bits only where that was proven too, so it is no substitute",
    ),
    "protected": RouteRule(
        meaning="kept opaque and bound at all times, so that no compiler fuses into it and no setting lowers it",
        discharge="evidence of the entry and of its providers, as everywhere",
        least="install+refuse",
        why="other regions' bits depend on it standing where it stands; lowering it would leave them unproven silently",
    ),
}


def on_failure(route: str, enforcement: str) -> str:
    """Return the outcome (a key of `OUTCOMES`) of a failed region; both failures have the same one.

    Raises KeyError or ValueError for a route or an enforcement that there is not.
    """
    if enforcement not in ENFORCEMENTS:
        raise ValueError(f"no enforcement {enforcement!r}; there are {', '.join(ENFORCEMENTS)}")
    asked = ENFORCEMENTS.index(enforcement)
    if asked < ENFORCEMENTS.index(ROUTE_RULES[route].least):
        return "no_plan"
    return ("unseen", "attested", "violation", "refused")[asked]
