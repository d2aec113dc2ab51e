# SPDX-License-Identifier: Apache-2.0
"""What binds a contract's regions on one arch: the module classes, and what a process needs besides them.

The CPU's are here; those of sm90 need triton and are imported when a contract asks for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.adapters.megatron import clipping, layers
from isoexec.adapters.megatron.attention import ContractCoreAttention
from isoexec.adapters.megatron.moe import ContractExperts, ContractMoELayer, ContractRouter
from isoexec.adapters.megatron.token_logprobs import TokenLogprobs
from isoexec.contracts.errors import InstallError
from isoexec.kernels.rope import ops as rope_ops

__all__ = ["CPU", "Kinds", "kinds_in", "kinds_of"]

_METHODS = (
    *("forward", "__call__", "compute", "compute_bias", "compute_rope", "compute_halves", "compute_logprobs"),
    "compute_sum",
    *("compute_routing", "compute_plan", "compute_slots", "compute_combine", "compute_down", "compute_silu"),
)


def _nothing(*_: Any) -> None:
    """A CPU has no switches to claim and nothing to agree on."""


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """The classes by slot, and the rest of an arch's binding.

    ``deferred_add`` leaves the sum after attention to the norm that reads it, where a layer lets it (`adds`).
    ``logprobs`` is what a model holds as ``token_logprobs``, None where the head computes them itself.  ``router``, ``experts``
    and ``moe`` are None where layers with experts are not bound.  ``sums`` has ``sum_of_squares``.  ``rope_tables`` gives the
    tables in use for (rotated width, base, device).  ``begin`` claims the process's switches, before anything reads them;
    ``agree`` lets a tensor-parallel group choose how accumulators travel and returns it in words; ``problem`` looks at the
    effect of both and says what is wrong.  ``rows`` is what the rows of a sequence-parallel rank must be a multiple of.
    """

    arch: str
    column: type[layers.ContractColumnParallelLinear]
    row: type[layers.Contracted]
    head: type[layers.ContractColumnParallelLinear]
    embedding: type[layers.Contracted]
    norm: type[layers.Contracted]
    head_norm: type[layers.Contracted]
    mlp: type[layers.ContractMLP]
    core: type[ContractCoreAttention]
    residual_add: Callable[..., Any]
    deferred_add: Callable[..., Any] | None = None
    logprobs: type | None
    sums: ModuleType
    rope_tables: Callable[[int, float, torch.device], Sequence[Tensor]]
    router: type[layers.Contracted] | None = None
    experts: type[layers.Contracted] | None = None
    moe: type[layers.Contracted] | None = None
    begin: Callable[[], None] = _nothing
    agree: Callable[[ProcessGroup | None, torch.device], str | None] = _nothing
    problem: Callable[[str, torch.device], str | None] = _nothing
    rows: int = 1
    methods: Mapping[type, Mapping[str, Any]] = field(init=False)
    """The methods as this package defined them, taken at import: what a later assignment to a class is compared with."""

    def __post_init__(self) -> None:
        classes = {c for c in vars(self).values() if isinstance(c, type)}
        taken = {
            c: {m: inspect.getattr_static(c, m) for m in _METHODS if hasattr(c, m)}
            for c in sorted(classes, key=lambda c: c.__qualname__)
        }
        object.__setattr__(self, "methods", taken)

    def adds(self, layer: Any) -> dict[str, Callable[..., Any]]:
        """What fills a layer's two bias-dropout-add slots, by their names.

        The sum after attention goes to the next norm as a pair, unless that norm is recomputed alone, offloaded, or not ours.
        """
        deferred = self.deferred_add
        if (
            type(layer.pre_mlp_layernorm) is not self.norm
            or layer.recompute_pre_mlp_layernorm
            or layer.config.fine_grained_activation_offloading
            or not isinstance(layer.pre_cross_attn_layernorm, IdentityOp)
            or not isinstance(layer.cross_attention, IdentityOp)
        ):
            deferred = None
        return {"self_attn_bda": deferred or self.residual_add, "mlp_bda": self.residual_add}

    def by_slot(self, name: str) -> type[layers.Contracted]:
        """The class of a slot's kind, by the field's name; InstallError where this arch has none."""
        found: type[layers.Contracted] | None = getattr(self, name)
        if found is None:
            raise InstallError(
                region="expert_linear",
                wanted=f"a contract of dense layers on {self.arch}",
                found=f"one with {name}, which this adapter does not bind there",
                fix="take a contract of a dense model, or run these layers natively and watch them",
            )
        return found


CPU = Kinds(
    arch="cpu",
    column=layers.ContractColumnParallelLinear,
    row=layers.ContractRowParallelLinear,
    head=layers.ContractHead,
    embedding=layers.ContractEmbedding,
    norm=layers.ContractRMSNorm,
    head_norm=layers.ContractQKNorm,
    mlp=layers.ContractMLP,
    core=ContractCoreAttention,
    residual_add=layers.contract_residual_add,
    logprobs=TokenLogprobs,
    sums=clipping,
    rope_tables=lambda width, base, device: rope_ops._table(width, base),  # noqa: ARG005
    router=ContractRouter,
    experts=ContractExperts,
    moe=ContractMoELayer,
)


def kinds_of(arch: str) -> Kinds:
    """The binding of an arch; InstallError for one this adapter does not know."""
    if arch == CPU.arch:
        return CPU
    if arch == "sm90":
        from isoexec.adapters.megatron import cuda

        return cuda.KINDS
    raise InstallError(
        region="model",
        wanted="a contract of cpu or sm90",
        found=f"one of {arch}",
        fix="take one of this machine (isoexec contract for MODEL_DIR)",
    )


def kinds_in(model: Any) -> Kinds:
    """The binding that is installed in a GPTModel; the CPU's, whose regions name every slot, where none is."""
    found: Kinds = getattr(model, "isoexec_kinds", CPU)
    return found
