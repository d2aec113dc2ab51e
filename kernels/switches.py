# SPDX-License-Identifier: Apache-2.0
"""Every switch of this process that may change bits: a catalogue of names, how each is read, and what it may change.

A switch is read by its effect where its getter lies or is missing: torch has no getter for flush-to-zero, and the reduced
precisions of a matmul can be allowed by two interfaces of which each hides the other.  `read` gives plain scalars by name; the
names are those of `claims.environment.switches` in a contract.  `variables` gives the environment variables that libraries read,
as they are now: most libraries read theirs once, so a later change says that a child process will differ.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "CATALOGUE",
    "PREFIXES",
    "VARIABLES",
    "Switch",
    "Value",
    "changes",
    "environment",
    "read",
    "variables",
]

Value = bool | int | str


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One switch: ``how`` is ``effect`` (computed and seen) or ``getter`` (torch is asked); ``changes``, what bits it moves."""

    name: str
    how: str
    changes: str
    read: Callable[[], Any]


def _flushes_denormal() -> bool:
    """Halve the smallest normal float32; what is left of it is a subnormal, or zero where they are flushed."""
    return not bool((torch.full((1,), 2.0**-126, dtype=torch.float32) * 0.5).view(torch.int32).item())


_ROUNDINGS = {(0, 0): "to_nearest", (1, 0): "up", (0, 1): "down"}


def _rounding() -> str:
    """Add three quarters of half a unit in the last place to 1 and to -1: only a directed rounding moves either."""
    one = torch.tensor([1.0, -1.0], dtype=torch.float32)
    moved = (one + one.sign() * 2.0**-24 * 0.75).abs() != 1.0
    up, down = (int(x) for x in moved.tolist())
    return _ROUNDINGS.get((up, down), "away_from_zero")


def _exact_product(device: str) -> bool:
    """Whether a float32 product with the unit matrix keeps a 23-bit fraction: any reduced precision of the inputs loses it."""
    x = torch.full((64, 64), 1.0 + 2.0**-23, dtype=torch.float32, device=device)
    return bool(torch.equal(x @ torch.eye(64, dtype=torch.float32, device=device), x))


@cache
def _operand() -> torch.Tensor:
    count = torch.arange(1, 2049, dtype=torch.int64) * 2654435761 % 2**32
    return ((count >> 8).to(torch.float32) * 2.0**-23 - 1.0).view(32, 64)


def _product_bits() -> str:
    """A name for the bits of a few float32 products of odd shapes: another vector width of the BLAS gives another one."""
    x = _operand()
    found = hashlib.sha256()
    for n in (5, 24):
        found.update((x @ x[:n].t()).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _cuda_product() -> bool | str:
    # asking must not start CUDA in a process that does without it
    return _exact_product("cuda") if torch.cuda.is_initialized() else "no device in use"


def _precision(backend: str, op: str) -> Callable[[], str]:
    """The precision in force: what says ``none`` takes its backend's, that one torch's, and torch's own is ``ieee``."""

    def get() -> str:
        ask = getattr(torch._C, "_get_fp32_precision_getter")  # noqa: B009  (not in torch's stubs)
        said = (str(ask(*of)) for of in ((backend, op), (backend, "all"), ("generic", "all")))
        return next((value for value in said if value != "none"), "ieee")

    return get


def _c(name: str) -> Callable[[], Any]:
    """A getter of torch's C module, by name; one that a later torch drops reads as unknown."""
    return lambda: getattr(torch._C, name)()  # noqa: PLW0108  (a name that is missing must raise when it is asked)


def _part(name: str, index: int) -> Callable[[], Any]:
    return lambda: getattr(torch._C, name)()[index]


def _enum(name: str) -> Callable[[], str]:
    return lambda: str(getattr(torch._C, name)()).rpartition(".")[2]


def _getter(name: str, changes: str, read: Callable[[], Any]) -> Switch:
    return Switch(name=name, how="getter", changes=changes, read=read)


_BF16 = "_get_cublas_allow_bf16_reduced_precision_reduction"
_FP16 = "_get_cublas_allow_fp16_reduced_precision_reduction"
_SDP = "which attention kernel scaled_dot_product_attention takes"

CATALOGUE: tuple[Switch, ...] = (
    # what the CPU does with every float
    Switch(
        name="flush_denormal",
        how="effect",
        changes="results below 2^-126 become zero, in this thread",
        read=_flushes_denormal,
    ),
    Switch(name="rounding", how="effect", changes="the last bit of every float operation", read=_rounding),
    Switch(
        name="float32_product_is_exact",
        how="effect",
        changes="float32 matmuls on the CPU: bfloat16 or TF32 inputs under it",
        read=lambda: _exact_product("cpu"),
    ),
    Switch(
        name="float32_products",
        how="effect",
        changes="which code of the BLAS computes float32 matmuls on the CPU, by a digest of what it gives",
        read=_product_bits,
    ),
    _getter(
        "cpu_capability",
        "vector width of torch's CPU kernels: the order of their sums",
        torch.backends.cpu.get_cpu_capability,
    ),
    _getter(
        "num_threads", "how CPU kernels split a sum, and which BLAS kernel they take", torch.get_num_threads
    ),
    _getter(
        "num_interop_threads", "how many operators run at a time on the CPU", torch.get_num_interop_threads
    ),
    # what torch does with every operator
    _getter(
        "default_dtype", "dtype of every tensor made without one", lambda: str(torch.get_default_dtype())[6:]
    ),
    _getter(
        "autocast.cpu",
        "operators on the CPU run in a narrower dtype",
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    _getter(
        "autocast.cuda",
        "operators on a GPU run in a narrower dtype",
        lambda: torch.is_autocast_enabled("cuda"),
    ),
    _getter(
        "float32_matmul_precision",
        "float32 matmuls through TF32 or bfloat16, on every backend",
        torch.get_float32_matmul_precision,
    ),
    _getter(
        "deterministic_algorithms",
        "which algorithm an operator takes",
        torch.are_deterministic_algorithms_enabled,
    ),
    _getter(
        "deterministic_algorithms.warn_only",
        "whether an operator without a deterministic algorithm runs all the same",
        torch.is_deterministic_algorithms_warn_only_enabled,
    ),
    _getter(
        "deterministic_algorithms.fill_uninitialized",
        "what empty tensors hold while deterministic algorithms are on",
        _c("_get_deterministic_fill_uninitialized_memory"),
    ),
    # oneDNN, NNPACK: matmuls and convolutions on the CPU
    _getter("mkldnn.enabled", "matmuls and convolutions on the CPU", _c("_get_mkldnn_enabled")),
    _getter("mkldnn.deterministic", "oneDNN's choice of algorithm", _c("_get_mkldnn_deterministic")),
    _getter("mkldnn.fp32_precision", "inputs of oneDNN's float32 operators", _precision("mkldnn", "all")),
    _getter(
        "mkldnn.matmul.fp32_precision", "inputs of oneDNN's float32 matmuls", _precision("mkldnn", "matmul")
    ),
    _getter("nnpack.enabled", "convolutions on the CPU", _c("_get_nnpack_enabled")),
    _getter(
        "cpu.fp16_reduced_precision",
        "accumulation of float16 matmuls on the CPU",
        _c("_get_cpu_allow_fp16_reduced_precision_reduction"),
    ),
    # cuBLAS, cuBLASLt, hipBLASLt, CK
    _getter(
        "fp32_precision",
        "inputs of every float32 operator a backend may narrow",
        _precision("generic", "all"),
    ),
    _getter("cuda.matmul.allow_tf32", "inputs of float32 matmuls on a GPU", _c("_get_cublas_allow_tf32")),
    _getter("cuda.matmul.fp32_precision", "inputs of float32 matmuls on a GPU", _precision("cuda", "matmul")),
    Switch(
        name="cuda.matmul.float32_product_is_exact",
        how="effect",
        changes="float32 matmuls on a GPU: TF32 inputs under it",
        read=_cuda_product,
    ),
    _getter(
        "cuda.matmul.bf16_reduced_precision", "partial sums of bfloat16 matmuls in bfloat16", _part(_BF16, 0)
    ),
    _getter("cuda.matmul.bf16_split_k", "bfloat16 matmuls may split K, by batch size", _part(_BF16, 1)),
    _getter(
        "cuda.matmul.fp16_reduced_precision", "partial sums of float16 matmuls in float16", _part(_FP16, 0)
    ),
    _getter("cuda.matmul.fp16_split_k", "float16 matmuls may split K, by batch size", _part(_FP16, 1)),
    _getter(
        "cuda.matmul.fp16_accumulation",
        "accumulator of float16 matmuls",
        _c("_get_cublas_allow_fp16_accumulation"),
    ),
    _getter("cuda.blas", "the library behind every matmul on a GPU", _enum("_get_blas_preferred_backend")),
    _getter(
        "cuda.linalg", "the library behind torch.linalg on a GPU", _enum("_get_linalg_preferred_backend")
    ),
    _getter("cuda.sm_carveout", "multiprocessors left to other kernels", _c("_get_sm_carveout_experimental")),
    # cuDNN
    _getter("cudnn.enabled", "convolutions and attention on a GPU", _c("_get_cudnn_enabled")),
    _getter("cudnn.deterministic", "cuDNN's choice of algorithm", _c("_get_cudnn_deterministic")),
    _getter("cudnn.benchmark", "cuDNN's choice of algorithm, by time", _c("_get_cudnn_benchmark")),
    _getter("cudnn.allow_tf32", "inputs of cuDNN's float32 operators", _c("_get_cudnn_allow_tf32")),
    _getter(
        "cudnn.conv.fp32_precision", "inputs of cuDNN's float32 convolutions", _precision("cuda", "conv")
    ),
    # scaled dot product attention
    _getter("sdp.flash", _SDP, _c("_get_flash_sdp_enabled")),
    _getter("sdp.mem_efficient", _SDP, _c("_get_mem_efficient_sdp_enabled")),
    _getter("sdp.math", _SDP, _c("_get_math_sdp_enabled")),
    _getter("sdp.cudnn", _SDP, _c("_get_cudnn_sdp_enabled")),
    _getter(
        "sdp.math_reduced_precision",
        "accumulation of the math kernel of scaled_dot_product_attention",
        _c("_get_math_sdp_allow_fp16_bf16_reduction"),
    ),
)
"""What `read` reads, in this order."""

VARIABLES: Mapping[str, str] = {
    "OMP_NUM_THREADS": "threads of OpenMP: how CPU kernels split a sum",
    "OMP_DYNAMIC": "OpenMP may take fewer threads than asked",
    "OMP_SCHEDULE": "how OpenMP splits loops",
    "ATEN_CPU_CAPABILITY": "vector width of torch's CPU kernels",
    "NVIDIA_TF32_OVERRIDE": "TF32 in every NVIDIA library, over what torch says",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "TF32 in cuBLAS, over what torch says",
    "CUBLAS_WORKSPACE_CONFIG": "which cuBLAS algorithms fit, and whether they are deterministic",
    "DISABLE_ADDMM_CUDA_LT": "cuBLAS instead of cuBLASLt for a linear with a bias",
    "CUDA_LAUNCH_BLOCKING": "no bit by itself; hides races that change some",
    "NCCL_ALGO": "order of the sums of a collective",
    "NCCL_PROTO": "order of the sums of a collective",
    "NCCL_NVLS_ENABLE": "sums in the switch, in another order",
    "NCCL_COLLNET_ENABLE": "sums in the network, in another order",
    "NCCL_MIN_NCHANNELS": "how a collective's sum is cut",
    "NCCL_MAX_NCHANNELS": "how a collective's sum is cut",
    "GLOO_ALGO": "order of the sums of a collective on the CPU",
    "TORCHDYNAMO_DISABLE": "whether code is compiled, and arithmetic fused",
    "TORCHINDUCTOR_MAX_AUTOTUNE": "which kernel a compiled matmul takes, by time",
    "PYTORCH_JIT": "whether scripted functions are fused",
    "PYTORCH_NVFUSER_DISABLE": "whether scripted functions are fused",
    "TRITON_INTERPRET": "Triton kernels run by numpy",
    "FLASH_ATTENTION_DETERMINISTIC": "order of the sums of the attention gradient",
    "NVTE_FLASH_ATTN": "which attention kernel Transformer Engine takes",
    "NVTE_FUSED_ATTN": "which attention kernel Transformer Engine takes",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "order of the sums of the attention gradient",
    "CUDA_DEVICE_MAX_CONNECTIONS": "no bit by itself; order of kernels and collectives",
}
"""Environment variable -> what bits a library that reads it may change."""

PREFIXES: Mapping[str, str] = {
    "MKL_": "MKL's threads, instruction set and reproducibility mode",
    "DNNL_": "oneDNN's instruction set and default precision",
    "ONEDNN_": "oneDNN's instruction set and default precision",
    "OPENBLAS_": "OpenBLAS's threads and instruction set",
    "GOTO_": "OpenBLAS's threads",
    "KMP_": "the OpenMP runtime's threads and order of reductions",
    "GOMP_": "the OpenMP runtime's threads",
    "CUBLASLT_": "cuBLASLt's choice of algorithm",
    "CUDNN_": "cuDNN's choice of algorithm",
    "VLLM_CPU_": "the CPU kernels vLLM takes, and their threads",
    "VLLM_USE_": "the kernels vLLM takes",
    "VLLM_ATTENTION_": "the attention kernel vLLM takes",
    "VLLM_FLASH_ATTN_": "the attention kernel vLLM takes",
    "VLLM_BATCH_INVARIANT": "vLLM's own batch-invariant kernels",
    "VLLM_ENABLE_": "features of vLLM, some of them other kernels",
    "VLLM_DISABLE_": "features of vLLM, some of them other kernels",
    "VLLM_ALLREDUCE_": "order of the sums of vLLM's collectives",
    "VLLM_FUSED_MOE_": "how vLLM cuts the tokens of its experts",
    "TORCHINDUCTOR_": "how compiled code is fused",
    "TORCH_BLAS_": "the library behind every matmul on a GPU",
    "TORCH_LINALG_": "the library behind torch.linalg on a GPU",
    "TRITON_F32_": "inputs of float32 products in Triton kernels",
}
"""Prefix of environment variables -> what bits a library that reads one may change."""

_SILENT = frozenset(("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_MODELSCOPE"))
"""Variables under a prefix that move no arithmetic."""


def read() -> dict[str, Value]:
    """Name -> value of every switch here and now; ``unknown: ...`` where torch cannot or will not say.

    It costs under a millisecond, and on a GPU that is in use one small product.
    """
    found: dict[str, Value] = {}
    for switch in CATALOGUE:
        try:
            value = switch.read()
        except (AttributeError, RuntimeError, TypeError, IndexError) as error:
            # torch refuses to answer where its two precision interfaces were mixed: that is itself a finding
            value = f"unknown: {(str(error).splitlines() or [''])[0][:100]}"
        found[switch.name] = value if isinstance(value, bool | int | str) else str(value)
    return found


def variables() -> dict[str, str]:
    """The environment variables of the catalogue that are set in this process now."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name in VARIABLES or name.startswith(tuple(PREFIXES))) and name not in _SILENT
    }


def environment() -> dict[str, Value]:
    """`read` and `variables` in one mapping: what a process attests, and what a contract's claims are compared with."""
    return {**variables(), **read()}


def changes(before: Mapping[str, Value], after: Mapping[str, Value]) -> list[str]:
    """What differs between two readings, one line a name; a variable that is not set reads as ``not set``."""
    return [
        f"{name} was {before.get(name, 'not set')} and is {after.get(name, 'not set')}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]
