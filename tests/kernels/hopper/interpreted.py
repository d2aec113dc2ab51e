# SPDX-License-Identifier: Apache-2.0
"""Runs every check in Triton's interpreter on the CPU and prints `{check: what went wrong, or ""}` as JSON.

A process of its own: Triton decides when a kernel is decorated whether it is interpreted.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import emulation  # type: ignore[import-not-found]  # noqa: F401 - the interpreter is asked for before anything imports triton
import numpy as np
import torch
from torch import Tensor

from isoexec.kernels.hopper import spec
from isoexec.kernels.linear.hopper import kernel as linear_kernel
from isoexec.kernels.linear.hopper import naive as linear_naive
from isoexec.kernels.logprobs.hopper import kernel as logprobs_kernel
from isoexec.kernels.logprobs.hopper import naive as logprobs_naive
from isoexec.kernels.rms_norm import naive as halving
from isoexec.kernels.rms_norm.hopper import kernel as norm_kernel
from isoexec.kernels.rms_norm.hopper import naive as norm_naive
from isoexec.kernels.rope import naive as rope_naive
from isoexec.kernels.rope.hopper import kernel as rope_kernel
from isoexec.kernels.silu_mul.hopper import kernel as silu_kernel
from isoexec.kernels.silu_mul.hopper import naive as silu_naive

CHECKS: dict[str, Callable[[], None]] = {}
VIEW = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def differing(a: Tensor, b: Tensor) -> int:
    assert (a.shape, a.dtype) == (b.shape, b.dtype), (a.shape, a.dtype, b.shape, b.dtype)
    return int((a.contiguous().view(VIEW[a.dtype]) != b.contiguous().view(VIEW[b.dtype])).sum())


def same(a: Tensor, b: Tensor, what: object = "") -> None:
    count = differing(a, b)
    assert count == 0, f"{what}: {count} of {a.numel()} elements differ"


def other(a: Tensor, b: Tensor, what: object = "") -> None:
    assert differing(a, b) > 0, f"{what}: a control that must differ is equal"


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


def norm(x: Tensor, w: Tensor, **free: Any) -> Tensor:
    y = poisoned(*x.shape, dtype=x.dtype)
    norm_kernel.launch(x, None, w, y, None, 1e-6, **free)
    return y


@check
def rms_norm_has_its_specifications_bits() -> None:
    for width in (128, 96, 40, 1):
        for dtype in (torch.float32, torch.bfloat16):
            x, w = rand(5, width, dtype=dtype, scale=3.0), rand(width, dtype=dtype)
            same(norm(x, w), norm_naive.rms_norm(x, w, 1e-6), (width, dtype))


@check
def rms_norm_with_a_residual_has_its_specifications_bits() -> None:
    x, r, w = rand(6, 64), rand(6, 64), rand(64)
    y, h = poisoned(6, 64), poisoned(6, 64)
    norm_kernel.launch(x, r, w, y, h, 1e-6)
    for got, want in zip((y, h), norm_naive.add_rms_norm(x, r, w, 1e-6), strict=True):
        same(got, want)
    unrounded = norm_naive.rms_norm(x.float() + r.float(), w.float(), 1e-6).bfloat16()
    other(y, unrounded, "the norm must read the rounded sum")


@check
def rms_norm_of_heads_reads_a_view_of_the_projection() -> None:
    qkv, w = rand(7, 4 * 32), rand(32)
    heads = qkv.view(7, 4, 32)[:, 1:3]
    same(norm(heads, w), norm_naive.rms_norm(heads, w, 1e-6))


@check
def rms_norm_does_not_depend_on_batch_rows_or_warps() -> None:
    x, w = rand(9, 128, dtype=torch.float32), rand(128, dtype=torch.float32)
    whole = norm(x, w)
    for rows in (1, 2, 4, 16):
        for warps in (1, 2, 8):
            same(norm(x, w, rows_per_program=rows, num_warps=warps), whole, (rows, warps))
    same(norm(x[4:5], w), whole[4:5], "alone")


@check
def rms_norm_differs_when_halves_are_added_instead_of_neighbours() -> None:
    x, w = rand(64, 128, dtype=torch.float32), rand(128, dtype=torch.float32)
    other(norm(x, w), halving.rms_norm(x, w, 1e-6))


def silu(gate: Tensor, up: Tensor, **free: Any) -> Tensor:
    out = poisoned(*gate.shape, dtype=gate.dtype)
    silu_kernel.launch(gate, up, out, **free)
    return out


@check
def silu_mul_has_its_specifications_bits_at_any_block() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        both = rand(5, 200, dtype=dtype, scale=20.0)
        gate, up = both.chunk(2, -1)
        want = silu_naive.silu_mul(gate, up)
        for block in (16, 64, 128):
            same(silu(gate, up, block=block), want, (dtype, block))
        same(silu(gate[2:3], up[2:3]), want[2:3], "alone")


@check
def exp_has_its_specifications_bits_over_the_whole_range() -> None:
    edge = [0.0, -0.0, 1.0, -87.0, -87.0001, 88.71875, 88.72, 1e30, -1e30]
    x = torch.cat((torch.linspace(-110, 100, 4096), rand(2000, dtype=torch.float32), torch.tensor(edge)))
    x = -x.unsqueeze(0)  # silu reads exp(-gate); with gate / (1 + e) every bit of e shows
    same(silu(x, torch.ones_like(x)), silu_naive.silu_mul(x, torch.ones_like(x)))


def logprobs(
    logits: Tensor, target: Tensor, leaves: int, *, warmth: Tensor | None = None, **cut: int
) -> Tensor:
    """Log p beside the entropy."""
    chosen = logprobs_kernel.Cut(**{"blocks": 2, "join": 2, "rows": 8, "warps": 4, **cut})
    rows, width = logits.shape
    m = poisoned(rows, leaves, logprobs_kernel.nodes_of(width, leaves, chosen.join), dtype=torch.float32)
    s, w, out = m.clone(), m.clone(), poisoned(2, rows, dtype=torch.float32)
    logprobs_kernel.launch_partials(logits, warmth, m, s, w, chosen)
    stats = poisoned(rows, 3, dtype=torch.float32)
    logprobs_kernel.launch_merge(
        logits, target, warmth, m, s, w, out[0], out[1], stats, rows_per_program=chosen.rows
    )
    return out.t().contiguous()


def specified(logits: Tensor, target: Tensor, leaves: int, warmth: Tensor | None = None) -> Tensor:
    return torch.stack(logprobs_naive.everything(logits, target, warmth, vocab_leaves=leaves)[:2], 1)


@check
def logprobs_have_their_specifications_bits() -> None:
    for width, leaves in ((1208, 4), (300, 1)):
        for dtype in (torch.float32, torch.bfloat16):
            logits, target = rand(6, width, dtype=dtype, scale=4.0), torch.randint(0, width, (6,))
            for warmth in (None, torch.rand(6) + 0.3):
                want = specified(logits, target, leaves, warmth)
                same(logprobs(logits, target, leaves, warmth=warmth), want, (width, leaves, dtype))


@check
def logprobs_are_as_exact_as_their_formula_says() -> None:
    logits, target = rand(64, 1200, dtype=torch.float32, scale=6.0), torch.randint(0, 1200, (64,))
    logits[:8] *= 4  # one word has nearly all
    exact = torch.log_softmax(logits.double(), -1)
    got = logprobs(logits, target, 4, rows=64).double()
    picked = exact.gather(1, target.unsqueeze(1)).squeeze(1)
    assert float(((got[:, 0] - picked).abs() / (1e-6 + 1.2e-7 * picked.abs())).max()) < 1
    assert float((got[:, 1] + (exact.exp() * exact).sum(-1)).abs().max()) < 2e-6
    assert bool((got[:, 0] <= 0).all())
    assert bool((got[:, 1] >= 0).all())


@check
def logprobs_survive_masked_columns_and_refuse_foreign_targets() -> None:
    logits, target = rand(6, 1200, dtype=torch.float32), torch.tensor([3, 5, 1200, -1, 7, 8])
    logits[:, 16:700] = -torch.inf
    logits[4], logits[5] = -3e38, 2e6
    got = logprobs(logits, target, 4)
    same(got[:2], specified(logits[:2], target[:2], 4))
    assert bool(got[2:4, 0].isnan().all()), "a target outside the vocabulary must give NaN"
    assert bool(got[4:].isnan().all()), "logits beyond the limit must give NaN"
    logits[0] = -torch.inf
    logits[1, 900] = torch.nan
    got = logprobs(logits, target, 4)
    assert bool(got[:2].isnan().all()), "a row without any token, or with a NaN logit, must give NaN"


@check
def logprobs_do_not_depend_on_batch_cut_or_shards() -> None:
    logits, target = rand(7, 1200, dtype=torch.float32), torch.randint(0, 1200, (7,))
    whole = logprobs(logits, target, 4)
    for cut in ({"blocks": 4, "join": 1}, {"blocks": 1, "join": 1, "rows": 4}, {"rows": 2, "warps": 1}):
        same(logprobs(logits, target, 4, **cut), whole, cut)  # type: ignore[arg-type]
    same(logprobs(logits[3:4], target[3:4], 4, rows=1), whole[3:4], "alone")
    chosen = logprobs_kernel.Cut(blocks=2, join=1, rows=8, warps=4)
    shards = []
    for shard in logits.chunk(2, -1):
        m, s, w = (poisoned(7, 2, 3, dtype=torch.float32) for _ in range(3))
        logprobs_kernel.launch_partials(shard.contiguous(), None, m, s, w, chosen)
        shards.append((m, s, w))
    m, s, w = (torch.cat(parts, 1) for parts in zip(*shards, strict=True))
    picked = logits.gather(1, target.unsqueeze(1)).squeeze(1)
    out, stats = poisoned(2, 7, dtype=torch.float32), poisoned(7, 3, dtype=torch.float32)
    logprobs_kernel.launch_merge(picked, None, None, m, s, w, out[0], out[1], stats)
    same(out.t().contiguous(), whole, "two shards")


@check
def logprobs_differ_with_another_leaf_count_or_temperature() -> None:
    logits, target = rand(200, 1200, dtype=torch.float32, scale=3.0), torch.randint(0, 1200, (200,))
    want = logprobs(logits, target, 4, rows=64)
    other(logprobs(logits, target, 2, rows=64), want, "leaves")
    warmth = torch.full((200,), 0.7)
    divided = logprobs(logits / 0.7, target, 4, rows=64)
    same(logprobs(logits, target, 4, rows=64, warmth=warmth), divided, "divided by an engine")
    other(logprobs(logits * (1 / warmth[:, None]), target, 4, rows=64), divided, "times the reciprocal")


def rope(x: Tensor, positions: Tensor, **free: Any) -> Tensor:
    out = poisoned(*x.shape, dtype=x.dtype)
    cos, sin = rope_naive.table(x.shape[-1], 1e6)
    rope_kernel.launch(x, positions, cos, sin, out, **free)
    return out


@check
def rope_has_its_specifications_bits() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        qkv = rand(5, 6 * 24, dtype=dtype)
        x = qkv.view(5, 6, 24)[:, :5]
        positions = torch.tensor([0, 7, 8191, 7, 100])
        want = rope_naive.rope(x, positions, 1e6)
        for heads in (1, 2, 8):
            same(rope(x, positions, heads_per_program=heads), want, (dtype, heads))
        same(rope(x[2:3], positions[2:3].int()), want[2:3], "alone, int32 positions")


@check
def rope_gives_nan_outside_its_table() -> None:
    got = rope(rand(3, 2, 16), torch.tensor([5, 8192, -1]))
    assert bool(got[0].isfinite().all())
    assert bool(got[1:].isnan().all())


def product(x: Tensor, w: Tensor, tile: linear_kernel.Tile, dtype: torch.dtype = torch.float32) -> Tensor:
    out = poisoned(len(x), len(w), dtype=dtype)
    linear_kernel.launch(x, w, out, tile)
    return out


def _tile(kind: Any, rows: int, columns: int, depth: int) -> linear_kernel.Tile:
    return linear_kernel.Tile(kind=kind, rows=rows, columns=columns, depth=depth, warps=4, stages=2)


@check
def every_tile_of_the_chain_has_the_specifications_bits() -> None:
    x, w = rand(19, 128), rand(40, 128)
    for dtype in (torch.float32, torch.bfloat16):
        want = linear_naive.linear(x, w, out_dtype=dtype)
        for kind in ("pointers", "maps", "swapped"):
            for rows, columns, depth in ((16, 16, 32), (32, 32, 128), (16, 64, 64)):
                same(
                    product(x, w, _tile(kind, rows, columns, depth), dtype),
                    want,
                    (kind, rows, columns, depth),
                )


@check
def a_row_alone_has_the_bits_it_has_in_company() -> None:
    x, w = rand(19, 128), rand(40, 128)
    whole = product(x, w, linear_kernel.REFERENCE)
    for kind in ("pointers", "maps", "swapped"):
        for M in (1, 2, 16, 17):
            same(product(x[:M], w, _tile(kind, 16, 32, 64)), whole[:M], (kind, M))


@check
def split_k_and_another_order_differ() -> None:
    x, w = rand(19, 128), rand(40, 128)
    whole = product(x, w, _tile("pointers", 16, 32, 64))
    halves = [
        product(a.contiguous(), b.contiguous(), _tile("pointers", 16, 32, 64))
        for a, b in zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)
    ]
    other(halves[0] + halves[1], whole, "split-K")
    other(product(x.flip(1), w.flip(1), _tile("pointers", 16, 32, 64)), whole, "K from the other end")


@check
def fma_rounds_once() -> None:
    a, b, c = (rand(4000, dtype=torch.float32) for _ in range(3))
    exact = []
    got = spec.fma(a, b, c)
    for i in range(400):
        value = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        near = np.float32(float(value))
        candidates = (np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf)))
        exact.append(min(candidates, key=lambda v: abs(Fraction(float(v)) - value)))
    same(got[:400], torch.tensor(np.array(exact)))
    other(got, a * b + c, "two roundings")


def main() -> None:
    torch.set_num_threads(1)
    np.seterr(all="ignore")  # infinities and NaN are among the inputs
    results = {}
    for name, function in CHECKS.items():
        torch.manual_seed(7)
        try:
            function()
            results[name] = ""
        except Exception:  # noqa: BLE001 - reported to the test that asked
            results[name] = traceback.format_exc(limit=4)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
