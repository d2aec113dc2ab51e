# SPDX-License-Identifier: Apache-2.0
"""rope.neox_fp32/1: rotary embedding from a float64 table rounded to fp32."""

from __future__ import annotations

from isoexec.kernels.rope.ops import rope, rope_grad

__all__ = ["rope", "rope_grad"]
