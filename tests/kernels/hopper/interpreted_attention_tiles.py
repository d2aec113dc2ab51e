# SPDX-License-Identifier: Apache-2.0
"""The sm90 attention's own kernel in Triton's interpreter: the library's bits, windows, tiles of any size."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import interpreted as base  # type: ignore[import-not-found]  # patches the interpreter; first
import torch
from attention_stand_in import (  # type: ignore[import-not-found]
    LENGTHS,
    Cache,
    D,
    S,
    ints,
    quickly,
    run_with_lse,
    slowly,
)
from interpreted import other, poisoned, rand, same

from isoexec.kernels.attention.hopper import kernel, naive, ops, reference, tiles

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


@contextmanager
def tiled() -> Iterator[None]:
    ops.TILED.add(D)
    try:
        yield
    finally:
        ops.TILED.clear()


MANY = ((0, 0, LENGTHS[0]), (1, 2, 7), (2, S - 1, S), (0, S + 3, 2 * S + 1), (3, S - 6, S + 1))
FEW = ((0, 0, 1), (0, S, S + 1), (3, S - 1, S), (1, 5, 6), (0, 2 * S + 3, 2 * S + 4))


@check
def the_own_kernel_has_the_librarys_bits_packed_in_pages_in_chunks_and_in_decode() -> None:
    cache = Cache()
    for sinks in (None, rand(2, dtype=torch.float32)):
        want = cache.whole(sinks)
        same(cache.packed(sinks, provider="triton"), want, "packed")
        for spans in (MANY, FEW):
            got, index = cache.spans(list(spans), sinks, provider="triton")
            same(got, want[index], spans)
    with tiled():  # a plan of the library's whose decode the own kernel serves
        got, index = cache.spans(list(FEW), None)
        same(got, cache.whole()[index], "decode in a plan of the library's")


@check
def a_window_has_its_specifications_bits_packed_in_pages_in_chunks_and_in_decode() -> None:
    cache = Cache()
    for window in (1, 5, S, S + 9):
        want = cache.whole(window=window)
        same(cache.packed(provider="triton", window=window), want, (window, "packed"))
        for spans in (MANY, FEW):
            got, index = cache.spans(list(spans), provider="triton", window=window)
            same(got, want[index], (window, spans))
    sinks = rand(2, dtype=torch.float32)
    same(cache.packed(sinks, provider="triton", window=7), cache.whole(sinks, 7), "sinks")
    same(cache.packed(provider="triton", window=4 * S), cache.whole(), "a window wider than the sequence")
    other(cache.packed(provider="triton", window=5), cache.packed(provider="triton", window=6), "window")


@check
def the_kernels_that_the_other_checks_take_by_their_specification_have_its_bits() -> None:
    for H, KV, width, keys in ((2, 1, D, 40), (1, 1, 256, 130)):  # by halves of 32 and of 20, padded to 32
        q, k, v = rand(keys, H, width, scale=2.0), rand(keys, KV, width), rand(keys, KV, width)
        for window in (0, 20):
            step = ops.plan(
                requests=1,
                tokens=5,
                most_rows=5,
                most_keys=keys,
                kv_segment=100,
                provider="triton",
                window=window,
                device="cpu",
            )
            step.fill(ints([0, 5]), ints([keys]), k_start=ints([0]))
            position = torch.arange(keys - 5, keys, dtype=torch.int32)
            found = []
            for way in (slowly, nullcontext):
                with way():
                    found.append(run_with_lse(step, q[-5:], k, v, position))
            want = naive.attention(q, k, v, width**-0.5, kv_segment=100, window=window)
            for got in found:
                same(got[0], want[0][-5:], (width, window))
                same(got[1], want[1][:, -5:], (width, window))


@check
def the_reference_s_windows_have_their_specifications_bits() -> None:
    for width, n, window in ((D, 50, 33), (256, 34, 9), (D, 18, 1)):
        q, k, v = rand(n, 2, width, scale=2.0), rand(n, 1, width), rand(n, 1, width)
        given = {"kv_segment": 32, "window": window, "sinks": rand(2, dtype=torch.float32)}
        with slowly():
            found = reference.reference(q, k, v, width**-0.5, **given, hardware=False)
        want = naive.attention(q, k, v, width**-0.5, **given)
        for a, b in zip(found, want, strict=True):
            same(a, b, (width, window))


@check
def tiles_and_groups_of_any_size_have_the_same_bits() -> None:
    for H, KV, width in ((6, 2, D), (5, 1, 128), (1, 1, 256)):
        n = 140  # in two segments, the first of two blocks at head dim 256
        q, k, v = rand(n, H, width, scale=2.0), rand(n, KV, width), rand(n, KV, width)
        for window in (0, 70):
            want, want_lse = naive.attention(q, k, v, width**-0.5, kv_segment=128, window=window)
            for rows in (16, 64):
                tile = tiles.Tile(rows=rows, warps=4, stages=2)
                held = tiles.tokens_of(tile, H // KV)
                spans = ints([[0], [n], [n], [0]])
                owners = torch.empty(2, n // held + 1, dtype=torch.int32)
                tiles.launch_map(spans[1], owners, unit=held)
                parts, lse = poisoned(2, n, H, width), poisoned(2, H, n, dtype=torch.float32)
                tiles.launch_tiles(
                    *(q, k, v, parts, lse, spans, owners, None),
                    scale=width**-0.5,
                    kv_segment=128,
                    window=window,
                    segments=2,
                    tile=tile,
                    tokens=held,
                    hardware=False,
                )
                out, whole = poisoned(n, H, width), poisoned(H, n, dtype=torch.float32)
                kernel.launch_merge(
                    *(None, None, parts, lse, torch.arange(n, dtype=torch.int32), None, out),
                    kv_segment=128,
                    window=window,
                    whole_lse=whole,
                    hardware=False,
                )
                same(out, want, (H, KV, width, window, rows))
                same(whole, want_lse, (H, KV, width, window, rows))


if __name__ == "__main__":
    base.CHECKS.clear()
    base.CHECKS.update({n: c for n, c in CHECKS.items() if n in sys.argv[1:] or len(sys.argv) == 1})
    with quickly():
        base.main()
