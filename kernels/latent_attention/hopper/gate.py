# SPDX-License-Identifier: Apache-2.0
"""What proves attention.latent_segments/1 on sm90: every provider's bits are the reference's, however rows and keys are laid out.

Keys lie packed, and in pages in random order; a page nobody owns and fresh memory hold NaN. Ranks hold whole heads; where there
are GPUs for them, they hand their gradients of keys on as processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from isoexec.kernels.attention.hopper import fa3
from isoexec.kernels.attention.hopper.tiles import Tile
from isoexec.kernels.gates import Gate, Run, attentions
from isoexec.kernels.gates.attentions import Decoding, Kind, batches, edges, hang, providers
from isoexec.kernels.gates.degrees import degrees, wants
from isoexec.kernels.gates.forward import many
from isoexec.kernels.gates.inputs import fill
from isoexec.kernels.gates.sequences import Batch, Span
from isoexec.kernels.gates.sharing import on_ranks
from isoexec.kernels.latent_attention.hopper import ops, reference, tiles
from isoexec.kernels.latent_attention.hopper.naive import HEAD, LATENT, ROPE
from isoexec.kernels.latent_attention.hopper.ops import Plan, latent_attention, plan

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["GATE", "Sequences", "native"]

GATE = Gate("attention.latent_segments/1", "sm90")
HEADS = (16, 5, 20)  # of a rank: DeepSeek-V3 by 8, GLM-4.7-Flash by 4 and whole
MANY = 128  # more than a tile holds
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

    def paged(self, q: Tensor, position: Tensor, step: Any, sinks: Tensor | None = None) -> Tensor:
        """Rows over the keys in pages, by a filled plan."""
        assert sinks is None, "latent attention has no sinks"
        return self.attend(q, self.keys, position, step)

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

    def specified_gradients(self, g: Tensor) -> list[Tensor]:
        """What `gradients` must give, by the reference alone."""
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


class Latent(Kind):
    """Head counts of a rank over one latent row a key."""

    def ways(self, provider: str) -> dict[str, Decoding]:
        """Few requests split by keys and columns, whoever decodes more; each asked of as many as there are."""
        many = "by the library" if provider == "fa3" else "in tiles"
        return {many: lambda _: _split(0), "split": lambda _: _split(1 << 30)}

    def named(self, heads: int) -> int:
        """Query heads."""
        return heads

    def batch(
        self,
        run: Run,
        heads: int,
        lengths: Sequence[int],
        page: int,
        of: Any = Sequences,
        q: float = 3.0,
    ) -> Sequences:
        """Packed sequences of these lengths, queries of the size `q`."""
        rows = sum(lengths)
        x = many(run, rows, heads, HEAD, salt=1, scale=q)
        k = many(run, rows, HEAD, salt=20, scale=2.0)
        found: Sequences = of(x, k, k, lengths, kv_segment=int(run.constants["kv_segment"]), page=page)
        return found


@contextmanager
def _split(few: int) -> Iterator[None]:
    """Decode so few programs by keys and columns."""
    before, ops.FEW_PROGRAMS = ops.FEW_PROGRAMS, few
    try:
        yield
    finally:
        ops.FEW_PROGRAMS = before


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


KIND = Latent(
    heads=HEADS,
    trained=len(HEADS),
    providers=("triton", "fa3"),
    decodings={},
    others=_others,
    covered=lambda: {"library": fa3.identity().build},
)
hang(GATE, KIND, keyed=False)


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    for batch, want, trained in batches(run, KIND):
        H = batch.q.shape[1]
        some = run.pick(
            sorted({0, H // 2, H - 1}), list(range(H))
        )  # the reference takes its time for each head
        out, _ = batch.of(batch.q[:, some], batch.k, batch.k, batch.lengths).by_reference()
        run.holds(out.isfinite())
        for provider in providers(run, KIND, trained):
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
        wide = KIND.batch(run, MANY, (attentions.SHORT, 1), attentions.PAGES[0])
        run.covers(heads=MANY)
        for provider in run.over("provider", KIND.providers):
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


wants(GATE, "partition_invariance", TP=(1, 2, 4, 8))


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
    batch = Sequences(q[:, own], k, k, lengths, kv_segment=S, page=attentions.PAGES[0])
    return [x.cpu() for x in batch.gradients(g[:, own], group=group)]


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """A rank owns whole heads: their bits are theirs among all, and gradients of keys, handed on, are those of one rank."""
    for batch, want, trained in batches(run, KIND):
        spans: list[Span] = [(0, p, p + 1) for p in edges(batch)]
        shares = [n for n in (1, 2, 4, 8) if batch.q.shape[1] % n == 0]
        for ranks in run.over("heads_in_parts", shares):
            for rank in range(ranks):
                own, queries, _ = batch.heads(rank, ranks)
                for provider in providers(run, KIND, trained):
                    run.equal(own.packed(provider=provider), want[:, queries])
                    got, index = own.rows(spans, provider=provider)
                    run.equal(got, want[index][:, queries])
        run.control("the_next_head", want.roll(1, 1), want)
    given = (
        HEADS[0] // 8 * 8 or 4,
        int(run.constants["kv_segment"]),
        run.pick(*attentions.TRAINED),
        run.device.type,
    )
    whole = _ranked(0, 1, None, *given)
    parts = [_ranked(rank, 2, None, *given) for rank in range(2)]  # each as if it were alone
    run.control("sums_of_two_ranks_added", parts[0][4] + parts[1][4], whole[4])
    for size in degrees(run, "TP", (1, 2, 4, 8)):
        found = on_ranks(run, size, _ranked, *given)
        for i in range(3):  # each rank's own heads
            run.equal(torch.cat([part[i] for part in found], 1), whole[i])
        for part in found:  # everybody's keys
            run.equal(part[3:], whole[3:])


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    for batch, want, trained in batches(run, KIND, 1):
        H = batch.q.shape[1]
        for provider in providers(run, KIND, trained):
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


@GATE.check("backward")
def _backward(run: Run) -> None:
    """Gradients are the reference's, whoever computed the result; near float64; padding and company are nothing to them."""
    run.covers(dtype=torch.bfloat16, **KIND.covered())
    for heads in run.over("heads", run.pick(HEADS[:1], HEADS)):
        lengths = run.pick(*attentions.TRAINED)
        with run.poisoned():
            batch = KIND.batch(run, heads, lengths, attentions.PAGES[0], q=2.0)
            g = many(run, len(batch.q), heads, LATENT, salt=60)
            want = batch.specified_gradients(g)
            for provider in run.over("provider", KIND.providers):
                run.equal(batch.gradients(g, provider=provider), want)
            _near_float64(run, batch, g, want)
            last = len(lengths) - 1
            at = batch.sequence(last)
            run.equal(batch.alone(last).gradients(g[at]), [x[at] for x in want])
            attentions.padded_at_the_end(run, batch, g, want, attentions.PADDING)
            swapped = batch.of(batch.q.flip(1), batch.k, batch.k, lengths).gradients(g.flip(1))
            run.control("heads_in_another_order", swapped[4], want[4])
            run.control("another_segment", batch.gradients(g, kv_segment=32)[1], want[1])


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
