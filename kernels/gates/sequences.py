# SPDX-License-Identifier: Apache-2.0
"""Sequences as the sm90 attention meets them: packed as a trainer has them, and the same keys in pages of an engine's cache.

Pages lie in random order; one that nobody owns holds NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.attention.hopper import ops, reference
from isoexec.kernels.attention.hopper.backward import launch_gradients
from isoexec.kernels.attention.hopper.ops import Plan, attention, plan
from isoexec.kernels.gates.recipes import gradients

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Batch", "Span"]

Span = tuple[int, int, int]  # sequence, first position, end


class Batch:
    """Sequences packed, and the same keys in pages; `tail` fills the rest of a sequence's last page.

    What is computed is attention.mma_segments/1, with a `window` attention.mma_window/1; `provider` says by whom unless a call
    says another.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Sequence[int],
        *,
        kv_segment: int,
        page: int,
        window: int = 0,
        tail: float = 0.0,
    ) -> None:
        self.q, self.k, self.v, self.lengths = q, k, v, tuple(lengths)
        self.S, self.page, self.window, self.tail = kv_segment, page, window, tail
        self.scale = q.shape[-1] ** -0.5
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

    def of(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Batch:
        """Other sequences under the same function and sizes of pages."""
        return Batch(q, k, v, lengths, kv_segment=self.S, page=self.page, window=self.window, tail=self.tail)

    def sequence(self, b: int) -> slice:
        """Where the rows of sequence b lie in the packed batch."""
        return slice(self.starts[b], self.starts[b + 1])

    def alone(self, b: int) -> Batch:
        """One of the sequences."""
        at = self.sequence(b)
        return self.of(self.q[at], self.k[at], self.v[at], [self.lengths[b]])

    def heads(self, rank: int, ranks: int) -> tuple[Batch, slice, slice]:
        """The whole KV groups that one of `ranks` owns, and its query and KV heads."""
        queries, groups = (
            slice(rank * n // ranks, (rank + 1) * n // ranks) for n in (self.q.shape[1], self.k.shape[1])
        )
        own = self.of(self.q[:, queries], self.k[:, groups], self.v[:, groups], self.lengths)
        return own, queries, groups

    def ints(self, values: Any) -> Tensor:
        """A table for a plan."""
        return torch.tensor(values, dtype=torch.int32, device=self.q.device)

    def plan(self, **sizes: Any) -> Plan:
        """An empty plan of this function; by the library where there is no window, unless `provider` says otherwise."""
        given = {"kv_segment": self.S, "window": self.window, "provider": "triton" if self.window else "fa3"}
        return plan(device=self.q.device, **{**given, **sizes})

    def whole(self, **free: Any) -> Plan:
        """A filled plan of all sequences packed."""
        most = max(self.lengths)
        sizes = {"requests": len(self.lengths), "tokens": len(self.q), "most_rows": most, "most_keys": most}
        step = self.plan(**{**sizes, **free})
        step.fill(self.ints(self.starts), self.ints(self.lengths), k_start=self.ints(self.starts[:-1]))
        return step

    def packed(self, sinks: Tensor | None = None, **free: Any) -> Tensor:
        """All sequences in one call, as a trainer's packed forward."""
        step = self.whole(**free)
        return attention(self.q, self.k, self.v, self.position, step, scale=self.scale, sinks=sinks)

    def rows(
        self, spans: Sequence[Span], sinks: Tensor | None = None, **bounds: Any
    ) -> tuple[Tensor, Tensor]:
        """Rows through the pages, as an engine's step: (result, the rows' places in the packed batch)."""
        index, step, (q_start, lengths, blocks) = self.step(spans, **bounds)
        step.fill(q_start, lengths, blocks=blocks)
        return self.paged(self.q[index], self.position[index], step, sinks), index

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

    def paged(self, q: Tensor, position: Tensor, step: Plan, sinks: Tensor | None = None) -> Tensor:
        """Rows over the keys in pages, by a filled plan."""
        return attention(q, self.keys, self.values, position, step, scale=self.scale, sinks=sinks)

    def reference(
        self, sinks: Tensor | None = None, *, kv_segment: int = 0, window: int = -1
    ) -> tuple[Tensor, Tensor]:
        """By the reference alone, a sequence at a time: (result, log-sum-exps [H, rows])."""
        found = []
        for a, b in pairwise(self.starts):
            rows = self.q[a:b], self.k[a:b], self.v[a:b]
            given = {"sinks": sinks, "hardware": ops.HARDWARE, "kv_segment": kv_segment or self.S}
            given["window"] = self.window if window < 0 else window
            found.append(reference.reference(*rows, self.scale, **given))  # type: ignore[arg-type]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], 1)

    def call(self, **free: Any) -> Callable[..., Tensor]:
        """The packed forward as a function of q, k, v and, if given, the sinks; differentiable."""
        step = self.whole(gradients=True, **free)

        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
            return attention(q, k, v, self.position, step, scale=self.scale, sinks=sinks)

        return attend

    @property
    def inputs(self) -> list[Tensor]:
        """What `call`'s function takes."""
        return [self.q, self.k, self.v]

    def gradients(self, g: Tensor, sinks: Tensor | None = None, **free: Any) -> list[Tensor]:
        """The packed result, and the gradients of q, k, v and the sinks."""
        return gradients(self.call(**free), self.inputs + ([] if sinks is None else [sinks]), g)

    def specified(self, g: Tensor, sinks: Tensor | None = None) -> list[Tensor]:
        """What `gradients` must give, by the reference alone."""
        out, lse = self.reference(sinks)
        parts, total = [], None if sinks is None else torch.zeros_like(sinks)
        for a, b in pairwise(self.starts):
            given: dict[str, Any] = {"window": self.window, "sinks": sinks, "hardware": ops.HARDWARE}
            *found, share = reference.gradients(
                *(g[a:b], self.q[a:b], self.k[a:b], self.v[a:b], out[a:b], lse[:, a:b]), self.scale, **given
            )
            parts.append(found)
            if total is not None and share is not None:
                total = total + share
        whole = [out, *(torch.cat(some) for some in zip(*parts, strict=True))]
        return whole if total is None else [*whole, -total]

    def walked(self, g: Tensor, sinks: Tensor | None = None, **free: Any) -> list[Tensor]:
        """The gradients by the kernels themselves, with `free` as `launch_gradients` takes it."""
        step = self.whole(gradients=True)
        assert step.units is not None
        found = launch_gradients(
            *(self.q, self.k, self.v, *self.reference(sinks), g, step.spans, step.units, sinks),
            scale=self.scale,
            window=self.window,
            most_rows=max(self.lengths),
            hardware=ops.HARDWARE,
            **free,
        )
        return [x for x in found if x is not None]
