# SPDX-License-Identifier: Apache-2.0
"""rms_norm.tree/1: sum of squares by a halving tree; the residual is rounded before the norm reads it."""

from __future__ import annotations

from isoexec.kernels.rms_norm.ops import add_rms_norm, residual_add, rms_norm, rms_norm_grad

__all__ = ["add_rms_norm", "residual_add", "rms_norm", "rms_norm_grad"]
