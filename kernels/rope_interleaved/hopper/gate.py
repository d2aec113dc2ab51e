# SPDX-License-Identifier: Apache-2.0
"""What proves rope.interleaved_fp32/1 on sm90: its specification, for GLM's query heads and the one key that heads share."""

from __future__ import annotations

from isoexec.kernels.gates import Gate
from isoexec.kernels.gates.ropes import Rotation, hang_rope
from isoexec.kernels.rope.hopper.kernel import launch
from isoexec.kernels.rope.hopper.rotation import rotate
from isoexec.kernels.rope_interleaved.hopper.ops import rope, tables

GATE = Gate("rope.interleaved_fp32/1", "sm90")

ROTATION = Rotation(
    op=rope,
    spec=rotate,
    tables=tables,
    launch=launch,
    interleaved=True,
    shapes=((20, 64, 64, 1e6), (1, 64, 64, 1e6), (8, 128, 64, 1e6)),
)
hang_rope(GATE, ROTATION)
