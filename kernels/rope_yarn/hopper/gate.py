# SPDX-License-Identifier: Apache-2.0
"""What proves rope.yarn_interleaved_fp32/1 on sm90: its specification by tables of several scalings, and the table itself."""

from __future__ import annotations

import math
from functools import partial

import torch

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.ropes import Rotation, hang_rope
from isoexec.kernels.rope.hopper.kernel import launch
from isoexec.kernels.rope.hopper.rotation import rotate
from isoexec.kernels.rope_yarn.hopper import naive
from isoexec.kernels.rope_yarn.hopper.ops import Yarn, rope, tables

GATE = Gate("rope.yarn_interleaved_fp32/1", "sm90")
DEEPSEEK = Yarn(factor=40.0, original=4096, mscale=1.0, mscale_all_dim=1.0)
SCALED = Yarn(factor=4.0, original=32768)  # cos and sin carry 0.1 ln 4 + 1


def _tables(width: int, base: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return tables(width, base, SCALED, device)


def _table(run: Run) -> None:
    for yarn in (DEEPSEEK, SCALED):
        run.covers(factor=int(yarn.factor), original=yarn.original)
        cos, sin = tables(64, 1e4, yarn, run.device)
        run.equal([cos.cpu(), sin.cpu()], list(naive.table(64, 1e4, yarn)))
        # the fastest frequency stays, the slowest is divided
        at = torch.arange(8192, dtype=torch.float64)
        slow = at * 1e4 ** (-62 / 64) / yarn.factor
        for column, angle in ((0, at), (31, slow)):
            run.equal(cos[:, column].cpu(), (angle.cos() * yarn.attention_factor).float())
            run.equal(sin[:, column].cpu(), (angle.sin() * yarn.attention_factor).float())
        run.control(
            "no_scaling", list(tables(64, 1e4, Yarn(factor=1.0, original=4096), run.device)), [cos, sin]
        )
    run.holds(torch.tensor([DEEPSEEK.attention_factor == 1.0]))
    run.holds(torch.tensor([SCALED.attention_factor == 0.1 * math.log(4.0) + 1.0]))
    wide = partial(tables, 64, 1e4)
    run.control("another_factor", list(wide(DEEPSEEK, run.device)), list(wide(SCALED, run.device)))


ROTATION = Rotation(
    op=rope,
    spec=rotate,
    tables=_tables,
    launch=launch,
    interleaved=True,
    shapes=((16, 64, 64, 1e4), (1, 64, 64, 1e4), (4, 192, 64, 1e4)),
)
hang_rope(GATE, ROTATION, more=_table)
