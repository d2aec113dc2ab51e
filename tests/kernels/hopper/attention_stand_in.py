# SPDX-License-Identifier: Apache-2.0
"""What stands in for a GPU where the sm90 attention is checked in Triton's interpreter.

In place of FlashAttention-3 is a function with its signature that evaluates the specification; so what is checked is which rows
and keys each call names, how the calls are put together, and the merge. The library's bits need a GPU. The interpreter pays for
each operation, not for each number: `quickly` takes some kernels of many small operations by their specification, and checks of
their own run the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import emulation  # type: ignore[import-not-found]  # noqa: F401 - patches the interpreter; first
import numpy as np
import torch
import triton.language as tl
from interpreted import poisoned, rand  # type: ignore[import-not-found]
from torch import Tensor
from triton.runtime import interpreter

from isoexec.kernels.attention.hopper import fa3, kernel, naive, ops, reference, segments, tiles
from isoexec.kernels.attention.hopper.ops import Plan, _attention, _tiles, plan
from isoexec.kernels.hopper.spec import fma

D, S, PAGE = 64, 32, 8  # a segment shorter than a block: the calls are checked here, not the library
SCALE = D**-0.5
LENGTHS = (2 * S + 5, 7, S, S + 1)
STARTS = (0, *np.cumsum(LENGTHS).tolist())
ops.HARDWARE = False


def _wide(name: str) -> Callable[[Any, Any], Any]:
    """exp2 and log2 rounded from fp64, as the specification takes them."""

    def apply(self: Any, arg: Any) -> Any:
        found = getattr(np, name)(arg.data.astype(np.float64)).astype(np.float32)
        return interpreter.TensorHandle(found, arg.dtype.scalar)

    return apply


interpreter.InterpreterBuilder.create_exp2 = _wide("exp2")
interpreter.InterpreterBuilder.create_log2 = _wide("log2")
launch_merge, in_order = kernel.launch_merge, tiles.in_order
launch_segment, chain, exp2 = reference.launch_segment, reference.chain, reference.exp2


def specified_rows(
    q: Tensor, k: Tensor, v: Tensor, limit: Tensor, scale: float, block: int = 0, low: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One segment, all heads: row i sees the keys low[i] .. limit[i] - 1."""
    group = q.shape[1] // k.shape[1]
    found = [
        naive.segment(q[:, h], k[:, h // group], v[:, h // group], limit, scale, block, low)
        for h in range(q.shape[1])
    ]
    return torch.stack([o for o, _ in found], 1), torch.stack([lse for _, lse in found])


def library(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> list[Tensor]:
    """FlashAttention-3's forward by the specification; refuses what would be another code path."""
    _, _, _, out, cu_q, cu_k, _, used_q, used_k, most_rows, most_keys, pages, *rest = args
    scale, causal, left, right, _, _, metadata, splits, pack, _, s_aux, spread, rank, total = rest[8:]
    assert (metadata, splits, pack, s_aux, rank) == (None, 1, None, None, 0)
    assert most_rows >= fa3.FEWEST[q.shape[-1]]
    assert all(t.is_contiguous() and t.dtype == torch.int32 for t in (cu_q, used_q, used_k))
    assert len(cu_q) == len(used_q) + 1 == len(used_k) + 1
    assert (cu_k is None) != (pages is None)
    result = poisoned(*q.shape) if out is None else out
    lse = poisoned(q.shape[1], len(q), dtype=torch.float32)
    width = k.shape[1] if pages is not None else 0
    for e, (at, rows, keys) in enumerate(zip(cu_q.tolist(), used_q.tolist(), used_k.tolist(), strict=False)):
        if not rows:
            continue
        assert keys > 0
        assert rows <= most_rows
        assert at + rows <= len(q)
        if pages is None:
            own_k, own_v = (x[cu_k[e] : cu_k[e] + keys] for x in (k, v))
        else:
            assert pages.shape == (len(used_q), most_keys // width if left < 0 else pages.shape[1])
            of = pages[e, : -(-keys // width)].long()
            own_k, own_v = (x[of].flatten(0, 1)[:keys] for x in (k, v))
        if causal and spread > 1:
            step = torch.arange(rows)
            limit = (step + int(total[e]) - rows) // spread + 1
            assert int(limit.min()) >= keys, "a row beyond the segment must see all of it"
        elif causal:
            assert keys >= rows
            limit = torch.arange(rows) + 1 + keys - rows
        else:
            assert right == -1
            assert left == -1 or left > keys
            assert left == -1 or most_keys - 1 > left, "the library drops a window that covers all keys"
            limit = torch.full((rows,), keys)
        o, le = specified_rows(q[at : at + rows], own_k, own_v, limit.clamp(max=keys), scale)
        result[at : at + rows], lse[:, at : at + rows] = o, le
    return [result, lse]


@contextmanager
def stand_in(past: str | None = None, by: Callable[..., list[Tensor]] = library) -> Iterator[None]:
    """The library is here, and serves all decode; `past` is the path of past segments, by default each head dim's own."""
    load, paths, few = fa3.load, dict(fa3.PAST), ops.FEW_PROGRAMS
    ops.FEW_PROGRAMS = dict.fromkeys(few, 0)
    fa3.load = lambda: by  # type: ignore[assignment]
    if past:
        fa3.PAST.update(dict.fromkeys(fa3.PAST, past))  # type: ignore[arg-type]
    try:
        yield
    finally:
        fa3.load = load
        fa3.PAST.update(paths)
        ops.FEW_PROGRAMS = few


def specified_merge(
    own: Tensor | None,
    own_lse: Tensor | None,
    parts: Tensor,
    part_lse: Tensor,
    position: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    *,
    kv_segment: int,
    window: int = 0,
    totals: Tensor | None = None,
    whole_lse: Tensor | None = None,
    hardware: bool = True,
) -> None:
    """`kernel.launch_merge` by the specification, for all rows that have the same segments at once."""
    assert not hardware or totals is None
    last = position.long() // kv_segment
    first = (position.long() - window + 1).clamp(min=0) // kv_segment if window else torch.zeros_like(last)
    if totals is not None:
        parts = (parts * (1.0 / totals.transpose(1, 2).double()).float()[..., None]).bfloat16()
    for a, b in {(int(x), int(y)) for x, y in zip(first, last, strict=True)}:
        t = ((first == a) & (last == b)).nonzero().flatten()
        of = [j % len(parts) for j in range(a, b + 1)]
        outs = [parts[j, t] for j in of[:-1]] + [parts[of[-1], t] if own is None else own[t]]
        lses = [part_lse[j][:, t] for j in of[:-1]]
        lses.append(part_lse[of[-1]][:, t] if own_lse is None else own_lse[:, t])
        found = [
            naive.merge_with_lse(
                torch.stack([o[:, h] for o in outs]),
                torch.stack([lse[h] for lse in lses]),
                None if sinks is None else sinks[h].expand(len(t)),
            )
            for h in range(out.shape[1])
        ]
        out[t] = torch.stack([o for o, _ in found], 1)
        if whole_lse is not None:
            whole_lse[:, t] = torch.stack([lse for _, lse in found])


def added_in_order(lanes: Any, x: Any, r: Any, FIRST: bool, ROWS: int, N: int) -> Any:
    """`tiles.in_order` without its halving."""
    numbers, found = x.handle.data, lanes.handle.data
    for i in range(numbers.shape[2]):
        one = numbers[:, :, i]
        if FIRST and i == 0:
            wide = [torch.from_numpy(np.ascontiguousarray(y)) for y in (found, r.handle.data, one)]
            found = fma(*wide).numpy()
        else:
            found = found + one
    return tl.tensor(interpreter.TensorHandle(found, tl.float32), lanes.type)


def specified_segment(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    visible: int,
    scale: float,
    hardware: bool = True,
    window: int = 0,
    keys: int = 0,
    ascending: bool = False,
    num_warps: int = 4,
) -> None:
    """`reference.launch_segment` by the specification, which has no walk upwards."""
    assert not hardware
    if ascending:
        launch_segment(
            *(q, k, v, out, lse), visible=visible, scale=scale, hardware=False, ascending=True, rows=64
        )
        return
    places = visible + torch.arange(len(q))
    low = (places - window).clamp(min=0) if window else None
    block = keys or (naive.WINDOW_BLOCK if window else naive.BLOCK)[q.shape[-1]]
    out[:], lse[:] = specified_rows(q, k, v, places.clamp(max=len(k)), scale, block, low)


def specified_exp2(x: Tensor, hardware: bool = True) -> Tensor:
    """`reference.exp2` by the specification."""
    assert not hardware
    return naive._exp2(x)


def _take(quick: bool) -> None:
    holders: tuple[Any, ...] = (kernel, segments, reference)
    for holder in holders:
        holder.launch_merge = specified_merge if quick else launch_merge
    tiles.in_order = added_in_order if quick else in_order
    slow: Any = reference
    slow.launch_segment = specified_segment if quick else launch_segment
    slow.chain = naive._chain if quick else chain
    slow.exp2 = specified_exp2 if quick else exp2


@contextmanager
def quickly() -> Iterator[None]:
    """Merges, sums in a lane's order, and the reference's segments and chains by their specification."""
    _take(True)
    try:
        yield
    finally:
        _take(False)


@contextmanager
def slowly() -> Iterator[None]:
    """Within `quickly`: by the kernels after all."""
    _take(False)
    try:
        yield
    finally:
        _take(True)


def run(step: Plan, q: Tensor, k: Tensor, v: Tensor, position: Tensor, sinks: Tensor | None = None) -> Tensor:
    return run_with_lse(step, q, k, v, position, sinks)[0]


def run_with_lse(
    step: Plan, q: Tensor, k: Tensor, v: Tensor, position: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    kernels: Any = (_tiles, _attention)
    tables: tuple[Any, ...] = (
        step.spans,
        step.owners,
        step.pages,
        step.units,
        sinks,
        step.gradient,
        q.shape[-1] ** -0.5,
        step.kv_segment,
    )
    if step.provider == "triton":
        sizes = (step.window, step.tokens, step.most_keys, step.single)
        found: tuple[Tensor, Tensor] = kernels[0](q, k, v, position, *tables, *sizes, True)
        return found
    calls: tuple[Any, ...] = (step.own, step.own_pages, step.past, step.past_pages)
    folded = (step.single, step.folded)
    bounds: tuple[Any, ...] = (step.requests, step.tokens, step.most_rows, step.most_keys)
    result: tuple[Tensor, Tensor] = kernels[1](q, k, v, position, *calls, *tables, *bounds, *folded, True)
    return result


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Cache:
    """The same keys packed and in pages of a cache whose unused rows are NaN."""

    def __init__(self) -> None:
        self.q, self.k, self.v = (
            rand(STARTS[-1], 2, D, scale=2.0),
            rand(STARTS[-1], 1, D),
            rand(STARTS[-1], 1, D),
        )
        self.position = torch.cat([torch.arange(n) for n in LENGTHS]).int()
        width = [-(-n // PAGE) for n in LENGTHS]
        order = torch.randperm(sum(width) + 3).tolist()
        self.blocks = torch.full((len(LENGTHS), max(width)), -1, dtype=torch.int32)
        self.keys, self.values = poisoned(len(order), PAGE, 1, D), poisoned(len(order), PAGE, 1, D)
        for b, n in enumerate(LENGTHS):
            for w in range(width[b]):
                page, size = order.pop(), min(PAGE, n - w * PAGE)
                self.blocks[b, w] = page
                at = STARTS[b] + w * PAGE
                self.keys[page, :size], self.values[page, :size] = (
                    self.k[at : at + size],
                    self.v[at : at + size],
                )

    def whole(self, sinks: Tensor | None = None, window: int = 0) -> Tensor:
        return self.whole_with_lse(sinks, window)[0]

    def whole_with_lse(self, sinks: Tensor | None = None, window: int = 0) -> tuple[Tensor, Tensor]:
        parts = [slice(STARTS[b], STARTS[b + 1]) for b in range(len(LENGTHS))]
        given: dict[str, Any] = {"kv_segment": S, "sinks": sinks, "window": window}
        found = [naive.attention(self.q[p], self.k[p], self.v[p], SCALE, **given) for p in parts]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], 1)

    def step(self, **bounds: Any) -> Plan:
        """A filled plan of all sequences packed."""
        most = max(LENGTHS)
        sizes = {"requests": len(LENGTHS), "tokens": len(self.q), "most_rows": most, "most_keys": most}
        step = plan(**sizes, kv_segment=S, device="cpu", **bounds)  # type: ignore[arg-type]
        step.fill(ints(STARTS), ints(LENGTHS), k_start=ints(STARTS[:-1]))
        return step

    def packed(self, sinks: Tensor | None = None, **bounds: Any) -> Tensor:
        return run(self.step(**bounds), self.q, self.k, self.v, self.position, sinks)

    def rows(
        self, of: dict[int, tuple[int, int]], sinks: Tensor | None = None, **bounds: Any
    ) -> tuple[Tensor, Tensor]:
        """Request b's positions of[b] through the cache: (result, the rows' indices in the packed batch)."""
        return self.spans([(b, *span) for b, span in of.items()], sinks, **bounds)

    def spans(
        self, several: list[tuple[int, int, int]], sinks: Tensor | None = None, **bounds: Any
    ) -> tuple[Tensor, Tensor]:
        """As `rows`; a request may come more than once."""
        of = [b for b, _, _ in several]
        spans = [(first, end) for _, first, end in several]
        index = torch.cat([STARTS[b] + torch.arange(first, end) for b, first, end in several])
        step = plan(
            requests=len(of),
            tokens=len(index),
            most_rows=max(b - a for a, b in spans),
            kv_segment=S,
            page=PAGE,
            device="cpu",
            **{"most_keys": max(LENGTHS), **bounds},
        )
        step.fill(
            ints([0, *np.cumsum([b - a for a, b in spans])]),
            ints([b for _, b in spans]),
            blocks=self.blocks[of],
        )
        return run(step, self.q[index], self.keys, self.values, self.position[index], sinks), index
