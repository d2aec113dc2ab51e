# SPDX-License-Identifier: Apache-2.0
"""Tables and texts of `isoexec gate`: what there is, what a run found, what a record says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from isoexec.contracts.evidence import FAMILIES, Check, EvidenceRecord
from isoexec.kernels.gates.checking import Value
from isoexec.kernels.gates.degrees import lacking, said
from isoexec.kernels.gates.running import Outcome

__all__ = ["constants_text", "counts", "gates_table", "outcome_lines", "record_text", "records_table"]

SHORT = {
    "conformance": "conf",
    "case_parity": "cases",
    "batch_invariance": "batch",
    "partition_invariance": "ranks",
    "resume_exactness": "resume",
    "degenerate_shapes": "edges",
    "rerun_determinism": "rerun",
    "backward": "grad",
}


def counts(number: int) -> str:
    """An element count as people read it."""
    return f"{number:,}"


def constants_text(constants: Mapping[str, Value]) -> str:
    """Constants on one line."""
    return ", ".join(f"{name} {value}" for name, value in sorted(constants.items())) or "none"


def gates_table(rows: Sequence[tuple[str, str, tuple[str, ...], int, str]]) -> Table:
    """Rows of (function, provider, families, sets of constants, newest evidence)."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("function", "provider", *SHORT.values()):
        table.add_column(name, no_wrap=True)
    table.add_column("constants", justify="right")
    table.add_column("evidence", no_wrap=True)
    for function, provider, families, sets, evidence in rows:
        marks = ["yes" if family in families else "-" for family in FAMILIES]
        table.add_row(function, provider.removeprefix("isoexec."), *marks, str(sets), evidence)
    return table


def outcome_lines(outcome: Outcome) -> list[str]:
    """What a gate found: one line a check, with its elements and each control."""
    lines = []
    for check in outcome.checks:
        controls = ", ".join(f"{one.name} {counts(one.differing)}" for one in check.controls)
        verdict = "holds" if not check.failures() else "FAILS: " + "; ".join(check.failures())
        lines.append(
            f"  {check.family:<21} {constants_text(check.constants)}: {counts(check.elements)} elements, "
            f"{counts(check.differing)} differ; controls differ: {controls or 'none planted'}; {verdict}"
        )
        if missing := said(lacking(outcome.gate, check)):
            lines.append(
                f"    NOT COVERED: {missing}: there are not that many ranks here; the record lacks them until "
                "`isoexec gate run --extend` is run where there are"
            )
    return [*lines, *(f"  FAILS: {why}" for why in outcome.broken)]


def records_table(rows: Sequence[tuple[str, EvidenceRecord | None, str]]) -> Table:
    """Rows of (digest, record or None, what is wrong with it or "")."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("digest", "function", "provider", "arch", "profile", "elements", "expires", ""):
        table.add_column(name, no_wrap=name != "", justify="right" if name == "elements" else "left")
    for digest, record, wrong in rows:
        if record is None:
            table.add_row(digest[:19], "", "", "", "", "", "", wrong)
        else:
            table.add_row(
                digest[:19],
                record.function,
                record.provider.name.removeprefix("isoexec."),
                record.arch,
                record.profile,
                counts(record.elements),
                record.expires[:10],
                wrong,
            )
    return table


def record_text(record: EvidenceRecord, signers: frozenset[str]) -> str:
    """A record as people read it."""
    provider = record.provider
    what = provider.source if provider.kind == "kernel" else provider.version
    lines = [
        record.digest,
        f"  function     {record.function} on {record.arch}",
        f"  provider     {provider.name}, {provider.kind} {what}"
        + (f", {constants_text(provider.settings)}" if provider.settings else ""),
        f"  gate         {record.gate}, {record.profile}",
        f"  made         {record.made}, expires {record.expires}",
        "  environment  "
        + ", ".join(f"{name} {value}" for name, value in sorted(record.environment.items())),
        f"  signed by    {', '.join(sorted(signers)) or 'nobody'}",
        f"  elements     {counts(record.elements)} compared as integers, in {len(record.checks)} checks",
    ]
    for check in sorted(record.checks, key=_order):
        lines.append(f"  {check.family} ({constants_text(check.constants)}): {FAMILIES[check.family]}")
        lines.append(f"    {counts(check.elements)} elements, {counts(check.differing)} differ")
        for name, values in sorted(check.domain.items()):
            lines.append(f"    {name:<12} {', '.join(str(v) for v in sorted(values, key=_numbers_first))}")
        lines += [
            f"    control {one.name}: {counts(one.differing)} of {counts(one.elements)} differ"
            for one in check.controls
        ]
    return "\n".join(lines)


def _order(check: Check) -> tuple[int, str]:
    return list(FAMILIES).index(check.family), constants_text(check.constants)


def _numbers_first(value: Value) -> tuple[int, int, str]:
    return (0, int(value), "") if isinstance(value, int) else (1, 0, value)
