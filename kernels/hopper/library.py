# SPDX-License-Identifier: Apache-2.0
"""Registers sm90 functions as opaque torch ops, names their source, and refuses a gradient they do not have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from isoexec.contracts.digests import digest_bytes, digest_of
from isoexec.kernels.domain import DomainError, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["OPS", "define", "require_model_dtype", "source_digest"]

# A fragment of the CPU ops' library: names start with sm90_, for these are other functions with other bits.
_LIBRARY = torch.library.Library("isoexec", "FRAGMENT")
_KERNELS = Path(__file__).resolve().parents[1]
OPS = ("linear", "rms_norm", "rope", "silu_mul", "logprobs")


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register `isoexec::<schema>` with a CUDA kernel and a fake kernel; return the callable overload.

    Asking for its gradient raises `DomainError`: without that a disconnected graph would train on zeros.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"isoexec::{name}", fake, lib=_LIBRARY)

    def backward(ctx: Any, *grads: Tensor) -> None:
        raise DomainError(f"isoexec::{name}", "a backward pass", "forward passes under torch.no_grad()")

    torch.library.register_autograd(f"isoexec::{name}", backward, lib=_LIBRARY)
    return getattr(torch.ops.isoexec, name).default


def require_model_dtype(op: str, *tensors: Tensor) -> None:
    """Raise `DomainError` unless every tensor is bfloat16 or float32 with unit stride in its last dimension."""
    for tensor in tensors:
        require(
            tensor.dtype in (torch.bfloat16, torch.float32) and tensor.stride(-1) == 1,
            op,
            f"{tensor.dtype} with strides {tensor.stride()}",
            "bfloat16 or float32 with unit stride in the last dimension",
        )


def source_digest(op: str) -> str:
    """`sha256:...` over the op's hopper files and those all sm90 functions share; line ends are normalised."""
    require(op in OPS, "source_digest", f"op {op!r}", f"the ops {list(OPS)}")
    files = {f"shared/{p.name}": p for p in (_KERNELS / "hopper").glob("*.py")}
    files |= {
        f"own/{p.name}": p for p in (_KERNELS / op / "hopper").iterdir() if p.suffix in (".py", ".json")
    }
    return digest_of(
        {
            name: digest_bytes(b"\n".join(line.rstrip() for line in path.read_bytes().splitlines()))
            for name, path in files.items()
        }
    )
