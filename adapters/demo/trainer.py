# SPDX-License-Identifier: Apache-2.0
"""One rank of the demo's trainer: a real megatron-core model with DDP and mixed-precision Adam, watched and fenced."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isoexec.adapters.megatron import cpu

cpu.install()  # before megatron-core is imported: this demo runs where there is no GPU

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402

from isoexec.adapters.megatron.logprobs import score  # noqa: E402
from isoexec.adapters.megatron.model import build  # noqa: E402
from isoexec.adapters.megatron.training import Batch, Trainer, group_advantages  # noqa: E402
from isoexec.adapters.megatron.watch import Watch  # noqa: E402
from isoexec.adapters.megatron.weights import save_hf  # noqa: E402
from isoexec.contracts.errors import HaltedError  # noqa: E402
from isoexec.contracts.schema import Contract  # noqa: E402
from isoexec.probes.client import Client, ProbeSettings  # noqa: E402

__all__ = ["TrainerHost"]


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
        ep: int = 0,
    ) -> None:
        world = tp * pp * cp
        torch.set_num_threads(1)
        self._rank = rank
        self._checkpoint = Path(checkpoint)
        self._client = Client(ProbeSettings.from_env(), "trainer", rank=rank, world=world)
        self._client.connect()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
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
        )
        self._trainer = Trainer(self._model, lr=lr, clip_grad=1.0, microbatch=32)
        self._watch = Watch(self._model, self._client)

    def boundary(self, step: int) -> str | None:
        """None to go on; what the halt says when the run is halted, every rank having saved a checkpoint."""
        try:
            self._watch.boundary(step, checkpoint=lambda: self._trainer.save_checkpoint(self._checkpoint))
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
        microbatch: int = 32,
    ) -> dict[str, float]:
        """Logprobs of the policy before the update (case trainer_score), kept for `train`; seconds of it and of the probe."""
        start = time.perf_counter()
        self._tokens = torch.from_numpy(tokens)
        self._old = score(self._model, self._tokens, microbatch=microbatch)
        scored = time.perf_counter()
        if watched:
            self._watch.record(
                "trainer_score",
                self._tokens,
                self._old,
                prompt_lengths,
                lengths,
                step=step,
                weight_version=version,
            )
        self._prompts, self._lengths = list(prompt_lengths), list(lengths)
        return {"score": scored - start, "probe": time.perf_counter() - scored}

    def train(
        self,
        rewards: np.ndarray[Any, np.dtype[np.float32]],
        group: int,
        *,
        step: int,
        version: int,
        watched: bool,
    ) -> dict[str, float]:
        """One GRPO update on the sequences last scored; loss, gradient norm, start (unix seconds) and seconds."""
        began = time.time()
        start = time.perf_counter()
        columns = torch.arange(self._tokens.shape[1]).unsqueeze(0)
        first = torch.tensor(self._prompts).unsqueeze(1)
        end = torch.tensor(self._lengths).unsqueeze(1)
        result = self._trainer.train_step(
            Batch(
                tokens=self._tokens,
                mask=(columns >= first) & (columns < end),
                advantages=group_advantages(torch.from_numpy(rewards), group),
                old_logprobs=self._old,
            )
        )
        trained = time.perf_counter()
        if watched:
            self._watch.record(
                "trainer_fwd",
                self._tokens,
                result.logprobs,
                self._prompts,
                self._lengths,
                step=step,
                weight_version=version,
            )
        return {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "began": began,
            "train": trained - start,
            "probe": time.perf_counter() - trained,
        }

    def publish(self, folder: str, *, version: int, step: int, watched: bool = True) -> dict[str, float]:
        """Write the weights as ``version`` for the engine (rank 0), digest and attest; seconds of both."""
        start = time.perf_counter()
        save_hf(self._model, folder)
        saved = time.perf_counter()
        if watched:
            self._watch.synced(version, step=step)
        return {"sync": saved - start, "probe": time.perf_counter() - saved}

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
