# SPDX-License-Identifier: Apache-2.0
"""The page of `topologies.py`: what is in its topologies.json, as tables."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["differing", "first_of", "markdown"]

_PARTS = ("generation", "score", "train", "sync", "probe", "step")


def markdown(found: Mapping[str, Any]) -> str:
    """The whole page."""
    lines = ["# Engines and trainers in every layout", ""]
    for run in found["runs"]:
        versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
        lines.append(
            f"- {run['started']} UTC, {run.get('seconds', 0)} s: {run['devices']} of {run['device']}; {versions}"
        )
    for model, of in found["models"].items():
        lines += ["", f"## {model}", "", *_bits(of), *_training(of)]
    lines += [*_schedules(found["schedules"]), *_steps(found["steps"]), *_faults(found["faults"])]
    if found["absent"]:
        lines += ["", "## Not run, or failed", ""]
        lines += [f"- {what}: {why}" for what, why in found["absent"].items()]
    return "\n".join([*lines, ""])


def _ordered(names: Iterable[str]) -> list[str]:
    """Layouts or pairs of them, those of fewer ranks first."""

    def size(name: str) -> list[tuple[int, str]]:
        return [
            (math.prod(int(n) for n in re.findall(r"(?:TP|PP|DP)(\d+)", one)), one)
            for one in name.split(" x ")
        ]

    return sorted(names, key=size)


def first_of(trained: Mapping[str, Any]) -> str:
    """The layout of fewest ranks, against which the others are held."""
    return _ordered(trained)[0]


def _bits(of: Mapping[str, Any]) -> list[str]:
    contract, native = of["bits"].get("contract", {}), of["bits"].get("native", {})
    pairs = [pair.split(" x ") for pair in {*contract, *native}]
    if not pairs:
        return []
    engines, trainers = (_ordered({pair[i] for pair in pairs}) for i in range(2))
    tokens = sorted({one["tokens"] for one in contract.values()})
    many = " to ".join(f"{n:,}" for n in dict.fromkeys((*tokens[:1], *tokens[-1:])))
    lines = [
        f"Weights: {len(of['weights'])} tensors, of one digest in every runtime.",
        "",
        f"Share of tokens with equal logprobs as integers under the contract, of {many} in each cell;",
        "in brackets natively: the share, mean and largest abs d in nats.",
        "",
        "| trainer | " + " | ".join(f"engine {name}" for name in engines) + " |",
        "|---|" + "---|" * len(engines),
    ]
    for trainer in trainers:
        names = [f"{engine} x {trainer}" for engine in engines]
        lines.append(f"| {trainer} | {' | '.join(_cell(contract.get(n), native.get(n)) for n in names)} |")
    return [*lines, ""]


def _cell(contract: Mapping[str, Any] | None, native: Mapping[str, Any] | None) -> str:
    said = f"{contract['share']:.6f}" if contract else "-"
    if contract and contract["equal"] != contract["tokens"]:
        said += f", {contract['tokens'] - contract['equal']:,} differ, {contract['max_abs_d']:.2g} at most"
    if native:
        said += f" ({native['share']:.6f}, {native['mean_abs_d']:.1e}, {native['max_abs_d']:.2g})"
    return said


def differing(trained: Mapping[str, Any], name: str) -> list[int]:
    """By step, how many tensors of a layout's master weights are not those of `first_of`."""
    first = trained[first_of(trained)]["masters"]
    own = trained[name]["masters"]
    return [
        sum(list(a[n]) != list(b.get(n, ())) for n in a) + len(b.keys() - a.keys())
        for a, b in zip(first, own, strict=True)
    ]


def _training(of: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for side, trained in of["training"].items():
        if not trained:
            continue
        first = first_of(trained)
        lines += [
            f"Training, {side}: clipped Adam steps on the same batches, master weights in fp32 against {first}.",
            "",
            "| trainer | tensors | differ after each step | last gradient norm | last loss | norms and losses |",
            "|---|---|---|---|---|---|",
        ]
        for name in _ordered(trained):
            one = trained[name]
            counts = ", ".join(map(str, differing(trained, name)))
            norm, loss = (float.fromhex(one[k][-1]) for k in ("norms", "losses"))
            same = all(one[k] == trained[first][k] for k in ("norms", "losses"))
            told = "-" if name == first else "equal" if same else "differ"
            lines.append(
                f"| {name} | {len(one['masters'][-1])} | {counts} | {norm:.6g} | {loss:.6g} | {told} |"
            )
        lines.append("")
    return lines


def _schedules(found: Mapping[str, Any]) -> list[str]:
    if not found:
        return []
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for ranks, times in found.items():
        for row in times:
            shape = row["shape"].partition(" on ")[0]
            rows.setdefault((row["op"], shape, row["rows"]), {})[ranks] = row
    degrees = list(found)
    lines = [
        "",
        "## Row-parallel schedules",
        "",
        "us of the library's product and NCCL, us of the schedule to take, their ratio; `handoff.py`, in CUDA graphs.",
        "",
        "| product | shape | rows | " + " | ".join(f"TP {n} | take" for n in degrees) + " |",
        "|---|---|---|" + "---|---|" * len(degrees),
    ]
    for (op, shape, count), at in sorted(rows.items()):
        cells = []
        for ranks in degrees:
            row = at.get(ranks)
            us = row["us"] if row else {}
            cells.append(
                f"{us['native']:.1f} / {us['ours']:.1f} = {us['ours'] / us['native']:.2f}x | {row['provider']}"
                if row
                else "- | -"
            )
        lines.append(f"| {op} | {shape} | {count:,} | {' | '.join(cells)} |")
    return lines


def _steps(found: Mapping[str, Any]) -> list[str]:
    if not found:
        return []
    lines = [
        "",
        "## A step at each degree",
        "",
        "`step.py`, engine and trainer of so many ranks on the same GPUs; seconds, medians.",
        "",
        "| ranks | side | " + " | ".join(_PARTS) + " | x native |",
        "|---|---|" + "---|" * (len(_PARTS) + 1),
    ]
    for ranks, sides in found.items():
        native = sides.get("native") or {}
        for side, m in sides.items():
            if not m:
                lines.append(f"| {ranks} | {side} |" + " - |" * (len(_PARTS) + 1))
                continue
            over = f"{m['step'] / native['step']:.3f}" if native else "-"
            lines.append(f"| {ranks} | {side} | {' | '.join(f'{m[p]:.3f}' for p in _PARTS)} | {over} |")
    return lines


def _faults(found: Mapping[str, Any]) -> list[str]:
    if not found:
        return []
    lines = ["", f"## Broken on purpose, {found['ranks']} ranks", ""]
    for name, one in found.items():
        if isinstance(one, dict):
            said = f"not caught: {one['absent']}" if "absent" in one else f"{one['verdict']}, {one['cause']}"
            lines += [f"- {name}: {said}", *(f"  - {line}" for line in one.get("lines", []))]
    return lines
