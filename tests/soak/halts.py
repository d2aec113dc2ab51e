# SPDX-License-Identifier: Apache-2.0
"""Stops real jobs in every way, and measures how long it takes, how many steps still run, and whether the checkpoint holds.

    .venv/bin/python tests/soak/halts.py [--out FILE.md] [--only PART] [CASE ...]

Parts: faults (torchrun and bare ranks; as root, for disks and clocks: mount, losetup, libfaketime), ray (RAY_PYTHON: a Python
with `ray[default]` that finds torch and this package's dependencies too), slurm (slurmd, slurmctld, slurm-client, munge),
kubernetes (kubectl, against an API that stands in), vllm. What is asked for and cannot run here is a row that says why, and
fails. Each case is one line of JSON; --out writes them as a table. Exit code 1 when a case does not end as it must.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "halting"))

from stage import Row  # type: ignore[import-not-found]  # beside this script, in halting/

PARTS = {
    "faults": "faults",
    "ray": "on_ray",
    "slurm": "on_slurm",
    "kubernetes": "on_kubernetes",
    "vllm": "on_vllm",
}


def chosen(only: list[str], wanted: list[str]) -> Iterator[tuple[str, Any]]:
    for part in only or PARTS:
        module = importlib.import_module(PARTS[part])
        for name in module.CASES:
            if not wanted or name in wanted:
                yield name, module


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    steps = "/".join(map(str, row["steps_after_verdict"]))
    if row["steps_after_fence"] is not None:
        steps += f", {row['steps_after_fence']} after the fence"
    went_on = "goes on" if row["starts"] else "-"
    seconds = went_on if row["seconds_to_stop"] is None else f"{row['seconds_to_stop']:.2f}"
    if row["seconds_to_fence"] is not None:
        seconds += f" (fence {row['seconds_to_fence']:.2f})"
    happened = "; ".join(
        filter(None, [row["happened"], row["rule"] and f"rule {row['rule']}", " > ".join(row["stages"])])
    )
    wrong = "; ".join(row["wrong"]) or "as it must"
    cells = [row["case"], row["asked"], happened, seconds, steps, row["checkpoint"], row["cleared"], wrong]
    return "| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |"


HEAD = """\
| case | asked | what happened | verdict to stop, s | steps begun after it, by rank | checkpoint | cleared | judged |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Stop real jobs in every way.")
    parser.add_argument("case", nargs="*", help="default: all")
    parser.add_argument("--only", action="append", default=[], choices=list(PARTS), help="only this part")
    parser.add_argument("--out", type=Path, help="write the table here too")
    given = parser.parse_args(argv)
    lines, good = [HEAD], True
    for name, module in chosen(given.only, given.case):
        with tempfile.TemporaryDirectory(prefix="isoexec-halts-") as folder:
            try:
                row = module.run_case(name, Path(folder))
            except Exception as error:  # noqa: BLE001 - one case that does not come up is a row that fails
                traceback.print_exc()
                row = Row(case=name, asked="", happened="", wrong=[f"did not run: {error}"[:600]])
        good &= not row.wrong
        print(json.dumps(row.to_dict()), flush=True)
        lines.append(line(row.to_dict()))
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
