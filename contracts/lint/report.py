# SPDX-License-Identifier: Apache-2.0
"""Lints contract files and writes what was found as text, JSON or SARIF 2.1.0, each finding with its line in the file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from isoexec.contracts.errors import ContractError
from isoexec.contracts.lint import SEVERITIES, Finding, Rule, all_rules, lint, words
from isoexec.contracts.loading import Document, Keys, Place, read
from isoexec.contracts.schema import Contract

if TYPE_CHECKING:
    from isoexec.contracts.discharge import Live
    from isoexec.contracts.evidence import Store

__all__ = ["FORMATS", "Report", "check", "exit_code", "line_of", "render", "rules_page", "unreadable"]

FORMATS = ("text", "json", "sarif")
_SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
# what names an entry of a list in a path, by the list's name; as much of it as tells the entries apart
_NAMED_BY: dict[str, tuple[str, ...]] = {
    "cases": ("name",),
    "composition": ("region", "cases"),
    "providers": ("function", "name"),
    "state": ("state",),
    "tolerances": ("cases", "metric"),
    "versions": ("name",),
}

words(
    "IX000",
    """A contract is a file of this format.

    A file that cannot be read, or says what the format does not know, promises nothing that could be checked.

    Breach: a field that is misspelt, a raw float, the same key twice, text that is no YAML, a file that is not there.

    Fix: the message names line, field and what to write; contracts/spec/contract-v1.md says the format.
    """,
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found in one file; `readable` is False where it is no contract, which is then the one finding."""

    file: str
    findings: tuple[Finding, ...]
    readable: bool = True

    def count(self, severity: str) -> int:
        """Return how many findings have a severity."""
        return sum(one.severity == severity for one in self.findings)


def check(
    path: Path, *, store: Store | None = None, now: float | None = None, live: Live | None = None
) -> Report:
    """Lint a file as `lint` does; what keeps it from being a contract becomes its one finding, IX000."""
    try:
        document = read(path)
        contract = Contract.from_document(document)
    except ContractError as error:
        return unreadable(str(path), error)
    found = lint(contract, document=document, store=store, now=now, live=live)
    return Report(file=str(path), findings=tuple(found))


def unreadable(file: str, error: ContractError) -> Report:
    """Return the report of a file that is no contract, for the reason the error gives."""
    finding = Finding(
        rule="IX000",
        severity="error",
        path=error.field,
        message=error.problem,
        fix=error.fix,
        file=file,
        line=error.line,
    )
    return Report(file=file, findings=(finding,), readable=False)


def exit_code(reports: Sequence[Report], *, strict: bool = False) -> int:
    """Return 0 for no breach, 1 for errors (when `strict`, for warnings too), 2 where a file is no contract."""
    if not all(one.readable for one in reports):
        return 2
    breaking = ("error", "warning") if strict else ("error",)
    return int(any(one.count(severity) for one in reports for severity in breaking))


def render(reports: Sequence[Report], form: str) -> str:
    """Return the reports in one of `FORMATS`."""
    return {"text": _text, "json": _json, "sarif": _sarif}[form](reports)


def _text(reports: Sequence[Report]) -> str:
    lines = []
    for report in reports:
        lines += [str(finding) for finding in report.findings]
        counts = ", ".join(_counted(report.count(severity), severity) for severity in SEVERITIES)
        lines.append(f"{report.file}: {counts}" + ("" if report.readable else "; not a contract"))
    return "\n".join(lines)


def _counted(count: int, severity: str) -> str:
    return f"{count} {severity}" + ("" if count == 1 else "s")


def _json(reports: Sequence[Report]) -> str:
    totals = {f"{severity}s": sum(one.count(severity) for one in reports) for severity in SEVERITIES}
    value = {
        "files": [{"file": one.file, "readable": one.readable} for one in reports],
        "findings": [finding.to_dict() for one in reports for finding in one.findings],
        **totals,
    }
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)


def _sarif(reports: Sequence[Report]) -> str:
    rules = all_rules()
    index = {identifier: position for position, identifier in enumerate(rules)}
    try:
        release = {"version": version("isoexec")}
    except PackageNotFoundError:
        release = {}
    run = {
        "tool": {
            "driver": {"name": "isoexec", **release, "rules": [_sarif_rule(one) for one in rules.values()]}
        },
        "columnKind": "unicodeCodePoints",
        "artifacts": [{"location": {"uri": _uri(one.file)}} for one in reports],
        "results": [
            _sarif_result(finding, index[finding.rule]) for one in reports for finding in one.findings
        ],
    }
    log = {"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2, ensure_ascii=False)


def _sarif_rule(one: Rule) -> dict[str, object]:
    return {
        "id": one.id,
        "shortDescription": {"text": one.title},
        "fullDescription": {"text": one.why},
        "help": {"text": f"Breach: {one.breach}\n\nFix: {one.fix}"},
        "defaultConfiguration": {"level": one.severity},
    }


def _sarif_result(finding: Finding, index: int) -> dict[str, object]:
    place: dict[str, object] = {"artifactLocation": {"uri": _uri(finding.file)}}
    if finding.line is not None:
        place["region"] = {"startLine": finding.line}
    location: dict[str, object] = {"physicalLocation": place}
    if finding.path:
        location["logicalLocations"] = [{"fullyQualifiedName": finding.path}]
    text = finding.message + (f"; {finding.fix}" if finding.fix else "")
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": finding.severity,
        "message": {"text": text},
        "locations": [location],
    }


def _uri(file: str) -> str:
    """Return a relative path as a relative URI, an absolute one as a file URI."""
    path = Path(file)
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())


def line_of(document: Document, path: str) -> int | None:
    """Return the line of a finding's path in its file, or of the nearest thing around it that the file has."""
    value, rest, name = document.value, path, ""
    keys: Keys = ()
    while rest:
        key: str | int | None = None
        if isinstance(value, list) and rest.startswith("["):
            label, _, rest = rest[1:].partition("]")
            key = _index(value, name, label)
            value = value[key] if key is not None else None
        elif isinstance(value, dict):
            rest = rest.removeprefix(".")
            names = [one for one in value if rest == one or rest.startswith((f"{one}.", f"{one}["))]
            key = name = max(names, key=len, default="")
            rest = rest[len(name) :]
            value = value.get(name)
        if key is None or key == "":
            break
        keys = (*keys, key)
    return Place(path=document.path, spans=document.spans, keys=keys).line


def _index(value: list[object], name: str, label: str) -> int | None:
    """Return which entry of a list a label means: one of its names, as many of them as the label gives."""
    for position, entry in enumerate(value):
        if isinstance(entry, Mapping):
            parts = [_label(entry.get(one)) for one in _NAMED_BY.get(name, ())]
            if label in {"|".join(parts[:count]) for count in range(1, len(parts) + 1)}:
                return position
    return None


def _label(value: object) -> str:
    return "+".join(sorted(map(str, value))) if isinstance(value, list) else str(value)


def rules_page() -> str:
    """Return the page contracts/spec/lint.md: every rule in words."""
    head = (
        "# Lint rules\n\n"
        "Generated by `isoexec contract explain --format markdown`; a test compares it with the rules.\n\n"
        "`isoexec contract lint FILE... [--strict] [--format text|json|sarif] [--evidence DIR]... [--at TIME]` checks\n"
        "contract files and the evidence they name. Ids never change their meaning and are never used again.\n"
        "`tests/contracts/broken.py` holds a broken contract for every rule; run it to see each found.\n\n"
        "| exit code | meaning |\n|---|---|\n"
        "| 0 | no error; with `--strict`, no warning either |\n"
        "| 1 | a rule is broken |\n"
        "| 2 | wrong usage, or a file that is no contract (IX000) |\n\n"
    )
    rules = all_rules().values()
    table = "".join(f"| [{one.id}](#{one.id.lower()}) | {one.severity} | {one.title} |\n" for one in rules)
    body = "".join(
        f"\n## {one.id}\n\n{one.title}\n\n{one.why}\n\n- Breach: {one.breach}\n- Fix: {one.fix}\n"
        for one in rules
    )
    return f"{head}| rule | severity | what must hold |\n|---|---|---|\n{table}{body}"
