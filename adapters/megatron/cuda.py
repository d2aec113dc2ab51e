# SPDX-License-Identifier: Apache-2.0
"""The dense regions bound to the opaque ops of sm90: the modules of `layers`, with other kernels, and the process's state.

The head computes token logprobs itself (``head_logprobs``): its logits are never written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.adapters.megatron.cuda_attention import CudaCoreAttention
from isoexec.adapters.megatron.kinds import Kinds
from isoexec.adapters.megatron.layers import (
    ContractColumnParallelLinear,
    ContractEmbedding,
    ContractMLP,
    ContractRMSNorm,
    ContractRowParallelLinear,
    Shard,
    adding,
    solo,
)
from isoexec.contracts.errors import InstallError, IsoExecError
from isoexec.kernels.bias.hopper import ops as bias_ops
from isoexec.kernels.embedding.hopper import ops as embedding_ops
from isoexec.kernels.grad_norm.hopper import ops as grad_norm_ops
from isoexec.kernels.linear.hopper import cublaslt, transport
from isoexec.kernels.linear.hopper import ops as linear_ops
from isoexec.kernels.linear_logprobs.hopper import ops as head_ops
from isoexec.kernels.rms_norm.hopper import ops as norm_ops
from isoexec.kernels.rms_norm.hopper.naive import TOKENS
from isoexec.kernels.rope.hopper import ops as rope_ops
from isoexec.kernels.silu_mul.hopper import ops as silu_ops

__all__ = [
    "KINDS",
    "CudaColumnParallelLinear",
    "CudaEmbedding",
    "CudaHead",
    "CudaMLP",
    "CudaQKNorm",
    "CudaRMSNorm",
    "CudaRowParallelLinear",
    "Pending",
    "cuda_deferred_add",
    "cuda_residual_add",
    "sum_of_squares",
]

_BY_LIBRARY = ("column_linear", "row_linear", "head_logprobs")
"""Regions some of whose products are cuBLASLt's."""


class CudaColumnParallelLinear(ContractColumnParallelLinear):
    """``linear.mma_chain`` for this rank's columns; the input gradient is a chain over N from rank to rank, part by part."""

    def compute(self, x: Tensor, weight: Tensor, group: ProcessGroup | None) -> Tensor:
        """Multiply x [s, b, K] (this rank's rows under sequence parallelism), weight [N/t, K] -> bf16 [s, b, N/t]."""
        self.require()
        return linear_ops.column_linear(
            x,
            weight,
            group=group,
            sequence_parallel=self.sequence_parallel and group is not None,
            laps=self.interleave,
        )

    def compute_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        """Add bias [N/t] to the rounded product x [s, b, N/t] of all tokens -> the same shape and dtype."""
        return bias_ops.bias_add(x, bias)


class CudaRowParallelLinear(ContractRowParallelLinear):
    """``linear.mma_chain`` over the whole K: each rank goes on from the fp32 accumulator of the rank before it."""

    def compute(self, x: Tensor, weight: Tensor, group: ProcessGroup | None) -> Tensor:
        """Multiply x [s, b, K/t], weight [N, K/t] -> [s, b, N], or this rank's rows of it under sequence parallelism."""
        self.require()
        return linear_ops.row_linear(
            x, weight, group=group, sequence_parallel=self.sequence_parallel and group is not None
        )


class CudaEmbedding(ContractEmbedding):
    """Vocabulary-parallel lookup whose sum over ranks has one non-zero term."""

    def compute(self, ids: Tensor, weight: Tensor, group: ProcessGroup | None) -> Tensor:
        """Look up ids [s, b] -> [s, b, H], or this rank's [s/t, b, H] where the module scatters to sequence-parallel ranks."""
        self.require()
        return embedding_ops.vocab_parallel_embedding(
            ids,
            weight,
            vocab_start=self.vocab_start_index if group is not None else 0,
            group=group,
            sequence_parallel=self.reduce_scatter_embeddings and group is not None,
        )


@dataclass(frozen=True)
class Pending:
    """A residual sum of [s, b, H] that the norm behind it makes."""

    x: Tensor
    residual: Tensor


class CudaRMSNorm(ContractRMSNorm):
    """``rms_norm.pairs`` over the hidden dimension; sequence-parallel ranks hold rows by whole chains of 16."""

    def compute(self, x: Tensor, weight: Tensor, eps: float | None, group: ProcessGroup | None) -> Tensor:
        """Norm x [s, b, H] or [s, b, heads, H], weight [H] -> the same shape and dtype as x."""
        self.require()
        shard: Shard = "none" if group is None else self.shard()
        return norm_ops.rms_norm_grad(
            x, weight, float(eps or 0.0), shard=shard, group=None if shard == "none" else group
        )

    def compute_sum(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float | None, group: ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, [s, b, H] each, and that sum rounded to the model dtype."""
        self.require()
        shard: Shard = "none" if group is None else self.shard()
        y, h = norm_ops.add_rms_norm(
            x.flatten(0, 1),
            residual.flatten(0, 1),
            weight,
            float(eps or 0.0),
            shard=shard,
            group=None if shard == "none" else group,
        )
        return y.view(x.shape), h.view(x.shape)

    def forward(self, x: Tensor | Pending) -> Any:
        """The norm of x; of a sum that is still to be made, the norm and the sum, as Megatron's layer takes both."""
        if isinstance(x, Pending):
            return self.compute_sum(x.x, x.residual, self.weight, self.eps, solo(self.tp_group))
        return super().forward(x)


class CudaQKNorm(CudaRMSNorm):
    """The norm of query and key heads: tensor-parallel ranks share the heads."""

    region = "qk_norm"

    def shard(self) -> Shard:
        return "heads"


class CudaMLP(ContractMLP):
    """fc1, ``silu_mul.poly`` of its halves as they lie, fc2."""

    def compute(self, gate: Tensor, up: Tensor) -> Tensor:
        """From gate and up [..., F/t] -> silu(gate) * up in their dtype."""
        return self.compute_halves(torch.cat((gate, up), -1))

    def compute_halves(self, hidden: Tensor) -> Tensor:
        """From fc1's [..., 2 F/t], gate first -> [..., F/t]."""
        self.require()
        out = silu_ops.silu_mul_halves(hidden.flatten(0, -2))
        return out.view(*hidden.shape[:-1], out.shape[-1])


class CudaHead(ContractColumnParallelLinear):
    """``linear_logprobs.mma_blocks``: token logprobs, and entropies, from hidden states and the vocabulary's rows."""

    region = "head_logprobs"

    def compute_logprobs(
        self,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        group: ProcessGroup | None,
        temperature: Tensor | None = None,
        entropy: bool = False,
    ) -> Tensor:
        """From x [T, H], weight [V/t, H], ids [T] of the whole vocabulary and temperatures fp32 [T] -> fp32 [T].

        With ``entropy`` fp32 [2, T]: logprobs, then entropies in nats.
        """
        leaves = self.constant("vocab_leaves")
        if not entropy:
            return head_ops.linear_logprobs(
                x, weight, target, group, vocab_leaves=leaves, temperature=temperature
            )
        return torch.stack(
            head_ops.linear_logprobs_and_entropy(
                x, weight, target, group, vocab_leaves=leaves, temperature=temperature
            )
        )

    def logprobs(
        self,
        hidden: Tensor,
        labels: Tensor,
        *,
        weight: Tensor | None = None,
        temperature: float | Tensor | None = None,
        entropy: bool = False,
    ) -> Tensor:
        """From hidden states [s, b, H] (this rank's rows under sequence parallelism), labels [b, s] -> fp32 [b, s].

        ``weight`` is a tied one.  ``temperature`` is one number, or fp32 [b, s].  With ``entropy`` fp32 [2, b, s].
        """
        group = solo(self.tp_group)
        if group is not None and self.sequence_parallel:
            # the gradient comes whole to every rank, which keeps its rows of it
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=group
            )
        s, b, width = hidden.shape
        target = labels.transpose(0, 1).reshape(-1)
        heat = None
        if isinstance(temperature, Tensor):
            heat = temperature.float().transpose(0, 1).reshape(-1)
        elif temperature is not None:
            heat = torch.full((s * b,), temperature, dtype=torch.float32, device=hidden.device)
        found = self.compute_logprobs(
            hidden.reshape(s * b, width),
            self.weight if weight is None else weight,
            target.contiguous(),
            group,
            heat if heat is None else heat.contiguous(),
            entropy,
        )
        return found.view(*found.shape[:-1], s, b).transpose(-1, -2).contiguous()

    def forward(
        self,
        input_: Tensor,  # noqa: ARG002
        weight: Tensor | None = None,  # noqa: ARG002
        runtime_gather_output: bool | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, None]:
        """Refuse: logits are no case of the contract's trainer."""
        raise InstallError(
            region=self.region,
            wanted="token logprobs by the head itself",
            found="a forward that asks the head for logits",
            fix="pass labels=... and output_processor=isoexec.adapters.megatron.logprobs.output_processor(model)",
        )


def cuda_residual_add(training: bool, fused: bool) -> Callable[..., Tensor]:  # noqa: ARG001
    """Megatron's bias-dropout-add slot: the residual add of the ``norm`` region, with neither bias nor dropout."""
    return adding(norm_ops.residual_add, training)


def cuda_deferred_add(training: bool, fused: bool) -> Callable[..., Any]:  # noqa: ARG001
    """As `cuda_residual_add`, for the slot before a norm that makes the sum itself (`Kinds.adds`)."""
    return adding(cast("Callable[[Tensor, Tensor], Tensor]", Pending), training)


def sum_of_squares(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> Tensor:
    """The kernel's exact sum; the one path of the bound methods and of the canary."""
    if not tensors:
        tensors = [torch.empty(0, device=torch.cuda.current_device())]
    return grad_norm_ops.exact_sq_sum(tensors, group)


def _begin() -> None:
    """Claim the switches of the library's products for this process, where training begins."""
    if cublaslt.switches() != cublaslt.WANTED:
        cublaslt.claim()


def _agree(group: ProcessGroup | None, device: torch.device) -> str | None:
    """Let the ranks of a tensor-parallel group choose a transport, all at once and outside of CUDA graphs."""
    group = solo(group)
    return None if group is None else f"handed on by {transport.prepare(group, device).name}"


def _problem(region: str, device: torch.device) -> str | None:
    """What is wrong with the library's products: its switches, and then their effect."""
    if region not in _BY_LIBRARY:
        return None
    try:
        cublaslt.check()
        cublaslt.probe(device=device.type)
    except IsoExecError as error:
        return str(error)
    return None


KINDS = Kinds(
    arch="sm90",
    column=CudaColumnParallelLinear,
    row=CudaRowParallelLinear,
    head=CudaHead,
    embedding=CudaEmbedding,
    norm=CudaRMSNorm,
    head_norm=CudaQKNorm,
    mlp=CudaMLP,
    core=CudaCoreAttention,
    residual_add=cuda_residual_add,
    deferred_add=cuda_deferred_add,
    logprobs=None,
    sums=sys.modules[__name__],
    rope_tables=lambda width, base, device: [t.cpu() for t in rope_ops.tables(width, base, device)],
    begin=_begin,
    agree=_agree,
    problem=_problem,
    rows=TOKENS,
)
