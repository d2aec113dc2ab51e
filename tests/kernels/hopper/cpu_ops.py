# SPDX-License-Identifier: Apache-2.0
"""Imported before any sm90 op: whatever is defined after takes tensors of the CPU too."""

from __future__ import annotations

from typing import Any

from isoexec.kernels.hopper import library

_define = library.define


def _on_cpu_too(schema: str, kernel: Any, fake: Any, **gradient: Any) -> Any:
    op = _define(schema, kernel, fake, **gradient)
    library._LIBRARY.impl(schema.partition("(")[0], kernel, "CPU")
    return op


library.define = _on_cpu_too
