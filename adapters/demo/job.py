# SPDX-License-Identifier: Apache-2.0
"""A small on-policy RL job over the two runtimes: sample, reward, score, update, sync; every step watched and fenced."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from isoexec.adapters.demo.processes import Remote, call_all
from isoexec.adapters.demo.report import StepRecord
from isoexec.adapters.demo.task import Task
from isoexec.contracts import wire
from isoexec.probes.client import Client, ProbeSettings

__all__ = ["Halted", "Job", "Layout"]

_ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class Halted(Exception):  # noqa: N818 - it is how a job ends, not a failure of ours
    """The guard stopped the job at ``step``; the text is the marker's."""

    def __init__(self, step: int, text: str) -> None:
        self.step = step
        self.text = text
        super().__init__(text)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the job's two runtimes are laid out; ``engine`` holds further vLLM arguments, ``engine_env`` variables of its process.

    ``trainer_dp`` replicas of the trainer share rows out; ``as_replicas=2`` lets one replica sum gradients as two do.
    ``trainer_ep`` is of a model with experts, whose slices take the tensor ranks that are left; 0 says nothing of it.
    ``random_weights`` are drawn by the trainer and given to an engine that begins with others (``load_format="dummy"``).
    ``fused_attention`` is of a native trainer; ``scores_only`` of one whose weights stay, without gradients and optimizer state.
    With ``graphs`` the trainer's microbatches are CUDA graphs.
    ``transport`` is how weights travel: by a ``file``, or by ``handles`` of the trainer's memory on this host.
    ``devices`` are the GPUs of this host that the job may use, all where none is named.
    """

    engine_tp: int = 1
    trainer_tp: int = 1
    trainer_pp: int = 1
    trainer_cp: int = 1
    trainer_dp: int = 1
    trainer_ep: int = 0
    as_replicas: int = 1
    sequence_parallel: bool = False
    dtype: str = "bfloat16"
    engine: Mapping[str, Any] = field(default_factory=dict)
    engine_env: Mapping[str, str] = field(default_factory=dict)
    gpu: bool = False
    transport: str = "file"
    microbatch: int = 32
    one_in: int = 1
    random_weights: bool = False
    fused_attention: bool = False
    graphs: bool = False
    scores_only: bool = False
    devices: tuple[int, ...] = ()

    @property
    def trainer_ranks(self) -> int:
        return self.trainer_tp * self.trainer_pp * self.trainer_cp * self.trainer_dp

    @property
    def engine_name(self) -> str:
        whole = f"+EP{self.engine_tp}" if self.engine.get("enable_expert_parallel") else ""
        return f"TP{self.engine_tp}{whole}"

    @property
    def trainer_name(self) -> str:
        trainer = f"TP{self.trainer_tp}" + ("+SP" if self.sequence_parallel else "")
        trainer += f"+PP{self.trainer_pp}" if self.trainer_pp > 1 else ""
        trainer += f"+DP{self.trainer_dp}" if self.trainer_dp > 1 else ""
        return trainer + (f"+EP{self.trainer_ep}" if self.trainer_ep > 1 else "")

    def __str__(self) -> str:
        return f"{self.engine_name} x {self.trainer_name}"


class Job:
    """Starts the engine and the trainer's ranks, and steps them; a context manager that ends their processes."""

    def __init__(
        self,
        *,
        run: str,
        layout: Layout,
        model: Path,
        work: Path,
        state_dir: Path,
        contract: Path | None,
        engine_contract: Path | None = None,
        regime: str,
        policy: str = "fail_open",
        task: Task | None = None,
        lr: float = 1.5e-3,
        seeded: bool = True,
        engine_model: Path | None = None,
        with_engine: bool = True,
    ) -> None:
        """``engine_model`` starts an engine of that model and no trainer: `sample` then takes the place of `step`.

        ``with_engine=False`` starts the trainer alone: `trainers` are then called by hand.
        """
        # seconds a runtime may take to start: kernels are compiled on a GPU, and ranks share the cores of a CPU
        self._patience = 900.0 if layout.gpu else 120.0 + 60.0 * max(layout.engine_tp, layout.trainer_ranks)
        self.run = run
        self.layout = layout
        self.task = task or Task()
        self.version = 0
        self.cached_tokens = 0
        self.update_starts: list[float] = []
        self._work = work / run
        self._work.mkdir(parents=True, exist_ok=True)
        self._weights = self._work / "weights"
        self._settings = ProbeSettings(run=run, state_dir=state_dir, regime=regime, policy=policy)
        self._env = {
            **({} if layout.gpu else {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}),
            **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, layout.devices))} if layout.devices else {}),
            "ISOEXEC_RUN": run,
            "ISOEXEC_STATE_DIR": str(state_dir),
            "ISOEXEC_REGIME": regime,
            "ISOEXEC_ON_DAEMON_LOSS": policy,
        }
        self._model = model
        self._contract = contract
        self._engine_contract = engine_contract or contract
        self._lr = lr
        self._seeded = seeded
        self._engine_model = engine_model
        self._with_engine = with_engine
        self.engine: Remote
        self.trainers: list[Remote] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        layout = self.layout
        env = dict(self._env)
        if self._contract is not None:
            env["ISOEXEC_CONTRACT"] = str(self._contract)
        store = self._work / "store"
        store.unlink(missing_ok=True)
        for rank in range(0 if self._engine_model else layout.trainer_ranks):
            self.trainers.append(
                Remote(
                    f"trainer{rank}",
                    "isoexec.adapters.demo.trainer:TrainerHost",
                    env=env,
                    log=self._work / f"trainer{rank}.log",
                    arguments={
                        "rank": rank,
                        "tp": layout.trainer_tp,
                        "pp": layout.trainer_pp,
                        "cp": layout.trainer_cp,
                        "dp": layout.trainer_dp,
                        "as_replicas": layout.as_replicas,
                        "ep": layout.trainer_ep,
                        "sequence_parallel": layout.sequence_parallel,
                        "model": str(self._model),
                        "contract": str(self._contract) if self._contract else None,
                        "dtype": layout.dtype,
                        "store": str(store),
                        "checkpoint": str(self._work / "checkpoint"),
                        "lr": self._lr,
                        "microbatch": layout.microbatch,
                        "one_in": layout.one_in,
                        "random_weights": layout.random_weights,
                        "fused_attention": layout.fused_attention,
                        "graphs": layout.graphs,
                        "scores_only": layout.scores_only,
                    },
                )
            )
        if self._with_engine:
            self.engine = self._started_engine(env)
        for remote in self._remotes():
            remote.wait_ready(self._patience)
        self._client = Client(self._settings, "driver")
        self._client.connect()
        if self.trainers and self._with_engine:
            self.sync(step=0)

    def _remotes(self) -> list[Remote]:
        return [*self.trainers, *([self.engine] if hasattr(self, "engine") else [])]

    def _started_engine(self, env: dict[str, str]) -> Remote:
        layout = self.layout
        engine_env = {**env, **_ENGINE_ENV}
        if self._engine_contract is not None:
            engine_env["ISOEXEC_CONTRACT"] = str(self._engine_contract)
        if layout.gpu:
            # its core and workers are processes of their own; one that is forked from where CUDA was asked for has none
            engine_env["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"
        elif layout.engine_tp == 1:
            engine_env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        else:
            cores = sorted(os.sched_getaffinity(0))
            engine_env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
                str(cores[i % len(cores)]) for i in range(layout.engine_tp)
            )
        engine_env |= layout.engine_env
        longest = self.task.prompt_lengths[1]
        return Remote(
            "engine",
            "isoexec.adapters.demo.engine:EngineHost",
            env=engine_env,
            log=self._work / "engine.log",
            arguments={
                "model": str(self._engine_model or self._model),
                "contract": str(self._engine_contract) if self._engine_contract else None,
                "tp": layout.engine_tp,
                "dtype": layout.dtype,
                "max_length": longest + self.task.response + 16,
                "batch": self.task.batch,
                "more": dict(layout.engine),
                "one_in": layout.one_in,
                "transport": layout.transport,
            },
        )

    def sample(
        self,
        step: int,
        *,
        temperature: float = 1.0,
        watched: bool = True,
        rescore: int = -1,
        logprobs: bool = False,
    ) -> dict[str, Any]:
        """One rollout, of which ``rescore`` sequences (-1: all) are read back by the engine as prompts."""
        prompts = self.task.batch_prompts(step)
        rollout: dict[str, Any] = self.engine.call(
            "generate",
            prompts,
            step=step,
            version=self.version,
            length=self.task.response,
            temperature=temperature,
            watched=watched,
            rescore=len(prompts) if rescore < 0 else rescore,
            seed=0 if self._seeded else None,
            logprobs=logprobs,
        )
        self.cached_tokens += rollout["cached"]
        return {"prompts": prompts, **rollout}

    def step(
        self,
        step: int,
        *,
        watched: bool = True,
        temperature: float = 1.0,
        before_sync: Callable[[], object] | None = None,
        load: bool = True,
        rescore: int = 8,
        skip: bool = False,
    ) -> StepRecord:
        """One step of GRPO.  Raises `Halted` at one of its boundaries: before the rollout, before the scoring, before the update.

        Each runtime looks at itself while the other works: the trainer while the engine samples, the engine, which then has
        sampled, while the trainer scores and takes its gradients.
        ``before_sync`` is called between the update and the weight sync; ``load=False`` is the sync that does not happen.
        ``skip`` spares the trainer's scoring where it may be spared (`allow_skip`).
        """
        start = time.perf_counter()
        self._boundary(step)
        with self._attesting(self.trainers if watched else [], step) as waited:
            rollout = self.sample(
                step,
                temperature=temperature,
                watched=watched,
                rescore=rescore if watched else 0,
                logprobs=skip,
            )
        prompts, responses = rollout["prompts"], rollout["responses"]
        rewards = self.task.rewards(responses)
        tokens, prompt_lengths, lengths = pad(prompts, responses)
        self._boundary(step)
        with self._attesting([self.engine] if watched else [], step) as waited_again:
            scored = call_all(
                self.trainers,
                "score",
                tokens,
                prompt_lengths,
                lengths,
                step=step,
                version=self.version,
                watched=watched,
                rollout=rollout["logprobs"] if skip else None,
            )
            trained = call_all(
                self.trainers,
                "accumulate",
                rewards,
                self.task.group,
                step=step,
                version=self.version,
                watched=watched,
            )
        self._boundary(step)
        updated = call_all(self.trainers, "update")
        self.update_starts.append(min(u["began"] for u in updated))
        if before_sync is not None:
            before_sync()
        synced = self.sync(step=step, watched=watched, load=load)
        seconds = {
            "generation": rollout["seconds"]["generation"],
            "score": max(s["score"] for s in scored),
            "train": max(t["train"] for t in trained) + max(u["train"] for u in updated),
            "sync": synced["sync"],
            "rescore": rollout["seconds"]["rescore"],
            "probe": sum(waited + waited_again)
            + rollout["seconds"]["probe"]
            + max(s["probe"] for s in scored)
            + max(t["probe"] for t in trained)
            + synced["probe"],
            "step": time.perf_counter() - start,
        }
        record = StepRecord(
            step=step,
            watched=watched,
            reward=float(rewards.mean()),
            loss=trained[0]["loss"],
            grad_norm=updated[0]["grad_norm"],
            seconds=seconds,
            tokens=sum(map(len, responses)),
            scored=scored[0]["rows"],
            skip=scored[0].get("skip"),
        )
        if watched:
            self._client.send(
                wire.Step,
                step=step,
                weight_version=self.version,
                seconds=seconds,
                values={"reward": record.reward, "loss": record.loss, "grad_norm": record.grad_norm},
            )
        return record

    def sync(self, *, step: int, watched: bool = True, load: bool = True) -> dict[str, float]:
        """Publish the trainer's weights as the next version and load them into the engine; seconds of it and of the probes.

        The trainer's ranks digest while the engine loads, and what they still take when it has them is the probe's.
        """
        version = self.version + 1
        start = time.perf_counter()
        handles = self.layout.transport == "handles"
        if handles:
            offered = call_all(self.trainers, "offer")[0]
        else:
            call_all(self.trainers, "publish", str(self._weights))
        watching = self.trainers if watched else []
        for remote in watching:
            remote.start("synced", version=version, step=step)
        more = {"version": version, "step": step, "watched": watched}
        if load and handles:
            probe = self.engine.call("receive", offered, **more)
        elif load:
            probe = self.engine.call("sync", str(self._weights / "model.safetensors"), **more)
        else:
            probe = self.engine.call("digest", version=version, step=step)
        loaded = time.perf_counter()
        for remote in watching:
            remote.finish("synced")
        probe += time.perf_counter() - loaded
        if handles:
            call_all(self.trainers, "withdraw")
        self.version = version
        return {"sync": time.perf_counter() - start - probe, "probe": probe}

    @contextmanager
    def _attesting(self, remotes: list[Remote], step: int) -> Iterator[list[float]]:
        """Let runtimes attest while others work inside; what is yielded then has the seconds they were still waited for."""
        for remote in remotes:
            remote.start("attest", version=self.version, step=step)
        waited: list[float] = []
        try:
            yield waited
        finally:
            start = time.perf_counter()
            for remote in remotes:
                remote.finish("attest")
            waited.append(time.perf_counter() - start)

    def _boundary(self, step: int) -> None:
        said = [text for text in call_all(self.trainers, "boundary", step) if text is not None]
        if said:
            raise Halted(step, said[0])

    def allow_skip(self, *, engine: bool | None = None) -> dict[str, bool | None]:
        """Take a census of both runtimes and let the trainer spare what it allows; gives whether each was clean.

        An engine that compiles its steps can't be looked into: ``engine`` is then what the census of an eager one said.
        """
        found = call_all(self.trainers, "census")
        trainer = None if any(one is None for one in found) else all(found)
        census = {"engine": self.engine.call("census") if engine is None else engine, "trainer": trainer}
        call_all(self.trainers, "allow_skip", census)
        return census

    def memory(self) -> dict[str, int]:
        """Bytes: the trainer's ranks' peaks since the last call added up, and what `EngineHost.memory` says."""
        return {"trainer": sum(call_all(self.trainers, "memory")), "engine": self.engine.call("memory")}

    def checkpoints(self) -> list[Path]:
        """The checkpoint files that lie there."""
        return sorted(p for p in (self._work / "checkpoint").rglob("*") if p.is_file())

    def close(self) -> None:
        """End every process of the job."""
        if hasattr(self, "_client"):
            self._client.close()
        for remote in self._remotes():
            remote.close()


def pad(
    prompts: list[list[int]], responses: list[list[int]]
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], list[int], list[int]]:
    """Right-padded token ids [n, L] int64, prompt lengths and whole lengths."""
    rows = [p + r for p, r in zip(prompts, responses, strict=True)]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, [len(p) for p in prompts], [len(r) for r in rows]
