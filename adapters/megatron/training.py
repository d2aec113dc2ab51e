# SPDX-License-Identifier: Apache-2.0
"""A GRPO step on real Megatron: pipeline schedule, DDP with fp32 gradients, mixed-precision Adam, clipping on, checkpoints.

The loss alone divides by the tokens; the schedule and DDP only sum.  Every rank has all logprobs in the end and makes the loss
that is reported of them, so that it does not depend on how the model is laid out, nor on microbatches.
Data-parallel replicas compute contiguous runs of microbatches; one replica has their bits with ``as_replicas=2``.
Where the host would hold a GPU up, ``graphs=True`` replays microbatches instead of calling them (`graphs`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from isoexec.adapters.megatron import graphs as recorded
from isoexec.adapters.megatron.clipping import leaves
from isoexec.adapters.megatron.logprobs import (
    align,
    from_last_stage,
    model_inputs,
    output_processor,
    score,
    sequence_multiple,
)
from isoexec.adapters.megatron.replicas import RunSums, gather_shares, runs_of, same_everywhere, share
from isoexec.adapters.megatron.slots import topology_of
from isoexec.adapters.megatron.weights import unwrap
from isoexec.contracts.errors import InstallError, IsoExecError

__all__ = [
    "Accumulated",
    "Batch",
    "CheckpointError",
    "StepResult",
    "Trainer",
    "group_advantages",
    "grpo_loss",
]


class CheckpointError(IsoExecError):
    """A checkpoint that is missing, incomplete, or of another layout."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One training batch, the same on every rank of every replica.

    tokens [n, L] int64, padded on the right; mask [n, L] bool, True for the response tokens to learn from; advantages [n] fp32;
    old_logprobs [n, L] fp32, aligned with tokens (the rollout's, or the trainer's own scores).
    """

    tokens: Tensor
    mask: Tensor
    advantages: Tensor
    old_logprobs: Tensor


@dataclass(frozen=True, kw_only=True)
class Accumulated:
    """What the gradients of a step came with: mean loss per response token and trainer_fwd logprobs [n, L] fp32."""

    loss: float
    logprobs: Tensor


@dataclass(frozen=True, kw_only=True)
class StepResult(Accumulated):
    """What a step did: that of its gradients, its number, and the global gradient norm before clipping."""

    step: int
    grad_norm: float


def group_advantages(rewards: Tensor, group: int, *, epsilon: float = 1e-6) -> Tensor:
    """GRPO advantages: rewards [n] of ``group`` answers to each prompt, centred and scaled within the group -> fp32 [n]."""
    r = rewards.double().view(-1, group)
    spread = r.std(dim=1, keepdim=True, unbiased=False)
    return ((r - r.mean(dim=1, keepdim=True)) / (spread + epsilon)).float().view(-1)


def grpo_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, clip: tuple[float, float]
) -> Tensor:
    """Sum over masked tokens of the clipped surrogate's negative; logprobs, old, mask [b, L], advantages [b] -> scalar."""
    ratio = torch.exp(logprobs - old)
    a = advantages.unsqueeze(1)
    best = torch.minimum(ratio * a, ratio.clamp(1.0 - clip[0], 1.0 + clip[1]) * a)
    return -torch.where(mask, best, torch.zeros_like(best)).sum()


class Trainer:
    """Owns the wrapped model and the optimizer of one run, of one data-parallel replica or of two (DP 1, DP 2).

    ``as_replicas`` (1 or 2) sums gradients in the order of so many replicas, so that DP 1 ends in the bits of DP 2; under DP 2 it
    is always 2.  One replica with 2 holds a second buffer of the gradients' size during a step.  With ``graphs`` microbatches
    are CUDA graphs, of a model that one GPU holds.  Raises InstallError for other degrees, for experts that replicas share out,
    for a model with an auxiliary loss, and for one that `graphs` does not take.
    """

    def __init__(
        self,
        model: Any,
        *,
        lr: float = 1e-4,
        clip_grad: float = 1.0,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        ratio_clip: tuple[float, float] = (0.2, 0.2),
        microbatch: int = 8,
        distributed_optimizer: bool = False,
        as_replicas: int = 1,
        graphs: bool = False,
    ) -> None:
        self.model = unwrap(model)
        config = self.model.config
        self._graphs = recorded.Graphs(self.model) if graphs else None
        self._runs = runs_of(self.model, as_replicas)
        self._dp = self.model.pg_collection.dp
        self.microbatch, self.ratio_clip, self.step = microbatch, ratio_clip, 0
        self._accumulated = False
        config.calculate_per_token_loss = True  # DDP reads it as it is made, the schedule at each step
        half = config.params_dtype is torch.bfloat16
        wrapped = Float16Module(config, self.model) if half else self.model
        with self._graphs.stream() if self._graphs else nullcontext():
            self.ddp = DistributedDataParallel(
                config,
                DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    overlap_grad_reduce=False,
                    use_distributed_optimizer=distributed_optimizer,
                ),
                wrapped,
            )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=lr,
                weight_decay=weight_decay,
                adam_beta1=betas[0],
                adam_beta2=betas[1],
                clip_grad=clip_grad,
                bf16=half,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=distributed_optimizer,
            ),
            [self.ddp],
            use_gloo_process_groups=False,
        )
        self._sums = RunSums(self.ddp)
        config.grad_scale_func = self.optimizer.scale_loss
        adapter = getattr(self.model, "isoexec_adapter", None)
        if adapter is not None:
            adapter.bind_optimizer(self.optimizer)

    def own_rows(self, n: int) -> range:
        """Which of ``n`` rows this replica computes in `train_step`; the last replica's may be fewer, or none."""
        size, runs = self._cut(n)
        mine = share(runs, self._dp.size(), self._dp.rank())
        return range(n)[mine.start * size : mine.stop * size]

    def _cut(self, n: int) -> tuple[int, int]:
        """Rows of a microbatch, and number of microbatches of ``n`` rows, padding among them: each run has as many."""
        size = min(self.microbatch, -(-n // self._runs))
        return size, -(-n // (size * self._runs)) * self._runs

    def train_step(self, batch: Batch) -> StepResult:
        """One optimizer step: `accumulate`, then `update`; every rank of every replica calls it with the same whole batch."""
        found = self.accumulate(batch)
        norm = self.update()
        return StepResult(step=self.step, loss=found.loss, grad_norm=norm, logprobs=found.logprobs)

    def accumulate(self, batch: Batch) -> Accumulated:
        """The gradients of a step, in place of those there were; no weight changes before `update`.

        Every rank of every replica calls it with the same whole batch. Each replica computes its own run of the batch's
        microbatches (`own_rows`); the result is of the whole batch, and the same on every rank.  Raises InstallError where
        replicas got different batches, FloatingPointError when the loss is not finite.
        """
        self._accumulated = False
        n, length = batch.tokens.shape
        if not same_everywhere(
            [batch.tokens, batch.mask.view(torch.uint8), batch.advantages, batch.old_logprobs], self._dp
        ):
            raise InstallError(
                region="trainer",
                wanted="the same whole batch on every replica",
                found="another batch on each",
                fix="give train_step all rows on every rank; it shares them out",
            )
        tokens = batch.mask.sum()
        count = int(tokens)
        if count == 0:
            raise InstallError(
                region="trainer",
                wanted="a batch with response tokens",
                found="an empty mask",
                fix="skip this batch",
            )
        size, microbatches = self._cut(n)
        padded = _pad_rows(batch, microbatches * size - n)
        if self._graphs:
            padded = _pad_columns(padded, -length % recorded.COLUMNS)
        mine = share(microbatches, self._dp.size(), self._dp.rank())
        parts = [padded.rows(i * size, (i + 1) * size) for i in mine]
        self.ddp.train()
        self.optimizer.zero_grad()
        runs = self._runs // self._dp.size()
        each = len(parts) // runs
        self._sums.begin(runs)
        found: list[Tensor] = []
        for run in range(runs):
            own = parts[run * each : (run + 1) * each]
            if self._graphs:
                for part in own:
                    found += self._graphs("train", self._recorded, *part, tokens)
            else:
                found += self._forward_backward(own, tokens)
            self._sums.end()
        device = batch.tokens.device
        if self.model.post_process:
            logprobs = torch.cat([f[:, :length].float() for f in found])
        else:
            logprobs = torch.empty(len(parts) * size, length, dtype=torch.float32, device=device)
        logprobs = from_last_stage(logprobs, self.model.pg_collection.pp)
        logprobs = gather_shares(logprobs, microbatches * size, self._dp)[:n].contiguous()
        total = grpo_loss(
            logprobs.double(), batch.old_logprobs, batch.advantages, batch.mask, clip=self.ratio_clip
        )
        loss = float(total) / count
        if loss - loss != 0.0:
            raise FloatingPointError(f"step {self.step + 1}: the loss is {loss}")
        self._accumulated = True
        return Accumulated(loss=loss, logprobs=logprobs)

    def _forward_backward(self, parts: list[_Rows], count: Tensor) -> list[Tensor]:
        """Add the gradients of microbatches to DDP's buffers, by Megatron's own schedule; their logprobs on the last stage."""
        multiple = sequence_multiple(self.model)
        process = output_processor(self.model)
        size, length = parts[0].tokens.shape

        def forward(rest: Iterator[_Rows], stage: Any) -> tuple[Tensor, Callable[..., Any]]:
            part = next(rest)
            values = stage(**model_inputs(part.tokens, multiple), output_processor=process)

            def loss_of(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                lp = align(values, length)
                total = grpo_loss(lp, part.old_logprobs, part.advantages, part.mask, clip=self.ratio_clip)
                tokens = part.mask.sum(dtype=torch.int32)  # nobody reads it, but it says: do not divide
                return total / count.to(total.dtype), tokens, lp.detach()

            return values, loss_of

        schedule = get_forward_backward_func(pp_size=self.model.pg_collection.pp.size())
        found: list[Tensor] = schedule(
            forward_step_func=forward,
            data_iterator=iter(parts),
            model=[self.ddp],
            num_microbatches=len(parts),
            seq_length=length + -length % multiple,
            micro_batch_size=size,
            forward_only=False,
        )
        return found

    def _recorded(self, *tensors: Tensor) -> list[Tensor]:
        *rows, count = tensors
        return self._forward_backward([_Rows(*rows)], count)

    def score(self, tokens: Tensor) -> Tensor:
        """`logprobs.score` of tokens [n, L] in this trainer's microbatches: fp32 [n, L] on every rank."""
        if self._graphs is None:
            return score(self.model, tokens, microbatch=self.microbatch)
        n, length = tokens.shape
        size = self.microbatch
        rows = torch.cat([tokens, tokens[:1].expand(-n % size, -1)])
        parts = torch.nn.functional.pad(rows, (0, -length % recorded.COLUMNS)).split(size)
        found = [self._graphs("score", self._scored, part)[0] for part in parts]
        return torch.cat(found)[:n, :length].contiguous()

    def _scored(self, tokens: Tensor) -> list[Tensor]:
        return [score(self.model, tokens, microbatch=len(tokens))]

    def update(self) -> float:
        """Clip what `accumulate` left and step the optimizer, on every rank; the global gradient norm before clipping.

        Raises InstallError where no gradients wait, and FloatingPointError when their norm is not finite, after Megatron has
        applied them: go back to a checkpoint then.
        """
        if not self._accumulated:
            raise InstallError(
                region="trainer",
                wanted="the gradients of a batch",
                found="none since the last update",
                fix="call accumulate first, or train_step for both",
            )
        self._accumulated = False
        done, norm, _ = self.optimizer.step()
        if not done or norm is None or norm - norm != 0.0:
            raise FloatingPointError(
                f"step {self.step + 1}: gradient norm {norm}, optimizer step done: {done}"
            )
        self.step += 1
        return float(norm)

    def save_checkpoint(self, folder: Path | str) -> Path:
        """Write parameters and optimizer state, one file a rank; returns the step's folder.

        ``latest`` names a step only after every rank's file is on disk, so an interrupted save is never resumed from.
        """
        root = Path(folder)
        target = root / f"step{self.step:08d}"
        rank = dist.get_rank()
        if rank == 0:
            target.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        state = {
            "step": self.step,
            "layout": self._layout(),
            "parameters": {n: p.detach() for n, p in self.model.named_parameters()},
            "optimizer": self.optimizer.state_dict(),
            "shards": [_own_shards(part) for part in self._sharded()],
        }
        part = target / f"rank{rank:05d}.part"
        torch.save(state, part)
        part.replace(target / f"rank{rank:05d}.pt")
        dist.barrier()
        if rank == 0:
            mark = root / ".latest"
            mark.write_text(
                json.dumps({"step": self.step, "folder": target.name, "layout": self._layout()}) + "\n"
            )
            mark.replace(root / "latest")
        dist.barrier()
        return target

    def load_checkpoint(self, folder: Path | str) -> int:
        """Continue bitwise from the folder's latest checkpoint; returns its step. CheckpointError for another layout."""
        root = Path(folder)
        mark = root / "latest"
        if not mark.is_file():
            raise CheckpointError(f"{root}: no checkpoint was completed here")
        latest = json.loads(mark.read_text())
        if latest["layout"] != self._layout():
            raise CheckpointError(
                f"{root}: saved under {latest['layout']}, this run is {self._layout()}; use that layout"
            )
        file = root / latest["folder"] / f"rank{dist.get_rank():05d}.pt"
        if not file.is_file():
            raise CheckpointError(f"{file}: missing")
        state = torch.load(file, map_location="cpu", weights_only=True)
        sharded, shards = self._sharded(), state.get("shards", [])
        if len(sharded) != len(shards):
            raise CheckpointError(
                f"{file}: wanted the shards of {len(sharded)} distributed optimizers, found those of {len(shards)}; "
                "use the optimizer it was saved with"
            )
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        for part, own in zip(sharded, shards, strict=True):
            for held in part.optimizer.state.values():
                # Megatron gives all parameters one counter, which each of them would count up
                if isinstance(held.get("step"), Tensor):
                    held["step"] = held["step"].clone()
            part.load_parameter_state_from_dp_reshardable(own)
        self.step = int(state["step"])
        dist.barrier()
        return self.step

    def _sharded(self) -> list[Any]:
        """The distributed optimizers: their state_dict has neither masters nor moments."""
        return [part for part in leaves(self.optimizer) if isinstance(part, DistributedOptimizer)]

    def _layout(self) -> dict[str, Any]:
        config = self.model.config
        return {**topology_of(self.model.pg_collection, config), "dtype": str(config.params_dtype)}


def _own_shards(optimizer: DistributedOptimizer) -> dict[Any, Any]:
    """Masters and moments of this rank, as Megatron loads them: nothing of them is padding between parameters."""
    state: dict[Any, Any] = optimizer.get_parameter_state_dp_reshardable()
    for key, buffer in state.items():
        if isinstance(key, int):
            for entry in chain.from_iterable(chain.from_iterable(buffer.values())):
                entry["padding"] = False
    return state


class _Rows(NamedTuple):
    """Rows of a `Batch`."""

    tokens: Tensor
    mask: Tensor
    advantages: Tensor
    old_logprobs: Tensor

    def rows(self, a: int, b: int) -> _Rows:
        return _Rows(*(t[a:b] for t in self))


def _pad_rows(batch: Batch, extra: int) -> _Rows:
    """The batch with ``extra`` rows that no mask selects."""
    none = torch.zeros(extra, batch.tokens.shape[1], dtype=torch.bool, device=batch.mask.device)
    return _Rows(
        tokens=torch.cat([batch.tokens, batch.tokens[:1].expand(extra, -1)]),
        mask=torch.cat([batch.mask, none]),
        advantages=torch.cat([batch.advantages, batch.advantages.new_zeros(extra)]),
        old_logprobs=torch.cat([batch.old_logprobs, batch.old_logprobs[:1].expand(extra, -1)]),
    )


def _pad_columns(rows: _Rows, extra: int) -> _Rows:
    """The rows with ``extra`` tokens of id 0 behind each, that no mask selects."""
    wider = {
        name: torch.nn.functional.pad(getattr(rows, name), (0, extra))
        for name in ("tokens", "mask", "old_logprobs")
    }
    return rows._replace(**wider)
