# SPDX-License-Identifier: Apache-2.0
"""moe.dispatch/1: a token's row to each of its experts, rows by expert and then by token."""

from __future__ import annotations

from isoexec.kernels.dispatch.naive import DispatchPlan
from isoexec.kernels.dispatch.ops import by_slot, dispatch, plan

__all__ = ["DispatchPlan", "by_slot", "dispatch", "plan"]
