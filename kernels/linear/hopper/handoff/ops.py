# SPDX-License-Identifier: Apache-2.0
"""Products whose K is sharded over a group of GPUs, as opaque torch ops; forward only, gradients are the caller's.

Calls of a group are collective: every rank makes the same ones with the same sizes, in one order, on one stream at a time.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.groups import name_of, size_of
from isoexec.kernels.hopper.library import define
from isoexec.kernels.linear.hopper.handoff import buffers, gather, kernel, protocol
from isoexec.kernels.linear.hopper.handoff.buffers import check, close
from isoexec.kernels.linear.hopper.handoff.schedule import Schedule, choose, fitted
from isoexec.kernels.linear.hopper.parts import require_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from isoexec.kernels.linear.hopper.handoff.buffers import Room
    from isoexec.kernels.linear.hopper.handoff.schedule import Form, Product

__all__ = ["check", "choose", "close", "column_gradient", "columns_product", "row_product", "run", "setup"]

_FORMS = ("all", "rows")
_DTYPES = (torch.bfloat16, torch.float32)


def setup(group: ProcessGroup, max_elements: int, *, patience: float = buffers.PATIENCE) -> None:
    """Give a group its symmetric memory, 6 bytes an element; collective, and outside graph capture.

    `max_elements` is the most that one launch of the chain holds, rows padded to tiles times results a row; products with more
    rows take several launches. The schedule `rows` needs (N + M / ranks) K / 2 elements. `patience` is in seconds.
    """
    buffers.open_room(group, max_elements, patience)


def _require_operands(op: str, x: Tensor, w: Tensor, shared: bool, out_dtype: torch.dtype) -> None:
    require(
        x.dtype == w.dtype == torch.bfloat16 and x.is_contiguous() and w.is_contiguous(),
        op,
        f"x {x.dtype} strides {x.stride()}, w {w.dtype} strides {w.stride()}",
        "contiguous bfloat16",
    )
    require(
        x.data_ptr() % 16 == 0 and w.data_ptr() % 16 == 0,
        op,
        f"operands {x.data_ptr() % 16} and {w.data_ptr() % 16} bytes past an alignment",
        "operands that begin at a multiple of 16 bytes",
    )
    require(
        x.dim() == 2 and w.dim() == 2 and shared,
        op,
        f"x {list(x.shape)} with w {list(w.shape)}",
        "matrices that share this rank's part of the sum",
    )
    require(out_dtype in _DTYPES, op, f"results in {out_dtype}", "bfloat16 and float32")


def _require_form(op: str, M: int, N: int, form: str, group: str) -> int:
    ranks = size_of(group)
    require(
        ranks > 1, op, "a group of one rank", "several ranks; one rank holds all of K and calls sm90_linear"
    )
    require(form in _FORMS, op, f"form {form!r}", " and ".join(_FORMS))
    require(N % 16 == 0, op, f"{N} results a row", "a multiple of 16")
    require(
        form == "all" or M % ranks == 0, op, f"{M} rows over {ranks} ranks", "equal row blocks on every rank"
    )
    return ranks


def run(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    room: Room,
    schedule: Schedule,
    *,
    each: bool,
    parts: Sequence[int],
    turned: bool,
) -> None:
    """One product by a given schedule; `out` is [M, N], or this rank's [M / ranks, N] where not `each`.

    This rank's K lies in `parts`, one a lap. Raises `RoomError` where the room is too small, `DomainError` where a part is no
    multiple of 16.
    """
    M = len(x)
    if schedule.kind == "rows":
        gather.by_rows(
            *(x, w, out, room),
            each=each,
            parts=parts,
            turned=turned,
            blocks=schedule.blocks,
            mover=schedule.mover,
        )
        return
    cut = schedule.cut
    assert schedule.kind == "chain", schedule
    assert cut is not None, schedule
    cut = replace(cut, depth=fitted(cut, gcd(*parts)))
    owners = 1 if each else room.ranks
    per, N = out.shape
    for first, count in launches(cut, per, N, owners, room.elements, out.dtype):
        kernel.launch(
            x[first:],
            w,
            out[first : first + count],
            room,
            cut,
            per=count,
            stride=M // owners,
            each=each,
            parts=parts,
            turned=turned,
        )


def launches(
    cut: kernel.Cut, per: int, N: int, owners: int, elements: int, dtype: torch.dtype
) -> list[tuple[int, int]]:
    """(first row, rows) an owner of each launch, so that accumulators, results and words fit."""
    across = -(-N // cut.columns)
    row_tiles = min(elements // (cut.rows * across * cut.columns), protocol.SLOTS // across) // owners
    rows = min(row_tiles * cut.rows, 2 * elements // (N * dtype.itemsize))
    if rows < 1:
        raise buffers.RoomError(
            f"max_elements of at least {owners * cut.rows * across * cut.columns}", f"{elements}"
        )
    return [(first, min(rows, per - first)) for first in range(0, per, rows)]


def _product(
    op: str,
    x: Tensor,
    w: Tensor,
    group: str,
    form: str,
    parts: Sequence[int],
    turned: bool,
    dtype: torch.dtype,
) -> Tensor:
    K = x.shape[1]
    _require_operands(op, x, w, w.shape[0 if turned else 1] == K, dtype)
    M, N = len(x), w.shape[1 if turned else 0]
    ranks = _require_form(op, M, N, form, group)
    require_parts(op, parts, K)
    out = torch.empty(M if form == "all" else M // ranks, N, dtype=dtype, device=x.device)
    if M:
        room = buffers.room_of(group)
        product: Product = "gradient" if turned else "row"
        sent: Form = "all" if form == "all" else "rows"
        schedule = choose(M, N, K * ranks, ranks, sent, product, room.elements, dtype.itemsize)
        run(x, w, out, room, schedule, each=form == "all", parts=parts, turned=turned)
    return out


def _row(x: Tensor, w: Tensor, group: str, form: str, out_dtype: torch.dtype) -> Tensor:
    return _product("sm90_handoff_row", x, w, group, form, [x.shape[1]], False, out_dtype)


def _row_fake(x: Tensor, w: Tensor, group: str, form: str, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((_rows(x, group, form), w.shape[0]), dtype=out_dtype)


def _rows(x: Tensor, group: str, form: str) -> int:
    return x.shape[0] if form == "all" else x.shape[0] // size_of(group)


def _gradient(dy: Tensor, w: Tensor, group: str, parts: Sequence[int], form: str) -> Tensor:
    return _product("sm90_handoff_gradient", dy, w, group, form, parts, True, torch.bfloat16)


def _gradient_fake(dy: Tensor, w: Tensor, group: str, parts: Sequence[int], form: str) -> Tensor:
    return dy.new_empty((_rows(dy, group, form), w.shape[1]))


def _columns(x: Tensor, w_columns: Tensor, group: str, form: str, out_dtype: torch.dtype) -> Tensor:
    op = "sm90_handoff_columns"
    ranks = size_of(group)
    M, n, K = len(x), len(w_columns), x.shape[1] * ranks
    _require_operands(op, x, w_columns, w_columns.shape[1] == K, out_dtype)
    _require_form(op, M, n, form, group)
    out = torch.empty(M if form == "all" else M // ranks, n * ranks, dtype=out_dtype, device=x.device)
    if M:
        room = buffers.room_of(group)
        schedule = choose(M, n * ranks, K, ranks, "all" if form == "all" else "rows", "columns")
        gather.by_columns(x, w_columns, out, room, each=form == "all", tile=schedule.tile)
    return out


def _columns_fake(x: Tensor, w_columns: Tensor, group: str, form: str, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((_rows(x, group, form), w_columns.shape[0] * size_of(group)), dtype=out_dtype)


_row_op = define(
    "sm90_handoff_row(Tensor x, Tensor w, str group, str form, ScalarType out_dtype) -> Tensor",
    _row,
    _row_fake,
)
_gradient_op = define(
    "sm90_handoff_gradient(Tensor dy, Tensor w, str group, int[] parts, str form) -> Tensor",
    _gradient,
    _gradient_fake,
)
_columns_op = define(
    "sm90_handoff_columns(Tensor x, Tensor w_columns, str group, str form, ScalarType out_dtype) -> Tensor",
    _columns,
    _columns_fake,
)


def row_product(
    x_local: Tensor,
    w_local: Tensor,
    group: ProcessGroup,
    form: Form = "all",
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`x_local [M, K / ranks] @ w_local [N, K / ranks]^T`, chained over the ranks in order and rounded once.

    `all` gives [M, N] on every rank, `rows` this rank's [M / ranks, N]. Raises `DomainError` for other shapes and dtypes,
    `RoomError` without `setup`, `PeerLostError` where an earlier product of the group waited in vain.
    """
    out: Tensor = _row_op(x_local, w_local, name_of(group), form, out_dtype)
    return out


def column_gradient(
    dy_local: Tensor, w_local: Tensor, group: ProcessGroup, parts: Sequence[int], form: Form = "all"
) -> Tensor:
    """`dy_local [M, N / ranks] @ w_local [N / ranks, K]` in bf16, chained over N: the input gradient of a column-parallel linear.

    A merged weight is `parts` of so many rows, one after the other on each rank ([gate; up] has two, and one that is not merged
    has one); all of the first part goes first, in rank order, then all of the second. Forms and errors as in `row_product`.
    """
    out: Tensor = _gradient_op(dy_local, w_local, name_of(group), list(parts), form)
    return out


def columns_product(
    x_local: Tensor,
    w_columns: Tensor,
    group: ProcessGroup,
    form: Form = "all",
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`row_product` for a weight sharded the other way, `w_columns [N / ranks, K]`: inputs are gathered, with the same bits."""
    out: Tensor = _columns_op(x_local, w_columns, name_of(group), form, out_dtype)
    return out
