# SPDX-License-Identifier: Apache-2.0
"""The runtimes that `topologies.py` starts: engines that sample, trainers that score what they sampled, trainers that train."""

from __future__ import annotations

import argparse
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import subjects  # type: ignore[import-not-found]  # noqa: F401 - puts the package on the path
import torch
from sampled import (  # type: ignore[import-not-found]
    LONGEST,
    MODELS,
    MOST,
    TINY,
    Logprobs,
    Tally,
    batches,
    scored,
)
from topologies_plan import (  # type: ignore[import-not-found]
    DEGREES,
    Kind,
    Side,
    Unit,
    engines,
    placed,
    trainers,
    waves,
)

from isoexec.adapters.demo.faults import edited_contract
from isoexec.adapters.demo.job import Job, Layout, pad
from isoexec.adapters.demo.processes import call_all
from isoexec.adapters.demo.services import Daemon
from isoexec.adapters.demo.task import Task
from isoexec.adapters.demo.tiny import make_mimo, make_qwen3, make_qwen3_moe, write_config
from isoexec.adapters.vllm.engines import sized_cache
from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.schema import library
from isoexec.probes.weights import add_named

__all__ = ["CONTRACTS", "SIDES", "Runtimes"]

SIDES: tuple[Side, ...] = ("contract", "native")
STEPS = 4  # of training
GIB = 1 << 30
# tiny, or not: random weights of real dimensions stay numbers
_LR = {True: 1e-3, False: 1e-5}
# the contract's stem by model, those on a CPU first
_TINY = {"tiny": "qwen3-dense", "tiny-mimo": "mimo-dense", "tiny-moe": "qwen3-moe"}
_MAKERS: dict[str, Any] = {"tiny": make_qwen3, "tiny-mimo": make_mimo, "tiny-moe": make_qwen3_moe}
CONTRACTS = {True: _TINY, False: {name: stem for name, (_, stem) in MODELS.items()}}
_EXPERTS = "tiny-moe"  # no adapter binds experts on a GPU
Digests = dict[str, tuple[int, int]]
Sampled = list[tuple[list[int], list[int], Logprobs]]  # prompt, response, its logprobs


def save(path: Path, rows: Sampled) -> None:
    """Write sampled sequences to an .npz file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        sizes=np.array([(len(p), len(r)) for p, r, _ in rows], np.int64),
        tokens=np.concatenate([np.array([*p, *r], np.int64) for p, r, _ in rows]),
        logprobs=np.concatenate([lp for _, _, lp in rows]),
    )


def load(path: Path) -> Sampled:
    """Read what `save` wrote."""
    rows: Sampled = []
    with np.load(path) as file:
        at = value = 0
        for prompt, response in file["sizes"].tolist():
            ids = file["tokens"][at : at + prompt + response].tolist()
            rows.append((ids[:prompt], ids[prompt:], file["logprobs"][value : value + response]))
            at, value = at + prompt + response, value + response
    return rows


def widened(stem: str) -> dict[str, Any]:
    """What a CPU contract must say to claim eight ranks: its records have them, but not for widths of any size."""
    every, eighth, block = (
        {"invariant": list(DEGREES)},
        {"multiple_of": 8, "minimum": 8},
        {"multiple_of": 512, "minimum": 512},
    )
    axes = {"engine": ["TP"], "trainer": ["TP", "SP"]}
    widths = ["hidden_size", "q_width", "qkv_width", "vocab_size"]
    if stem == CONTRACTS[True][_EXPERTS]:
        axes = {role: [*own, "EP", "ETP"] for role, own in axes.items()}
        widths.append("expert_size")
    else:
        widths.append("intermediate_size")
    return {
        **{f"claims.topology.{role}.{axis}": every for role, own in axes.items() for axis in own},
        **{f"model.facts.{name}": eighth for name in ("heads", "kv_heads")},
        **{f"model.facts.{name}": block for name in widths},
    }


class Runtimes:
    """Starts units in groups and keeps what they found in ``found``, by model, side and name; ``write`` is called after each."""

    def __init__(
        self,
        args: argparse.Namespace,
        work: Path,
        daemon: Daemon,
        found: dict[str, Any],
        write: Callable[[], None],
    ) -> None:
        self.args, self.work, self.daemon, self.found, self.write = args, work, daemon, found, write
        self.started = time.monotonic()
        self._lock = threading.Lock()
        self._opened = 0

    @property
    def left(self) -> float:
        """Seconds of the whole run that are left."""
        return float(self.args.seconds - (time.monotonic() - self.started))

    def say(self, *words: object) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s]", *words, flush=True)

    def of(self, model: str) -> dict[str, Any]:
        empty: dict[str, Any] = {"weights": {}, "engines": {}, "bits": {}, "training": {}}
        found: dict[str, Any] = self.found["models"].setdefault(model, empty)
        return found

    def contract(self, model: str) -> Path:
        """The shipped contract; on a CPU one that claims up to eight ranks, for models that so many can share."""
        stem = CONTRACTS[self.args.tiny][model]
        if not self.args.tiny:
            return library(f"{stem}-sm90")
        edited = self.work / f"{stem}-cpu.yaml"
        return edited if edited.exists() else edited_contract(library(f"{stem}-cpu"), edited, widened(stem))

    def folder(self, model: str, layers: int | None = None) -> Path:
        """The model's folder: on a CPU a tiny checkpoint, else a configuration to which `publish` adds the weights."""
        folder = self.work / (model if layers is None else f"{model}-{layers}-layers")
        with self._lock:  # units of one group ask at once, and what is there must be whole
            if folder.exists():
                return folder
            if self.args.tiny:
                made: Path = _MAKERS[model](folder, seed=20, layers=4, **TINY)
                return made
            folder.mkdir(parents=True)
            sizes, _ = MODELS[model]
            sizes = {**sizes, **({"layers": layers} if layers else {})}
            write_config(folder, **sizes, max_positions=8192, dtype=torch.bfloat16)
        return folder

    def vocab(self, model: str) -> int:
        return int(TINY["vocab"] if self.args.tiny else MODELS[model][0]["vocab"])

    def layout(self, layout: Layout, **more: Any) -> Layout:
        """A unit's layout on this machine."""
        made = replace(layout, microbatch=1, **more)
        engine = {**layout.engine, "logprobs_mode": "raw_logprobs"}
        if not self.args.tiny:
            engine |= sized_cache(int(self.args.kv_gib * GIB))
            made = replace(made, gpu=True, fused_attention=True)
        return replace(made, engine=engine)

    @contextmanager
    def job(self, unit: Unit, layout: Layout, model: Path, **more: Any) -> Iterator[Job]:
        with self._lock:
            self._opened += 1
            run = f"topologies-{self._opened}"
        prompt, response = LONGEST[self.args.tiny]
        task = Task(
            vocab=self.vocab(unit.model),
            prompts=MOST[self.args.tiny],
            group=1,
            prompt_lengths=(4, prompt),
            response=response,
        )
        with Job(
            run=run,
            layout=layout,
            model=model,
            work=self.work,
            state_dir=self.daemon.state.path,
            contract=self.contract(unit.model) if unit.side == "contract" else None,
            regime="bitwise" if unit.side == "contract" else "bf16_dense",
            task=task,
            **more,
        ) as job:
            yield job

    def publish(self, model: str) -> None:
        """The checkpoint that every engine loads, written by a trainer of one rank; the trainers draw the same weights."""
        folder = self.folder(model)
        if (folder / "model.safetensors").exists():
            return
        unit = Unit(kind="score", model=model, side="native", layout=Layout(devices=(0,)))
        with self.job(
            unit, self.layout(unit.layout, scores_only=True, random_weights=True), folder, with_engine=False
        ) as job:
            call_all(job.trainers, "publish", str(folder))

    def units(self, kind: Kind, model: str, side: Side) -> list[Unit]:
        sizes = {} if self.args.tiny else MODELS[model][0]
        experts, most = model == _EXPERTS, self.args.devices
        if kind == "engine":
            chosen = engines(most, experts=experts)
        else:
            chosen = trainers(most, experts=experts, tied=bool(sizes.get("tied")))
            if kind == "train" and side == "native":
                chosen = [chosen[0], *[one for one in chosen if one.trainer_tp > 1][:1]]  # that it can differ
        made = [Unit(kind=kind, model=model, side=side, layout=layout) for layout in chosen]
        return [unit for unit in made if self.args.only in str(unit)]

    def weights(self, unit: Unit, digests: Digests) -> None:
        """Hold a runtime's weights against those that the first one of the model had; IsoExecError where one differs."""
        with self._lock:
            first: dict[str, list[int]] = self.of(unit.model)["weights"]
            if not first:
                first |= {name: list(lanes) for name, lanes in digests.items()}
            names = digests.keys() & first.keys() if unit.side == "native" else digests.keys() | first.keys()
            wrong = [n for n in sorted(names) if list(digests.get(n, ())) != first.get(n)]
            if wrong:
                raise IsoExecError(
                    f"{unit}: wanted the weights of every other runtime, found {len(wrong)} of {len(names)} tensors "
                    f"different, {wrong[0]} first"
                )

    def engine(self, unit: Unit) -> None:
        """Sample, and keep what was sampled."""
        args, tally = self.args, 0
        rows: Sampled = []
        began = time.monotonic()
        folder = self.folder(unit.model)
        with self.job(unit, self.layout(unit.layout), folder, engine_model=folder) as job:
            ready = time.monotonic()
            self.weights(unit, job.engine.call("digests"))
            for number, (prompts, lengths) in enumerate(batches(self.vocab(unit.model), tiny=args.tiny)):
                if tally >= args.tokens:
                    break
                rollout = job.engine.call(
                    "generate",
                    prompts,
                    step=number,
                    version=0,
                    length=lengths,
                    watched=False,
                    logprobs=True,
                    seed=number,
                )
                rows += zip(prompts, rollout["responses"], rollout["logprobs"], strict=True)
                tally += sum(map(len, rollout["responses"]))
        save(self.rollouts(unit.model, unit.side, unit.name), rows)
        seconds = {"start": round(ready - began, 1), "sample": round(time.monotonic() - ready, 1)}
        self.note("engines", unit, {"tokens": tally, "sequences": len(rows), "seconds": seconds})

    def rollouts(self, model: str, side: str, engine: str) -> Path:
        return Path(self.args.out) / "rollouts" / f"{model}-{side}-{engine}.npz"

    def score(self, unit: Unit) -> None:
        """Score what every engine of the side sampled; a sequence that several sampled alike is scored once."""
        own: dict[tuple[bytes, int], Logprobs] = {}
        files = {
            e: self.rollouts(unit.model, unit.side, e)
            for e in self.of(unit.model)["engines"].get(unit.side, {})
        }
        if not files:
            raise IsoExecError(
                f"{unit}: wanted an engine's sampled tokens, found none; run its engines first"
            )
        layout = self.layout(unit.layout, scores_only=True, random_weights=not self.args.tiny)
        with self.job(unit, layout, self.folder(unit.model), with_engine=False) as job:
            self.weights(unit, add_named(call_all(job.trainers, "digests")))
            for engine, file in files.items():
                rows = load(file)
                keys = [(np.array([*p, *r], np.int64).tobytes(), len(p)) for p, r, _ in rows]
                new = dict(zip(keys, rows, strict=True))
                new = {key: row for key, row in new.items() if key not in own}
                if new:
                    prompts, responses = [p for p, _, _ in new.values()], [r for _, r, _ in new.values()]
                    made = scored(job.trainers, prompts, responses, tiny=self.args.tiny, step=0, version=0)
                    own |= zip(new, made, strict=True)
                tally = Tally()
                for key, (_, _, logprobs) in zip(keys, rows, strict=True):
                    tally.add(logprobs, own[key])
                self.note("bits", unit, tally.result(), f"{engine} x {unit.name}")

    def train(self, unit: Unit) -> None:
        """Optimizer steps on one batch after another; the masters' digests after each."""
        args = self.args
        rng = np.random.default_rng(11)
        tiny: bool = args.tiny
        count, shortest, longest = (10, 8, 40) if tiny else (10, 64, 512)
        layout = replace(self.layout(unit.layout, random_weights=not tiny), microbatch=2, as_replicas=2)
        found: dict[str, Any] = {"masters": [], "norms": [], "losses": []}
        folder = self.folder(unit.model, None if tiny else args.train_layers)
        with self.job(unit, layout, folder, with_engine=False, lr=_LR[tiny]) as job:
            for step in range(STEPS):
                sizes = rng.integers(shortest, longest + 1, (count, 2)).tolist()
                rows = [[rng.integers(3, self.vocab(unit.model), n).tolist() for n in pair] for pair in sizes]
                tokens, first, ends = pad([p for p, _ in rows], [r for _, r in rows])
                more = {"step": step, "version": 0, "watched": False}
                call_all(job.trainers, "score", tokens, first, ends, **more)
                rewards = rng.random(count).astype(np.float32)
                losses = [
                    t["loss"] for t in call_all(job.trainers, "accumulate", rewards, count // 2, **more)
                ]
                norms = [u["grad_norm"] for u in call_all(job.trainers, "update")]
                if len(set(losses)) > 1 or len(set(norms)) > 1:
                    raise IsoExecError(
                        f"{unit}: ranks disagree about loss or gradient norm in step {step + 1}"
                    )
                found["norms"].append(norms[0].hex())
                found["losses"].append(losses[0].hex())
                masters = add_named(call_all(job.trainers, "digests", masters=True))
                found["masters"].append({name: list(lanes) for name, lanes in masters.items()})
        self.note("training", unit, found)

    def note(self, what: str, unit: Unit, result: dict[str, Any], name: str = "") -> None:
        with self._lock:
            self.of(unit.model)[what].setdefault(unit.side, {})[name or unit.name] = result

    def done(self, unit: Unit) -> bool:
        held = self.of(unit.model)
        if unit.kind == "engine":
            made = unit.name in held["engines"].get(unit.side, {})
            return made and self.rollouts(unit.model, unit.side, unit.name).exists()
        if unit.kind == "train":
            return unit.name in held["training"].get(unit.side, {})
        pairs = [f"{engine} x {unit.name}" for engine in held["engines"].get(unit.side, {})]
        return all(pair in held["bits"].get(unit.side, {}) for pair in pairs)

    def all_of(self, units: Sequence[Unit]) -> None:
        """Run units in groups; one that fails is named with its error, one that time leaves out too."""
        todo = [unit for unit in units if not self.done(unit)]
        for group in waves(todo, self.args.devices, alone=self.args.tiny):
            if self.left < self.args.reserve:
                for unit in group:
                    self.found["absent"][str(unit)] = "no time was left"
                continue
            self.say("; ".join(map(str, group)))
            threads = [threading.Thread(target=self._one, args=(unit,)) for unit in placed(group)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.write()

    def _one(self, unit: Unit) -> None:
        work: dict[str, Callable[[Unit], None]] = {
            "engine": self.engine,
            "score": self.score,
            "train": self.train,
        }
        try:
            work[unit.kind](unit)
        except Exception as error:  # noqa: BLE001 - the other units go on, and the page says it
            with self._lock:
                self.found["absent"][str(unit)] = f"{type(error).__name__}: {error}"
            traceback.print_exc()

    def bits(self, model: str) -> None:
        """Every engine samples and every trainer scores, on each side."""
        if not self.args.tiny:
            self.publish(model)
        for side in self.args.sides:
            self.all_of(self.units("engine", model, side))
            self.all_of(self.units("score", model, side))

    def training(self, model: str) -> None:
        """Every trainer trains under the contract, and two natively."""
        for side in self.args.sides:
            self.all_of(self.units("train", model, side))
