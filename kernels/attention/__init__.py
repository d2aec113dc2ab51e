# SPDX-License-Identifier: Apache-2.0
"""attention.segments/1: softmax attention over absolute key segments, for the trainer and for a paged cache."""

from __future__ import annotations

from isoexec.kernels.attention.dense import attention_varlen
from isoexec.kernels.attention.paged import PagedPlan, attention_paged

__all__ = ["PagedPlan", "attention_paged", "attention_varlen"]
