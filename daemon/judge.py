# SPDX-License-Identifier: Apache-2.0
"""Turns a window into verdicts by the run's rules, and verdicts into what the lease says."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from isoexec.contracts.causes import CAUSES
from isoexec.contracts.errors import ContractError
from isoexec.contracts.halting import HaltMarker, LeaseState
from isoexec.contracts.rules import DEFAULT_RULES, Rule, load_rules
from isoexec.contracts.verdict import RuleHistory, Verdict, evaluate, guard_state, overall
from isoexec.contracts.window import Window

__all__ = ["CLAIM_SIGNALS", "Judge", "claim_outcomes", "lease_state", "marker_of", "rules_for", "run_outcome"]

# claim -> (facts of the window that break it, silences that leave it unknown)
CLAIM_SIGNALS: Mapping[str, tuple[str, ...]] = {
    "handshake": ("hello",),
    "topology": ("hello", "attestation"),
    "regions": ("hello", "attestation"),
    "canaries": ("hello", "attestation"),
    "weights": ("weights",),
    "sampling": ("logprobs",),
    "environment": ("hello", "attestation"),
}


def rules_for(regime: str, path: Path | None = None) -> tuple[Rule, ...]:
    """Give the rules of a rules file, or the ladder that a regime starts with; none for an unknown regime."""
    if path is not None:
        return load_rules(path)
    try:
        return DEFAULT_RULES(regime)
    except ContractError:
        # evaluate() answers windows without a rule with `unknown`, which is what a foreign regime is
        return ()


class Judge:
    """The rules and the memory of one session of a run."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self.history = RuleHistory()

    def judge(self, window: Window) -> list[Verdict]:
        verdicts = evaluate(self.rules, window, self.history)
        self.history = self.history.after(verdicts)
        return verdicts


def lease_state(verdicts: Sequence[Verdict]) -> LeaseState:
    """Give what the lease says after a window.

    A rule that cannot know asks for `warn` at most and that is what the lease says: `unknown` on a lease means
    that the daemon is lost, and only that is left to the run's policy.
    """
    return {
        "ok": LeaseState.OK,
        "warn": LeaseState.WARN,
        "halt": LeaseState.HALT,
        "unknown": LeaseState.WARN,
    }[guard_state(verdicts)]


def marker_of(window: Window, verdicts: Sequence[Verdict]) -> HaltMarker:
    """Give the halt marker of verdicts that ask for a halt."""
    worst = overall(verdicts)
    if worst is None:
        return HaltMarker(
            run=window.run, step=window.step, rule="", cause="", verdict="unknown", time=time.time()
        )
    told = worst.evidence.get("diagnosis", {}).get("text")
    cause = told or CAUSES.get(worst.cause or "", "")
    text = f"{worst.cause}: {cause}" if cause else worst.message
    return HaltMarker(
        run=window.run,
        step=window.step,
        rule=worst.rule,
        cause=text,
        verdict=worst.outcome,
        evidence=worst.to_dict()["evidence"] | {"message": worst.message},
        time=time.time(),
        runbook=worst.runbook,
    )


def run_outcome(verdicts: Iterable[tuple[str, str]]) -> str:
    """Give one outcome for the (outcome, action) of every rule: violation, then unknown, then pass.

    What a rule only records as unknown (`dryrun`: a rescore that is not sampled, a baseline that is too young)
    does not make the run unknown; without a single pass it is.
    """
    found = [outcome for outcome, action in verdicts if (outcome, action) != ("unknown", "dryrun")]
    return next((one for one in ("violation", "unknown", "pass") if one in found), "unknown")


def claim_outcomes(window: Window) -> dict[str, str]:
    """Say of each claim whether the window proves it, breaks it, or leaves it unknown."""
    broken = {
        "handshake": bool(window.handshake),
        "topology": bool(window.topology_breaks),
        "regions": any(one.kind != "canary" for one in window.region_breaks),
        "canaries": any(one.kind == "canary" for one in window.region_breaks),
        "weights": any(one.kind not in ("unknown", "unchanged") for one in window.weights),
        "sampling": bool(window.sampling),
        "environment": bool(window.environment_breaks),
    }
    outcomes: dict[str, str] = {}
    for claim, subjects in CLAIM_SIGNALS.items():
        # without a contract there is no such claim to prove; weights and sampling are watched all the same
        unclaimed = window.monitor_only and claim not in ("weights", "sampling")
        unread = claim == "weights" and any(one.kind == "unknown" for one in window.weights)
        if broken[claim]:
            outcomes[claim] = "violation"
        elif unclaimed or unread or window.silent(*subjects):
            outcomes[claim] = "unknown"
        else:
            outcomes[claim] = "pass"
    return outcomes
