# SPDX-License-Identifier: Apache-2.0
"""linear.chain/1: one fp32 chain over K, handed from rank to rank where K is sharded."""

from __future__ import annotations

from isoexec.kernels.linear.ops import chain, column_linear, hand_off, pack_weight, row_linear

__all__ = ["chain", "column_linear", "hand_off", "pack_weight", "row_linear"]
