# SPDX-License-Identifier: Apache-2.0
"""Row-parallel products on two GPUs of one host: which schedule and which tiles, in one call.

`python tests/bench/handoff.py [--shipped] [--seconds 240] [--gpus 2] [--only PATTERN]` starts one process a GPU, checks
every candidate's bits against one GPU over the whole K before it is timed and again after its replays, and times it in CUDA
graphs beside the library's product and NCCL. A candidate that does not compile, times out or ends the processes is left out
and said; the processes are started again without it. Writes `handoff.md` and `handoff.json` (the best of each, which
`kernels.py --merge` puts into the table), `handoff-all.json`, `handoff-table.json` (a new
`kernels/linear/hopper/handoff/table.json`) and the log `handoff.jsonl` to $OUT or the working directory. `--shipped` tries
only what the checked-in table chooses, in memory of the size that a group gets, and so times what `row_linear` runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import report as page  # type: ignore[import-not-found]  # beside this script
import torch
from handoff_work import LOG, OUT, work  # type: ignore[import-not-found]

from isoexec.kernels.linear.hopper.handoff.schedule import PATH
from isoexec.kernels.registry import source_digest

# ops of the table, by product and form
OPS = {
    ("row", "all"): "row_parallel",
    ("row", "rows"): "row_parallel_sp",
    ("gradient", "all"): "column_gradient",
    ("gradient", "rows"): "column_gradient_sp",
    ("columns", "all"): "row_parallel_by_columns",
    ("columns", "rows"): "row_parallel_by_columns_sp",
}
FUNCTION = "linear.mma_chain/1"
SILENCE = 90  # seconds without a word after which the processes are started again
START = time.monotonic()


def last_tried() -> str | None:
    lines = [json.loads(line) for line in LOG.read_text().splitlines()] if LOG.exists() else []
    for line in reversed(lines):
        if "trying" in line:
            return str(line["trying"])
        if "schedule" in line:
            return None
    return None


def finished() -> bool:
    return LOG.exists() and '"finished": true' in LOG.read_text()


def grown() -> tuple[int, float]:
    return (LOG.stat().st_size if LOG.exists() else 0), time.monotonic()


def table_of(best: Iterable[dict[str, Any]], facts: dict[str, Any], gpus: int) -> dict[str, Any]:
    """The best schedules as rows of the table of all kernels; bytes and products are of one GPU."""
    times = []
    for d in best:
        M, N, K = d["rows"], d["N"], d["K"]
        results = M * N if d["form"] == "all" else M * N // gpus
        times.append(
            {
                "op": OPS[d["product"], d["form"]],
                "shape": f"{d['case']} {N}x{K} on {gpus} GPUs",
                "rows": M,
                "function": FUNCTION,
                "nbytes": 2.0 * ((N * K + M * K) / gpus + results),
                "flops": 2.0 * M * N * K / gpus,
                "provider": d["schedule"],
                "absent": {},
                "us": {"native": d["native"], "ours": d["us"]},
            }
        )
    digest = source_digest(FUNCTION, "sm90")
    return {"runs": [facts], "sources": {FUNCTION: digest}, "times": page.ordered(times)}


def reported(gpus: int, shipped: bool) -> None:
    lines = [json.loads(line) for line in LOG.read_text().splitlines()]
    facts: dict[str, Any] = {}
    for line in lines:
        facts |= {
            k: line[k]
            for k in ("device", "torch", "cuda", "triton", "nccl", "gpus", "date", "link", "lost")
            if k in line
        }
    timed = [line for line in lines if "schedule" in line]
    good = [d for d in timed if d.get("us") and not d["differ"] and not d["differ_after"]]
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for d in good:
        key = (d["product"], d["form"], d["case"], d["N"], d["K"], d["rows"])
        if key not in best or d["us"] < best[key]["us"]:
            best[key] = d
    shown = table_of(best.values(), facts, gpus)
    page.write(OUT, shown, "handoff")
    print("\n".join([*page.goals(shown["times"]), *page.heading(), *map(page.line, shown["times"])]))
    blind = sorted({f"{d['product']} {d['case']} {d['rows']}" for d in best.values() if not d["control"]})
    print("adding the ranks' parts differs in every case" + (f" but {', '.join(blind)}" if blind else ""))
    bad = [d for d in timed if d not in good]
    for d in bad:
        why = d.get("trouble") or f"differ {d.get('differ')}, after replays {d.get('differ_after')}"
        print("left out:", d["product"], d["case"], d["form"], d["rows"], d["schedule"], why)
    for line in lines:
        if "left_out" in line:
            print("left out:", line["left_out"], line["why"])
    (OUT / "handoff-all.json").write_text(json.dumps({**facts, "times": timed}, indent=1) + "\n")
    print("link GB/s:", facts.get("link"), "| lost peer:", facts.get("lost"))
    if shipped:
        return
    table = json.loads(PATH.read_text())
    kept = [e for e in table["products"] if (e["N"], e["K"], e["ranks"]) == (0, 0, 0)]
    groups: dict[tuple[Any, ...], list[tuple[int, dict[str, Any]]]] = {}
    for (product, form, case, N, K, M), d in best.items():
        groups.setdefault((product, form, N, K, case), []).append((M, d))
    for (product, form, N, K, case), steps in groups.items():
        steps.sort(key=lambda one: one[0])
        limits = [M for M, _ in steps[:-1]] + [1 << 30]
        entry = {"product": product, "form": form, "name": case, "N": N, "K": K, "ranks": gpus}
        entry["steps"] = [
            {"up_to": limit, "us": round(d["us"], 1), "native_us": d["native"], "schedule": d["made"]}
            for limit, (_, d) in zip(limits, steps, strict=True)
        ]
        kept.append(entry)
    measured = ", ".join(str(facts.get(k)) for k in ("date", "device", "torch", "triton"))
    table |= {"measured": measured, "products": kept}
    (OUT / "handoff-table.json").write_text(json.dumps(table, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=240, help="when to stop trying candidates")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--only", default="", help="cases whose name and product contain this")
    parser.add_argument("--shipped", action="store_true", help="only what the checked-in table chooses")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        return work(arguments)
    if torch.cuda.device_count() < arguments.gpus:
        print(f"needs {arguments.gpus} GPUs, found {torch.cuda.device_count()}", file=sys.stderr)
        return 2
    LOG.unlink(missing_ok=True)
    ended = START + arguments.seconds
    while not finished() and time.monotonic() < ended - 15:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(arguments.gpus),
        ]
        left = ended - time.monotonic()
        command += [str(Path(__file__).resolve()), "--work", "--seconds", str(left), "--only", arguments.only]
        command += ["--shipped"] if arguments.shipped else []
        process = subprocess.Popen(command)
        size, since = grown()
        while process.poll() is None and not finished():
            time.sleep(0.5)
            if grown()[0] != size:
                size, since = grown()
            if time.monotonic() - since > SILENCE or time.monotonic() > ended + 60:
                process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        if not finished():
            culprit = last_tried() or "start"
            with LOG.open("a") as file:
                file.write(
                    json.dumps({"left_out": culprit, "why": "the processes ended or hung in it"}) + "\n"
                )
            if culprit in ("start", "build", "first calls", "link rates", "lost peer"):
                print("the processes ended outside any candidate:", culprit, file=sys.stderr)
                break
    if not LOG.exists():
        return 1
    reported(arguments.gpus, arguments.shipped)
    return 0


if __name__ == "__main__":
    sys.exit(main())
