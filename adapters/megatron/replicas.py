# SPDX-License-Identifier: Apache-2.0
"""Data parallelism in one order of summing: contiguous shares of rows, a sum for each share, then the sums added.

A sum of two fp32 numbers commutes, so the all-reduce and the reduce-scatter of two replicas have fixed bits; of more the order is
the library's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.contracts.errors import InstallError
from isoexec.probes.weights import Block, tensor_partials

__all__ = ["RunSums", "gather_shares", "runs_of", "same_everywhere", "share"]


def share(n: int, size: int, rank: int) -> range:
    """Of ``n`` rows those of replica ``rank`` of ``size``: contiguous, as even as can be, the first replicas hold one more."""
    each, more = divmod(n, size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def gather_shares(mine: Tensor, n: int, group: ProcessGroup) -> Tensor:
    """Put each replica's `share` of ``n`` rows together, [n, ...] on every rank; ``mine`` holds this replica's rows."""
    size = group.size()
    if size == 1:
        return mine
    counts = [len(share(n, size, rank)) for rank in range(size)]
    padded = mine.new_zeros(counts[0], *mine.shape[1:])
    padded[: len(mine)] = mine
    found = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(found, padded, group=group)
    return torch.cat([rows[:count] for rows, count in zip(found, counts, strict=True)])


def runs_of(model: Any, as_replicas: int) -> int:
    """How many runs of microbatches are summed each for itself: the replicas there are, or ``as_replicas`` of a single one.

    Raises InstallError for what has no fixed order of summing, and for a loss that the schedule would scale by itself.
    """
    groups, config = model.pg_collection, model.config
    dp = groups.dp.size()
    if dp not in (1, 2):
        raise _refused(
            "DP 1 or 2",
            f"DP {dp}",
            "start tp * pp ranks, once or twice: the order in which more replicas are summed is the collective library's",
        )
    if as_replicas not in (1, 2):
        raise _refused(
            "as_replicas 1 or 2",
            f"as_replicas={as_replicas}",
            "name the number of replicas whose order is meant",
        )
    if config.num_moe_experts is not None and groups.expt_dp.size() != dp:
        raise _refused(
            f"every expert on each of {dp} replicas",
            f"an expert on {groups.expt_dp.size()} of them: its gradient would sum the rows of several replicas at once",
            "keep EP * ETP within the tensor-parallel ranks",
        )
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "mtp_num_layers"):
        value = getattr(config, name, None)
        if torch.tensor(value or 0.0).any():
            raise _refused(
                "a model whose only loss is the batch's",
                f"{name}={value}: its loss was set up for a schedule that divides by the microbatches",
                f"build the model without {name}",
            )
    return max(dp, as_replicas)


def _refused(wanted: str, found: str, fix: str) -> InstallError:
    return InstallError(region="trainer", wanted=wanted, found=found, fix=fix)


def same_everywhere(tensors: Sequence[Tensor], group: ProcessGroup) -> bool:
    """Whether every replica passes tensors of the same shapes and bits, by their digests; as many dimensions on each."""
    if group.size() == 1:
        return True
    facts: list[int] = []
    for tensor, digest in zip(
        tensors, tensor_partials(Block(t, t.shape, [0] * t.dim()) for t in tensors), strict=True
    ):
        facts += [*tensor.shape, *(lane - (lane >> 63 << 64) for lane in digest.lanes)]
    mine = torch.tensor(facts, device=tensors[0].device)
    found = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(found, mine, group=group)
    return all(torch.equal(one, mine) for one in found)


class RunSums:
    """Gradients of one run after the other, summed alone, then added, and after the last one finalized as Megatron does.

    It takes the place of a schedule's own finalizing (``finalize_model_grads_func``, which is not set).  Between runs a second
    buffer of the gradients' size holds what is summed.  The number of tokens, by which Megatron would divide, is not handed on:
    the loss of a microbatch is already of the whole batch's tokens.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._kept: list[Tensor] = []
        self._left = 0

    def begin(self, runs: int) -> None:
        """Before the first of ``runs`` runs of the schedule."""
        self._ddp.zero_grad_buffer()
        self._kept, self._left = [], runs

    @torch.no_grad()
    def end(self) -> None:
        """After each run."""
        self._left -= 1
        buffers = [b.grad_data for b in (*self._ddp.buffers, *self._ddp.expert_parallel_buffers)]
        for buffer, kept in zip(buffers, self._kept, strict=False):
            buffer.add_(kept)
        self._kept = []
        if self._left:
            self._kept = [buffer.clone() for buffer in buffers]
            self._ddp.zero_grad_buffer()
        else:
            finalize_model_grads([self._ddp])
