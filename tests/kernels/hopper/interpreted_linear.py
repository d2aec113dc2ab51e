# SPDX-License-Identifier: Apache-2.0
"""The sm90 linear's chain in every layout, in Triton's interpreter, against its specification; prints what `interpreted` does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import interpreted as base  # type: ignore[import-not-found]  # patches the interpreter; first
import torch
from interpreted import other, poisoned, rand, same
from torch import Tensor

from isoexec.kernels.domain import DomainError
from isoexec.kernels.linear.hopper import chains, naive, products, table
from isoexec.kernels.linear.hopper.chains import Layout
from isoexec.kernels.linear.hopper.kernel import Tile

CHECKS: dict[str, Callable[[], None]] = {}
BF16, FP32 = torch.bfloat16, torch.float32
TILES = (("maps", 16, 16, 32), ("maps", 32, 128, 64), ("swapped", 16, 64, 32), ("swapped", 32, 16, 16))


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def _tile(kind: Any, rows: int, columns: int, depth: int) -> Tile:
    return Tile(kind=kind, rows=rows, columns=columns, depth=depth, warps=4, stages=2)


def _three(M: int, N: int, K: int) -> list[tuple[Layout, Tensor, Tensor]]:
    x, w, dy = rand(M, K), rand(N, K), rand(M, N)
    return [("forward", x, w), ("input", dy, w), ("weight", dy, x)]


def specified(layout: Layout, a: Tensor, b: Tensor, acc: Tensor | None, dtype: torch.dtype) -> Tensor:
    if layout == "forward":
        return naive.chain(a, b, acc).to(dtype)
    if layout == "input":
        return naive.input_gradient(a, b, acc, out_dtype=dtype)
    return naive.chain(a.t(), b.t(), acc).to(dtype)


def run(
    layout: Layout, a: Tensor, b: Tensor, acc: Tensor | None = None, *, tile: Tile, dtype: torch.dtype = FP32
) -> Tensor:
    rows, columns, _ = chains.sizes(layout, a, b)
    out = poisoned(rows, columns, dtype=dtype)
    chains.launch(layout, a, b, acc, out, tile)
    return out


@check
def every_layout_has_its_specifications_bits_from_zero_and_going_on() -> None:
    for layout, a, b in _three(19, 48, 96):
        rows, columns, _ = chains.sizes(layout, a, b)
        for acc in (None, rand(rows, columns, dtype=FP32)):
            for dtype in (FP32, BF16):
                want = specified(layout, a, b, acc, dtype)
                for cut in TILES if dtype == FP32 else TILES[1:2]:
                    same(run(layout, a, b, acc, tile=_tile(*cut), dtype=dtype), want, (layout, cut, dtype))


@check
def a_chain_cut_at_any_multiple_of_16_and_handed_on_is_the_chain() -> None:
    tile = _tile("maps", 16, 32, 32)
    for layout, a, b in _three(20, 48, 64):
        a_dim, b_dim = (0, 0) if layout == "weight" else (1, 0 if layout == "input" else 1)
        length = a.shape[a_dim]
        whole = run(layout, a, b, tile=tile)
        for at in range(16, length, 16):
            first = run(layout, a.narrow(a_dim, 0, at), b.narrow(b_dim, 0, at), tile=tile)
            kept = first.clone()
            rest = (a.narrow(a_dim, at, length - at), b.narrow(b_dim, at, length - at))
            same(run(layout, *rest, first, tile=tile), whole, (layout, at))
            same(first, kept, "what is handed over is not written to")
            other(first + run(layout, *rest, tile=tile), whole, "an accumulator added after the loop")


@check
def an_accumulator_may_be_continued_where_it_lies() -> None:
    x, w, acc = rand(20, 64), rand(48, 64), rand(20, 48, dtype=FP32)
    want = naive.chain(x, w, acc)
    chains.launch("forward", x, w, acc, acc, _tile("maps", 16, 16, 32))
    same(acc, want)


@check
def tokens_to_a_multiple_of_16_count_as_zeros() -> None:
    for tokens in (1, 7, 33):
        dy, x = rand(tokens, 32), rand(tokens, 48)
        for cut in TILES[1:3]:
            got = run("weight", dy, x, tile=_tile(*cut))
            same(got, naive.weight_gradient(dy, x, out_dtype=FP32), (tokens, cut))
            padded = [torch.cat([t, torch.zeros(23, t.shape[1], dtype=BF16)]) for t in (dy, x)]
            same(run("weight", *padded, tile=_tile(*cut)), got, "padding at the end")


@check
def parts_of_wider_rows_are_read_and_written_where_they_lie() -> None:
    wide, w = rand(12, 96), rand(48, 96)
    tile = _tile("maps", 16, 32, 32)
    same(
        run("forward", wide[:, 32:80], w[:, 32:80], tile=tile),
        naive.chain(wide[:, 32:80], w[:, 32:80]),
    )
    out = poisoned(12, 64, dtype=FP32)
    chains.launch("forward", wide, w, None, out[:, 8:56], tile)
    same(out[:, 8:56].contiguous(), naive.chain(wide, w))
    assert bool(out[:, :8].isnan().all()), "columns before the part were written"
    assert bool(out[:, 56:].isnan().all()), "columns behind the part were written"


@check
def the_kinds_of_programs_and_their_number_change_no_bit() -> None:
    x, w, acc = rand(35, 64), rand(80, 64), rand(35, 80, dtype=FP32)
    want = naive.chain(x, w, acc)
    programs = chains._programs
    try:
        for count in (1, 3, 1000):
            chains._programs = lambda _, n=count: n  # type: ignore[assignment]
            same(run("forward", x, w, acc, tile=_tile("maps", 16, 32, 64)), want, count)
    finally:
        chains._programs = programs


@check
def misaligned_operands_are_refused() -> None:
    x, w = rand(8, 40), rand(16, 40)
    out = poisoned(8, 16)
    for bad in (
        lambda: chains.launch("forward", x[:, 1:33], w[:, :32], None, out, chains.REFERENCE),
        lambda: chains.launch("forward", x[:, ::2], w[:, :20], None, out, chains.REFERENCE),
        lambda: chains.launch("forward", rand(8, 36), rand(16, 36), None, out, chains.REFERENCE),
    ):
        said = ""
        try:
            bad()
        except DomainError as error:
            said = str(error)
        assert "multiple of 16 bytes" in said, said


@check
def products_choose_by_the_table_and_refuse_the_rest() -> None:
    N, K = 1024, 2048
    table.known(N, K)
    x, acc = rand(2, K), rand(2, 16, dtype=FP32)
    for bad in (
        lambda: products.product("forward", x, rand(16, K), acc.double(), FP32),
        lambda: products.product("forward", x, rand(24, K), None, FP32),
        lambda: products.product("forward", x.float(), rand(16, K), None, FP32),
        lambda: products.product("forward", x, rand(16, K - 16), None, FP32),
        lambda: products.product("input", rand(2, 24), rand(24, K), None, BF16),
        lambda: products.product("weight", rand(3, 16), x, None, BF16),
        lambda: products.product("forward", x, rand(16, K), None, torch.float16),
    ):
        try:
            bad()
        except DomainError:
            continue
        raise AssertionError("not refused")


if __name__ == "__main__":
    base.CHECKS = CHECKS
    sys.exit(base.main())
