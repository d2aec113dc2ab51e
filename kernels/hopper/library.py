# SPDX-License-Identifier: Apache-2.0
"""Registers sm90 functions as opaque torch ops, with their gradient or a refusal of it."""

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


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Any:
    """Register `isoexec::<schema>` with a CUDA kernel, a fake kernel and, where given, its gradient; return the overload.

    Without a `backward`, asking for the gradient raises `DomainError`: a disconnected graph would train on zeros.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"isoexec::{name}", fake, lib=_LIBRARY)

    def refuse(ctx: Any, *grads: Tensor) -> None:
        raise DomainError(f"isoexec::{name}", "a backward pass", "forward passes under torch.no_grad()")

    torch.library.register_autograd(
        f"isoexec::{name}", backward or refuse, setup_context=setup_context, lib=_LIBRARY
    )
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
