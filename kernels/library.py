# SPDX-License-Identifier: Apache-2.0
"""The `isoexec` operator library: every fast path is an opaque torch op, so no compiler fuses arithmetic across it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["define"]

# Ops are defined here rather than with `torch.library.custom_op`, whose wrapper costs twice the dispatch time.
_LIBRARY = torch.library.Library("isoexec", "DEF")


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Any:
    """Register `isoexec::<schema>` with a CPU kernel, a fake kernel and, where given, its gradient.

    Returns the callable overload. Only the CPU key is filled: a tensor elsewhere is an error, not another function.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CPU")
    torch.library.register_fake(f"isoexec::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            f"isoexec::{name}", backward, setup_context=setup_context, lib=_LIBRARY
        )
    return getattr(torch.ops.isoexec, name).default
