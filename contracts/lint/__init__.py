# SPDX-License-Identifier: Apache-2.0
"""Checks what a contract means across its parts; each rule has an id that never changes its meaning.

An `error` makes the contract unusable (`require_clean` refuses it), a `warning` is something a reader should know, a
`note` something that could be said better. The rules themselves are in the other modules of this package.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from isoexec.contracts.errors import ContractError
from isoexec.contracts.schema import Contract

if TYPE_CHECKING:
    from isoexec.contracts.discharge import Live
    from isoexec.contracts.evidence import Store
    from isoexec.contracts.loading import Document

__all__ = [
    "RULES",
    "SEVERITIES",
    "Finding",
    "Rule",
    "all_rules",
    "explain",
    "lint",
    "require_clean",
    "rule",
    "words",
]

SEVERITIES = ("error", "warning", "note")
Found = tuple[str, str, str]
"""What a check yields: path, message, fix."""
Check = Callable[[Contract], Iterator[Found]]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One breach: the `rule` id, its `severity`, dotted `path`, what is wrong, and the `fix`.

    `file` and the 1-based `line` are "" and None for a contract that was no file.
    """

    rule: str
    severity: str
    path: str
    message: str
    fix: str
    file: str = ""
    line: int | None = None

    def to_dict(self) -> dict[str, object]:
        """Return the finding as plain JSON values."""
        names = ("rule", "severity", "file", "line", "path", "message", "fix")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        at = f"{self.file}:{self.line}: " if self.line is not None else f"{self.file}: " if self.file else ""
        where = f"{self.path}: " if self.path else ""
        return f"{at}{self.rule} {self.severity}: {where}{self.message}" + (
            f"; {self.fix}" if self.fix else ""
        )


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule in words: what must hold (`title`), what goes wrong where it does not (`why`), one `breach`, its `fix`.

    `check` finds the breaches in a contract alone; None for rules that the loader or the evidence store checks.
    """

    id: str
    severity: str
    title: str
    why: str
    breach: str
    fix: str
    check: Check | None = None

    def __str__(self) -> str:
        return f"{self.id} ({self.severity}): {self.title}\n\nWhy: {self.why}\n\nBreach: {self.breach}\n\nFix: {self.fix}"


RULES: dict[str, Rule] = {}
_PARTS = re.compile(r"(?s)(?P<title>.+?)\n\n(?P<why>.+?)\n\nBreach: (?P<breach>.+?)\n\nFix: (?P<fix>.+)")


def words(identifier: str, text: str, *, severity: str = "error", check: Check | None = None) -> Rule:
    """Register a rule of which `text` holds title, why, `Breach: ...` and `Fix: ...`, with a blank line between each."""
    match = _PARTS.fullmatch(inspect.cleandoc(text))
    if identifier in RULES or match is None or severity not in SEVERITIES:
        raise ValueError(
            f"{identifier} is taken, or has no title, why, breach and fix, or is no {SEVERITIES}"
        )
    parts = {name: " ".join(part.split()) for name, part in match.groupdict().items()}
    RULES[identifier] = Rule(id=identifier, severity=severity, check=check, **parts)
    return RULES[identifier]


def rule(identifier: str, severity: str = "error") -> Callable[[Check], Check]:
    """Register a check whose docstring is the rule's words."""

    def register(check: Check) -> Check:
        words(identifier, check.__doc__ or "", severity=severity, check=check)
        return check

    return register


def lint(
    contract: Contract,
    *,
    document: Document | None = None,
    store: Store | None = None,
    now: float | None = None,
    live: Live | None = None,
) -> list[Finding]:
    """Return every breach, by rule and then by path; empty for a clean contract.

    `document` is the file the contract came from, and gives findings their line. With a `store` the evidence is judged
    too, at Unix time `now` (the clock's when None) and for the process `live`, where that is given; without a store only
    what the contract itself says is.
    """
    found = [
        Finding(rule=one.id, severity=one.severity, path=path, message=message, fix=fix)
        for one in all_rules().values()
        if one.check is not None
        for path, message, fix in one.check(contract)
    ]
    if store is not None:
        from isoexec.contracts.lint.evidence import judged

        found += judged(contract, store, now, live)
    if document is not None:
        from isoexec.contracts.lint.report import line_of

        found = [replace(one, file=document.path, line=line_of(document, one.path)) for one in found]
    return sorted(found, key=lambda one: (one.rule, one.path, one.message))


def require_clean(contract: Contract, *, store: Store | None = None, now: float | None = None) -> None:
    """Return for a contract without errors; raises ContractError for the first error, and counts the others."""
    errors = [finding for finding in lint(contract, store=store, now=now) if finding.severity == "error"]
    if errors:
        first = errors[0]
        more = f" (and {len(errors) - 1} more: isoexec contract lint)" if len(errors) > 1 else ""
        raise ContractError(
            f"{first.rule} {first.message}{more}", path=contract.name, field=first.path, fix=first.fix
        )


def all_rules() -> Mapping[str, Rule]:
    """Return every rule by id, in order."""
    # the rules register themselves; imported here because they need `rule` and `words` from this module
    from isoexec.contracts.lint import (  # noqa: F401
        claims,
        composition,
        evidence,
        fit,
        parity,
        providers,
        report,
    )

    return dict(sorted(RULES.items()))


def explain(identifier: str = "") -> str:
    """Return what a rule means, why it is there, a breach and a fix; all rules, a line each, without an id.

    Raises ContractError for an unknown id.
    """
    known = all_rules()
    if not identifier:
        return "\n".join(f"{one.id}  {one.severity:<7}  {one.title}" for one in known.values())
    found = known.get(identifier.upper())
    if found is None:
        raise ContractError(f"no rule {identifier!r}", fix=f"use one of {', '.join(known)}")
    return str(found)
