# SPDX-License-Identifier: Apache-2.0
"""One rank of the demo's trainer: a real megatron-core model with DDP and mixed-precision Adam, watched and fenced."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from isoexec.adapters.megatron import cpu

if not torch.cuda.is_available():
    cpu.install()  # before megatron-core is imported: the demo runs where there is no GPU

from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from isoexec.adapters.demo.memory import peak_bytes, reset_peak
from isoexec.adapters.demo.tiny import drawn
from isoexec.adapters.handles import Offer
from isoexec.adapters.megatron.logprobs import score
from isoexec.adapters.megatron.model import build
from isoexec.adapters.megatron.replicas import gather_shares, share
from isoexec.adapters.megatron.training import Batch, Trainer, group_advantages
from isoexec.adapters.megatron.watch import Watch
from isoexec.adapters.megatron.weights import export_hf, pieces, save_hf, unwrap, weight_partials
from isoexec.contracts.errors import HaltedError, IsoExecError
from isoexec.contracts.schema import Contract
from isoexec.probes.client import Client, ProbeSettings
from isoexec.probes.skip import ScoreSkip, padded

__all__ = ["TrainerHost", "draw"]


class TrainerHost:
    """Built inside a trainer rank's process; every rank gets the same calls."""

    def __init__(
        self,
        *,
        rank: int,
        tp: int,
        pp: int,
        sequence_parallel: bool,
        model: str,
        contract: str | None,
        dtype: str,
        store: str,
        checkpoint: str,
        lr: float,
        cp: int = 1,
        dp: int = 1,
        ep: int = 0,
        as_replicas: int = 1,
        microbatch: int = 32,
        one_in: int = 1,
        random_weights: bool = False,
        fused_attention: bool = False,
        graphs: bool = False,
        scores_only: bool = False,
    ) -> None:
        """``random_weights`` are drawn on the rank's device in place of a checkpoint's: ``model`` needs a config.json only.

        ``dp`` replicas share rows out, and every rank has the whole result. ``fused_attention`` is of a trainer without a
        contract. With ``graphs`` microbatches are CUDA graphs. With ``scores_only`` there is no optimizer, and no `accumulate`.
        """
        world = tp * pp * cp * dp
        torch.set_num_threads(1)
        self._rank = rank
        self._checkpoint = Path(checkpoint)
        self._client = Client(ProbeSettings.from_env(), "trainer", rank=rank, world=world)
        self._client.connect()
        self._device = torch.device("cpu")
        if torch.cuda.is_available():
            self._device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            "nccl" if self._device.type == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
        )
        parallel_state.initialize_model_parallel(
            tp,
            pp,
            context_parallel_size=cp,
            expert_model_parallel_size=max(ep, 1),
            expert_tensor_parallel_size=tp // max(ep, 1),
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
        self._model = build(
            model,
            dtype=getattr(torch, dtype),
            contract=Contract.load(contract) if contract else None,
            sequence_parallel=sequence_parallel,
            load=not random_weights,
            fused_attention=fused_attention,
        ).to(self._device)
        if random_weights:
            draw(self._model)
        self._microbatch = microbatch
        self._trainer: Trainer | None = None
        if not scores_only:
            self._trainer = Trainer(
                self._model,
                lr=lr,
                clip_grad=1.0,
                microbatch=microbatch,
                as_replicas=as_replicas,
                graphs=graphs,
            )
        self._watch = Watch(self._model, self._client, one_in=one_in)
        self._one_in = one_in
        self._skip: ScoreSkip | None = None
        self._rollout: list[np.ndarray[Any, np.dtype[np.float32]]] | None = None
        self._offered: Offer | None = None
        self._settled = False

    def census(self) -> bool | None:
        """Whether all arithmetic that makes this rank's scores is in regions; None where no contract is installed."""
        adapter = self._model.isoexec_adapter
        return None if adapter is None else bool(adapter.census().clean_in("trainer_score"))

    def allow_skip(self, census: dict[str, bool | None]) -> None:
        """From now on `score` spares what `probes.skip` lets it spare of a rollout it is given."""
        self._skip = ScoreSkip(self._client.settings, one_in=self._one_in, census=census)

    def boundary(self, step: int) -> str | None:
        """None to go on; what the halt says when the run is halted, every rank having saved a checkpoint."""
        save = partial(self._trainer.save_checkpoint, self._checkpoint) if self._trainer else None
        try:
            self._watch.boundary(step, checkpoint=save)
        except HaltedError as error:
            return str(error)
        return None

    def score(
        self,
        tokens: np.ndarray[Any, np.dtype[np.int64]],
        prompt_lengths: Sequence[int],
        lengths: Sequence[int],
        *,
        step: int,
        version: int,
        watched: bool = True,
        rollout: list[np.ndarray[Any, np.dtype[np.float32]]] | None = None,
        answer: bool = False,
    ) -> dict[str, Any]:
        """Logprobs of the policy before the update (case trainer_score), kept for `accumulate`; seconds of it and of the probe.

        With ``rollout``, the engine's logprobs by sequence, only what the skip asks for is scored. ``answer`` gives the
        responses' logprobs back, float32 by sequence.
        """
        start = time.perf_counter()
        self._tokens = torch.from_numpy(tokens).to(self._device)
        self._rollout = rollout if self._skip is not None else None
        rows = list(range(len(lengths)))
        if self._skip is not None and rollout is not None:
            sequences = [tokens[i, :end].tolist() for i, end in enumerate(lengths)]
            chosen = self._skip.choose(
                sequences, step=step, rollout_version=version, trainer_version=version, group=dist.group.WORLD
            )
            rows = np.flatnonzero(chosen).tolist()
        found = self._scored(rows)
        if self._skip is not None and rollout is not None:
            own = self._responses(found, rows, prompt_lengths, lengths)
            good = self._skip.check([rollout[i] for i in rows], own, step=step)
            if not good and len(rows) < len(lengths):
                rows = list(range(len(lengths)))
                found = self._scored(rows)
        if len(rows) == len(lengths) or rollout is None:
            self._old = found
        else:
            assert self._skip is not None
            whole = padded(rollout, prompt_lengths, tokens.shape[1])
            spared = set(range(len(lengths))) - set(rows)
            self._skip.skipped += sum(lengths[i] - prompt_lengths[i] for i in spared)
            self._old = torch.from_numpy(whole).to(self._device)
        self._wait()
        scored = time.perf_counter()
        self._prompts, self._lengths = list(prompt_lengths), list(lengths)
        if watched:
            mine = self._share(len(rows))
            self._record(
                "trainer_score", rows[mine.start : mine.stop], found[mine.start : mine.stop], step, version
            )
        out: dict[str, Any] = {
            "score": scored - start,
            "probe": time.perf_counter() - scored,
            "rows": len(rows),
        }
        if self._skip is not None:
            out |= {"skip": self._skip.ended or self._skip.waiting, "skipped": self._skip.skipped}
        if answer:
            out["logprobs"] = self._responses(found, rows, prompt_lengths, lengths)
        return out

    def _scored(self, rows: list[int]) -> torch.Tensor:
        """fp32 [rows, L] on every rank, each replica having scored its share."""
        mine = self._share(len(rows))
        tokens = self._tokens[rows[mine.start : mine.stop]]
        if not len(mine):  # fewer rows than replicas
            found = torch.empty(tokens.shape, dtype=torch.float32, device=self._device)
        elif self._trainer is not None:
            found = self._trainer.score(tokens)
        else:
            found = score(self._model, tokens, microbatch=self._microbatch)
        return gather_shares(found, len(rows), self._model.pg_collection.dp)

    def _share(self, n: int) -> range:
        group = self._model.pg_collection.dp
        return share(n, group.size(), group.rank())

    def _record(
        self, case: str, rows: Sequence[int], logprobs: torch.Tensor, step: int, version: int
    ) -> None:
        """Send what this replica computed: ``logprobs`` [len(rows), L] of those rows of the batch."""
        if rows:
            self._watch.record(
                case,
                self._tokens[list(rows)],
                logprobs,
                [self._prompts[i] for i in rows],
                [self._lengths[i] for i in rows],
                step=step,
                weight_version=version,
            )

    def _responses(
        self,
        values: torch.Tensor,
        rows: Sequence[int],
        prompt_lengths: Sequence[int],
        lengths: Sequence[int],
    ) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        host = values.detach().float().cpu().numpy()
        return [np.ascontiguousarray(host[at, prompt_lengths[i] : lengths[i]]) for at, i in enumerate(rows)]

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def accumulate(
        self,
        rewards: np.ndarray[Any, np.dtype[np.float32]],
        group: int,
        *,
        step: int,
        version: int,
        watched: bool,
    ) -> dict[str, float]:
        """The gradients of a GRPO update on the sequences last scored, for `update`; loss and seconds."""
        trainer = self._with_optimizer("accumulate")
        start = time.perf_counter()
        columns = torch.arange(self._tokens.shape[1], device=self._device).unsqueeze(0)
        first = torch.tensor(self._prompts, device=self._device).unsqueeze(1)
        end = torch.tensor(self._lengths, device=self._device).unsqueeze(1)
        batch = Batch(
            tokens=self._tokens,
            mask=(columns >= first) & (columns < end),
            advantages=group_advantages(torch.from_numpy(rewards).to(self._device), group),
            old_logprobs=self._old,
        )
        result = trainer.accumulate(batch)
        if self._skip is not None and self._rollout is not None:
            # this forward has the logprobs of every sequence: what was not scored is compared all the same
            every = range(len(self._lengths))
            own = self._responses(result.logprobs, every, self._prompts, self._lengths)
            if not self._skip.check(self._rollout, own, step=step):
                # nothing is learnt from what was spared: the weights are still those that a scoring would have had
                result = trainer.accumulate(replace(batch, old_logprobs=result.logprobs))
        self._wait()
        trained = time.perf_counter()
        if watched:
            mine = trainer.own_rows(len(self._lengths))
            self._record("trainer_fwd", mine, result.logprobs[mine.start : mine.stop], step, version)
        return {"loss": result.loss, "train": trained - start, "probe": time.perf_counter() - trained}

    def update(self) -> dict[str, float]:
        """Step the optimizer; gradient norm, start (unix seconds) and seconds."""
        trainer = self._with_optimizer("update")
        began, start = time.time(), time.perf_counter()
        norm = trainer.update()
        self._wait()
        if not self._settled:
            # a step makes many objects, and each collection of theirs would look at all that stays as well
            gc.collect()
            gc.freeze()
            self._settled = True
        return {"grad_norm": norm, "began": began, "train": time.perf_counter() - start}

    def _with_optimizer(self, what: str) -> Trainer:
        if self._trainer is None:
            raise IsoExecError(
                f"{what}: wanted a trainer with an optimizer, found one made with scores_only=True"
            )
        return self._trainer

    def publish(self, folder: str) -> None:
        """Write the weights for the engine (rank 0)."""
        save_hf(self._model, folder)

    def offer(self) -> list[list[Any]]:
        """Hold the weights out to the engine by handles (rank 0): names and handles.

        They stay until the next call of `offer`, or until `withdraw`.
        """
        self._offered = Offer(export_hf(self._model, device=self._device))
        return self._offered.handles

    def synced(self, *, version: int, step: int) -> None:
        """Digest the weights as ``version``."""
        self._watch.synced(version, step=step, attest=False)

    def attest(self, *, version: int, step: int) -> None:
        """Attest this rank."""
        self._watch.attest("sync", step=step, weight_version=version)

    def digests(self, *, masters: bool = False) -> dict[str, tuple[int, int]]:
        """Give this rank's share of each tensor's digest, of weights or of the optimizer's fp32 masters; shares add up."""
        return weight_partials(self._model, masters=masters).tensors

    def withdraw(self) -> None:
        """The engine has read what was offered."""
        if self._offered is not None:
            self._offered.withdraw()

    def memory(self) -> int:
        """Peak bytes of this rank since the last call: on the GPU, or of the process where there is none."""
        found = peak_bytes(self._device)
        reset_peak(self._device)
        return found

    def rebuild_groups(self) -> dict[str, int]:
        """Fault: the framework made the tensor-parallel groups anew, of one rank each, and handed them to live layers."""
        solo = [dist.new_group([r]) for r in range(dist.get_world_size())][self._rank]
        changed = 0
        for module in self._model.modules():
            if hasattr(module, "tp_group"):
                module.tp_group = solo
                changed += 1
        return {"modules": changed}

    def close(self) -> dict[str, float]:
        """End the watch; returns what the probe cost."""
        self._client.close()
        stats = self._client.stats
        dist.destroy_process_group()
        return {"seconds": stats.seconds, "dropped": stats.dropped, "sent": stats.sent}


@torch.no_grad()
def draw(model: Any) -> None:
    """Seeded weights by name that keep activations near 1, the same in every layout."""
    tied = unwrap(model).share_embeddings_and_output_weights
    for piece in pieces(model):
        piece.write(
            piece.cut(drawn(piece.name, piece.whole, piece.view.device, tied=tied)).to(piece.view.dtype)
        )
