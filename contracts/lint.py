# SPDX-License-Identifier: Apache-2.0
"""Checks what a contract means across its parts; each rule has an id that never changes its meaning.

An `error` makes the contract unusable (`require_clean` refuses it); a `warning` is something a reader should know.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from isoexec.contracts.errors import ContractError
from isoexec.contracts.schema import Contract

__all__ = ["RULES", "Finding", "Rule", "explain", "lint", "require_clean", "rule"]

Found = tuple[str, str, str]
"""What a check yields: path, message, fix."""
Check = Callable[[Contract], Iterator[Found]]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One breach: the `rule` id, `severity` error or warning, dotted `path`, what is wrong, and the `fix`."""

    rule: str
    severity: str
    path: str
    message: str
    fix: str

    def to_dict(self) -> dict[str, str]:
        """Return the finding as plain JSON values."""
        return {name: str(getattr(self, name)) for name in ("rule", "severity", "path", "message", "fix")}

    def __str__(self) -> str:
        return f"{self.rule} {self.severity}: {self.path}: {self.message}; {self.fix}"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A check and its words: `title` says what must hold, `why` what goes wrong where it does not."""

    id: str
    severity: str
    title: str
    why: str
    check: Check


RULES: dict[str, Rule] = {}


def rule(identifier: str, severity: str = "error") -> Callable[[Check], Check]:
    """Register a check; its docstring is the title, a blank line, and why."""

    def register(check: Check) -> Check:
        title, _, why = inspect.cleandoc(check.__doc__ or "").partition("\n\n")
        if identifier in RULES or not title or not why:
            raise ValueError(f"{identifier} is taken, or its check has no title and reason")
        why = " ".join(why.split())
        RULES[identifier] = Rule(id=identifier, severity=severity, title=title, why=why, check=check)
        return check

    return register


def lint(contract: Contract) -> list[Finding]:
    """Return every breach, by rule and then by path; empty for a clean contract."""
    _load_rules()
    return [
        Finding(rule=one.id, severity=one.severity, path=path, message=message, fix=fix)
        for _, one in sorted(RULES.items())
        for path, message, fix in sorted(one.check(contract))
    ]


def require_clean(contract: Contract) -> None:
    """Return for a contract without errors; raises ContractError for the first error, and counts the others."""
    errors = [finding for finding in lint(contract) if finding.severity == "error"]
    if errors:
        first = errors[0]
        more = f" (and {len(errors) - 1} more: isoexec contract lint)" if len(errors) > 1 else ""
        raise ContractError(
            f"{first.rule} {first.message}{more}", path=contract.name, field=first.path, fix=first.fix
        )


def explain(identifier: str) -> str:
    """Return what a rule means and why it is there; raises ContractError for an unknown id."""
    _load_rules()
    found = RULES.get(identifier.upper())
    if found is None:
        raise ContractError(f"no rule {identifier!r}", fix=f"use one of {', '.join(sorted(RULES))}")
    return f"{found.id} ({found.severity}): {found.title}\n\n{found.why}"


def _load_rules() -> None:
    # the rules register themselves; imported here because they need `rule` from this module
    from isoexec.contracts import lint_composition, lint_fit  # noqa: F401
