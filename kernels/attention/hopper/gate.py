# SPDX-License-Identifier: Apache-2.0
"""What proves attention.mma_segments/1 on sm90: the library's bits, and the own kernel's, are the reference's, however laid out.

The library's build stands in the domain of every check. Keys lie packed, and in pages in random order; a page nobody owns and
fresh memory hold NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from isoexec.kernels.attention.hopper import fa3, ops
from isoexec.kernels.attention.hopper.kernel import TOTAL_STEP
from isoexec.kernels.attention.hopper.ops import attention
from isoexec.kernels.attention.hopper.reference import launch_segment
from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.attentions import SHORT, Kind, batches, edges, hang, providers
from isoexec.kernels.gates.forward import many
from isoexec.kernels.gates.sequences import Batch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GATE", "KIND", "native"]

GATE = Gate("attention.mma_segments/1", "sm90")
HEADS = (
    (32, 8, 128),
    (16, 2, 256),
    (32, 8, 64),
    (4, 4, 128),
    (8, 1, 64),
    (24, 4, 256),
)  # query heads, KV heads, head dim
TRAINED = 3  # the first of them, one of each head dim
REPEATED = 9  # requests at each edge of a sequence, where a control wants many
TOO_FAR = 1.2  # of the error that one pass over all keys makes


@contextmanager
def by_the_library(_: int) -> Iterator[None]:
    """Decode no few requests by own kernels."""
    before, ops.FEW_PROGRAMS = ops.FEW_PROGRAMS, dict.fromkeys(ops.FEW_PROGRAMS, 0)
    try:
        yield
    finally:
        ops.FEW_PROGRAMS = before


@contextmanager
def split(_: int) -> Iterator[None]:
    """Decode any number of requests by keys and columns."""
    before, ops.FEW_PROGRAMS = ops.FEW_PROGRAMS, dict.fromkeys(ops.FEW_PROGRAMS, 1 << 30)
    try:
        yield
    finally:
        ops.FEW_PROGRAMS = before


@contextmanager
def in_tiles(head_dim: int) -> Iterator[None]:
    """Decode by the own kernel under the library's plan."""
    before = set(ops.TILED)
    ops.TILED.add(head_dim)
    try:
        yield
    finally:
        ops.TILED.intersection_update(before)


def native(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, rows: int, keys: int, **given: Any) -> Tensor:
    """The library as engines call it, by its own schedule; `given`: cu_k, or used and pages; splits, window."""
    left, right = given.get("window", (-1, -1))
    out: Tensor = fa3.load()(
        *(q, k, v, None, None, None, None, cu_q, given.get("cu_k"), None, None, given.get("used")),
        *(rows, keys, given.get("pages"), None, None, None, None, None, None, None, None),
        *(q.shape[-1] ** -0.5, True, left, right, 0.0, True, None, given.get("splits", 0)),
        *(None, 0, None, 1, 0, None),
    )[0]
    return out


def _other_schedules(run: Run, batch: Batch, want: Tensor) -> None:
    cu = batch.ints(batch.starts)
    n, D = batch.lengths[0], batch.q.shape[-1]
    run.control("another_segment", batch.packed(kv_segment=2 * batch.S), want)
    whole = native(batch.q, batch.k, batch.v, cu, n, n, cu_k=cu)
    run.control("the_library_s_own_schedule", whole[:n], want[:n])
    last = native(
        *(batch.q[n - 1 : n], batch.keys, batch.values, batch.ints([0, 1]), 1, n),
        used=batch.ints([n]),
        pages=batch.blocks[:1].contiguous(),
    )
    run.control("the_library_s_own_split_in_decode", last, want[n - 1 : n])
    if D == 64:
        few, fa3.FEWEST[D] = fa3.FEWEST[D], 1
        try:
            with by_the_library(D):
                found, index = batch.rows([(0, p, p + 1) for p in edges(batch)] * REPEATED)
            run.control("few_rows_claimed", found, want[index])
        finally:
            fa3.FEWEST[D] = few


KIND = Kind(
    heads=HEADS,
    trained=TRAINED,
    providers=("fa3", "triton"),
    decodings={"by the library": by_the_library, "split": split, "in tiles": in_tiles},
    others=_other_schedules,
    covered=lambda: {"library": fa3.identity().build},
)
hang(GATE, KIND)


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    for batch, want, trained in batches(run, KIND):
        exact, _ = batch.reference()
        run.holds(want.isfinite())
        H, D, S = batch.q.shape[1], batch.q.shape[2], batch.S
        sinks = many(run, H, salt=5, dtype=torch.float32, scale=4.0)
        with_sinks, _ = batch.reference(sinks)
        for provider in providers(run, KIND, trained):
            run.equal(batch.packed(provider=provider), exact)
            run.equal(batch.packed(sinks, provider=provider), with_sinks)
        run.control("no_sinks", want, with_sinks)
        q, k, v = batch.q[S : 2 * S], batch.k[:S], batch.v[:S]
        out, lse = torch.empty_like(q), torch.empty(H, S, device=run.device)
        one = partial(launch_segment, q, k, v, visible=S, scale=batch.scale, hardware=ops.HARDWARE)
        one(out=out, lse=lse)
        table = batch.ints([[0, S], [S, 0], [S, 0], [0, 0], [S * TOTAL_STEP, 0]])
        call = partial(fa3.call, q, k, v, table, None, scale=batch.scale, most_rows=S, most_keys=S)
        for path in run.over("past", sorted({fa3.PAST[D], "spread"})):
            run.equal(call(path=path), (out, lse))
        one(out=out, lse=lse, ascending=True)
        run.control("blocks_upwards", lse, call(path="spread")[1])
        one(out=out, lse=lse, keys=64)
        run.control("blocks_of_64", lse, call(path="spread")[1])
        _against_fp32(run, batch, want)


def _against_fp32(run: Run, batch: Batch, want: Tensor) -> None:
    n, at = batch.lengths[3], batch.sequence(3)  # one segment and a key
    group = batch.q.shape[1] // batch.k.shape[1]
    q, k, v = (x[at].float().transpose(0, 1)[None] for x in (batch.q, batch.k, batch.v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
    cu = batch.ints([0, n])
    once = native(batch.q[at], batch.k[at], batch.v[at], cu, n, n, cu_k=cu, splits=1)
    off, admitted = (float((x.float() - exact).norm()) for x in (want[at], once))
    run.holds(torch.tensor([off < TOO_FAR * admitted]))


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    for batch, want, trained in batches(run, KIND, TRAINED):
        q, k, S, group = batch.q, batch.k, batch.S, batch.q.shape[1] // batch.k.shape[1]
        for provider in providers(run, KIND, trained):
            # one key, no row, a first token
            got, index = batch.rows([(4, 0, 1), (1, 3, 3), (0, 0, 1)], provider=provider)
            run.equal(got, want[index])
            first = batch.v[batch.starts[4] :].repeat_interleave(group, 1)[:1]
            run.equal(got[:1], first)
            run.control("the_next_key", batch.v[1:2].repeat_interleave(group, 1), got[1:])
            for n in run.over("keys", [n for n in (1, 2, 63, 79, 81, 129, 161) if n <= SHORT]):
                short = batch.of(q[:n], k[:n], batch.v[:n], [n])
                run.equal(short.packed(provider=provider), short.reference()[0])
        step = batch.plan(requests=1, tokens=4, most_rows=4, most_keys=9)
        for rows, keys in ((q[:4].float(), k), (q[:4, :, :32], k[..., :32]), (q[:5], k)):
            run.refuses(partial(attention, rows, keys, keys, batch.position[:4], step, scale=1.0))
        sizes = {"requests": 1, "tokens": 4, "most_rows": 4}
        run.refuses(partial(batch.plan, **sizes, most_keys=33 * S))
        run.refuses(partial(batch.plan, **sizes, most_keys=9, kv_segment=100, page=16))
        run.refuses(partial(batch.plan, **sizes, most_keys=9, window=8, provider="fa3"))
        run.refuses(partial(batch.plan, **sizes, most_keys=9, page=batch.page, gradients=True))
