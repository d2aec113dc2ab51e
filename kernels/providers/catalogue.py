# SPDX-License-Identifier: Apache-2.0
"""The providers this installation knows: own kernels by their source, library calls by version and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from isoexec.contracts.errors import EvidenceError
from isoexec.contracts.evidence import Subject
from isoexec.kernels import registry
from isoexec.kernels.providers.versions import cublaslt_version, torch_build, triton_version

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LIBRARIES", "Provider", "provider_for", "providers"]

Value = str | int | bool
Call = Callable[..., "Tensor"]


def _nothing() -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class Provider:
    """Something that may compute `function` on `arch`.

    `make(constants)` gives the call: it takes the function's canary inputs by name and returns the output. `held` is a context
    in which its switches are as `settings` say. `version` is a library's, or of the compiler where that is named. An own kernel
    without `make` is called by its gate.
    """

    name: str
    kind: str
    function: str
    arch: str
    about: str
    make: Callable[[Mapping[str, Value]], Call] | None = None
    version: Callable[[], str] | None = None
    settings: Mapping[str, Value] = field(default_factory=dict)
    held: Callable[[], AbstractContextManager[None]] = _nothing

    def subject(self) -> Subject:
        """Its identity here and now, as evidence names it; raises `EvidenceError` for a library that is not loaded."""
        return Subject(
            name=self.name,
            kind=self.kind,
            source=registry.source_digest(self.function, self.arch) if self.kind == "kernel" else None,
            version=self.version() if self.version else None,
            settings=dict(self.settings),
        )


# Library calls, as functions of the canary's inputs


def _embedding(constants: Mapping[str, Value]) -> Call:
    return lambda ids, w: F.embedding(ids, w) + 0.0


def _bare_embedding(constants: Mapping[str, Value]) -> Call:
    return lambda ids, w: F.embedding(ids, w)  # noqa: PLW0108 - called by name


def _rounded_to(x: Tensor, constants: Mapping[str, Value]) -> torch.dtype:
    return torch.float32 if constants.get("boundary") == "float32" else x.dtype


def _torch_linear(constants: Mapping[str, Value]) -> Call:
    return lambda x, w: F.linear(x.float(), w.float()).to(_rounded_to(x, constants))


def _torch_rms_norm(constants: Mapping[str, Value]) -> Call:
    return lambda x, w, eps: F.rms_norm(x, w.shape, w, eps)


def _torch_silu_mul(constants: Mapping[str, Value]) -> Call:
    return lambda gate, up: (F.silu(gate.float()) * up.float()).to(gate.dtype)


def _torch_log_softmax(constants: Mapping[str, Value]) -> Call:
    def call(logits: Tensor, target: Tensor) -> Tensor:
        return torch.log_softmax(logits.float(), -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)

    return call


def _cublaslt(constants: Mapping[str, Value]) -> Call:
    from isoexec.kernels.linear.hopper import cublaslt

    return lambda x, w: cublaslt.linear(x, w, _rounded_to(x, constants))


def _few_rows(constants: Mapping[str, Value]) -> Call:
    from isoexec.kernels.linear.hopper.kernel import launch
    from isoexec.kernels.linear.hopper.table import tile_for

    def call(x: Tensor, w: Tensor) -> Tensor:
        N, K = w.shape
        tile = tile_for(N, K, len(x)) or tile_for(N, K, 1)
        assert tile is not None, "the table serves one row by Triton"
        out = torch.empty(len(x), N, dtype=_rounded_to(x, constants), device=x.device)
        launch(x, w, out, tile)
        return out

    return call


def _grouped_mm(constants: Mapping[str, Value]) -> Call:
    def call(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        grouped: Call = torch._grouped_mm
        return grouped(x, w.transpose(-2, -1), offs=ends)

    return call


def _fused_moe(constants: Mapping[str, Value]) -> Call:
    from isoexec.kernels.providers.fused_moe import grouped

    return grouped


def _fused_moe_version() -> str:
    from isoexec.kernels.providers.fused_moe import version

    return version()


def _fa3(constants: Mapping[str, Value]) -> Call:
    from isoexec.kernels.providers.flash_attention import segments

    return segments(constants)


def _fa3_latent(constants: Mapping[str, Value]) -> Call:
    from isoexec.kernels.providers.flash_attention import latent_segments

    return latent_segments(constants)


def _fa3_version() -> str:
    from isoexec.kernels.providers.flash_attention import version

    return version()


def _fa3_held() -> AbstractContextManager[None]:
    from isoexec.kernels.providers.flash_attention import held

    return held()


def _switches_held() -> AbstractContextManager[None]:
    from isoexec.kernels.linear.hopper.gate import claimed

    return claimed()


_MMA_SETTINGS: dict[str, Value] = {  # names as in kernels/switches.py
    "cuda.blas": "Cublaslt",
    "cuda.matmul.bf16_reduced_precision": False,
    "cuda.matmul.bf16_split_k": False,
}
_FA3_SETTINGS: dict[str, Value] = {"splits": 1, "softcap": False, "scheduler_metadata": "none"}
_library = partial(Provider, kind="library")

LIBRARIES: tuple[Provider, ...] = (
    _library(
        name="torch.embedding",
        function="embedding.lookup/1",
        arch="cpu",
        about="aten::embedding, then + 0.0 as the function adds it",
        make=_embedding,
        version=torch_build,
        settings={"then": "add_zero"},
    ),
    _library(
        name="torch.embedding.bare",
        function="embedding.lookup/1",
        arch="cpu",
        about="aten::embedding alone: keeps -0, which a sum over vocabulary shards loses",
        make=_bare_embedding,
        version=torch_build,
    ),
    _library(
        name="torch.embedding",
        function="embedding.lookup/1",
        arch="sm90",
        about="aten::embedding, then + 0.0 as the function adds it",
        make=_embedding,
        version=torch_build,
        settings={"then": "add_zero"},
    ),
    _library(
        name="torch.linear",
        function="linear.chain/1",
        arch="cpu",
        about="aten::linear in fp32, rounded once: the BLAS chooses its own order",
        make=_torch_linear,
        version=torch_build,
    ),
    _library(
        name="torch.rms_norm",
        function="rms_norm.tree/1",
        arch="cpu",
        about="aten::rms_norm",
        make=_torch_rms_norm,
        version=torch_build,
    ),
    _library(
        name="torch.silu_mul",
        function="silu_mul.exp/1",
        arch="cpu",
        about="aten::silu in fp32, times up, rounded once",
        make=_torch_silu_mul,
        version=torch_build,
    ),
    _library(
        name="torch.log_softmax",
        function="logprobs.leaves/1",
        arch="cpu",
        about="aten::log_softmax and a gather",
        make=_torch_log_softmax,
        version=torch_build,
    ),
    _library(
        name="cublaslt",
        function="linear.mma_chain/1",
        arch="sm90",
        about="cuBLASLt through torch with split-K refused, from two rows up",
        make=_cublaslt,
        version=cublaslt_version,
        settings=_MMA_SETTINGS,
        held=_switches_held,
    ),
    Provider(
        name="triton.few_rows",
        kind="kernel",
        function="linear.mma_chain/1",
        arch="sm90",
        about="the Triton chain by the table's tile for few rows, at every number of rows",
        make=_few_rows,
        version=triton_version,
    ),
    _library(
        name="torch.grouped_mm",
        function="linear.grouped_mma_chain/1",
        arch="sm90",
        about="torch._grouped_mm (CUTLASS): one product an expert, rows in order of experts",
        make=_grouped_mm,
        version=torch_build,
    ),
    _library(
        name="vllm.fused_moe",
        function="linear.grouped_mma_chain/1",
        arch="sm90",
        about="vLLM's Triton fused_moe_kernel, by its source: a block of rows and columns walks K in order",
        make=_fused_moe,
        version=_fused_moe_version,
    ),
    _library(
        name="vllm.flash_attn3",
        function="attention.mma_segments/1",
        arch="sm90",
        about="FlashAttention-3 as built into vLLM, called segment by segment: one split, one code path a head dim",
        make=_fa3,
        version=_fa3_version,
        settings=_FA3_SETTINGS,
        held=_fa3_held,
    ),
    _library(
        name="vllm.flash_attn3",
        function="attention.latent_segments/1",
        arch="sm90",
        about="the same, the latent part of queries as its q_v, latent rows as values",
        make=_fa3_latent,
        version=_fa3_version,
        settings=_FA3_SETTINGS,
        held=_fa3_held,
    ),
)


def providers(
    *, arch: str | None = None, function: str | None = None, name: str | None = None
) -> list[Provider]:
    """Every provider of an arch, a function or a name: own kernels first."""
    own = [
        Provider(
            name=kernel.module.removesuffix(".ops"),
            kind="kernel",
            function=f.name,
            arch=kernel.arch,
            about="own kernel, called as its gate does",
        )
        for f in registry.FUNCTIONS.values()
        for kernel in f.kernels
    ]
    return [
        one
        for one in (*own, *LIBRARIES)
        if arch in (None, one.arch) and function in (None, one.function) and name in (None, one.name)
    ]


def provider_for(name: str, function: str, arch: str) -> Provider:
    """The provider of that name; raises `EvidenceError` where the catalogue has none."""
    found = providers(arch=arch, function=function, name=name)
    if not found:
        have = ", ".join(one.name for one in providers(arch=arch, function=function)) or "none"
        raise EvidenceError(
            field="provider",
            wanted=f"{name} of {function} on {arch}",
            found=f"the providers {have}",
            fix="name one of these, or add yours to kernels/providers/catalogue.py",
        )
    return found[0]
