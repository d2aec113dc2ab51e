# SPDX-License-Identifier: Apache-2.0
"""What proves attention.mma_segments/1 on sm90: the library's bits are the reference's, however rows and keys are laid out.

The library's build stands in the domain of every check. Keys lie packed, and in pages in random order; a page nobody owns and
fresh memory hold NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from isoexec.kernels.attention.hopper import fa3, kernel, ops
from isoexec.kernels.attention.hopper.ops import attention, plan
from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.forward import CASES, many, touched
from isoexec.kernels.hopper.timing import capture

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GATE", "Batch", "ints", "native"]

GATE = Gate("attention.mma_segments/1", "sm90")
HEADS = (
    (32, 8, 128),
    (16, 2, 256),
    (32, 8, 64),
    (4, 4, 128),
    (8, 1, 64),
    (24, 4, 256),
)  # query heads, KV heads, head dim
PAGES = (16, 64, 256)
TOO_FAR = 1.2  # of the error that one pass over all keys makes

Span = tuple[int, int, int]  # sequence, first position, end


def ints(values: Any, device: torch.device | str = "cuda") -> Tensor:
    """A table for the library."""
    return torch.tensor(values, dtype=torch.int32, device=device)


class Batch:
    """Sequences packed, and the same keys in pages; `tail` fills the rest of a sequence's last page."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Sequence[int],
        *,
        kv_segment: int,
        page: int,
        tail: float = 0.0,
    ) -> None:
        self.q, self.k, self.v = q, k, v
        self.S, self.page, self.lengths, self.scale = kv_segment, page, tuple(lengths), q.shape[-1] ** -0.5
        self.starts = [0]
        for n in lengths:
            self.starts.append(self.starts[-1] + n)
        self.position = torch.cat([torch.arange(n, device=q.device) for n in lengths]).int()
        width = [-(-n // page) for n in lengths]
        order = torch.randperm(sum(width) + 5, generator=torch.Generator().manual_seed(3))
        blocks = torch.full((len(lengths), max(width) + 2), -1, dtype=torch.int32)
        shape = (len(order), page, *k.shape[1:])
        self.keys = torch.full(shape, math.nan, dtype=k.dtype, device=q.device)
        self.values = self.keys.clone()
        used = 0
        for b, n in enumerate(lengths):
            mine = order[used : used + width[b]]
            used += width[b]
            blocks[b, : width[b]] = mine.int()
            for cache, x in ((self.keys, k), (self.values, v)):
                padded = torch.full((width[b] * page, *k.shape[1:]), tail, dtype=k.dtype, device=q.device)
                padded[:n] = x[self.starts[b] : self.starts[b + 1]]
                cache[mine.to(q.device)] = padded.view(width[b], page, *k.shape[1:])
        self.blocks = blocks.to(q.device)

    def packed(self, sinks: Tensor | None = None, *, kv_segment: int = 0, **free: Any) -> Tensor:
        """All sequences in one call, as a trainer's packed forward."""
        most = max(self.lengths)
        step = plan(
            requests=len(self.lengths),
            tokens=len(self.q),
            most_rows=most,
            most_keys=most,
            kv_segment=kv_segment or self.S,
            device=self.q.device,
            **free,
        )
        on = partial(ints, device=self.q.device)
        step.fill(on(self.starts), on(self.lengths), k_start=on(self.starts[:-1]))
        return attention(self.q, self.k, self.v, self.position, step, scale=self.scale, sinks=sinks)

    def rows(
        self, spans: Sequence[Span], sinks: Tensor | None = None, **bounds: Any
    ) -> tuple[Tensor, Tensor]:
        """Rows through the pages, as an engine's step: (result, the rows' places in the packed batch)."""
        index = torch.cat([self.starts[b] + torch.arange(a, e) for b, a, e in spans]).to(self.q.device)
        sizes = [e - a for _, a, e in spans]
        given = {"most_rows": max(sizes), "most_keys": max(self.lengths), "kv_segment": self.S, **bounds}
        step = plan(requests=len(spans), tokens=len(index), page=self.page, device=self.q.device, **given)
        at = [0]
        for n in sizes:
            at.append(at[-1] + n)
        on = partial(ints, device=self.q.device)
        step.fill(on(at), on([e for _, _, e in spans]), blocks=self.blocks[[b for b, _, _ in spans]])
        got = attention(
            self.q[index], self.keys, self.values, self.position[index], step, scale=self.scale, sinks=sinks
        )
        return got, index

    def reference(self, sinks: Tensor | None = None, **free: Any) -> Tensor:
        """By Triton alone."""
        parts = [slice(a, b) for a, b in pairwise(self.starts)]
        given = {"kv_segment": self.S, "sinks": sinks, **free}
        return torch.cat(
            [kernel.reference(self.q[p], self.k[p], self.v[p], self.scale, **given)[0] for p in parts]
        )


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


def _batches(run: Run, heads: Sequence[tuple[int, int, int]] = HEADS) -> Iterator[tuple[Batch, Tensor]]:
    """Batches over the head counts, and each as the packed forward computes it."""
    S = int(run.constants["kv_segment"])
    run.covers(dtype=torch.bfloat16, case=CASES, library=fa3.identity().build)
    for i, (H, KV, D) in enumerate(run.pick(heads[:3], heads)):
        run.covers(heads=f"{H}/{KV}x{D}")
        page = next(p for p in (*PAGES[i % 3 :], 16) if S % p == 0)
        run.covers(page=page)
        lengths = (2 * S + 777, 700, S, S + 1, 1)
        rows = sum(lengths)
        q, k, v = (
            many(run, rows, n, D, salt=i + s, scale=scale)
            for n, s, scale in ((H, 1, 3.0), (KV, 20, 2.0), (KV, 40, 2.0))
        )
        with run.poisoned():
            batch = Batch(q, k, v, lengths, kv_segment=S, page=page)
            yield batch, batch.packed()


def _edges(batch: Batch) -> list[int]:
    """Positions of the first sequence around every size at which a block, a tile or a segment ends."""
    S, n = batch.S, batch.lengths[0]
    near = {p + d for p in (0, 64, 80, 128, 160, 256, S // 2, S, 2 * S, n - 1) for d in (-1, 0, 1)}
    return sorted(p for p in near if 0 <= p < n)


def _other_schedules(run: Run, batch: Batch, want: Tensor) -> None:
    cu = ints(batch.starts)
    n = batch.lengths[0]
    run.control("another_segment", batch.packed(kv_segment=2 * batch.S), want)
    whole = native(batch.q, batch.k, batch.v, cu, n, n, cu_k=cu)
    run.control("the_library_s_own_schedule", whole[:n], want[:n])


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    for batch, want in _batches(run):
        run.holds(want.isfinite())
        run.equal(want, batch.reference())
        H, D, S = batch.q.shape[1], batch.q.shape[2], batch.S
        sinks = many(run, H, salt=5, dtype=torch.float32, scale=4.0)
        run.equal(batch.packed(sinks), batch.reference(sinks))
        run.control("no_sinks", want, batch.packed(sinks))
        q, k, v = batch.q[S : 2 * S], batch.k[:S], batch.v[:S]
        out, lse = torch.empty_like(q), torch.empty(H, S, device=run.device)
        kernel.launch_segment(q, k, v, out, lse, visible=S, scale=batch.scale)
        table = ints([[0, S], [S, 0], [S, 0], [0, 0], [S * kernel.TOTAL_STEP, 0]])
        call = partial(fa3.call, q, k, v, table, None, scale=batch.scale, most_rows=S, most_keys=S)
        for path in run.over("past", {fa3.PAST[D], "spread"}):
            run.equal(call(path=path), (out, lse))
        kernel.launch_segment(q, k, v, out, lse, visible=S, scale=batch.scale, ascending=True)
        run.control("blocks_upwards", lse, call(path="spread")[1])
        kernel.launch_segment(q, k, v, out, lse, visible=S, scale=batch.scale, keys=64)
        run.control("blocks_of_64", lse, call(path="spread")[1])
        _against_fp32(run, batch, want)


def _against_fp32(run: Run, batch: Batch, want: Tensor) -> None:
    n = batch.lengths[3]  # one segment and a key
    at = slice(batch.starts[3], batch.starts[4])
    group = batch.q.shape[1] // batch.k.shape[1]
    q, k, v = (x[at].float().transpose(0, 1)[None] for x in (batch.q, batch.k, batch.v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
    cu = ints([0, n])
    once = native(batch.q[at], batch.k[at], batch.v[at], cu, n, n, cu_k=cu, splits=1)
    off, admitted = (float((x.float() - exact).norm()) for x in (want[at], once))
    run.holds(torch.tensor([off < TOO_FAR * admitted]))


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    """Prefill through pages, decode by the library and split, replayed from a CUDA graph: the packed forward's bits."""
    for batch, want in _batches(run):
        run.equal(batch.packed(folded=True), want)
        whole, index = batch.rows([(b, 0, n) for b, n in enumerate(batch.lengths)])
        run.equal(whole, want[index])
        spans = [(0, p, p + 1) for p in _edges(batch)]
        for few in run.over("split", (0, 1 << 30)):
            before, ops.FEW_PROGRAMS = ops.FEW_PROGRAMS, few
            try:
                got, index = batch.rows(spans)
                run.equal(got, want[index])
                outs: list[Tensor] = []
                _replayed(batch, spans, outs)
                run.equal(outs[-1], got)
            finally:
                ops.FEW_PROGRAMS = before
        _other_schedules(run, batch, want)
        n, D = batch.lengths[0], batch.q.shape[-1]
        last = native(
            *(batch.q[n - 1 : n], batch.keys, batch.values, ints([0, 1]), 1, n),
            used=ints([n]),
            pages=batch.blocks[:1].contiguous(),
        )
        run.control("the_library_s_own_split_in_decode", last, want[n - 1 : n])
        if D == 64:
            few, fa3.FEWEST[D] = fa3.FEWEST[D], 1
            try:
                run.control("few_rows_claimed", batch.rows(spans * 9)[0], want[batch.rows(spans * 9)[1]])
            finally:
                fa3.FEWEST[D] = few


def _replayed(batch: Batch, spans: Sequence[Span], outs: list[Tensor]) -> None:
    index = torch.tensor([batch.starts[b] + a for b, a, _ in spans], device=batch.q.device)
    step = plan(
        requests=len(spans),
        tokens=len(spans),
        most_rows=1,
        most_keys=max(batch.lengths),
        kv_segment=batch.S,
        page=batch.page,
    )
    q, position = batch.q[index], batch.position[index]
    q_start, lengths = ints(range(len(spans) + 1)), ints([1 for _ in spans])
    blocks = batch.blocks[[b for b, _, _ in spans]]

    def call(_: int) -> None:
        step.fill(q_start, lengths, blocks=blocks)
        outs.append(attention(q, batch.keys, batch.values, position, step, scale=batch.scale))

    graph = capture(call, 1)
    lengths.copy_(ints([e for _, _, e in spans]))  # the graph fills its tables itself
    graph.replay()
    torch.cuda.synchronize()


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    for batch, want in _batches(run):
        spans = [(0, p, p + 1) for p in _edges(batch)] + [(b, n - 1, n) for b, n in enumerate(batch.lengths)]
        spans += [(1, 0, 700), (3, batch.S - 9, batch.S + 1)]
        for one in spans:
            got, index = batch.rows([one])
            run.equal(got, want[index])
        for count in run.over("requests", (2, 7, 33, 200)):
            several = (spans * (count // len(spans) + 1))[:count]
            got, index = batch.rows(several, most_keys=run.pick(3, 6) * batch.S)
            run.equal(got, want[index])
        for b, n in enumerate(batch.lengths):
            at = slice(batch.starts[b], batch.starts[b + 1])
            alone = Batch(
                batch.q[at], batch.k[at], batch.v[at], [n], kv_segment=batch.S, page=batch.page
            ).packed()
            run.equal(alone, want[at])
        _other_schedules(run, batch, want)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """A rank owns whole KV groups: its heads' bits are theirs among all; ranks take turns in one process."""
    for batch, want in _batches(run):
        H, KV = batch.q.shape[1], batch.k.shape[1]
        for ranks in run.over("TP", [n for n in (1, 2, 4, 8) if KV % n == 0]):
            for rank in range(ranks):
                heads, groups = (slice(rank * n // ranks, (rank + 1) * n // ranks) for n in (H, KV))
                own = Batch(
                    *(batch.q[:, heads], batch.k[:, groups], batch.v[:, groups], batch.lengths),
                    kv_segment=batch.S,
                    page=batch.page,
                )
                run.equal(own.packed(), want[:, heads])
                spans = [(0, p, p + 1) for p in _edges(batch)]
                got, index = own.rows(spans)
                run.equal(got, want[index][:, heads])
        run.control("the_next_head", want.roll(1, 1), want)


@GATE.check("resume_exactness")
def _resume(run: Run) -> None:
    for batch, want in _batches(run):
        S, n = batch.S, batch.lengths[0]
        for cut in ((0, 333, S - 1, S, S + 1, n), (0, 1, 130, 2 * S + 5, n), (0, S // 2, 3 * S // 2, n)):
            for a, e in pairwise(cut):
                for folded in run.over("folded", (True, False)):
                    got, index = batch.rows([(0, a, e)], folded=folded)
                    run.equal(got, want[index])
        for span in ((0, S - 6, S + 7), (0, 100, 113), (0, 2 * S, 2 * S + 2)):  # draft tokens
            got, index = batch.rows([span])
            run.equal(got, want[index])
        mixed = [(3, S, S + 1), (0, 100, 2 * S + 60), (1, 699, 700), (2, 5, 5), (1, 0, 700)]
        got, index = batch.rows(mixed)
        run.equal(got, want[index])
        part, index = batch.rows([(0, 333, S)], kv_segment=S // 2)
        run.control("segments_from_elsewhere", part, want[index])


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    for batch, want in _batches(run, HEADS[:3]):
        got, index = batch.rows([(4, 0, 1), (1, 3, 3), (0, 0, 1)])  # one key, no row, a first token
        run.equal(got, want[index])
        run.equal(
            got[:1], batch.v[batch.starts[4] :].repeat_interleave(got.shape[1] // batch.v.shape[1], 1)[:1]
        )
        run.control(
            "the_next_key", batch.v[1:2].repeat_interleave(got.shape[1] // batch.v.shape[1], 1), got[1:]
        )
        for n in run.over("keys", (1, 2, 63, 79, 81, 129, 161)):
            at = slice(0, n)
            short = Batch(batch.q[at], batch.k[at], batch.v[at], [n], kv_segment=batch.S, page=batch.page)
            run.equal(short.packed(), short.reference())
        step = plan(requests=1, tokens=4, most_rows=4, most_keys=9, kv_segment=batch.S)
        q, k = batch.q, batch.k
        for rows, keys in ((q[:4].float(), k), (q[:4, :, :32], k[..., :32]), (q[:5], k)):
            run.refuses(partial(attention, rows, keys, keys, batch.position[:4], step, scale=1.0))
        run.refuses(
            partial(plan, requests=1, tokens=4, most_rows=4, most_keys=33 * batch.S, kv_segment=batch.S)
        )
        run.refuses(partial(plan, requests=1, tokens=4, most_rows=4, most_keys=9, kv_segment=100, page=16))


@GATE.check("rerun_determinism")
def _rerun(run: Run) -> None:
    for batch, want in _batches(run):
        spans = [(0, p, p + 1) for p in _edges(batch)]
        first, _ = batch.rows(spans)
        for _ in range(run.pick(3, 10)):
            run.equal(batch.packed(), want)
            run.equal(batch.rows(spans)[0], first)
        run.control("the_last_bit_of_one_in_seven", touched(want), want)
