# SPDX-License-Identifier: Apache-2.0
"""What the gates of the sm90 attention have in common: every way a row is computed gives the packed forward's bits.

A gate brings its head counts, the providers of its segments, and the ways its decode may be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.attention.hopper import ops, reference
from isoexec.kernels.attention.hopper.backward import Walk
from isoexec.kernels.gates.forward import many, touched
from isoexec.kernels.gates.recipes import trainer_forwards
from isoexec.kernels.gates.sequences import Batch, Span
from isoexec.kernels.hopper.timing import capture

if TYPE_CHECKING:
    from torch import Tensor

    from isoexec.kernels.gates.checking import Gate, Run

__all__ = [
    "CASES",
    "Kind",
    "batches",
    "edges",
    "hang",
    "near_float64",
    "padded_at_the_end",
    "partition_of_results",
    "trained_batches",
]

CASES = ("engine_prefill", "engine_decode", "trainer_fwd", "trainer_recompute", "trainer_score")
PAGES = (16, 64, 256)
MORE, SHORT = 777, 700  # keys beyond two segments, and those of a sequence within one
DRAFTS = (2, 5, 13)  # rows of a request whose draft tokens are verified
TRAINED = ((300, 1, 129), (700, 1, 129, 64))  # sequences whose gradients are held against the reference
PADDING = 61
REQUESTS = (2, 7, 33, 200)
OTHER_WALK = Walk(hold=64, step=32, warps=4, stages=2)
APART = Walk(hold=64, step=32, warps=4, stages=2, apart=True)
STORE = 4 << 30  # bytes in which every product can be written down
ACCURACY = 2.0**-7  # of a gradient's norm: weights, their gradients and each result are rounded to bf16

Decoding = Callable[[int], AbstractContextManager[object]]


class Kind:
    """What a gate is of: head counts (query heads, KV heads, head dim), those whose gradients and own kernel are covered.

    `providers` compute segments; `decodings`, each a context manager of a head dim, are the ways in which the first decodes.
    `others` plants faults of the gate's own; `covered` is what stands in the domain of every check.
    """

    def __init__(
        self,
        *,
        heads: Sequence[Any],
        trained: int,
        providers: Sequence[str],
        decodings: Mapping[str, Decoding],
        others: Callable[[Run, Any, Tensor], None],
        covered: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self.heads, self.trained = tuple(heads), trained
        self.providers, self.decodings, self.others = tuple(providers), dict(decodings), others
        self.covered = covered

    def ways(self, provider: str) -> Mapping[str, Decoding]:
        """The ways in which a provider decodes; empty where it has one."""
        return self.decodings if provider == self.providers[0] else {}

    def named(self, heads: Any) -> str | int:
        """Head counts, as a record's domain has them."""
        H, KV, D = heads
        return f"{H}/{KV}x{D}"

    def batch(
        self, run: Run, heads: Any, lengths: Sequence[int], page: int, of: type[Batch] = Batch, q: float = 3.0
    ) -> Batch:
        """Sequences of these lengths, queries of the size `q`."""
        H, KV, D = heads
        x, k, v = (
            many(run, sum(lengths), n, D, salt=i + salt, scale=size)
            for i, (n, salt, size) in enumerate(((H, 1, q), (KV, 20, 2.0), (KV, 40, 2.0)))
        )
        window = int(run.constants.get("window", 0))
        return of(x, k, v, lengths, kv_segment=int(run.constants["kv_segment"]), page=page, window=window)


def batches(run: Run, kind: Kind, most: int | None = None) -> Iterator[tuple[Any, Tensor, bool]]:
    """Batches over the head counts, each as the packed forward computes it, and whether its gradients are covered."""
    S = int(run.constants["kv_segment"])
    run.covers(dtype=torch.bfloat16, case=CASES, **kind.covered())
    for i, heads in enumerate(run.pick(kind.heads[: kind.trained], kind.heads)[:most]):
        run.covers(heads=kind.named(heads))
        page = next(p for p in (*PAGES[i % 3 :], *PAGES) if S % p == 0)
        run.covers(page=page)
        with run.poisoned():
            batch = kind.batch(run, heads, (2 * S + MORE, SHORT, S, S + 1, 1), page)
            yield batch, batch.packed(), i < kind.trained


def providers(run: Run, kind: Kind, trained: bool) -> Iterator[str]:
    """The providers a batch is computed by: the own kernel takes long to compile, and not for every head count."""
    yield from run.over("provider", kind.providers if trained else kind.providers[:1])


def edges(batch: Batch) -> list[int]:
    """Positions of the first sequence around every size at which a block, a tile, a segment or a window ends."""
    S, n = batch.S, batch.lengths[0]
    at = (0, 64, 80, 128, 160, 256, S // 2, S, 2 * S, n - 1, batch.window, batch.window + S)
    near = {p + d for p in at for d in (-1, 0, 1)}
    return sorted(p for p in near if 0 <= p < n)


def drafts(batch: Batch) -> list[Span]:
    """Draft tokens of several requests in one step, over edges too."""
    S, n = batch.S, batch.lengths[0]
    starts = {p for p in (0, 100 % n, S // 2 - 3, S - 6, 2 * S - 1) if 0 <= p < n - 1}
    first = [(0, p, min(n, p + count)) for p in sorted(starts) for count in DRAFTS]
    return [*first, (1, 0, 1), (3, S - 1, S + 1), (0, n - 2, n)]


def case_parity(run: Run, kind: Kind) -> None:
    """Prefill through pages, decode in every way, draft tokens, the trainer's forwards: the packed forward's bits."""
    for batch, want, trained in batches(run, kind):
        spans: list[Span] = [(0, p, p + 1) for p in edges(batch)]
        for provider in providers(run, kind, trained):
            run.equal(batch.packed(provider=provider, folded=True), want)
            whole, index = batch.rows([(b, 0, n) for b, n in enumerate(batch.lengths)], provider=provider)
            run.equal(whole, want[index])
            ways = kind.ways(provider)
            for way in run.over("decode", ways or (f"by {provider}",)):
                with ways.get(way, _as_it_is)(batch.q.shape[-1]):
                    _decoded(run, batch, spans, want, provider)
            _verified(run, batch, provider)
            if trained:
                for out in trainer_forwards(batch.call(provider=provider), *batch.inputs).values():
                    run.equal(out, want)
        kind.others(run, batch, want)


def _as_it_is(_: int) -> AbstractContextManager[object]:
    return nullcontext()


def _decoded(run: Run, batch: Batch, spans: list[Span], want: Tensor, provider: str) -> None:
    got, index = batch.rows(spans, provider=provider)
    run.equal(got, want[index])
    if run.device.type == "cuda":
        run.equal(_replayed(batch, spans, provider), got)


def _verified(run: Run, batch: Batch, provider: str) -> None:
    """A decode of several rows a request has the bits of those rows one by one."""
    spans = drafts(batch)
    got, _ = batch.rows(spans, provider=provider)
    one_by_one, _ = batch.rows([(b, p, p + 1) for b, a, e in spans for p in range(a, e)], provider=provider)
    run.covers(draft_tokens=DRAFTS)
    run.equal(got, one_by_one)
    late = [(b, max(a - 1, 0), max(e - 1, 1)) for b, a, e in spans if a]
    moved, _ = batch.rows(late, provider=provider)
    rows, _ = batch.rows([span for span in spans if span[1]], provider=provider)
    run.control("a_draft_one_token_late", moved, rows)


def _replayed(batch: Batch, spans: Sequence[Span], provider: str) -> Tensor:
    index, step, (q_start, lengths, blocks) = batch.step(spans, provider=provider)
    q, position, ends = batch.q[index], batch.position[index], lengths.clone()
    lengths.fill_(1)
    outs: list[Tensor] = []

    def call(_: int) -> None:
        step.fill(q_start, lengths, blocks=blocks)
        outs.append(batch.paged(q, position, step))

    graph = capture(call, 1)
    lengths.copy_(ends)  # the graph fills its tables itself
    graph.replay()
    torch.cuda.synchronize()
    return outs[-1]


def batch_invariance(run: Run, kind: Kind) -> None:
    for batch, want, trained in batches(run, kind):
        S = batch.S
        spans = [(0, p, p + 1) for p in edges(batch)] + [(b, n - 1, n) for b, n in enumerate(batch.lengths)]
        spans += [(1, 0, SHORT), (3, S - 9, S + 1)]
        for provider in providers(run, kind, trained):
            for one in spans if provider == kind.providers[0] else spans[:: run.pick(9, 3)]:
                got, index = batch.rows([one], provider=provider)
                run.equal(got, want[index])
            for count in run.over("requests", REQUESTS):
                several = (spans * (count // len(spans) + 1))[:count]
                got, index = batch.rows(several, provider=provider, most_keys=run.pick(3, 6) * S)
                run.equal(got, want[index])
            for b in range(len(batch.lengths)):
                run.equal(batch.alone(b).packed(provider=provider), want[batch.sequence(b)])
        kind.others(run, batch, want)


def partition(run: Run, kind: Kind) -> None:
    """A rank owns whole KV groups: its heads' bits and gradients are theirs among all; ranks take turns in one process."""
    partition_of_results(run, kind)
    for batch, g, sinks in trained_batches(run, kind):
        out, dq, dk, dv, dsinks = batch.gradients(g, sinks)
        for ranks in [n for n in (2, 4, 8) if batch.k.shape[1] % n == 0]:
            for rank in range(ranks):
                own, queries, groups = batch.heads(rank, ranks)
                theirs = out[:, queries], dq[:, queries], dk[:, groups], dv[:, groups], dsinks[queries]
                run.equal(own.gradients(g[:, queries], sinks[queries]), theirs)


def partition_of_results(run: Run, kind: Kind) -> None:
    """Of what a forward pass gives."""
    for batch, want, trained in batches(run, kind):
        spans = [(0, p, p + 1) for p in edges(batch)]
        for ranks in run.over("TP", [n for n in (1, 2, 4, 8) if batch.k.shape[1] % n == 0]):
            for provider in providers(run, kind, trained):
                for rank in range(ranks) if provider == kind.providers[0] else (ranks - 1,):
                    own, queries, _ = batch.heads(rank, ranks)
                    run.equal(own.packed(provider=provider), want[:, queries])
                    got, index = own.rows(spans, provider=provider)
                    run.equal(got, want[index][:, queries])
        run.control("the_next_head", want.roll(1, 1), want)


def resume(run: Run, kind: Kind) -> None:
    for batch, want, trained in batches(run, kind):
        S, n = batch.S, batch.lengths[0]
        early = n // 7
        cuts = ((0, early, S - 1, S, S + 1, n), (0, 1, 130 % n, 2 * S + 5, n), (0, S // 2, 3 * S // 2, n))
        for provider in providers(run, kind, trained):
            for a, e in (pair for cut in cuts for pair in pairwise(sorted(set(cut)))):
                for folded in (True, False) if provider == "fa3" else (True,):
                    run.covers(folded=folded)
                    got, index = batch.rows([(0, a, e)], folded=folded, provider=provider)
                    run.equal(got, want[index])
            mixed = [(3, S, S + 1), (0, early, 2 * S + 6), (1, SHORT - 1, SHORT), (2, 5, 5), (1, 0, SHORT)]
            got, index = batch.rows(mixed, provider=provider)
            run.equal(got, want[index])
        part, index = batch.rows([(0, early, S)], kv_segment=S // 2)
        run.control("segments_from_elsewhere", part, want[index])
        stale, at = batch.alone(0), early // batch.page  # the first row's own page, which every window sees
        stale.blocks[0, at] = stale.blocks[0, at + 1]
        run.control("a_stale_page", stale.rows([(0, early, S)])[0], want[early:S])


def rerun(run: Run, kind: Kind) -> None:
    for batch, want, trained in batches(run, kind):
        spans = [(0, p, p + 1) for p in edges(batch)]
        times = run.pick(2, 10)
        run.covers(runs=times + 1)
        for provider in providers(run, kind, trained):
            first, _ = batch.rows(spans, provider=provider)
            for _ in range(times):
                run.equal(batch.packed(provider=provider), want)
                run.equal(batch.rows(spans, provider=provider)[0], first)
        run.control("the_last_bit_of_one_in_seven", touched(want), want)
        if trained:
            g = many(run, *want.shape, salt=60)
            grads = batch.gradients(g)
            for _ in range(run.pick(1, 4)):
                run.equal(batch.gradients(g), grads)


def trained_batches(
    run: Run, kind: Kind, of: tuple[Sequence[int], Sequence[int]] | None = None
) -> Iterator[tuple[Batch, Tensor, Tensor]]:
    """Packed sequences with a gradient of their result, and sinks; `of`: their lengths, of a quick run and a full one."""
    run.covers(dtype=torch.bfloat16, **kind.covered())
    for heads in kind.heads[: kind.trained]:
        run.covers(heads=f"{heads[0]}/{heads[1]}x{heads[2]}")
        lengths = run.pick(*(of or TRAINED))
        with run.poisoned():
            batch = kind.batch(run, heads, lengths, PAGES[0], q=2.0)
            g = many(run, *batch.q.shape, salt=60)
            yield batch, g, many(run, heads[0], salt=5, dtype=torch.float32, scale=4.0)


def backward(run: Run, kind: Kind) -> None:
    """The gradients are the specification's by every walk, whoever computed the result; close to float64; padding is nothing."""
    for batch, g, sinks in trained_batches(run, kind):
        T, H, D = batch.q.shape
        want = batch.specified(g, sinks)
        for provider in run.over("provider", kind.providers):
            run.equal(batch.gradients(g, sinks, provider=provider), want)
        plain = batch.gradients(g)
        run.equal(plain, batch.specified(g))
        room = 2 * 128 * 128 * (-(-max(batch.lengths) // 128) + 1) * (T // 128 + len(batch.lengths))
        walks: dict[str, dict[str, Any]] = {
            "products computed twice": {"workspace": 0},
            "a KV group at a time": {"workspace": room * H // batch.k.shape[1]},
            "products written down": {"workspace": STORE},
            "other blocks": {"workspace": STORE, "key": OTHER_WALK, "stored": OTHER_WALK},
            "other blocks, computed twice": {"workspace": 0, "key": APART, "query": OTHER_WALK},
        }
        for name in run.over("walk", walks if D < 256 else list(walks)[:2]):
            run.equal(batch.walked(g, sinks, **walks[name]), want[1:])
        near_float64(run, batch, g, plain)
        at = batch.sequence(2)
        run.equal(batch.alone(2).gradients(g[at]), [x[at] for x in plain])
        padded_at_the_end(run, batch, g, plain, PADDING)
        _planted(run, batch, g, plain)


def padded_at_the_end(run: Run, batch: Batch, g: Tensor, found: Sequence[Tensor], padding: int) -> None:
    """The first sequence with so many more rows, whose results nobody uses: its rows' bits stay, theirs are zeros."""
    n = batch.lengths[0]
    more = [many(run, padding, *x.shape[1:], salt=70) for x in (batch.q, batch.k, batch.v)]
    q, k, v = (torch.cat([x[:n], y]) for x, y in zip((batch.q, batch.k, batch.v), more, strict=True))
    longer = batch.of(q, k, v, [n + padding]).gradients(
        torch.cat([g[:n], g.new_zeros(padding, *g.shape[1:])])
    )
    run.covers(padding=padding)
    run.equal([x[:n] for x in longer], [x[:n] for x in found])
    run.holds(torch.cat([x[n:].flatten() for x in longer[1:]]) == 0)


def _planted(run: Run, batch: Batch, g: Tensor, found: list[Tensor]) -> None:
    group = batch.q.shape[1] // batch.k.shape[1]
    order = torch.arange(batch.q.shape[1], device=g.device).view(-1, group).flip(1).flatten()
    swapped = batch.of(batch.q[:, order].contiguous(), batch.k, batch.v, batch.lengths)
    _, dq, dk, dv = swapped.gradients(g[:, order].contiguous())
    run.equal(dq, found[1][:, order])  # a query's gradient knows no other head
    if group > 1:
        run.control("heads_of_a_group_in_the_other_order", [dk, dv], found[2:])
    run.control("the_last_bit_of_one_in_seven", touched(found[2]), found[2])
    run.control("the_gradient_of_another_result", batch.gradients(touched(g))[1:], found[1:])
    at, lse = batch.sequence(0), batch.reference()[1]
    over = reference.gradients(
        *(g[at], batch.q[at], batch.k[at], batch.v[at], found[0][at], lse[:, at] * (1 + 2.0**-20)),
        batch.scale,
        window=batch.window,
        hardware=ops.HARDWARE,
    )
    run.control("a_softmax_of_another_sum", over[1:3], [x[at] for x in found[2:]])


def near_float64(run: Run, batch: Batch, g: Tensor, found: Sequence[Tensor]) -> None:
    """Result and gradients of the first sequence are float64's, each to `ACCURACY` of its norm; none is zero."""
    at = batch.sequence(0)
    n, group = batch.lengths[0], batch.q.shape[1] // batch.k.shape[1]
    q, k, v = (x[at].double().requires_grad_() for x in (batch.q, batch.k, batch.v))
    place = torch.arange(n, device=q.device)
    hidden = place[None, :] > place[:, None]
    if batch.window:
        hidden |= place[:, None] - place[None, :] >= batch.window
    with torch.enable_grad():
        wide = [x.repeat_interleave(group, 1) for x in (k, v)]
        s = torch.einsum("ihd,jhd->hij", q, wide[0]) * batch.scale
        exact = torch.einsum("hij,jhd->ihd", s.masked_fill(hidden, -torch.inf).softmax(-1), wide[1])
        want = [exact.detach(), *torch.autograd.grad(exact, [q, k, v], g[at].double())]
    for a, b in zip(found, want, strict=True):
        off = (a[at].double() - b).norm() / b.norm()
        run.holds((off < ACCURACY).view(1))
        run.holds((b != 0).any().view(1))


_FORWARD = {
    "case_parity": case_parity,
    "batch_invariance": batch_invariance,
    "resume_exactness": resume,
    "rerun_determinism": rerun,
}
_WHOLE = {**_FORWARD, "partition_invariance": partition, "backward": backward}


def hang(gate: Gate, kind: Kind, *, keyed: bool = True) -> None:
    """Hang on a gate every check that does not depend on which attention it is of; `keyed`: each KV head has its own keys."""
    for family, body in (_WHOLE if keyed else _FORWARD).items():
        gate.check(family)(partial(body, kind=kind))
