# SPDX-License-Identifier: Apache-2.0
"""The gate of a rotation on an accelerator: heads as they lie in a projection, rotated wholly or in their first columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isoexec.kernels.gates import rows
from isoexec.kernels.gates.forward import many
from isoexec.kernels.gates.inputs import DTYPES, ids
from isoexec.kernels.gates.recipes import gradients
from isoexec.kernels.gates.rows import Rows

if TYPE_CHECKING:
    from isoexec.kernels.gates.checking import Gate, Run

__all__ = ["Rotation", "hang_rope"]

LENGTH = 8192
PLANTED = 256  # rows in which another rounding shows
FREE = ((1, 1, 1), (1, 8, 4), (2, 2, 2), (4, 4, 4))  # tokens, heads, warps

Tables = tuple[Tensor, Tensor]


class Rotation:
    """What a gate says of its function: the op, its specification by a table, and that table by width and base."""

    def __init__(
        self,
        *,
        op: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        spec: Callable[..., Tensor],
        tables: Callable[[int, float, torch.device], Tables],
        launch: Callable[..., None],
        interleaved: bool,
        shapes: tuple[tuple[int, int, int, float], ...],
    ) -> None:
        self.op = op
        self.spec = spec
        self.tables = tables
        self.launch = launch
        self.interleaved = interleaved
        self.shapes = shapes  # heads, their width, how much of it is rotated, base

    def specified(self, x: Tensor, at: Tensor, tables: Tables, *, reverse: bool = False) -> Tensor:
        """By the tables where `x` lies."""
        both = tables[0].to(x.device), tables[1].to(x.device)
        return self.spec(x, at, both, interleaved=self.interleaved, reverse=reverse)

    def written(self, x: Tensor, at: Tensor, tables: Tables, **free: int | bool) -> Tensor:
        """The rotation with other free settings."""
        out = torch.full(x.shape, float("nan"), dtype=x.dtype, device=x.device)
        self.launch(x, at, *tables, out, interleaved=self.interleaved, **free)
        return out


def hang_rope(gate: Gate, rotation: Rotation, *, more: Callable[[Run], None] | None = None) -> None:
    """Hang every check of a rotation on its gate; `more` belongs to conformance."""

    def over(run: Run, count: int) -> Iterator[Rows]:
        for dtype in run.over("dtype", DTYPES):
            for heads, width, turned, base in rotation.shapes:
                run.covers(shape=f"{heads}x{width}", rotated=turned, base=int(base))
                x = many(run, count, (heads + 2) * width, salt=1, dtype=dtype, scale=3.0)
                x = x.view(count, heads + 2, width)[:, :heads]
                at = ids(count, LENGTH, 2).to(run.device)
                tables = rotation.tables(turned, base, run.device)
                yield _subject(rotation, x, at, tables)

    rows.hang(gate, over, partial(_planted, rotation=rotation), more=more)
    gate.check("partition_invariance")(partial(_partition, rotation=rotation))
    gate.check("degenerate_shapes")(partial(_degenerate, rotation=rotation))


def _subject(rotation: Rotation, x: Tensor, at: Tensor, tables: Tables) -> Rows:
    def exact(x: Tensor, at: Tensor) -> Tensor:
        half = tables[0].shape[-1]
        cos, sin = (t[at].unsqueeze(1).to(x.dtype) for t in tables)
        a, b = (
            (x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2])
            if rotation.interleaved
            else (x[..., :half], x[..., half : 2 * half])
        )
        low, high = a * cos - b * sin, a * sin + b * cos
        both = (
            torch.stack((low, high), -1).flatten(-2) if rotation.interleaved else torch.cat((low, high), -1)
        )
        return torch.cat((both, x[..., 2 * half :]), -1)

    return Rows(
        op=lambda x, at: rotation.op(x, at, *tables),
        spec=lambda x, at: rotation.specified(x, at, tables),
        by_row=(x, at),
        free=[
            partial(
                rotation.written,
                x,
                at,
                tables,
                tokens_per_program=tokens,
                heads_per_program=heads,
                num_warps=warps,
            )
            for tokens, heads, warps in FREE
        ],
        spec_gradients=lambda g, _, at: [rotation.specified(g, at, tables, reverse=True)],
        exact=exact,
    )


def _planted(run: Run, rotation: Rotation) -> None:
    heads, width, turned, base = rotation.shapes[0]
    x = many(run, PLANTED, heads, width, salt=4, dtype=torch.float32)
    at = ids(PLANTED, LENGTH, 5).to(run.device)
    tables = rotation.tables(turned, base, run.device)
    want = rotation.op(x, at, *tables)
    run.control("fused_multiply_add", rotation.written(x, at, tables, fused_multiply_add=True), want)
    run.control("the_next_position", rotation.op(x, (at + 1) % LENGTH, *tables), want)
    run.control("the_other_way", rotation.written(x, at, tables, reverse=True), want)
    other = torch.full_like(x, float("nan"))
    rotation.launch(x, at, *tables, other, interleaved=not rotation.interleaved)
    run.control("other_pairs", other, want)


def _partition(run: Run, rotation: Rotation) -> None:
    """Heads and rows on several ranks: nothing is exchanged."""
    for dtype in run.over("dtype", DTYPES):
        for heads, width, turned, base in rotation.shapes:
            x = many(run, rows.SOME, heads, width, salt=1, dtype=dtype, scale=3.0)
            at = ids(rows.SOME, LENGTH, 2).to(run.device)
            tables = rotation.tables(turned, base, run.device)
            whole = rotation.op(x, at, *tables)
            for shards in run.over("TP", (1, 2, 4, 8)):
                if shards <= heads:
                    run.equal(torch.cat([rotation.op(p, at, *tables) for p in x.chunk(shards, 1)], 1), whole)
            parts = zip(x.chunk(3), at.chunk(3), strict=True)
            run.equal(torch.cat([rotation.op(p, where, *tables) for p, where in parts]), whole)
            run.control("the_next_position", rotation.op(x, (at + 1) % LENGTH, *tables), whole)


def _turned(rotation: Rotation, at: Tensor, tables: Tables, x: Tensor) -> Tensor:
    return rotation.op(x, at, *tables)


def _degenerate(run: Run, rotation: Rotation) -> None:
    for dtype in run.over("dtype", DTYPES):
        for heads, width, turned in ((1, 2, 2), (3, 24, 24), (5, 96, 34), (1, 256, 64)):
            run.covers(shape=f"{heads}x{width}", rotated=turned)
            tables = rotation.tables(turned, 1e4, run.device)
            for count in run.over("rows", (0, 1, 5)):
                x, at = many(run, count, heads, width, salt=1, dtype=dtype), ids(count, LENGTH, 3)
                at = at.to(run.device)
                run.equal(rotation.op(x, at, *tables), rotation.specified(x, at, tables))
                back = gradients(partial(_turned, rotation, at, tables), [x], x)[1]
                run.equal(back, rotation.specified(x, at, tables, reverse=True))
        x = many(run, 4, 2, 64, salt=2, dtype=dtype)
        at = torch.tensor([0, LENGTH - 1, LENGTH, -1], device=run.device)
        tables = rotation.tables(64, 1e6, run.device)
        got = rotation.op(x, at, *tables)
        run.equal(got[:2], rotation.specified(x[:2], at[:2], tables))
        run.holds(got[2:].isnan())  # no table entry: no answer
        run.equal(rotation.op(x[:2], at[:2].int(), *tables), got[:2])
        odd = x.clone()
        odd[0, 0, 0], odd[1, 1, 3] = float("nan"), float("inf")
        turned_odd = rotation.op(odd[:2], at[:2], *tables)
        run.equal(turned_odd, rotation.specified(odd[:2], at[:2], tables), any_nan=True)
        run.control("odd_values", turned_odd, got[:2])
        run.refuses(partial(rotation.op, x.half(), at, *tables))
        run.refuses(partial(rotation.op, x, at[:2], *tables))
        run.refuses(partial(rotation.op, x[..., :32], at, *tables))
        run.refuses(partial(rotation.op, x, at.float(), *tables))
        run.refuses(partial(rotation.op, x, at.expand(3, 4).contiguous(), *tables))
