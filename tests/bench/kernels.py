# SPDX-License-Identifier: Apache-2.0
"""Times of every sm90 op on one GPU, next to the native op, vLLM's batch-invariant kernels and a tree of eight leaves.

`python tests/bench/kernels.py [--only OP,OP] [--seconds N]` times each op at the shapes of Qwen3-8B and Qwen3.5-35B-A3B, for 1
to 8192 rows, forward and, from 1024 rows, backward. It writes `kernels-h200.json` and `.md` to $OUT or the working directory
after each row, so a run that is cut keeps what it has; what matters most comes first. `--merge FILE ...` puts the JSON of several
runs together, without a GPU. `--only` takes ops or sections (`--list`). `--tune` measures tiles of the weights that
`kernels/linear/hopper/table.json` lacks, `--tune-products` those of gradients and continued chains, `--tune-all` all anew.
Nothing is timed where a function has neither a record nor a quick gate that holds. Needs torch and triton on a Hopper GPU, and of
this project only `isoexec.kernels` and `isoexec.contracts`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import experts  # type: ignore[import-not-found]  # beside this script, as are
import heads  # type: ignore[import-not-found]
import linears  # type: ignore[import-not-found]
import report  # type: ignore[import-not-found]
import rows  # type: ignore[import-not-found]
import sequences  # type: ignore[import-not-found]
import torch
import triton
from subjects import MODELS, AbsentError, Call, Model, Subject, vllm  # type: ignore[import-not-found]

from isoexec.contracts.evidence import default_store
from isoexec.kernels.gates.found import contracts_for, gate_for
from isoexec.kernels.gates.running import Job, State, jobs_of, proven, run_gates, single_thread
from isoexec.kernels.hopper.timing import capture, copies_for, graph_time, replay_times
from isoexec.kernels.linear.hopper import cublaslt, tuning
from isoexec.kernels.linear.hopper import table as linear_table
from isoexec.kernels.registry import source_digest

# sections in the order in which a short run needs them, and so the numbers of rows
SECTIONS: dict[str, Callable[[Model, int], Iterable[Subject]]] = {
    "linear": linears.subjects,
    "rows": rows.subjects,
    "logprobs": heads.subjects,
    "experts": experts.subjects,
    "attention": sequences.subjects,
    "others": lambda model, M: rows.others(M) if model is MODELS[0] else (),
}
ROWS = (8192, 1, 64, 16, 128, 1024)
FUNCTIONS = tuple(name for one in (linears, rows, heads, experts, sequences) for name in one.FUNCTIONS)
# constants of what no shipped contract binds
UNBOUND: dict[str, dict[str, str | int | bool]] = {
    "linear_logprobs.mma_blocks/1": {
        "step": 16,
        "accumulate": "float32",
        "block": 128,
        "vocab_leaves": heads.LEAVES,
    }
}
COMPILED = (64, 8192)  # rows at which the native op is compiled too
COPIED = 1024  # rows from which a copy is timed beside
SLOW_US = 3000.0  # a floor above which fewer replays are enough
START = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:5.0f} s]", *words, flush=True)


def every(rows_of: Iterable[int] = ROWS) -> Iterator[tuple[str, Subject]]:
    """All there is to time, with its section, in the order in which it is timed."""
    for section, subjects in SECTIONS.items():
        for M in rows_of:
            for model in MODELS:
                for one in subjects(model, M):
                    yield section, one


def chosen(words: list[str], rows_of: Iterable[int] = ROWS) -> list[Subject]:
    """What `--only` names, or everything; exits where a word names nothing."""
    found = list(every(rows_of))
    known = {name for section, one in found for name in (section, one.op, one.op.partition("+")[0])}
    if unknown := [word for word in words if word not in known]:
        raise SystemExit(f"no op or section {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return [
        one for section, one in found if not words or {section, one.op, one.op.partition("+")[0]} & set(words)
    ]


# Before anything is timed


def gated(functions: set[str]) -> tuple[dict[str, str], list[str]]:
    """How each function is known to hold, and what its quick gate finds where no record proves it in this environment."""
    names = [name for name in FUNCTIONS if name in functions]
    contracts = contracts_for("sm90")
    held: dict[str, str] = {}
    with single_thread():
        for name in names:
            jobs = jobs_of([name], "sm90", contracts, full=False)
            if jobs and proven(jobs, default_store(), now=time.time()):
                held[name] = "record"
    left = [name for name in names if name not in held]
    say("proven by records:", ", ".join(held) or "nothing", "| quick gates:", ", ".join(left) or "none")
    jobs = jobs_of(left, "sm90", contracts, full=False)
    for gate in (gate_for(name, "sm90") for name in left if name in UNBOUND):
        jobs += [
            Job(gate=gate, family=family, constants=UNBOUND[gate.function], full=False)
            for family in gate.families
        ]
    held |= dict.fromkeys(left, "quick gate")
    if not jobs:
        return held, []
    with tempfile.TemporaryDirectory() as folder:
        outcomes = list(run_gates(jobs, State(Path(folder)), fresh=True, said=lambda *_: None))
    return held, [f"{one.gate.function} {why}" for one in outcomes for why in one.failures]


def compile_beside(words: list[str], rows_of: list[int]) -> None:
    """Compile what will be timed into Triton's cache, in processes beside one another."""
    count = max(1, min(12, (os.cpu_count() or 2) - 2))
    command = [sys.executable, __file__, "--rows", *map(str, rows_of)]
    command += ["--only", ",".join(words)] if words else []
    children = [subprocess.Popen([*command, "--warm", f"{i}/{count}"]) for i in range(count)]
    bad = sum(child.wait() != 0 for child in children)
    say(f"compiled by {count} processes", f"({bad} of them ended badly)" if bad else "")


def warm(subjects: list[Subject], part: str) -> None:
    """Call ours and the leaf tree once for every `count`-th subject; what fails here fails again where it is timed."""
    index, count = map(int, part.split("/"))
    for one in subjects[index::count]:
        if one.nbytes > 4e9:
            continue  # by libraries, or by kernels that fewer rows have compiled
        try:
            inputs = (*one.make(), *one.shared())
            one.ours(*inputs)
            if "leaf tree" in one.peers:
                one.peers["leaf tree"](*inputs)
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - said, and said again in the table
            say("not compiled:", one.op, one.shape, one.rows, repr(error)[:200])
        inputs = ()
        torch.cuda.empty_cache()


# Times


def copier(nbytes: float, copies: int) -> Call:
    """A copy that moves `nbytes` in all, over rotating buffers."""
    count = min(copies, 8)
    half = [torch.empty(int(nbytes) // 2, dtype=torch.uint8, device="cuda") for _ in range(2 * count)]

    def call(i: int) -> None:
        half[2 * (i % count)].copy_(half[2 * (i % count) + 1])

    return call


def compiled(one: Subject, inputs: list[tuple[Any, ...]]) -> float:
    """Microseconds of the native op compiled for this shape."""
    torch._dynamo.reset()
    fast = torch.compile(one.native, dynamic=False)
    return graph_time(lambda i: fast(*inputs[i]), len(inputs))


def timed(one: Subject, *, inductor: bool = False) -> dict[str, Any]:
    """A row: microseconds of every call in turns, with cuBLAS as torch ships it but for ours; what is absent, and why."""
    copies = min(copies_for(max(1, int(one.nbytes))), one.most)
    shared = one.shared()
    inputs = [(*one.make(), *shared) for _ in range(copies)]
    calls: dict[str, Call] = {"native": one.native, "again": one.native, "ours": one.ours, **one.peers}
    absent: dict[str, str] = {}
    graphs: dict[str, Any] = {}
    claimed = cublaslt.switches()
    for name, call in calls.items():
        cublaslt.restore(claimed if name == "ours" else cublaslt.SHIPPED)
        try:
            graphs[name] = capture(partial(_on, call, inputs), copies)
        except AbsentError as why:
            absent[name] = str(why)
        except Exception as error:  # noqa: BLE001 - said in the table
            absent[name] = f"fails: {error!r:.200}"
        finally:
            cublaslt.restore(claimed)
    if one.copied and one.rows >= COPIED:
        graphs["copy"] = capture(copier(one.nbytes, copies), copies)
    row: dict[str, Any] = {
        **{k: getattr(one, k) for k in ("op", "shape", "rows", "function", "nbytes", "flops", "provider")},
        "absent": absent,
    }
    replays = 5 if report.floor(row)[0] * copies > SLOW_US else 9
    spans = replay_times(list(graphs.values()), copies, replays=replays)
    row["us"] = dict(zip(graphs, (round(us, 3) for us in spans), strict=True))
    if inductor and one.rows in COMPILED and not one.flops:
        try:
            row["us"]["compiled"] = round(compiled(one, inputs), 3)
        except Exception as error:  # noqa: BLE001 - said in the table
            absent["compiled"] = f"fails: {error!r:.200}"
    return row


def _on(call: Call, inputs: list[tuple[Any, ...]], i: int) -> Any:
    return call(*inputs[i])


def measured(
    subjects: list[Subject], kept: dict[str, Any], folder: Path, ends: float, *, inductor: bool
) -> list[str]:
    """Time one after the other and write after each, until the time ends; what failed, or was left out."""
    troubles = []
    print("\n".join(report.heading()))
    for at, one in enumerate(subjects):
        if time.monotonic() > ends:
            left = dict.fromkeys(f"{rest.op} {rest.rows}" for rest in subjects[at:])
            kept["runs"][-1]["left_out"] = f"{len(subjects) - at} rows, time was over"
            report.write(folder, kept)
            say("time was over before", ", ".join(left))
            break
        try:
            row = timed(one, inductor=inductor)
        except Exception as error:  # noqa: BLE001 - one op less, and said
            troubles.append(f"{one.op} {one.shape} {one.rows}: {error!r:.300}")
            say(troubles[-1])
            if "CUDA error" in str(error):
                return [*troubles, "the GPU's context is lost; start again with what is left"]
            continue
        finally:
            torch.cuda.empty_cache()
        troubles += [
            f"{one.op} {one.shape} {one.rows}: {name} {row['absent'][name]}"
            for name in ("native", "ours")
            if name in row["absent"]
        ]
        kept["times"].append(row)
        kept["runs"][-1]["seconds"] = round(time.monotonic() - START)
        print(report.line(row), flush=True)
        report.write(folder, kept)
    return troubles


def facts(words: list[str]) -> dict[str, Any]:
    """What the times are of."""
    driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        vllm("matmul_persistent")
        theirs = str(__import__("vllm").__version__)
    except AbsentError as why:
        theirs = str(why)
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": torch.cuda.get_device_name(0),
        "driver": subprocess.run(driver, capture_output=True, text=True, check=False).stdout.strip(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "vllm": theirs,
        "only": ", ".join(words),
    }


def merge(paths: list[Path], folder: Path, *, older: bool) -> int:
    kept, left = report.merged([json.loads(path.read_text()) for path in paths], older=older)
    report.write(folder, kept)
    print(f"{len(kept['times'])} rows of {len(paths)} runs in {folder / report.NAME}.md")
    for why in left:
        print("left out:", why)
    return 0


def tune(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure tiles and write them to the linear's table, a copy of which goes to the folder."""
    if arguments.tune or arguments.tune_all:
        tuning.extend(linear_table.PATH, say, every=arguments.tune_all)
    if arguments.tune_products or arguments.tune_all:
        names = tuple(arguments.weights)
        tuning.extend_products(
            linear_table.PATH, say, every=arguments.tune_all, names=names, ends=START + arguments.seconds
        )
    (folder / "table.json").write_text(linear_table.PATH.read_text())


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="OP,OP", help="ops or sections")
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=520, help="when to stop, from the start")
    parser.add_argument("--compiled", action="store_true", help="time the native op under Inductor too")
    parser.add_argument("--no-gates", action="store_true", help="time what nothing has proven here")
    parser.add_argument("--no-warm", action="store_true", help="do not compile beside one another first")
    parser.add_argument("--tune", action="store_true", help="measure few-row tiles the table lacks, and stop")
    parser.add_argument(
        "--tune-products", action="store_true", help="as --tune, of gradients and continued chains"
    )
    parser.add_argument("--tune-all", action="store_true", help="as both, of every weight anew")
    parser.add_argument("--weights", nargs="*", default=[], help="of --tune-products: how names start, as 8B")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="put runs together, and stop")
    parser.add_argument(
        "--older", action="store_true", help="of --merge: keep rows of sources that have changed since"
    )
    parser.add_argument("--list", action="store_true", help="print the ops, and stop")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = parsed()
    folder = Path(os.environ.get("OUT", "."))
    words = [word for part in arguments.only for word in part.replace(",", " ").split()]
    if arguments.merge:
        return merge(arguments.merge, folder, older=arguments.older)
    subjects = chosen(words, arguments.rows)
    if arguments.list:
        for section, one in dict.fromkeys((section, one.op) for section, one in every()):
            print(section, one)
        return 0
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("needs a GPU of compute capability 9.0", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    with torch.no_grad():
        run = (
            {} if arguments.warm else facts(words)
        )  # imports vLLM, which may flip a switch: before they are claimed
        cublaslt.claim()
        if arguments.warm:
            warm(subjects, arguments.warm)
            return 0
        say(run)
        cublaslt.probe()
        if arguments.tune or arguments.tune_products or arguments.tune_all:
            tune(arguments, folder)
            return 0
        if any(one.function in sequences.FUNCTIONS for one in subjects) and (why := sequences.missing()):
            run["without"] = f"attention: {why}"
            say("nothing of attention is timed:", why)
            subjects = [one for one in subjects if one.function not in sequences.FUNCTIONS]
        run["proven"] = "not asked in this run"
        if not arguments.no_gates:
            run["proven"], found = gated({one.function for one in subjects})
            if found:
                print("nothing is timed, for gates fail:", *found, sep="\n  ", file=sys.stderr)
                return 1
        if not arguments.no_warm:
            compile_beside(words, arguments.rows)
        sources = {name: source_digest(name, "sm90") for name in FUNCTIONS}
        kept = {"runs": [run], "sources": sources, "times": []}
        ends = START + arguments.seconds
        troubles = measured(subjects, kept, folder, ends, inductor=arguments.compiled)
    print("\n".join(report.goals(kept["times"])))
    for why in troubles:
        print("not as wanted:", why, file=sys.stderr)
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
