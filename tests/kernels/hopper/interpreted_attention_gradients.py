# SPDX-License-Identifier: Apache-2.0
"""The gradients of the sm90 attention in Triton's interpreter: every walk, company, padding, heads on ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import interpreted as base  # type: ignore[import-not-found]  # patches the interpreter; first
import numpy as np
import torch
from attention_stand_in import D, chain, exp2, ints, quickly, slowly  # type: ignore[import-not-found]
from interpreted import other, poisoned, rand, same
from torch import Tensor

from isoexec.kernels.attention.hopper import backward, naive, reference, tiles

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


class Packed:
    """Sequences with their results, and the gradients' tables; the last row and key belong to nobody and are NaN."""

    def __init__(
        self, lengths: tuple[int, ...], H: int, KV: int, width: int, *, window: int = 0, sinks: bool = False
    ) -> None:
        self.lengths, self.window, self.scale = lengths, window, width**-0.5
        self.starts = [0, *np.cumsum(lengths).tolist()]
        rows = self.starts[-1] + 1
        self.q, self.k, self.v = (rand(rows, n, width, scale=1.5) for n in (H, KV, KV))
        self.g, self.out = rand(rows, H, width), poisoned(rows, H, width)
        self.lse = poisoned(H, rows, dtype=torch.float32)
        self.sinks = rand(H, dtype=torch.float32) if sinks else None
        for p in self.parts():
            own = (self.q[p], self.k[p], self.v[p])
            self.out[p], self.lse[:, p] = naive.attention(
                *own, self.scale, kv_segment=64, sinks=self.sinks, window=window
            )
        for x in (self.q, self.k, self.v, self.g):
            x[-1] = torch.nan

    def parts(self) -> list[slice]:
        return [slice(a, b) for a, b in zip(self.starts, self.starts[1:], strict=False)]

    def want(self) -> list[Tensor]:
        found = []
        for p in self.parts():
            g, q, k, v, out = (x[p] for x in (self.g, self.q, self.k, self.v, self.out))
            given: dict[str, Any] = {"window": self.window, "sinks": self.sinks}
            found.append(naive.gradients(g, q, k, v, out, self.lse[:, p], self.scale, **given))
        whole: list[Tensor] = [torch.cat(x) for x in list(zip(*found, strict=True))[:3]]
        if self.sinks is not None:
            total = torch.zeros_like(self.sinks)
            for one in found:
                assert one[3] is not None
                total = total + one[3]
            whole.append(-total)
        return whole

    def got(self, **free: Any) -> list[Tensor]:
        spans = ints([self.starts[:-1], self.lengths, self.lengths, self.starts[:-1]])
        units = torch.empty(2, len(self.q) // backward.UNIT + len(self.lengths) + 1, dtype=torch.int32)
        tiles.launch_map(spans[1], units, unit=backward.UNIT)
        found = backward.launch_gradients(
            *(self.q, self.k, self.v, self.out, self.lse, self.g, spans, units, self.sinks),
            scale=self.scale,
            window=self.window,
            most_rows=max(self.lengths),
            hardware=False,
            **free,
        )
        for x in found[:3]:
            assert x is not None
            assert not x[-1].any()
        return [x[:-1] if i < 3 else x for i, x in enumerate(found) if x is not None]


@check
def the_references_chains_exponentials_and_gradients_have_their_specifications_bits() -> None:
    for M, N, K in ((5, 80, 48), (70, 16, 33)):
        x, w, acc = rand(M, K), rand(N, K), rand(M, N, dtype=torch.float32)
        same(chain(x, w, acc), naive._chain(x, w, acc), (M, N, K))
        same(chain(x.t().contiguous().t(), w, acc), naive._chain(x, w, acc), "a view")
    x = rand(5000, dtype=torch.float32, scale=20.0)
    same(exp2(x, hardware=False), naive._exp2(x))
    packed = Packed((37,), 2, 1, D, window=9, sinks=True)
    rows = [x[:37] for x in (packed.g, packed.q, packed.k, packed.v, packed.out)]
    given = {"window": 9, "sinks": packed.sinks}
    with slowly():
        found = reference.gradients(*rows, packed.lse[:, :37], packed.scale, **given, hardware=False)
    want = naive.gradients(*rows, packed.lse[:, :37], packed.scale, **given)  # type: ignore[arg-type, call-arg]
    for a, b in zip(found, want, strict=True):
        assert a is not None
        assert b is not None
        same(a, b, "gradients")


def walk(hold: int, step: int, *, apart: bool = False) -> backward.Walk:
    return backward.Walk(hold=hold, step=step, warps=4, stages=2, apart=apart)


@check
def gradients_have_their_specifications_bits_in_every_walk() -> None:
    packed = Packed((150, 1, 33), 4, 2, D, sinks=True)
    want = packed.want()
    for free in (
        {},
        {"workspace": 1 << 30},
        {"workspace": 0, "key": walk(64, 128), "query": walk(64, 32)},
        {"workspace": 1 << 30, "key": walk(64, 16, apart=True), "stored": walk(32, 128)},
        {"workspace": 1 << 19},  # a KV group at a time
    ):
        for a, b, name in zip(packed.got(**free), want, ("dq", "dk", "dv", "dsinks"), strict=True):
            same(a, b, (free, name))


@check
def gradients_of_wide_heads_and_of_windows_have_their_specifications_bits() -> None:
    for H, KV, width, window in ((1, 1, 128, 0), (2, 1, 256, 0), (3, 1, D, 40), (2, 2, D, 1)):
        packed = Packed((137, 20), H, KV, width, window=window)
        for a, b, name in zip(packed.got(), packed.want(), ("dq", "dk", "dv"), strict=True):
            same(a, b, (H, KV, width, window, name))


@check
def gradients_do_not_depend_on_company_place_padding_or_the_number_of_groups() -> None:
    packed = Packed((40, 133, 7), 4, 2, D)
    dq, dk, dv = packed.got()
    at = packed.parts()[1]
    alone = Packed((133,), 4, 2, D)
    for name in ("q", "k", "v", "g", "out"):
        getattr(alone, name)[:-1] = getattr(packed, name)[at]
    alone.lse[:, :-1] = packed.lse[:, at]
    for a, b in zip(alone.got(), (dq, dk, dv), strict=True):
        same(a, b[at], "alone")
    padded = Packed((133 + 60,), 4, 2, D)
    for name in ("q", "k", "v", "g", "out"):
        getattr(padded, name)[:133] = getattr(packed, name)[at]
    padded.g[133:-1] = 0.0
    padded.lse[:, :133] = packed.lse[:, at]
    for a, b in zip(padded.got(), (dq, dk, dv), strict=True):
        same(a[:133], b[at], "padded at the end")
    rank = Packed((40, 133, 7), 2, 1, D)
    for name, heads in (("q", 2), ("k", 1), ("v", 1), ("g", 2), ("out", 2)):
        setattr(rank, name, getattr(packed, name)[:, -heads:].contiguous())
    rank.lse = packed.lse[-2:].contiguous()
    for a, b in zip(rank.got(), (dq, dk, dv), strict=True):
        same(a, b[:, -a.shape[1] :], "one of two ranks")


@check
def gradients_are_those_of_attention_and_another_order_differs() -> None:
    packed = Packed((150,), 4, 2, D, sinks=True)
    found = packed.got()
    q, k, v = (x[:150].double().requires_grad_() for x in (packed.q, packed.k, packed.v))
    assert packed.sinks is not None
    sinks = packed.sinks.double().requires_grad_()
    wide_k, wide_v = (x.repeat_interleave(2, 1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q, wide_k) * packed.scale
    s = s.masked_fill(torch.ones(150, 150).triu(1).bool(), -torch.inf)
    p = torch.cat((s, sinks[:, None, None].expand(4, 150, 1)), -1).softmax(-1)[..., :-1]
    torch.einsum("hij,jhd->ihd", p, wide_v).backward(packed.g[:150].double())
    for a, b, name in zip(found, (q, k, v, sinks), ("dq", "dk", "dv", "dsinks"), strict=True):
        assert b.grad is not None
        error = float((a.double() - b.grad).norm() / b.grad.norm())
        assert error < 8e-3, (name, error)
    swapped = Packed((150,), 4, 2, D)
    order = [1, 0, 3, 2]  # the heads of each group in the other order
    for name in ("q", "g", "out"):
        setattr(swapped, name, getattr(packed, name)[:, order].contiguous())
    swapped.k, swapped.v, swapped.lse = packed.k, packed.v, packed.lse[order].contiguous()
    dq, dk, dv = swapped.got()
    same(dq, found[0][:, order], "a query's gradient knows no other head")
    other(dk, found[1], "heads in another order")
    other(dv, found[2], "heads in another order")


@check
def a_request_that_lacks_rows_of_its_keys_gets_no_number_for_a_gradient() -> None:
    packed = Packed((20, 30), 2, 1, D)
    spans = ints([packed.starts[:-1], packed.lengths, [20, 31], packed.starts[:-1]])
    units = torch.empty(2, 3, dtype=torch.int32)
    tiles.launch_map(spans[1], units, unit=backward.UNIT)
    tensors = (packed.q, packed.k, packed.v, packed.out, packed.lse, packed.g, spans, units, None)
    for x in backward.launch_gradients(*tensors, scale=packed.scale, window=0, most_rows=30, hardware=False)[
        :3
    ]:
        assert x is not None
        assert bool(x[:20].isfinite().all())
        assert bool(x[20:50].isnan().all())


if __name__ == "__main__":
    base.CHECKS.clear()
    base.CHECKS.update({n: c for n, c in CHECKS.items() if n in sys.argv[1:] or len(sys.argv) == 1})
    with quickly():
        base.main()
