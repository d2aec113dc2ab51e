# SPDX-License-Identifier: Apache-2.0
"""A GRPO step on real Megatron: pipeline schedule, DDP with fp32 gradients, mixed-precision Adam, clipping on, checkpoints.

Every reduction of the loss runs over one microbatch's [rows, length] tensor, which each rank holds whole, so the loss does not
depend on how the model is laid out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from isoexec.adapters.megatron.logprobs import (
    align,
    from_last_stage,
    model_inputs,
    output_processor,
    sequence_multiple,
)
from isoexec.adapters.megatron.slots import topology_of
from isoexec.adapters.megatron.weights import unwrap
from isoexec.contracts.errors import InstallError, IsoExecError

__all__ = ["Batch", "CheckpointError", "StepResult", "Trainer", "group_advantages", "grpo_loss"]


class CheckpointError(IsoExecError):
    """A checkpoint that is missing, incomplete, or of another layout."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One training batch, the same on every rank of the model.

    tokens [n, L] int64, padded on the right; mask [n, L] bool, True for the response tokens to learn from; advantages [n] fp32;
    old_logprobs [n, L] fp32, aligned with tokens (the rollout's, or the trainer's own scores).
    """

    tokens: Tensor
    mask: Tensor
    advantages: Tensor
    old_logprobs: Tensor


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did: mean loss per response token, global gradient norm before clipping, trainer_fwd logprobs [n, L] fp32."""

    step: int
    loss: float
    grad_norm: float
    logprobs: Tensor


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
    """Owns the wrapped model and the optimizer of one run; data parallelism is left to the caller's framework (DP = 1)."""

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
    ) -> None:
        self.model = unwrap(model)
        config = self.model.config
        groups = self.model.pg_collection
        if groups.dp.size() != 1:
            raise InstallError(
                region="trainer",
                wanted="DP 1",
                found=f"DP {groups.dp.size()}",
                fix="start tp * pp ranks for this Trainer",
            )
        self.microbatch, self.ratio_clip, self.step = microbatch, ratio_clip, 0
        half = config.params_dtype is torch.bfloat16
        wrapped = Float16Module(config, self.model) if half else self.model
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
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        adapter = getattr(self.model, "isoexec_adapter", None)
        if adapter is not None:
            adapter.bind_optimizer(self.optimizer)

    def train_step(self, batch: Batch) -> StepResult:
        """One optimizer step; every rank of the model calls it with the same batch.

        Raises FloatingPointError when the loss is not finite, before any weight has changed, and when the gradient norm is not,
        after Megatron has applied it: go back to a checkpoint then.
        """
        n, length = batch.tokens.shape
        size = min(self.microbatch, n)
        count = int(batch.mask.sum())
        if count == 0:
            raise InstallError(
                region="trainer",
                wanted="a batch with response tokens",
                found="an empty mask",
                fix="skip this batch",
            )
        padded = _pad_rows(batch, -n % size)
        parts = [padded.rows(a, a + size) for a in range(0, n + -n % size, size)]
        microbatches, multiple = len(parts), sequence_multiple(self.model)
        process = output_processor(self.model)
        self.ddp.train()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

        def forward(parts: Iterator[_Rows], stage: Any) -> tuple[Tensor, Callable[..., Any]]:
            part = next(parts)
            values = stage(**model_inputs(part.tokens, multiple), output_processor=process)

            def loss_of(values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                lp = align(values, length)
                total = grpo_loss(lp, part.old_logprobs, part.advantages, part.mask, clip=self.ratio_clip)
                # the schedule divides by the number of microbatches
                return total / count * microbatches, {"sum": total.detach(), "logprobs": lp.detach()}

            return values, loss_of

        found = get_forward_backward_func(pp_size=self.model.pg_collection.pp.size())(
            forward_step_func=forward,
            data_iterator=iter(parts),
            model=[self.ddp],
            num_microbatches=microbatches,
            seq_length=length + -length % multiple,
            micro_batch_size=size,
            forward_only=False,
        )
        device = batch.tokens.device
        if self.model.post_process:
            sums = torch.stack([f["sum"].double() for f in found])
            logprobs = torch.cat([f["logprobs"].float() for f in found])[:n].contiguous()
        else:
            sums = torch.empty(len(parts), dtype=torch.float64, device=device)
            logprobs = torch.empty(n, length, dtype=torch.float32, device=device)
        pp = self.model.pg_collection.pp
        loss = float(from_last_stage(sums, pp).sum()) / count
        logprobs = from_last_stage(logprobs, pp)
        if loss - loss != 0.0:
            raise FloatingPointError(f"step {self.step + 1}: the loss is {loss}")
        done, norm, _ = self.optimizer.step()
        if not done or norm is None or norm - norm != 0.0:
            raise FloatingPointError(
                f"step {self.step + 1}: gradient norm {norm}, optimizer step done: {done}"
            )
        self.step += 1
        return StepResult(step=self.step, loss=loss, grad_norm=float(norm), logprobs=logprobs)

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
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = int(state["step"])
        dist.barrier()
        return self.step

    def _layout(self) -> dict[str, Any]:
        config = self.model.config
        return {**topology_of(self.model.pg_collection, config), "dtype": str(config.params_dtype)}


@dataclass(frozen=True, kw_only=True)
class _Rows:
    tokens: Tensor
    mask: Tensor
    advantages: Tensor
    old_logprobs: Tensor

    def rows(self, a: int, b: int) -> _Rows:
        return _Rows(
            tokens=self.tokens[a:b],
            mask=self.mask[a:b],
            advantages=self.advantages[a:b],
            old_logprobs=self.old_logprobs[a:b],
        )


def _pad_rows(batch: Batch, extra: int) -> _Rows:
    """The batch with ``extra`` rows that no mask selects."""
    none = torch.zeros(extra, batch.tokens.shape[1], dtype=torch.bool, device=batch.mask.device)
    return _Rows(
        tokens=torch.cat([batch.tokens, batch.tokens[:1].expand(extra, -1)]),
        mask=torch.cat([batch.mask, none]),
        advantages=torch.cat([batch.advantages, batch.advantages.new_zeros(extra)]),
        old_logprobs=torch.cat([batch.old_logprobs, batch.old_logprobs[:1].expand(extra, -1)]),
    )
