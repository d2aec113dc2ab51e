# SPDX-License-Identifier: Apache-2.0
"""bias.add/1: one bias a feature, added to a rounded product and rounded again."""

from __future__ import annotations

from isoexec.kernels.bias.ops import bias_add

__all__ = ["bias_add"]
