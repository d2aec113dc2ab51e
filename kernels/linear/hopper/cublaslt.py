# SPDX-License-Identifier: Apache-2.0
"""cuBLASLt with split-K refused as a provider of the chain.

Its three switches are state of the whole process that any library may flip, so they are read before every product, and
`probe` looks at the effect: a product for which the shipped setting splits K must have the chain's bits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from isoexec.contracts.errors import IsoExecError
from isoexec.kernels.linear.hopper.kernel import reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = [
    "PROBES",
    "SHIPPED",
    "WANTED",
    "ProbeError",
    "SwitchError",
    "Switches",
    "check",
    "claim",
    "input_gradient",
    "linear",
    "probe",
    "restore",
    "switches",
    "weight_gradient",
]

# [M, N, K] for which cuBLAS as shipped splits K
PROBES = ((16, 1024, 3072), (64, 1024, 3072), (128, 1024, 2048), (64, 4096, 4096))


@dataclass(frozen=True, kw_only=True)
class Switches:
    """The process state that decides cuBLAS bits: preferred library, reduced-precision reduction, split-K."""

    library: str
    reduced_precision: bool
    split_k: bool


WANTED = Switches(library="cublaslt", reduced_precision=False, split_k=False)
SHIPPED = Switches(library="cublas", reduced_precision=True, split_k=True)  # as torch starts


class SwitchError(IsoExecError):
    """A switch is not as the provider needs it: `found`."""

    def __init__(self, found: Switches) -> None:
        self.found = found
        super().__init__(found)

    def __str__(self) -> str:
        wrong = [
            f"{f.name} is {getattr(self.found, f.name)!r}, wanted {getattr(WANTED, f.name)!r}"
            for f in fields(Switches)
            if getattr(self.found, f.name) != getattr(WANTED, f.name)
        ]
        return (
            f"cuBLASLt is not the chain's provider here: {'; '.join(wrong)}. Call cublaslt.claim() once the libraries are "
            "loaded, and find which of them calls torch.backends.cuda afterwards"
        )


class ProbeError(IsoExecError):
    """The products are not the chain's: `found` lists (M, N, K, differing elements)."""

    def __init__(self, found: list[tuple[int, int, int, int]]) -> None:
        self.found = found
        super().__init__(found)

    def __str__(self) -> str:
        return (
            f"products have other bits than the chain: (M, N, K, elements) {self.found}. Whatever computed them is no "
            "provider of linear.mma_chain/1; where that is cuBLASLt with its switches claimed, install a certified version"
        )


def switches() -> Switches:
    """The switches as torch reports them now."""
    reduced, split = torch._C._get_cublas_allow_bf16_reduced_precision_reduction()
    library = str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2].lower()
    return Switches(library=library, reduced_precision=reduced, split_k=split)


def restore(state: Switches) -> None:
    """Set the switches, `claim`'s undoing included; raises `SwitchError` where torch keeps others."""
    torch.backends.cuda.preferred_blas_library(state.library)
    torch._C._set_cublas_allow_bf16_reduced_precision_reduction(state.reduced_precision, state.split_k)
    if (found := switches()) != state:
        raise SwitchError(found)


def claim() -> Switches:
    """Set the switches for this process, read them back, and return what they were (for `restore`)."""
    before = switches()
    restore(WANTED)
    return before


def check() -> None:
    """Raise `SwitchError` unless every switch is as claimed."""
    if (found := switches()) != WANTED:
        raise SwitchError(found)


def linear(x: Tensor, w: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`x [M, K] @ w [N, K]^T`, bf16 in, bf16 or fp32 out. One row is a matrix-vector kernel with other bits: not here."""
    check()
    if out_dtype == torch.float32:
        return torch.mm(x, w.t(), out_dtype=torch.float32)
    return F.linear(x, w)


def input_gradient(dy: Tensor, w: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`dy [M, N] @ w [N, K]`, bf16 in, bf16 or fp32 out."""
    check()
    return torch.mm(dy, w, out_dtype=torch.float32) if out_dtype == torch.float32 else torch.mm(dy, w)


def weight_gradient(dy: Tensor, x: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`dy [M, N]^T @ x [M, K]`, bf16 in, bf16 or fp32 out."""
    check()
    return torch.mm(dy.t(), x, out_dtype=torch.float32) if out_dtype == torch.float32 else torch.mm(dy.t(), x)


def probe(provider: Callable[[Tensor, Tensor], Tensor] = linear, device: str = "cuda") -> None:
    """Raise `ProbeError` unless the provider has the chain's bits where cuBLAS as shipped splits K.

    With the default provider, `SwitchError` comes first where a switch is wrong.
    """
    found = []
    for M, N, K in PROBES:
        generator = torch.Generator(device).manual_seed(M + N + K)
        x = torch.randn(M, K, device=device, generator=generator).bfloat16()
        w = (torch.randn(N, K, device=device, generator=generator) / K**0.5).bfloat16()
        count = int((provider(x, w).view(torch.int16) != reference(x, w).view(torch.int16)).sum())
        if count:
            found.append((M, N, K, count))
    if found:
        raise ProbeError(found)
