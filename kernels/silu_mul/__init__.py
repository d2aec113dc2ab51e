# SPDX-License-Identifier: Apache-2.0
"""silu_mul.exp/1: SiLU written with exp, times up."""

from __future__ import annotations

from isoexec.kernels.silu_mul.ops import silu_mul

__all__ = ["silu_mul"]
