# SPDX-License-Identifier: Apache-2.0
"""A gradient's sum of squares, exact in integers, the same for any sharding."""

from __future__ import annotations

from isoexec.kernels.grad_norm.ops import exact_sq_sum

__all__ = ["exact_sq_sum"]
