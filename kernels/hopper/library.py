# SPDX-License-Identifier: Apache-2.0
"""Registers sm90 functions as opaque torch ops, and refuses a gradient they do not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.domain import DomainError, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["define", "require_model_dtype"]

# A fragment of the CPU ops' library: names start with sm90_, for these are other functions with other bits.
_LIBRARY = torch.library.Library("isoexec", "FRAGMENT")


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
