# SPDX-License-Identifier: Apache-2.0
"""Judge a window by rules. Pure: no clock, no I/O, so a journal replays to the same verdicts.

`evaluate` reads a history and never changes it; `history.after(verdicts)` is the history of the next window::

    verdicts = evaluate(rules, window, history)
    history = history.after(verdicts)

Silence never passes: a signal that cannot be known gives the outcome `unknown`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from isoexec.contracts.causes import CAUSES, Cause, classify
from isoexec.contracts.rules import LADDER, Action, Rule
from isoexec.contracts.signals import SIGNALS, Reading, Signal
from isoexec.contracts.window import Window

__all__ = [
    "BASELINE_MIN",
    "Outcome",
    "RuleHistory",
    "Verdict",
    "evaluate",
    "guard_state",
    "overall",
    "replay",
]

Outcome = Literal["pass", "violation", "unknown"]

BASELINE_MIN = 8  # windows before a run has a baseline of its own
_KEPT = 64  # trailing values kept per rule

_LOWER: dict[str, Action] = {"halt": "warn", "warn": "dryrun", "dryrun": "dryrun"}
_DEGREE = {"none": 0, "dryrun": 1, "warn": 2, "halt": 3}
_SEVERITY = {"pass": 0, "unknown": 1, "violation": 2}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one rule says about one window.

    action: what the rule asks for now, `none` on a pass. cause: id of the likely cause of a violation (see
    CAUSES), else None. streak: windows in a row with this outcome's kind; the rule's action waits for
    `patience` of them.
    """

    rule: str
    outcome: Outcome
    action: Literal["none", "dryrun", "warn", "halt"]
    cause: str | None
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    step: int
    value: float | None = None  # of the signal in this window, before any averaging
    streak: int = 0

    @property
    def runbook(self) -> str:
        """Where the runbook treats the cause; "" without one."""
        return Cause(id=self.cause, text="").anchor if self.cause else ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; a non-finite value becomes a string."""
        return {
            "rule": self.rule,
            "outcome": self.outcome,
            "action": self.action,
            "cause": self.cause,
            "message": self.message,
            "evidence": _plain(self.evidence),
            "step": self.step,
            "value": _plain(self.value),
            "streak": self.streak,
            "runbook": self.runbook,
        }


@dataclass(frozen=True, kw_only=True)
class RuleHistory:
    """What rules remember of one run: streaks and trailing values. Start with `RuleHistory()`."""

    violations: Mapping[str, int] = field(default_factory=dict)
    unknowns: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def after(self, verdicts: Iterable[Verdict]) -> RuleHistory:
        """Return the history of the window that follows the one these verdicts judge.

        An unknown window neither adds to a streak of violations nor ends it. A baseline learns from windows
        that keep to it only, so that a fault does not become the new normal.
        """
        violations, unknowns, values = dict(self.violations), dict(self.unknowns), dict(self.values)
        for verdict in verdicts:
            name = verdict.rule
            if verdict.outcome == "unknown":
                unknowns[name] = unknowns.get(name, 0) + 1
            else:
                unknowns[name] = 0
                violations[name] = violations.get(name, 0) + 1 if verdict.outcome == "violation" else 0
            learns = not (verdict.outcome == "violation" and verdict.evidence.get("relative"))
            if verdict.value is not None and learns:
                values[name] = (*values.get(name, ()), verdict.value)[-_KEPT:]
        return RuleHistory(violations=violations, unknowns=unknowns, values=values)


def evaluate(rules: Sequence[Rule], window: Window, history: RuleHistory) -> list[Verdict]:
    """Return one verdict per rule that applies to the window's regime and mode, in the order of the rules.

    In a monitor-only run the contract's rules do not apply and no rule does more than warn. A window made between
    steps is judged by the rules on facts alone. When no rule
    applies at all, nothing was judged: one `unknown` verdict named `no_rule` says so.
    """
    causes = classify(window)
    verdicts = [
        _judge(rule, SIGNALS[rule.signal], window, history, causes)
        for rule in rules
        if rule.applies_to(window.regime)
        and not (window.monitor_only and SIGNALS[rule.signal].scope == "contract")
        and (SIGNALS[rule.signal].is_fact or not window.between_steps)
    ]
    if not verdicts:
        message = f"no rule applies to regime {window.regime}: nothing was judged"
        return [
            Verdict(
                rule="no_rule",
                outcome="unknown",
                action="warn",
                cause=None,
                message=message,
                step=window.step,
            )
        ]
    return verdicts


def _judge(
    rule: Rule, signal: Signal, window: Window, history: RuleHistory, causes: Sequence[Cause]
) -> Verdict:
    reading = signal.read(window)
    value = _value(rule, signal, reading, window, history)
    violated = value is not None and value > rule.bound
    missing = reading.missing
    if value is None and not missing:
        missing = (f"the run has fewer than {BASELINE_MIN} windows to compare with",)
    evidence: dict[str, Any] = dict(reading.evidence)
    evidence |= {"signal": signal.name, "bound": rule.bound}
    if signal.relative:
        evidence["relative"] = True
    if value is not None:
        evidence["value"] = value
    if violated:
        streak = history.violations.get(rule.name, 0) + 1
        cause = signal.cause or (causes[0].id if causes else None)
        evidence["causes"] = [c.id for c in causes]
        said = next((c for c in causes if c.id == cause), None)
        text = said.text if said is not None else CAUSES[cause] if cause else ""
        if said is not None and text != CAUSES[said.id]:
            evidence["diagnosis"] = {"text": text, **said.evidence}
        return Verdict(
            rule=rule.name,
            outcome="violation",
            action=_action(rule.action, streak, rule.patience, window),
            cause=cause,
            message=_violation(rule, signal, value, streak, text),
            evidence=evidence,
            step=window.step,
            value=reading.value,
            streak=streak,
        )
    if missing:
        streak = history.unknowns.get(rule.name, 0) + 1
        evidence["missing"] = list(missing)
        return Verdict(
            rule=rule.name,
            outcome="unknown",
            action=_action(rule.on_unknown, streak, rule.patience, window),
            cause="silence" if window.silence else None,
            message=f"{rule.name}: not known, {'; '.join(missing)}",
            evidence=evidence,
            step=window.step,
            value=reading.value,
            streak=streak,
        )
    return Verdict(
        rule=rule.name,
        outcome="pass",
        action="none",
        cause=None,
        message=f"{rule.name}: {signal.text} {_number(value)}, at most {_number(rule.bound)} allowed",
        evidence=evidence,
        step=window.step,
        value=reading.value,
    )


def _value(
    rule: Rule, signal: Signal, reading: Reading, window: Window, history: RuleHistory
) -> float | None:
    if reading.value is None:
        return None
    trailing = history.values.get(rule.name, ())
    if not signal.relative:
        recent = (*trailing, reading.value)[-rule.window :]
        return math.fsum(recent) / len(recent)
    trailing = trailing[-rule.window :]
    if len(trailing) < min(BASELINE_MIN, rule.window):
        return None
    # a ratio of two mismatches that are both far below the regime's bound says nothing
    floor = LADDER.get(window.regime, {}).get("mean_abs_d", (1e-6,))[0] / 10
    return reading.value / max(statistics.median(trailing), floor)


def _action(action: Action, streak: int, patience: int, window: Window) -> Action:
    action = action if streak >= patience else _LOWER[action]
    return "warn" if window.monitor_only and action == "halt" else action


def _violation(rule: Rule, signal: Signal, value: float | None, streak: int, cause: str) -> str:
    unit = f" {signal.unit}" if signal.unit else ""
    text = f"{rule.name}: {signal.text} {_number(value)}{unit}, at most {_number(rule.bound)} allowed"
    if rule.patience > 1:
        text += f" (window {streak} in a row, {rule.action} from {rule.patience} on)"
    return f"{text}; likely cause: {cause}" if cause else text


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.6g}"


def overall(verdicts: Iterable[Verdict]) -> Verdict | None:
    """Return the verdict that matters most: strongest action, violation before unknown; None for none."""
    return max(verdicts, key=lambda v: (_DEGREE[v.action], _SEVERITY[v.outcome]), default=None)


def guard_state(verdicts: Sequence[Verdict]) -> Literal["ok", "warn", "halt", "unknown"]:
    """Return what the lease tells the guard; verdicts that only record leave it `ok`, none is `unknown`."""
    if not verdicts:
        return "unknown"
    if any(v.action == "halt" for v in verdicts):
        return "halt"
    if any(v.outcome == "violation" and v.action == "warn" for v in verdicts):
        return "warn"
    if any(v.outcome == "unknown" and v.action == "warn" for v in verdicts):
        return "unknown"
    return "ok"


def replay(rules: Sequence[Rule], windows: Iterable[Window]) -> Iterator[tuple[Window, list[Verdict]]]:
    """Judge the windows of one run in order, from an empty history."""
    history = RuleHistory()
    for window in windows:
        verdicts = evaluate(rules, window, history)
        history = history.after(verdicts)
        yield window, verdicts


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
