# SPDX-License-Identifier: Apache-2.0
"""linear.grouped_chain/1: each row is linear.chain/1 with the weight of its expert."""

from __future__ import annotations

from isoexec.kernels.grouped_linear.ops import (
    chain,
    grouped_linear,
    hand_off,
    pack_weights,
    row_grouped_linear,
)

__all__ = ["chain", "grouped_linear", "hand_off", "pack_weights", "row_grouped_linear"]
