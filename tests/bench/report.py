# SPDX-License-Identifier: Apache-2.0
"""The table of `kernels.py`: rows kept as JSON, shown as Markdown with the goals first, and runs in pieces put together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "BANDWIDTH",
    "GOALS",
    "NAME",
    "TENSOR",
    "floor",
    "goals",
    "heading",
    "line",
    "markdown",
    "merged",
    "ordered",
    "write",
]

NAME = "kernels-h200"
BANDWIDTH, TENSOR = 4.8, 989.0  # TB/s and bf16 TFLOP/s of an H200 as its data sheet says
SAME = ("device", "torch", "cuda", "triton")  # of which rows of one table must be
Row = dict[str, Any]


def floor(row: Row) -> tuple[float, str]:
    """Microseconds that the chip needs at least, and for what."""
    moving, computing = row["nbytes"] / BANDWIDTH / 1e6, row["flops"] / TENSOR / 1e6
    return (computing, "tensor") if computing > moving else (moving, "bandwidth")


def ratio(row: Row) -> float:
    """Ours over the native op; above 1 is slower."""
    return float(row["us"]["ours"] / row["us"]["native"])


def roofline(row: Row) -> float:
    """The share of the chip's bandwidth or arithmetic, whichever is nearer."""
    return float(floor(row)[0] / row["us"]["ours"])


def of_copy(row: Row) -> float:
    """The share of the bandwidth that a copy of as many bytes reaches in the same run."""
    return float(row["us"]["copy"] / row["us"]["ours"])


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What is wanted of every row that `of` picks: `value` at most, or where `least` at least, `limit`."""

    name: str
    limit: float
    of: Callable[[Row], bool]
    value: Callable[[Row], float] = ratio
    least: bool = False

    def met(self, row: Row) -> bool:
        return self.value(row) >= self.limit if self.least else self.value(row) <= self.limit


def _is(*ops: str, low: int = 1, high: int = 1 << 30) -> Callable[[Row], bool]:
    return lambda row: row["op"] in ops and low <= row["rows"] <= high


LINEAR = ("linear", "linear_fp32", "row_linear")
GRADIENTS = ("linear_input_gradient", "linear_weight_gradient")
SHARED = ("row_parallel", "column_gradient")  # by `handoff.py`
SHARED_SP = tuple(f"{op}_sp" for op in SHARED)
GROUPED = ("grouped_linear", "grouped_linear_input_gradient", "grouped_linear_weight_gradient")
NORMS = ("rms_norm", "add_rms_norm", "head_norm", "rms_norm_centred", "add_rms_norm_centred")
FUSED = (*NORMS, "silu_mul", "rope")
GOALS = (
    Goal(name="linear, more than 128 rows, to the native op", limit=1.02, of=_is(*LINEAR, low=129)),
    Goal(name="linear, up to 128 rows, to the native op", limit=1.05, of=_is(*LINEAR, high=128)),
    Goal(name="gradients of the linear, to the native op", limit=1.02, of=_is(*GRADIENTS)),
    *(
        Goal(
            name=f"shared by GPUs, {name}, to the library and NCCL",
            limit=limit,
            of=_is(*ops, low=low, high=high),
        )
        for name, limit, ops, low, high in (
            ("8192 rows, whole results", 1.05, SHARED, 8192, 8192),
            ("8192 rows, each its rows", 1.10, SHARED_SP, 8192, 8192),
            ("up to 256 rows", 1.20, (*SHARED, *SHARED_SP), 1, 256),
        )
    ),
    *(
        Goal(
            name=f"{name}, 8192 rows, share of a copy's bandwidth",
            limit=0.85,
            of=_is(*ops, low=8192),
            value=of_copy,
            least=True,
        )
        for name, ops in (("RMSNorm", NORMS), ("SiLU-mul", ("silu_mul",)), ("RoPE", ("rope",)))
    ),
    Goal(
        name="RMSNorm, SiLU-mul, RoPE, up to 256 rows, to the native op", limit=1.0, of=_is(*FUSED, high=256)
    ),
    Goal(
        name="logprobs from logits, 1024 rows and more, share of the bandwidth",
        limit=0.80,
        of=_is("logprobs", low=1024),
        value=roofline,
        least=True,
    ),
    Goal(
        name="fused logprobs, to the product alone without its logits",
        limit=1.05,
        of=_is("linear_logprobs"),
    ),
    Goal(name="attention, 2048 to 32768 tokens, to the library's schedule", limit=1.05, of=_is("attention")),
    Goal(
        name="decode, 64 to 256 requests, to the library's schedule",
        limit=1.02,
        of=_is("attention_decode", low=64, high=256),
    ),
    Goal(name="decode, 1 request, to the library's schedule", limit=1.15, of=_is("attention_decode", high=1)),
    Goal(name="grouped product and gradients, to torch's", limit=1.02, of=_is(*GROUPED)),
    Goal(
        name="combine, 8192 tokens, share of the bandwidth",
        limit=0.85,
        of=_is("combine", "combine_shared", low=8192),
        value=roofline,
        least=True,
    ),
)


def goals(times: Iterable[Row]) -> list[str]:
    """The table of goals: the worst row of each, and how many rows meet it."""
    text = ["| goal | limit | worst | at | median | met by |", "|" + "---|" * 6]
    good = [row for row in times if {"ours", "native"} <= set(row["us"])]
    for goal in GOALS:
        rows = [row for row in good if goal.of(row) and (goal.value is not of_copy or "copy" in row["us"])]
        sign = ">=" if goal.least else "<="
        if not rows:
            text.append(f"| {goal.name} | {sign} {goal.limit:.2f} | not measured | | | |")
            continue
        ranked = sorted(rows, key=goal.value, reverse=not goal.least)
        worst, middle = ranked[0], ranked[len(ranked) // 2]
        met = sum(map(goal.met, rows))
        where = f"{worst['op']} {worst['shape']}, {worst['rows']} rows"
        text.append(
            f"| {goal.name} | {sign} {goal.limit:.2f} | {goal.value(worst):.2f} | {where} | {goal.value(middle):.2f} "
            f"| {met} of {len(rows)} |"
        )
    return text


COLUMNS = ("native", "noise", "ours", "ratio", "vllm", "leaf tree", "compiled", "of copy", "roofline", "by")
_LEGEND = """\
Microseconds, medians of CUDA-graph replays in turns over rotating inputs, so the L2 is cold. `native` is the stock torch op,
cuBLAS as shipped, or for fused logprobs the product alone; `noise` is a second graph of it over the first; `ratio` is ours
over native, above 1 is slower. `vllm` (its batch-invariant Triton kernels; of experts its fused kernel, in blocks as without
a tuned file; of attention FlashAttention-3 in one split), `leaf tree` (eight leaves of K, as published) and `compiled` (the
native op under Inductor) are over native too; on Hopper, vLLM's batch-invariant mode leaves a plain product to cuBLASLt and
not to the kernel timed here. `of copy` is our share of the bandwidth of a copy that moves as many bytes in the same run;
`roofline` is our share of 4.8 TB/s or 989 TFLOP/s, whichever is nearer, of the fewest bytes that must move and products that
must be made. `+grad` is forward and backward together. Products shared by GPUs are of `handoff.py`, next to the library's
product and NCCL. What attention's times are made of, and its gradients, are of `attention_hopper.py` and
`attention_backward.py`.
"""


def line(row: Row) -> str:
    """A row of the table."""
    us, shown = row["us"], dict[str, str]()
    native = us.get("native")
    shown["native"] = f"{native:.2f}" if native else row["absent"].get("native", "")
    if native:
        shown |= {
            name: f"{us[key] / native:.2f}"
            for name, key in (
                ("noise", "again"),
                ("ratio", "ours"),
                ("vllm", "vllm"),
                ("leaf tree", "leaf tree"),
                ("compiled", "compiled"),
            )
            if key in us
        }
    for name in ("vllm", "leaf tree", "compiled"):
        shown.setdefault(name, row["absent"].get(name, ""))
    shown["ours"] = f"{us['ours']:.2f}" if "ours" in us else row["absent"].get("ours", "")
    if "ours" in us:
        shown["of copy"] = f"{of_copy(row):.2f}" if "copy" in us else ""
        shown["roofline"], shown["by"] = f"{roofline(row):.2f}", floor(row)[1]
    notes = [shown.get("by", ""), row["provider"], "an older source" if row.get("older") else ""]
    shown["by"] = ", ".join(filter(None, notes))
    cells = [row["op"], row["shape"], str(row["rows"]), *(shown.get(name, "") for name in COLUMNS)]
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def ordered(times: list[Row]) -> list[Row]:
    """Rows by op and shape, as these first came, then by the number of rows."""
    ops = {name: i for i, name in enumerate(dict.fromkeys(row["op"] for row in times))}
    shapes = {name: i for i, name in enumerate(dict.fromkeys(row["shape"] for row in times))}
    return sorted(times, key=lambda row: (ops[row["op"]], shapes[row["shape"]], row["rows"]))


def heading() -> list[str]:
    """The table's first two lines."""
    head = ("op", "shape", "rows", *COLUMNS)
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]


def markdown(kept: dict[str, Any]) -> str:
    """The whole page."""
    text = ["# Times of the sm90 kernels", ""]
    text += ["- " + "; ".join(f"{k}: {v}" for k, v in run.items() if v) for run in kept["runs"]]
    text += ["", "## Goals", "", *goals(kept["times"]), "", "## Times", "", _LEGEND]
    return "\n".join([*text, *heading(), *map(line, ordered(kept["times"])), ""])


def write(folder: Path, kept: dict[str, Any], name: str = NAME) -> None:
    """Write both files, each whole or not at all."""
    for suffix, text in (("json", json.dumps(kept, indent=1) + "\n"), ("md", markdown(kept))):
        path = folder / f"{name}.{suffix}"
        beside = path.with_suffix(f".{suffix}.new")
        beside.write_text(text)
        beside.replace(path)


def _key(row: Row) -> tuple[Any, ...]:
    return row["op"], row["shape"], row["rows"]


def merged(every: list[dict[str, Any]], *, older: bool = False) -> tuple[dict[str, Any], list[str]]:
    """One table of several runs, of each row the last that was measured; and what was left out.

    Rows of a function whose source has changed since are left out, or with `older` marked. Raises `ValueError` where runs are of
    different machines.
    """
    kinds = [{k: run[k] for k in SAME} for one in every for run in one["runs"]]
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(f"runs of different machines are no one table: {kinds}")
    sources: dict[str, str] = {}
    for one in every:
        sources |= one["sources"]
    rows: dict[tuple[Any, ...], Row] = {}
    left = []
    for one in every:
        for row in one["times"]:
            if one["sources"][row["function"]] != sources[row["function"]]:
                if not older:
                    left.append(
                        f"{row['op']} {row['shape']} {row['rows']}: {row['function']} has changed since"
                    )
                    continue
                row["older"] = True
            rows[_key(row)] = row
    runs = [run for one in every for run in one["runs"]]
    return {"runs": runs, "sources": sources, "times": list(rows.values())}, left
