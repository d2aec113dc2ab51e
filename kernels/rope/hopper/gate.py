# SPDX-License-Identifier: Apache-2.0
"""What proves rope.neox_fp32/1 on sm90: the CPU's specification, for whole heads, some columns, and positions of several axes."""

from __future__ import annotations

from functools import partial

import torch

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.forward import many
from isoexec.kernels.gates.inputs import DTYPES, ids
from isoexec.kernels.gates.recipes import gradients
from isoexec.kernels.gates.ropes import LENGTH, Rotation, hang_rope
from isoexec.kernels.rope import naive
from isoexec.kernels.rope.hopper import rotation
from isoexec.kernels.rope.hopper.kernel import launch
from isoexec.kernels.rope.hopper.ops import rope, rope_sections, section_axes, tables

GATE = Gate("rope.neox_fp32/1", "sm90")
SECTIONED = 300  # tokens with positions of their own on each axis

ROTATION = Rotation(
    op=rope,
    spec=rotation.rotate,
    tables=tables,
    launch=launch,
    interleaved=False,
    # Qwen3's query and key heads, and Qwen3.5's, of which a quarter is rotated
    shapes=((32, 128, 128, 1e6), (8, 128, 128, 1e6), (16, 256, 64, 1e7)),
)


def _more(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):  # the specification is the CPU function's
        for heads, width, turned, base in ROTATION.shapes[1:]:
            x = many(run, 64, heads, width, salt=3, dtype=dtype, scale=3.0).cpu()
            at = ids(64, LENGTH, 4)
            want = torch.cat((naive.rope(x[..., :turned], at, base), x[..., turned:]), -1)
            got = rope(x.to(run.device), at.to(run.device), *tables(turned, base, run.device))
            run.equal(got.cpu(), want)
            back = gradients(
                lambda x: rope(x, at.to(run.device), *tables(turned, base, run.device)),
                [x.to(run.device)],
                x.to(run.device),
            )[1]
            run.equal(back.cpu()[..., :turned], naive.rope_backward(x[..., :turned], at, base))
    _sections(run)


def _sections(run: Run) -> None:
    """Frequencies by axes: Qwen3.5's sections, which take turns, and Qwen2-VL's, one after another."""
    for dtype in run.over("dtype", DTYPES):
        for sections, turns, width, base in (((11, 11, 10), True, 256, 1e7), ((16, 24, 24), False, 128, 1e6)):
            run.covers(sections="-".join(map(str, sections)), turns=turns)
            both = tables(2 * sum(sections), base, run.device)
            axes = section_axes(sections, turns, run.device)
            x = many(run, SECTIONED, 4, width, salt=5, dtype=dtype, scale=3.0)
            at = torch.stack([ids(SECTIONED, LENGTH, salt) for salt in (6, 7, 8)]).to(run.device)
            got = rope_sections(x, at, axes, *both)
            run.equal(got, rotation.rotate(x, at, both, axes=axes))
            back = gradients(lambda x: rope_sections(x, at, axes, *both), [x], x)[1]
            run.equal(back, rotation.rotate(x, at, both, axes=axes, reverse=True))
            run.equal(rope_sections(x[3:4], at[:, 3:4].contiguous(), axes, *both), got[3:4])
            text = at[:1].expand(3, -1).contiguous()
            run.equal(rope_sections(x, text, axes, *both), rope(x, at[0], *both))
            other = section_axes(sections, not turns, run.device)
            run.control("other_sections", rope_sections(x, at, other, *both), got)
            run.control("axes_exchanged", rope_sections(x, at.flip(0), axes, *both), got)
            run.refuses(partial(rope_sections, x, at[0], axes, *both))
            run.refuses(partial(rope_sections, x, at, axes[:-1], *both))
            run.refuses(partial(rope_sections, x, at, axes.long(), *both))


hang_rope(GATE, ROTATION, more=_more)
