# SPDX-License-Identifier: Apache-2.0
"""Imported before any sm90 op: whatever is defined after gets its kernel for tensors of the CPU too, in Triton's interpreter."""

from __future__ import annotations

import cpu_ops  # type: ignore[import-not-found]  # noqa: F401 - it imports no triton
import emulation  # type: ignore[import-not-found]  # noqa: F401 - the interpreter is asked for before anything imports triton
