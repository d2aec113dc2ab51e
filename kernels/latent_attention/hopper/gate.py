# SPDX-License-Identifier: Apache-2.0
"""What proves attention.latent_segments/1 on sm90: every provider's bits are the reference's, however rows and keys are laid out.

Keys lie packed, and in pages in random order; a page nobody owns and fresh memory hold NaN. Ranks hold whole heads; where there
are GPUs for them, they hand their gradients of keys on as processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from isoexec.kernels.attention.hopper import fa3
from isoexec.kernels.attention.hopper.tiles import Tile
from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.degrees import degrees, wants
from isoexec.kernels.gates.forward import many, touched
from isoexec.kernels.gates.inputs import fill
from isoexec.kernels.gates.recipes import gradients, trainer_forwards
from isoexec.kernels.gates.sequences import Batch, Span
from isoexec.kernels.hopper.timing import capture
from isoexec.kernels.latent_attention.hopper import ops, reference, tiles
from isoexec.kernels.latent_attention.hopper.naive import HEAD, LATENT, ROPE
from isoexec.kernels.latent_attention.hopper.ops import Plan, latent_attention, plan

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["GATE", "Sequences", "native"]

GATE = Gate("attention.latent_segments/1", "sm90")
CASES = ("engine_prefill", "engine_decode", "trainer_fwd", "trainer_recompute", "trainer_score")
HEADS = (16, 5, 20)  # of a rank: DeepSeek-V3 by 8, GLM-4.7-Flash by 4 and whole
MANY = 128  # more than a tile holds
PAGES = (64, 16, 256)
MORE, SHORT = 777, 700  # keys beyond two segments, and those of a sequence within one
DRAFTS = (2, 5, 13)  # rows of a request whose draft tokens are verified
TRAINED = ((300, 1, 129), (700, 1, 129, 64))  # sequences whose gradients are held against the reference
PADDING = 61
REQUESTS = (2, 7, 33, 200)
TILES = (Tile(rows=16, warps=8, stages=2), Tile(rows=32, warps=8, stages=1))
ACCURACY = 2.0**-6  # of a gradient's norm: weights, their gradients and each result are rounded to bf16
TOO_FAR = 1.2  # of the error that one pass over all keys makes


class Sequences(Batch):
    """Packed and paged sequences: q [T, H, 576] has its rotated part first, k [T, 576] its latent one, as engines' caches do.

    What a batch holds as values are the same rows.
    """

    def of(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Sequences:
        """Other sequences under the same function and sizes of pages."""
        return Sequences(q, k, v, lengths, kv_segment=self.S, page=self.page, tail=self.tail)

    def alone(self, b: int) -> Sequences:
        """One of the sequences."""
        at = self.sequence(b)
        return self.of(self.q[at], self.k[at], self.k[at], [self.lengths[b]])

    def heads(self, rank: int, ranks: int) -> tuple[Sequences, slice, slice]:
        """The heads that one of `ranks` owns; keys are everybody's."""
        H = self.q.shape[1]
        own = slice(rank * H // ranks, (rank + 1) * H // ranks)
        return self.of(self.q[:, own], self.k, self.k, self.lengths), own, slice(None)

    def plan(self, **sizes: Any) -> Plan:
        """An empty plan of this function."""
        return plan(device=self.q.device, **{"kv_segment": self.S, **sizes})

    def whole(self, **free: Any) -> Plan:
        """A filled plan of all sequences packed."""
        step = super().whole(**free)
        assert isinstance(step, Plan)
        return step

    def attend(self, q: Tensor, k: Tensor, position: Tensor, step: Plan) -> Tensor:
        """The op over joined rows."""
        parts = q[..., :ROPE], q[..., ROPE:], k[..., LATENT:], k[..., :LATENT]
        return latent_attention(*parts, position, step, scale=self.scale)

    def packed(self, sinks: Tensor | None = None, **free: Any) -> Tensor:
        """All sequences in one call, as a trainer's packed forward."""
        assert sinks is None, "latent attention has no sinks"
        return self.attend(self.q, self.k, self.position, self.whole(**free))

    def rows(
        self, spans: Sequence[Span], sinks: Tensor | None = None, **bounds: Any
    ) -> tuple[Tensor, Tensor]:
        """Rows through the pages, as an engine's step: (result, the rows' places in the packed batch)."""
        assert sinks is None, "latent attention has no sinks"
        index, step, tables = self.step(spans, **bounds)
        step.fill(tables[0], tables[1], blocks=tables[2])
        return self.attend(self.q[index], self.keys, self.position[index], step), index

    def step(self, spans: Sequence[Span], **bounds: Any) -> tuple[Tensor, Plan, tuple[Tensor, ...]]:
        """Rows' places in the packed batch, an empty plan for them, and what fills it."""
        index = torch.cat([self.starts[b] + torch.arange(a, e) for b, a, e in spans]).to(self.q.device)
        sizes = [e - a for _, a, e in spans]
        given = {"most_rows": max(sizes), "most_keys": max(self.lengths), **bounds}
        step = self.plan(requests=len(spans), tokens=len(index), page=self.page, **given)
        at = [0]
        for n in sizes:
            at.append(at[-1] + n)
        blocks = self.blocks[[b for b, _, _ in spans]]
        return index, step, (self.ints(at), self.ints([e for _, _, e in spans]), blocks)

    def by_reference(self, *, kv_segment: int = 0, **other: Any) -> tuple[Tensor, Tensor]:
        """By the reference alone, a sequence at a time: (result, log-sum-exps [H, rows])."""
        found = []
        for a, b in pairwise(self.starts):
            q_rope, q_latent, k_rope, latent = (x[a:b] for x in self.inputs)
            given = {"kv_segment": kv_segment or self.S, "hardware": ops.HARDWARE, **other}
            found.append(reference.reference(q_rope, q_latent, k_rope, latent, self.scale, **given))
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], 1)

    def call(self, group: ProcessGroup | None = None, **free: Any) -> Callable[..., Tensor]:
        """The packed forward as a function of both parts of queries and keys; differentiable."""
        step = self.whole(gradients=True, **free)

        def attend(q_rope: Tensor, q_latent: Tensor, k: Tensor, v: Tensor) -> Tensor:
            given = {"scale": self.scale, "group": group}
            return latent_attention(q_rope, q_latent, k, v, self.position, step, **given)

        return attend

    @property
    def inputs(self) -> list[Tensor]:
        """What `call`'s function takes."""
        return [self.q[..., :ROPE], self.q[..., ROPE:], self.k[..., LATENT:], self.k[..., :LATENT]]

    def trained(self, g: Tensor, **free: Any) -> list[Tensor]:
        """The packed result and the gradients of its inputs."""
        return gradients(self.call(**free), self.inputs, g)

    def specified_gradients(self, g: Tensor) -> list[Tensor]:
        """What `trained` must give, by the reference alone."""
        out, lse = self.by_reference()
        parts = []
        for a, b in pairwise(self.starts):
            rows = [x[a:b] for x in self.inputs]
            *dq, keys = reference.gradients(*rows, out[a:b], lse[:, a:b], g[a:b], self.scale)
            parts.append((*dq, keys[:, :ROPE].bfloat16(), keys[:, ROPE:].bfloat16()))
        return [out, *(torch.cat(some) for some in zip(*parts, strict=True))]


def native(batch: Sequences, cu: Tensor, rows: int, keys: int, splits: int = 0, **given: Any) -> Tensor:
    """The library as engines call it, by its own schedule over `given` rows q, or all; cu_k, or used and pages."""
    q, k = given.get("q", batch.q), given.get("k", batch.k).unsqueeze(-2)
    out: Tensor = fa3.load()(
        *(q[..., :ROPE], k[..., LATENT:], k[..., :LATENT], None, None, q[..., ROPE:], None),
        *(cu, given.get("cu_k"), None, None, given.get("used")),
        *(rows, keys, given.get("pages"), None, None, None, None, None, None, None, None),
        *(batch.scale, True, -1, -1, 0.0, True, None, splits, None, 0, None, 1, 0, None),
    )[0]
    return out


def sequences(
    run: Run, lengths: Sequence[int], heads: int, page: int, salt: int = 0, scale: float = 3.0
) -> Sequences:
    """Packed sequences of these lengths."""
    rows = sum(lengths)
    q = many(run, rows, heads, HEAD, salt=salt + 1, scale=scale)
    k = many(run, rows, HEAD, salt=salt + 20, scale=2.0)
    return Sequences(q, k, k, lengths, kv_segment=int(run.constants["kv_segment"]), page=page)


def _batches(run: Run, most: int | None = None) -> Iterator[tuple[Sequences, Tensor]]:
    """Batches over the head counts, and each as the packed forward computes it."""
    S = int(run.constants["kv_segment"])
    run.covers(dtype=torch.bfloat16, case=CASES)
    for i, heads in enumerate(run.pick(HEADS[:1], HEADS)[:most]):
        page = next(p for p in (*PAGES[i % 3 :], *PAGES) if S % p == 0)
        run.covers(heads=heads, page=page)
        with run.poisoned():
            batch = sequences(run, (2 * S + MORE, SHORT, S, S + 1, 1), heads, page, salt=i)
            yield batch, batch.packed()


def _providers(run: Run) -> Iterator[str]:
    """The own kernel, and the library where a build of it is certified for this function."""
    known = ("triton", "fa3") if ops.BUILDS else ("triton",)
    for provider in run.over("provider", known):
        if provider == "fa3":
            run.covers(library=fa3.identity().build)
        yield provider


def _edges(batch: Sequences) -> list[int]:
    """Positions of the first sequence around every size at which a block, a tile or a segment ends."""
    S, n = batch.S, batch.lengths[0]
    near = {p + d for p in (0, 64, 128, S // 2, S, 2 * S, n - 1) for d in (-1, 0, 1)}
    return sorted(p for p in near if 0 <= p < n)


def _drafts(batch: Sequences) -> list[Span]:
    """Draft tokens of several requests in one step, over edges too."""
    S, n = batch.S, batch.lengths[0]
    starts = sorted({p for p in (0, 100 % n, S // 2 - 3, S - 6, 2 * S - 1) if 0 <= p < n - 1})
    first = [(0, p, min(n, p + count)) for p in starts for count in DRAFTS]
    return [*first, (1, 0, 1), (3, S - 1, S + 1), (0, n - 2, n)]


def _others(run: Run, batch: Sequences, want: Tensor) -> None:
    """Schedules that are other functions."""
    n = batch.lengths[0]
    run.control("another_segment", batch.packed(kv_segment=2 * batch.S), want)
    q_rope, q_latent, k_rope, latent = (x.float() for x in batch.alone(0).inputs)
    scores = torch.einsum("ihd,jd->hij", q_rope[-64:], k_rope)
    scores += torch.einsum("ihd,jd->hij", q_latent[-64:], latent)
    place = torch.arange(n, device=latent.device)
    plain = (scores * batch.scale).masked_fill(place > place[-64:, None], -torch.inf).softmax(-1)
    run.control(
        "one_softmax_in_fp32", torch.einsum("hij,jd->ihd", plain, latent).bfloat16(), want[n - 64 : n]
    )


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    for batch, want in _batches(run):
        H = batch.q.shape[1]
        some = run.pick(
            sorted({0, H // 2, H - 1}), list(range(H))
        )  # the reference takes its time for each head
        out, _ = batch.of(batch.q[:, some], batch.k, batch.k, batch.lengths).by_reference()
        run.holds(out.isfinite())
        for provider in _providers(run):
            run.equal(batch.packed(provider=provider)[:, some], out)
        _free(run, batch, want)
        at = batch.sequence(3)
        near = batch.of(batch.q[at, :1], batch.k[at], batch.k[at], batch.lengths[3:4])
        right = near.by_reference()
        for name, other in (
            ("blocks_upwards", {"ascending": True}),
            ("blocks_of_32", {"keys": 32}),
            ("latent_part_first", {"latent_first": True}),
        ):
            run.control(name, near.by_reference(**other), right)
        _against_fp64(run, batch, want)
    with run.poisoned():
        wide = sequences(run, (SHORT, 1), MANY, PAGES[0])
        run.covers(heads=MANY)
        for provider in _providers(run):
            run.equal(wide.packed(provider=provider), wide.by_reference()[0])


def _free(run: Run, batch: Sequences, want: Tensor) -> None:
    """Other tiles of the own kernel."""
    before = tiles.PREFILL
    for tile in run.over("tile", (f"{t.rows} rows, {t.stages} stages" for t in TILES)):
        tiles.PREFILL = next(t for t in TILES if tile.startswith(f"{t.rows} "))
        try:
            run.equal(batch.alone(3).packed(), want[batch.sequence(3)])
        finally:
            tiles.PREFILL = before


def _against_fp64(run: Run, batch: Sequences, want: Tensor) -> None:
    """No farther from exact attention than bf16 attention with one pass over the keys, by a factor."""
    one = batch.alone(3)  # one segment and a key
    q_rope, q_latent, k_rope, latent = one.inputs
    hidden = torch.ones(len(latent), len(latent), dtype=torch.bool, device=latent.device).triu(1)
    off = admitted = 0.0
    for h in range(one.q.shape[1]):
        scores = (
            q_rope[:, h].double() @ k_rope.double().T + q_latent[:, h].double() @ latent.double().T
        ) * one.scale
        exact = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ latent.double()
        rough = scores.float().masked_fill(hidden, -torch.inf)
        weights = (rough - rough.amax(-1, keepdim=True)).exp()
        once = (weights.bfloat16().float() @ latent.float() / weights.sum(-1, keepdim=True)).bfloat16()
        off += float((want[batch.sequence(3)][:, h].double() - exact).square().sum())
        admitted += float((once.double() - exact).square().sum())
    run.holds(torch.tensor([off < TOO_FAR**2 * admitted]))


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    """Prefill through pages, decode and its replay from a CUDA graph, draft tokens, the trainer's forwards."""
    for batch, want in _batches(run):
        spans: list[Span] = [(0, p, p + 1) for p in _edges(batch)]
        for provider in _providers(run):
            whole, index = batch.rows([(b, 0, n) for b, n in enumerate(batch.lengths)], provider=provider)
            run.equal(whole, want[index])
            for few in run.over("split", (0, 1 << 30) if provider == "triton" else (0,)):
                before, ops.FEW_PROGRAMS = ops.FEW_PROGRAMS, few
                try:
                    got, index = batch.rows(spans, provider=provider)
                    run.equal(got, want[index])
                    if run.device.type == "cuda":
                        run.equal(_replayed(batch, spans, provider), got)
                finally:
                    ops.FEW_PROGRAMS = before
            drafts = _drafts(batch)
            run.covers(draft_tokens=DRAFTS)
            several, _ = batch.rows(drafts, provider=provider)
            single, _ = batch.rows(
                [(b, p, p + 1) for b, a, e in drafts for p in range(a, e)], provider=provider
            )
            run.equal(several, single)
            for out in trainer_forwards(batch.call(provider=provider), *batch.inputs).values():
                run.equal(out, want)
        late, _ = batch.rows([(b, a - 1, e - 1) for b, a, e in drafts if a])
        run.control("a_draft_one_token_late", late, batch.rows([span for span in drafts if span[1]])[0])
        _others(run, batch, want)


def _replayed(batch: Sequences, spans: Sequence[Span], provider: str) -> Tensor:
    index, step, (q_start, lengths, blocks) = batch.step(spans, provider=provider)
    q, position, ends = batch.q[index], batch.position[index], lengths.clone()
    lengths.fill_(1)
    outs: list[Tensor] = []

    def call(_: int) -> None:
        step.fill(q_start, lengths, blocks=blocks)
        outs.append(batch.attend(q, batch.keys, position, step))

    graph = capture(call, 1)
    lengths.copy_(ends)  # the graph fills its tables itself
    graph.replay()
    torch.cuda.synchronize()
    return outs[-1]


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    for batch, want in _batches(run):
        S = batch.S
        spans = [(0, p, p + 1) for p in _edges(batch)] + [(b, n - 1, n) for b, n in enumerate(batch.lengths)]
        spans += [(1, 0, SHORT), (3, S - 9, S + 1)]
        for provider in _providers(run):
            for one in spans:
                got, index = batch.rows([one], provider=provider)
                run.equal(got, want[index])
            for count in run.over("requests", REQUESTS):
                several = (spans * (count // len(spans) + 1))[:count]
                got, index = batch.rows(several, provider=provider, most_keys=run.pick(3, 6) * S)
                run.equal(got, want[index])
            for b in range(len(batch.lengths)):
                run.equal(batch.alone(b).packed(provider=provider), want[batch.sequence(b)])
        _others(run, batch, want)


wants(GATE, "partition_invariance", TP=(1, 2, 4))


def _ranked(
    rank: int,
    size: int,
    group: ProcessGroup | None,
    heads: int,
    S: int,
    lengths: tuple[int, ...],
    device: str,
) -> list[Tensor]:
    """Result and gradients of a rank's heads, in a process of its own or alone."""
    rows = sum(lengths)
    q = fill(rows, heads, HEAD, salt=1, dtype=torch.bfloat16, scale=2.0)
    g = fill(rows, heads, LATENT, salt=60, dtype=torch.bfloat16)
    k = fill(rows, HEAD, salt=20, dtype=torch.bfloat16, scale=2.0)
    q, g, k = (x.to(device) for x in (q, g, k))
    own = slice(rank * heads // size, (rank + 1) * heads // size)
    batch = Sequences(q[:, own], k, k, lengths, kv_segment=S, page=PAGES[0])
    return [x.cpu() for x in batch.trained(g[:, own], group=group)]


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """A rank owns whole heads: their bits are theirs among all, and gradients of keys, handed on, are those of one rank."""
    for batch, want in _batches(run):
        spans: list[Span] = [(0, p, p + 1) for p in _edges(batch)]
        shares = [n for n in (1, 2, 4, 8) if batch.q.shape[1] % n == 0]
        for ranks in run.over("heads_in_parts", shares):
            for rank in range(ranks):
                own, queries, _ = batch.heads(rank, ranks)
                for provider in _providers(run):
                    run.equal(own.packed(provider=provider), want[:, queries])
                    got, index = own.rows(spans, provider=provider)
                    run.equal(got, want[index][:, queries])
        run.control("the_next_head", want.roll(1, 1), want)
    given = (HEADS[0] // 4 * 4 or 4, int(run.constants["kv_segment"]), run.pick(*TRAINED), run.device.type)
    whole = _ranked(0, 1, None, *given)
    parts = [_ranked(rank, 2, None, *given) for rank in range(2)]  # each as if it were alone
    run.control("sums_of_two_ranks_added", parts[0][4] + parts[1][4], whole[4])
    for size in degrees(run, "TP", (1, 2, 4)):
        found = run.ranks(size, _ranked, *given)
        for i in range(3):  # each rank's own heads
            run.equal(torch.cat([part[i] for part in found], 1), whole[i])
        for part in found:  # everybody's keys
            run.equal(part[3:], whole[3:])


@GATE.check("resume_exactness")
def _resume(run: Run) -> None:
    for batch, want in _batches(run):
        S, n = batch.S, batch.lengths[0]
        early = n // 7
        cuts = ((0, early, S - 1, S, S + 1, n), (0, 1, 130 % n, 2 * S + 5, n), (0, S // 2, 3 * S // 2, n))
        for provider in _providers(run):
            for a, e in (pair for cut in cuts for pair in pairwise(sorted(set(cut)))):
                for folded in (True, False) if provider == "fa3" else (True,):
                    got, index = batch.rows([(0, a, e)], folded=folded, provider=provider)
                    run.equal(got, want[index])
            mixed = [(3, S, S + 1), (0, early, 2 * S + 6), (1, SHORT - 1, SHORT), (2, 5, 5), (1, 0, SHORT)]
            got, index = batch.rows(mixed, provider=provider)
            run.equal(got, want[index])
        part, index = batch.rows([(0, early, S)], kv_segment=S // 2)
        run.control("segments_from_elsewhere", part, want[index])
        stale = batch.alone(0)
        stale.blocks[0, 0] = stale.blocks[0, 1]
        run.control("a_stale_page", stale.rows([(0, early, S)])[0], want[early:S])


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    for batch, want in _batches(run, 1):
        H = batch.q.shape[1]
        for provider in _providers(run):
            got, index = batch.rows([(4, 0, 1), (1, 3, 3), (0, 0, 1)], provider=provider)
            run.equal(got, want[index])
            run.equal(
                got[:1], batch.k[batch.starts[4] :, None, :LATENT].expand(1, H, LATENT)
            )  # one key: its latent
            run.control("the_next_key", batch.k[1:2, None, :LATENT].expand(1, H, LATENT), got[1:])
            for n in run.over("keys", (1, 2, 63, 64, 65, 129)):
                at = slice(0, n)
                short = batch.of(batch.q[at], batch.k[at], batch.k[at], [n])
                run.equal(short.packed(provider=provider), short.by_reference()[0])
        step = batch.plan(requests=1, tokens=4, most_rows=4, most_keys=9)
        q, k, place = batch.q[:4], batch.k, batch.position[:4]
        for rows, keys in (
            (q.float(), k),
            (q, k[:, :300]),
            (batch.q[:5], k),
            (q, k.float()),
            (q, batch.keys),
        ):
            run.refuses(partial(batch.attend, rows, keys, place, step))
        run.refuses(partial(batch.plan, requests=1, tokens=4, most_rows=4, most_keys=33 * batch.S))
        run.refuses(
            partial(batch.plan, requests=1, tokens=4, most_rows=4, most_keys=9, kv_segment=100, page=16)
        )
        run.refuses(
            partial(batch.plan, requests=1, tokens=4, most_rows=4, most_keys=9, page=16, gradients=True)
        )


@GATE.check("rerun_determinism")
def _rerun(run: Run) -> None:
    for batch, want in _batches(run):
        spans: list[Span] = [(0, p, p + 1) for p in _edges(batch)]
        times = run.pick(2, 10)
        run.covers(runs=times + 1)
        g = many(run, *want.shape, salt=60)
        first, grads = batch.rows(spans)[0], batch.trained(g)
        for provider in _providers(run):
            for _ in range(times):
                run.equal(batch.packed(provider=provider), want)
                run.equal(batch.rows(spans, provider=provider)[0], first)
        for _ in range(run.pick(1, 4)):
            run.equal(batch.trained(g), grads)
        run.control("the_last_bit_of_one_in_seven", touched(want), want)


@GATE.check("backward")
def _backward(run: Run) -> None:
    """Gradients are the reference's, whoever computed the result; near float64; padding and company are nothing to them."""
    run.covers(dtype=torch.bfloat16)
    for heads in run.over("heads", run.pick(HEADS[:1], HEADS)):
        lengths = run.pick(*TRAINED)
        with run.poisoned():
            batch = sequences(run, lengths, heads, PAGES[0], scale=2.0)
            g = many(run, len(batch.q), heads, LATENT, salt=60)
            want = batch.specified_gradients(g)
            for provider in _providers(run):
                run.equal(batch.trained(g, provider=provider), want)
            _near_float64(run, batch, g, want)
            last = len(lengths) - 1
            at = batch.sequence(last)
            run.equal(batch.alone(last).trained(g[at]), [x[at] for x in want])
            n = lengths[0]
            rows = [
                torch.cat([x[:n], many(run, PADDING, *x.shape[1:], salt=70)])
                for x in (batch.q, batch.k, batch.v)
            ]
            padded = batch.of(rows[0], rows[1], rows[1], [n + PADDING])
            longer = torch.cat([g[:n], torch.zeros_like(g[:PADDING])])
            run.equal([x[:n] for x in padded.trained(longer)], [x[:n] for x in want])
            swapped = batch.of(batch.q.flip(1), batch.k, batch.k, lengths).trained(g.flip(1))
            run.control("heads_in_another_order", swapped[4], want[4])
            run.control("another_segment", batch.trained(g, kv_segment=32)[1], want[1])


def _near_float64(run: Run, batch: Sequences, g: Tensor, found: Sequence[Tensor]) -> None:
    n = batch.lengths[0]
    inputs = [x[:n].double().requires_grad_() for x in batch.inputs]
    with torch.enable_grad():
        scores = torch.einsum("ihd,jd->hij", inputs[0], inputs[2])
        scores = (scores + torch.einsum("ihd,jd->hij", inputs[1], inputs[3])) * batch.scale
        hidden = torch.ones(n, n, dtype=torch.bool, device=g.device).triu(1)
        out = torch.einsum("hij,jd->ihd", F.softmax(scores.masked_fill(hidden, -torch.inf), -1), inputs[3])
        exact = torch.autograd.grad(out, inputs, g[:n].double())
    for got, true in zip(found[1:], exact, strict=True):
        error = float((got[:n].double() - true).norm() / true.norm())
        run.holds(torch.tensor([error < ACCURACY]))
