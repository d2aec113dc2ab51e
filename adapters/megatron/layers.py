# SPDX-License-Identifier: Apache-2.0
"""Contract modules in the place of megatron-core's: same parameters, same checkpoint names, the contract's arithmetic.

A module holds the :class:`~isoexec.adapters.base.Binding` of its region, given by the adapter's install; before that its forward
raises, so a model built from a rewritten spec and never installed does not run.  ``compute`` is the one path to the kernel: the
forward takes it with the module's own process group, the canary takes it with none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.transformer.mlp import MLP
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.adapters.base import Binding
from isoexec.contracts.errors import InstallError
from isoexec.kernels import bias as bias_kernel
from isoexec.kernels import embedding as embedding_kernel
from isoexec.kernels import linear as linear_kernel
from isoexec.kernels import rms_norm as norm_kernel
from isoexec.kernels import silu_mul as silu_kernel

SHARDED = "sequence_parallel"
"""Megatron's mark on a weight whose input rows tensor-parallel ranks share; its gradient is summed over them."""

Shard = Literal["none", "sequence", "heads"]

__all__ = [
    "SHARDED",
    "ContractColumnParallelLinear",
    "ContractEmbedding",
    "ContractHead",
    "ContractMLP",
    "ContractQKNorm",
    "ContractRMSNorm",
    "ContractRowParallelLinear",
    "Contracted",
    "adding",
    "contract_residual_add",
    "linear_unfit",
    "solo",
]


def solo(group: ProcessGroup | None) -> ProcessGroup | None:
    """None for a group of one rank: the kernels skip every collective there."""
    return None if group is None or group.size() == 1 else group


class Contracted:
    """What every contract module has: its region, its binding, and the stock module it may have taken over."""

    region: ClassVar[str]
    stock: ClassVar[tuple[type, ...]] = ()
    also: ClassVar[Mapping[str, str]] = {}
    """Regions that every module of the class serves besides its own -> the attribute that holds their binding."""
    binding: Binding | None = None

    def bind(self, binding: Binding | None) -> None:
        """Give the module its region's binding, or take it away."""
        self.binding = binding

    def require(self) -> Binding:
        """The region's binding; InstallError when the module has none."""
        if self.binding is None:
            raise InstallError(
                region=self.region,
                wanted=f"a binding for {type(self).__name__}",
                found="a model built from a rewritten spec and never installed",
                fix="call MegatronAdapter(model).install(plan) before the first forward",
            )
        return self.binding

    def constant(self, name: str) -> Any:
        """A constant of the region's binding."""
        return self.require().constants[name]

    def unfit(self) -> str | None:
        """Why this module cannot keep the contract, or None."""
        return None

    @classmethod
    def takes(cls, module: object) -> bool:
        """Whether ``module`` is Megatron's own for this slot, unchanged, so that it can be adopted."""
        return type(module) in cls.stock

    @classmethod
    def adopt(cls, module: torch.nn.Module) -> Self:
        """A contract module that shares ``module``'s parameters, buffers, hooks and settings; ``module`` stays as it was."""
        new = cls.__new__(cls)
        for name, value in vars(module).items():
            new.__dict__[name] = value.copy() if isinstance(value, dict) else value
        return new


def linear_unfit(module: Any, biased: bool = False) -> str | None:
    """Why a linear of Megatron's cannot keep the contract, or None."""
    if module.bias is not None and not biased:
        return "a bias, and the contract's linear has none"
    if biased and (module.bias is None or module.skip_bias_add):
        return "no bias to add here, and the contract's linear has one"
    if module.is_expert:
        return "an expert layer"
    if getattr(module, "gradient_accumulation_fusion", False):
        return "gradient_accumulation_fusion, which sums weight gradients outside the contract"
    if getattr(module, "gtp_remat_size", 1) > 1:
        return f"gtp_remat of size {module.gtp_remat_size}"
    return None


class ContractColumnParallelLinear(Contracted, ColumnParallelLinear):
    """``linear.chain`` over K for each output column this rank holds; the input gradient is a chain over N from rank to rank.

    Where the contract has ``qkv_bias``, the projection of query, key and value also adds its bias by ``bias.add``; either of the
    two regions may be left to Megatron.
    """

    region = "column_linear"
    stock = (ColumnParallelLinear,)
    interleave = 1
    biased = False
    bias_binding: Binding | None = None

    def __init__(self, *args: Any, stride: int = 1, **options: Any) -> None:
        super().__init__(*args, stride=stride, **options)
        self.interleave = stride

    @classmethod
    def adopt(cls, module: torch.nn.Module) -> Self:
        new = super().adopt(module)
        weight = module.weight
        new.interleave = getattr(weight, "partition_stride", 1) if weight is not None else 1
        return new

    def bind(self, binding: Binding | None, bias: Binding | None = None) -> None:
        """``binding`` and ``bias`` are None for a region Megatron keeps; both None unbinds."""
        self.binding, self.bias_binding = binding, bias

    def unfit(self) -> str | None:
        if self.gather_output:
            return "gather_output=True; keep the output parallel"
        if self.disable_grad_reduce:
            return "disable_grad_reduce=True"
        return linear_unfit(self, self.biased)

    def compute(self, x: Tensor, weight: Tensor, group: ProcessGroup | None) -> Tensor:
        """Multiply x [s, b, K] (this rank's rows under sequence parallelism), weight [N/t, K] -> [s, b, N/t], x's dtype."""
        return linear_kernel.column_linear(
            x,
            weight,
            k_block=self.constant("k_block"),
            group=group,
            sequence_parallel=self.sequence_parallel and group is not None,
            interleave=self.interleave,
        )

    def compute_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        """Add bias [N/t] to the rounded product x [s, b, N/t] of all tokens -> the same shape and dtype."""
        return bias_kernel.bias_add(x, bias)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """``input_`` [s, b, K] -> (output [s, b, N/t], None)."""
        if runtime_gather_output:
            raise InstallError(
                region=self.region,
                wanted="vocabulary- or column-parallel output",
                found="runtime_gather_output=True",
                fix="leave it False; the contract's logprobs need no gather",
            )
        weight = self.weight if weight is None else weight
        if self.binding is None and self.bias_binding is not None:
            out = self._without_bias(input_, weight)
        else:
            out = self.compute(input_, weight, solo(self.tp_group))
        if self.bias_binding is not None:
            return self.compute_bias(out, self.bias), None
        return (out if self.bias is None else out + self.bias), None

    def _without_bias(self, input_: Tensor, weight: Tensor) -> Tensor:
        """Megatron's own product."""
        self.skip_bias_add = True
        try:
            out: Tensor = super().forward(input_, weight)[0]
        finally:
            self.skip_bias_add = False
        return out


class ContractHead(ContractColumnParallelLinear):
    """The output layer: the same chain, and fp32 logits without a rounding to the model's dtype."""

    region = "lm_head"

    def compute(self, x: Tensor, weight: Tensor, group: ProcessGroup | None) -> Tensor:
        """Multiply x [s, b, K], weight [V/t, K] -> fp32 logits [s, b, V/t]."""
        return linear_kernel.column_linear(
            x,
            weight,
            k_block=self.constant("k_block"),
            group=group,
            sequence_parallel=self.sequence_parallel and group is not None,
            out_dtype=torch.float32,
        )


class ContractRowParallelLinear(Contracted, RowParallelLinear):
    """``linear.chain`` over the whole K: each rank goes on from the fp32 sum of the rank before it, and one rounding ends it."""

    region = "row_linear"
    stock = (RowParallelLinear,)

    def unfit(self) -> str | None:
        if not self.input_is_parallel:
            return "input_is_parallel=False"
        return linear_unfit(self)

    def compute(self, x: Tensor, weight: Tensor, group: ProcessGroup | None) -> Tensor:
        """Multiply x [s, b, K/t], weight [N, K/t] -> [s, b, N], or this rank's rows of it under sequence parallelism."""
        return linear_kernel.row_linear(
            x,
            weight,
            k_block=self.constant("k_block"),
            group=group,
            sequence_parallel=self.sequence_parallel and group is not None,
        )

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        return self.compute(input_, self.weight, solo(self.tp_group)), None


class ContractEmbedding(Contracted, VocabParallelEmbedding):
    """Vocabulary-parallel lookup whose sum over ranks has one non-zero term."""

    region = "embedding"
    stock = (VocabParallelEmbedding,)

    def unfit(self) -> str | None:
        size = getattr(self, "gtp_remat_size", 1)
        return f"gtp_remat of size {size}" if size > 1 else None

    def compute(self, ids: Tensor, weight: Tensor, group: ProcessGroup | None) -> Tensor:
        """Look up ids [s, b] -> [s, b, H], or this rank's [s/t, b, H] where the module scatters to sequence-parallel ranks."""
        self.require()
        return embedding_kernel.vocab_parallel_embedding(
            ids,
            weight,
            vocab_start=self.vocab_start_index if group is not None else 0,
            group=group,
            sequence_parallel=self.reduce_scatter_embeddings and group is not None,
        )

    def forward(self, input_: Tensor) -> Tensor:
        """[b, s] ids -> [b, s, H], or [s/t, b, H] where the module scatters.

        Tokens are taken sequence first in both cases: the weight's gradient adds them in the order they come.
        """
        out = self.compute(input_.transpose(0, 1).contiguous(), self.weight, solo(self.tp_group))
        return out if self.reduce_scatter_embeddings else out.transpose(0, 1)


class ContractRMSNorm(Contracted, torch.nn.RMSNorm):
    """``rms_norm.tree`` over the hidden dimension; the scale's gradient does not depend on how rows lie on ranks.

    Megatron sums that gradient over the tensor-parallel group exactly where rows or heads are sharded; the kernel leaves it whole
    on the group's first rank and zero on the others, so that the sum is exact.
    """

    region = "norm"
    stock = (torch.nn.RMSNorm,)
    tp_group: ProcessGroup | None = None

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.config = config
        setattr(self.weight, SHARDED, config.sequence_parallel)

    @classmethod
    def takes(cls, module: object) -> bool:
        # Megatron's wrapper makes a plain torch.nn.RMSNorm; frameworks subclass it to mark its weight
        return isinstance(module, torch.nn.RMSNorm) and type(module).forward is torch.nn.RMSNorm.forward

    def shard(self) -> Shard:
        """Which axis of the input tensor-parallel ranks share: ``none``, ``sequence`` or ``heads``."""
        return "sequence" if getattr(self.weight, SHARDED, False) else "none"

    def compute(self, x: Tensor, weight: Tensor, eps: float | None, group: ProcessGroup | None) -> Tensor:
        """Norm x [s, b, H] or [s, b, heads, H], weight [H] -> the same shape and dtype as x."""
        self.require()
        shard: Shard = "none" if group is None else self.shard()
        return norm_kernel.rms_norm_grad(
            x, weight, float(eps or 0.0), shard=shard, group=None if shard == "none" else group
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight, self.eps, solo(self.tp_group))


class ContractQKNorm(ContractRMSNorm):
    """The norm of query and key heads: tensor-parallel ranks share the heads."""

    region = "qk_norm"

    def shard(self) -> Shard:
        return "heads"


class ContractMLP(Contracted, MLP):
    """fc1, ``silu_mul.exp``, fc2; fc1 holds a rank's gate rows, then its up rows."""

    region = "silu_mul"
    stock = (MLP,)

    def compute(self, gate: Tensor, up: Tensor) -> Tensor:
        """From gate and up [..., F/t] -> silu(gate) * up in their dtype."""
        self.require()
        return silu_kernel.silu_mul(gate, up)

    def compute_halves(self, hidden: Tensor) -> Tensor:
        """From fc1's [s, b, 2 F/t], gate first -> [s, b, F/t]."""
        gate, up = hidden.chunk(2, -1)
        return self.compute(gate, up)

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """[s, b, H] -> ([s, b, H], None)."""
        if per_token_scale is not None:
            raise InstallError(
                region=self.region,
                wanted="a dense MLP",
                found="per_token_scale",
                fix="this adapter covers dense models",
            )
        hidden, bias = self.linear_fc1(hidden_states)
        if bias is not None:
            raise InstallError(
                region=self.region, wanted="no bias", found="a bias from fc1", fix="add_bias_linear=False"
            )
        return self.linear_fc2(self.compute_halves(hidden))


def contract_residual_add(training: bool, fused: bool) -> Callable[..., Tensor]:  # noqa: ARG001
    """Megatron's bias-dropout-add slot: the residual add of the ``norm`` region, with neither bias nor dropout."""
    return adding(norm_kernel.residual_add, training)


def adding(kernel: Callable[[Tensor, Tensor], Tensor], training: bool) -> Callable[..., Tensor]:
    """What fills Megatron's bias-dropout-add slot: ``kernel(x, residual)`` alone; InstallError for a bias or dropout."""

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        if bias is not None or (training and prob > 0.0):
            raise InstallError(
                region="norm",
                wanted="a residual add alone",
                found="a bias" if bias is not None else f"dropout {prob}",
                fix="add_bias_linear=False and hidden_dropout=0.0",
            )
        return kernel(x, residual)

    return add
