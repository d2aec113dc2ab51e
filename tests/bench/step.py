# SPDX-License-Identifier: Apache-2.0
"""Times a synchronous RL step (generate, score, train, sync) natively and under the contract, in turns, on the same prompts.

    python tests/bench/step.py --tiny --seconds 120                       # here, on the CPU's adapters
    python tests/bench/step.py --model qwen3-0.6b --seconds 500           # one H200
    python tests/bench/step.py --model qwen3-8b --layers 12 --bits 100000 --seconds 500

Columns: `native`; `contract`; `contract+skip`, whose trainer scores one sequence in `--one-in` and takes the rollout's logprobs
for the others (`isoexec.probes.skip`); `invariant`, vLLM's batch-invariant mode before the native trainer. Each side's engine and
trainer are processes of their own, for what they switch is process state. Sides take turns, the order turned in each round, and
stay on the GPU together where `--resident` says so: otherwise a side ends its processes before the next one starts. The first
step of a side's processes warms up and is not counted, nor are those in which the skip proves itself. `--generation` starts no
trainer: a step is then its generation alone, and there is room for deeper models. `--bits N` then compares at
least N sampled tokens, prompts of 16 to 4096, responses to 2048, batches of 1 to 256, rollout against trainer as integers,
natively and under the contract.

`--faults kernel,stale-weights,kept-cache,claim` breaks a promise a time, as `isoexec demo --fault` does: a kernel is replaced,
a sync is missed, a prefix cache outlives one, or the trainer's degree is outside the claim; `topology`, a live degree, wants
`--trainer-tp 2`, and `one-rank`, a kernel of the engine's last rank alone, `--engine-tp 2`. Each must be caught by its rule and
the job halted, or refused before it samples; anything else is a failure.

Results are written after each turn to step.json and step.md in $OUT (or `--out`). A side that fails is named there with its
error, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

if importlib.util.find_spec("isoexec") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".src"))

from sampled import (  # type: ignore[import-not-found]  # beside this script
    LONGEST,
    MODELS,
    MOST,
    TINY,
    Tally,
    batches,
    scored,
)

from isoexec.adapters.demo.faults import FAULTS, edited_contract
from isoexec.adapters.demo.job import Halted, Job, Layout
from isoexec.adapters.demo.phases import Stage, fault_phase
from isoexec.adapters.demo.processes import RemoteError
from isoexec.adapters.demo.profiling import KINDS
from isoexec.adapters.demo.services import Daemon
from isoexec.adapters.demo.task import Task
from isoexec.adapters.demo.tiny import make_qwen3, write_config
from isoexec.adapters.vllm.engines import sized_cache
from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.schema import library

__all__ = ["Bench", "bits", "main", "markdown", "medians", "names", "require_known"]

GIB = 1 << 30
SIDES = ("native", "contract", "contract+skip", "invariant")
PARTS = ("generation", "score", "train", "sync", "probe", "step")
_FAULTS = ("kernel", "one-rank", "stale-weights", "kept-cache", "claim", "topology")
_LR = 1e-6  # no step may move random weights to where logits have no numbers
_PROVING = 30.0  # seconds, at most, until the skip may begin: a step is judged a while after it
RAW = {"logprobs_mode": "raw_logprobs"}  # at temperature 1 the same numbers, and the engine's default


def _profiler(folder: Path) -> dict[str, Any]:
    return {
        "profiler_config": {
            "profiler": "torch",
            "torch_profiler_dir": str(folder),
            "torch_profiler_with_stack": False,
        }
    }


class Bench:
    """The sides of one run, and what they have measured."""

    def __init__(self, args: argparse.Namespace, work: Path, daemon: Daemon, out: Path) -> None:
        self.args, self.work, self.daemon, self.out = args, work, daemon, out
        self.started = time.monotonic()
        self.found: dict[str, Any] = {
            "what": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
            "host": platform.node(),
            "python": platform.python_version(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
            "sides": {side: {"steps": [], "absent": None} for side in args.sides},
            "bits": {},
            "faults": {},
        }
        if args.tiny:
            self.model, stem = make_qwen3(work / "model", seed=20, **TINY), "qwen3-dense"
        else:
            sizes, stem = MODELS[args.model]
            sizes = {**sizes, **({"layers": args.layers} if args.layers else {})}
            self.model = work / "model"
            self.model.mkdir(parents=True)
            import torch

            write_config(self.model, **sizes, max_positions=8192, dtype=torch.bfloat16)
        self.contract = args.contract or library(f"{stem}-{'cpu' if args.tiny else 'sm90'}")
        self.task = Task(
            vocab=TINY["vocab"] if args.tiny else sizes["vocab"],
            prompts=args.prompts,
            group=args.group,
            prompt_lengths=(args.prompt[0], args.prompt[1]),
            response=args.response,
        )
        self._jobs: dict[str, Job] = {}
        self._starting: dict[str, Future[None]] = {}
        self._stack = ExitStack()
        self._next: dict[str, int] = {}
        self._opened = 0

    @property
    def left(self) -> float:
        return float(self.args.seconds - (time.monotonic() - self.started))

    def layout(self, job: str) -> Layout:
        """How a job's runtimes are laid out on this machine."""
        args = self.args
        plain = Layout(
            engine_tp=args.engine_tp,
            trainer_tp=args.trainer_tp,
            sequence_parallel=args.sequence_parallel,
            one_in=args.one_in,
            transport=args.transport,
            engine=RAW,
        )
        if not args.tiny:
            plain = replace(
                plain,
                gpu=True,
                microbatch=args.microbatch,
                random_weights=True,
                fused_attention=not args.unfused,
                graphs=job in args.graphs,
                engine={
                    **RAW,
                    "load_format": "dummy",
                    **sized_cache(int(args.kv_gib * GIB)),
                    **(_profiler(self._folder(job)) if "torch" in args.profile else {}),
                },
            )
        env = {"VLLM_BATCH_INVARIANT": "1"} if job == "invariant" else {}
        if args.profile:  # sends functions to the workers, which are processes of this job
            env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        return replace(plain, engine_env=env)

    def open(self, job: str, task: Task, *, layout: Layout | None = None) -> Job:
        """Start a job's runtimes."""
        return self._stack.enter_context(self._made(job, task, layout or self.layout(job)))

    def _made(self, job: str, task: Task, layout: Layout, *, engine_model: Path | None = None) -> Job:
        self._opened += 1
        return Job(
            run=f"bench-{job}-{self._opened}",
            layout=layout,
            model=self.model,
            engine_model=engine_model,
            work=self.work,
            state_dir=self.daemon.state.path,
            contract=self.contract if job == "contract" else None,
            regime="bitwise" if job == "contract" else "bf16_dense",
            task=task,
            lr=_LR,
        )

    def leave(self) -> None:
        """End every job's processes, each after a profile where one is asked for."""
        for name, job in self._jobs.items():
            if self.args.profile:
                self._profile(job, name)
        self.close()

    def close(self) -> None:
        """End every job's processes."""
        self._stack.close()
        self._jobs.clear()

    def _job(self, side: str) -> Job:
        name = side.partition("+")[0]
        if name in self._starting:  # it may have failed
            self._starting.pop(name).result()
        if name not in self._jobs:
            if not self.args.resident:
                self.leave()
            self._start(name)
        return self._jobs[name]

    def _start(self, name: str) -> None:
        skips = name == "contract" and "contract+skip" in self.args.sides
        engine = self._eager_census() if skips and not self.args.tiny else None
        if self.args.generation:
            made = self._made(name, self.task, self.layout(name), engine_model=self.model)
            job = self._stack.enter_context(made)
        else:
            job = self.open(name, self.task)
        if skips:
            self.found["census"] = job.allow_skip(engine=engine)
        self._next[name] = 0
        self._step(job, name, skip=False)  # warms up
        self._jobs[name] = job

    def _start_all(self) -> None:
        """Start the processes of every side at once; a turn of one that failed says so."""
        with ThreadPoolExecutor() as pool:
            jobs = dict.fromkeys(side.partition("+")[0] for side in self.args.sides)
            self._starting = {name: pool.submit(self._start, name) for name in jobs}

    def _step(self, job: Job, name: str, *, skip: bool) -> dict[str, Any]:
        step = self._next[name]
        self._next[name] += 1
        if self.args.generation:
            rollout = job.sample(step, watched=False, rescore=0)
            seconds = dict.fromkeys(PARTS, 0.0) | rollout["seconds"]
            seconds["step"] = seconds["generation"]
            tokens = sum(map(len, rollout["responses"]))
            return {"seconds": seconds, "tokens": tokens, "scored": 0, "skip": None}
        return asdict(job.step(step, rescore=0, skip=skip))

    def _profile(self, job: Job, name: str) -> None:
        """A step under each profiler; tables of every process to ``profile/NAME``, the engine's own beside them."""
        for kind in self.args.profile:
            for remote in (*job.trainers, job.engine):
                remote.profile(kind, self._folder(name))
            self._step(job, name, skip=False)
            for remote in (*job.trainers, job.engine):
                remote.profile(None, self._folder(name))

    def _folder(self, name: str) -> Path:
        made = (self.out / "profile" / name).resolve()
        made.mkdir(parents=True, exist_ok=True)
        return made

    def _eager_census(self) -> bool:
        """Of an engine like the contract's that does not compile its steps."""
        layout = self.layout("contract")
        eager = replace(layout, engine={**layout.engine, "enforce_eager": True})
        with self._made("contract", self.task, eager, engine_model=self.model) as job:
            return bool(job.engine.call("census"))

    def turn(self, side: str) -> None:
        """One turn of a side: a measured step, or as many as `--steps` says."""
        entry = self.found["sides"][side]
        if entry["absent"] is not None:
            return
        try:
            job, skip = self._job(side), "skip" in side
            name = side.partition("+")[0]
            deadline = time.monotonic() + _PROVING
            taken = 0
            while taken < self.args.steps:
                row = self._step(job, name, skip=skip)
                if skip and not taken and row["skip"] is not None and time.monotonic() < deadline:
                    continue  # what it waits for is said beside the table, should it wait too long
                row["memory"] = job.memory()
                entry["steps"].append(row)
                taken += 1
        except (RemoteError, IsoExecError, Halted) as error:
            entry["absent"] = f"{type(error).__name__}: {error}"
            print(f"{side}: {entry['absent']}", file=sys.stderr, flush=True)
            self.close()
        self.write()

    def rounds(self, seconds: float) -> None:
        """Turns until the time is over or every side has `--rounds` of them."""
        sides = list(self.args.sides)
        if self.args.resident and self.args.rounds:
            self._start_all()
        for number in range(self.args.rounds):
            at = number % len(sides)
            order = sides[at:] + sides[:at]
            if not self.args.resident:  # a job's two columns share its processes
                order.sort(
                    key=lambda side: [s.partition("+")[0] for s in sides].index(side.partition("+")[0])
                )
            for side in order:
                if time.monotonic() - self.started > seconds:
                    self.leave()
                    return
                self.turn(side)
        self.leave()

    def write(self) -> None:
        """Write what is known so far."""
        self.found["seconds"] = round(time.monotonic() - self.started, 1)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "step.json").write_text(json.dumps(self.found, indent=1) + "\n")
        (self.out / "step.md").write_text(markdown(self.found))


def bits(bench: Bench, job: str) -> dict[str, Any]:
    """Sample at least `--bits` tokens in a job and compare each with the trainer's score, as integers."""
    args = bench.args
    prompt, response = LONGEST[args.tiny]
    # the longest batch decides how much the engine takes at once
    task = replace(
        bench.task, prompts=MOST[args.tiny], group=1, prompt_lengths=(4, prompt), response=response
    )
    tally = Tally()
    running = bench.open(job, task, layout=replace(bench.layout(job), scores_only=True))
    for number, (prompts, lengths) in enumerate(batches(bench.task.vocab, tiny=args.tiny)):
        if tally.tokens >= args.bits or (bench.left < 20 and tally.tokens):
            break
        rollout = running.engine.call(
            "generate", prompts, step=number, version=running.version, length=lengths, watched=False, logprobs=True,
            seed=number if running.layout.gpu else 0,
        )  # fmt: skip
        own = scored(
            running.trainers,
            prompts,
            rollout["responses"],
            tiny=args.tiny,
            step=number,
            version=running.version,
        )
        for theirs, ours in zip(rollout["logprobs"], own, strict=True):
            tally.add(theirs, ours)
    bench.close()
    return tally.result()


def fault(bench: Bench, name: str) -> dict[str, Any]:
    """Plant a fault into a job under the contract; IsoExecError unless it is caught as its kind must be."""
    layout = replace(bench.layout("contract"), one_in=1)
    stage = Stage(
        daemon=bench.daemon, prometheus=None, model=bench.model, work=bench.work, contract=bench.contract,
        tick=lambda _name, _done, _of: None, lr=_LR,
    )  # fmt: skip
    if name != "claim":
        found = fault_phase(stage, FAULTS[name], layout, steps=4, regime="bitwise")
        return {"verdict": found.verdict, "cause": found.cause, "lines": found.lines}
    other = 2 * layout.trainer_tp
    contract = edited_contract(
        bench.contract, bench.work / "claim.yaml", {"claims.topology.trainer.TP": {"pinned": other}}
    )
    try:
        with stage.job("bench-claim", layout, contract=contract, regime="bitwise"):
            raise IsoExecError(
                f"claim: wanted a trainer of TP {layout.trainer_tp} refused, claimed {other}; it started"
            )
    except RemoteError as error:
        if error.kind != "TopologyError":
            raise
        return {"verdict": "refused", "cause": str(error), "lines": ["refused before a token was sampled"]}


def markdown(found: dict[str, Any]) -> str:
    """The tables: medians of a side's steps."""
    lines = [
        f"# A synchronous RL step, {found['what']['model'] if not found['what']['tiny'] else 'tiny model on CPU'}",
        "",
        f"{found['started']} UTC, {found.get('seconds', 0)} s. Seconds, medians of the steps; GiB.",
        "",
        "| side | steps | "
        + " | ".join(PARTS)
        + " | x native | tokens/s sampled | tokens/s step | scored | trainer | engine |",
        "|---|" + "---|" * (len(PARTS) + 7),
    ]
    native = medians(found["sides"].get("native", {}).get("steps", []))
    notes = []
    for side, entry in found["sides"].items():
        if entry["absent"] is not None:
            notes.append(f"- {side}: {entry['absent']}")
        steps = entry["steps"]
        if not steps:
            lines.append(f"| {side} | 0 |" + " - |" * (len(PARTS) + 6))
            continue
        m = medians(steps)
        over = f"{m['step'] / native['step']:.3f}" if native else "-"
        shown = " | ".join(f"{m[part]:.3f}" for part in PARTS)
        lines.append(
            f"| {side} | {len(steps)} | {shown} | {over} | {m['tokens'] / m['generation']:,.0f} | "
            f"{m['tokens'] / m['step']:,.0f} | {m['scored']:.0f} | {m['trainer'] / GIB:.1f} | {m['engine'] / GIB:.1f} |"
        )
        whys = sorted({row["skip"] for row in steps if row["skip"] and "skip" in side})
        notes += [f"- {side}, a step scored whole: {why}" for why in whys]
    if found["bits"]:
        lines += [
            "",
            "| side | tokens | sequences | bitwise equal | mean abs d | max abs d |",
            "|---|---|---|---|---|---|",
        ]
        for side, b in found["bits"].items():
            if "absent" in b:
                notes.append(f"- bits, {side}: {b['absent']}")
                continue
            lines.append(
                f"| {side} | {b['tokens']:,} | {b['sequences']} | {b['share']:.6f} | {b['mean_abs_d']:.3e} | "
                f"{b['max_abs_d']:.3e} |"
            )
    for name, f in found["faults"].items():
        said = (
            f"not caught: {f['absent']}"
            if "absent" in f
            else f"{f['verdict']}, {f['cause']}; {'; '.join(f['lines'])}"
        )
        notes.append(f"- fault {name}: {said}")
    return "\n".join([*lines, "", *notes, ""])


def medians(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of each part's seconds, of tokens and of scored sequences; the most bytes of memory. Empty without a step."""
    if not steps:
        return {}
    out = {part: median(row["seconds"][part] for row in steps) for part in PARTS}
    out |= {key: median(row[key] for row in steps) for key in ("tokens", "scored")}
    return out | {key: max(row["memory"][key] for row in steps) for key in ("trainer", "engine")}


def names(text: str) -> list[str]:
    """An option's names, given by commas."""
    return [name for name in text.split(",") if name]


def require_known(option: str, chosen: Iterable[str], known: Collection[str]) -> None:
    """SystemExit where an option holds a name that is none of those it may hold."""
    found = list(chosen)
    if set(found) - set(known):
        raise SystemExit(f"{option}: wanted some of {', '.join(known)}, found {', '.join(found)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU's adapters")
    parser.add_argument(
        "--model", choices=sorted(MODELS), default="qwen3-0.6b", help="a shape; its weights are random"
    )
    parser.add_argument(
        "--layers", type=int, help="fewer layers than the shape has, where its optimizer has no room"
    )
    parser.add_argument("--sides", type=names, help=f"of {','.join(SIDES)}")
    parser.add_argument("--seconds", type=float, default=500.0, help="limit of the whole run")
    parser.add_argument("--rounds", type=int, default=1000, help="turns of each side at most")
    parser.add_argument("--steps", type=int, default=1, help="measured steps a turn")
    parser.add_argument("--resident", action="store_true", help="all sides stay on the GPU")
    parser.add_argument("--generation", action="store_true", help="engines alone, without trainers")
    parser.add_argument("--engine-tp", type=int, default=1, help="tensor-parallel degree of the engine")
    parser.add_argument("--trainer-tp", type=int, default=1, help="tensor-parallel degree of the trainer")
    parser.add_argument("--sequence-parallel", action="store_true", help="in the trainer")
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--group", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--prompt", type=int, nargs=2, metavar=("LOW", "HIGH"))
    parser.add_argument("--response", type=int)
    parser.add_argument("--microbatch", type=int, default=16, help="rows the trainer takes at once")
    parser.add_argument("--kv-gib", type=float, default=16.0, help="GiB of an engine's key-value cache")
    parser.add_argument(
        "--one-in", type=int, default=8, help="sequences of which one is recorded, and scored under the skip"
    )
    parser.add_argument(
        "--transport", choices=("handles", "file"), default="handles", help="how weights travel"
    )
    parser.add_argument(
        "--bits", type=int, default=0, help="sampled tokens to compare on either side; 0 for none"
    )
    parser.add_argument(
        "--unfused",
        action="store_true",
        help="the native trainer's attention is Megatron's local one, and not torch's fused one",
    )
    parser.add_argument(
        "--graphs",
        type=names,
        default=[],
        help="of native,contract,invariant: sides whose trainer replays its microbatches as CUDA graphs",
    )
    parser.add_argument(
        "--profile",
        type=names,
        default=[],
        help=f"of {','.join(KINDS)}: a further step of each job under each, tables into OUT/profile",
    )
    parser.add_argument("--faults", type=names, default=[], help=f"of {', '.join(_FAULTS)}")
    parser.add_argument("--contract", type=Path, help="in the place of the shipped one")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "step-report")))
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run it; 1 where a side or a comparison failed."""
    args = _parser().parse_args(argv)
    sides = args.sides or [s for s in SIDES if not (args.tiny and s == "invariant")]
    require_known("--sides", sides, SIDES)
    require_known("--faults", args.faults, _FAULTS)
    require_known("--profile", args.profile, KINDS)
    require_known("--graphs", args.graphs, [side for side in SIDES if "+" not in side])
    if args.tiny and args.graphs:
        raise SystemExit("--graphs: wanted a GPU, found --tiny; leave one of them out")
    if args.generation and (args.bits or args.faults or "contract+skip" in sides):
        raise SystemExit(
            "--generation: wanted sides without a trainer's part, found --bits, --faults or contract+skip"
        )
    args.sides = sides
    small: dict[str, Any] = {"prompts": 2, "prompt": [8, 24], "response": 24}
    large: dict[str, Any] = {"prompts": 8, "prompt": [64, 512], "response": 512}
    for name, value in (small if args.tiny else large).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    work = Path(tempfile.mkdtemp(prefix="isoexec-step-"))
    daemon = Daemon(work / "state", work / "daemon.log")
    bench = Bench(args, work, daemon, args.out)
    try:
        bench.rounds(args.seconds * (0.6 if args.bits else 1.0))
        bench.close()
        for job in [side for side in ("native", "contract") if args.bits and side in sides]:
            bench.found["bits"][job] = _or_absent(bits, bench, job)
            bench.write()
        for name in args.faults:
            bench.found["faults"][name] = _or_absent(fault, bench, name)
            bench.write()
    finally:
        bench.close()
        daemon.close()
        for log in work.rglob("*.log"):
            target = args.out / "logs" / log.relative_to(work)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(log, target)
        shutil.rmtree(work, ignore_errors=True)
    bench.write()
    print(markdown(bench.found))
    failed = any(entry["absent"] for entry in bench.found["sides"].values())
    rest = [*bench.found["bits"].values(), *bench.found["faults"].values()]
    return 1 if failed or any("absent" in one for one in rest) else 0


def _or_absent(call: Callable[[Bench, str], dict[str, Any]], bench: Bench, name: str) -> dict[str, Any]:
    try:
        return call(bench, name)
    except (RemoteError, IsoExecError) as error:
        bench.close()
        return {"absent": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(main())
