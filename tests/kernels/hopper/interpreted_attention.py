# SPDX-License-Identifier: Apache-2.0
"""The sm90 attention in Triton's interpreter: segments, the merge, and what the library is called with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import interpreted as base  # type: ignore[import-not-found]  # patches the interpreter; first
import torch
from attention_stand_in import (  # type: ignore[import-not-found]
    LENGTHS,
    PAGE,
    SCALE,
    STARTS,
    Cache,
    D,
    S,
    ints,
    launch_merge,
    launch_segment,
    quickly,
    run,
    run_with_lse,
    slowly,
    specified_merge,
    specified_rows,
    stand_in,
)
from interpreted import differing, other, poisoned, rand, same
from torch import Tensor

from isoexec.kernels.attention.hopper import fa3, kernel, naive, reference, split
from isoexec.kernels.attention.hopper.ops import plan
from isoexec.kernels.domain import DomainError

__all__ = ["differing", "ints"]

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def segment(
    q: Tensor, k: Tensor, v: Tensor, visible: int, scale: float = SCALE, **free: Any
) -> tuple[Tensor, Tensor]:
    out, lse = poisoned(*q.shape), poisoned(q.shape[1], len(q), dtype=torch.float32)
    launch_segment(q, k, v, out, lse, visible=visible, scale=scale, hardware=False, **free)
    return out, lse


def specified(q: Tensor, k: Tensor, v: Tensor, visible: int, scale: float = SCALE) -> tuple[Tensor, Tensor]:
    return specified_rows(q, k, v, (visible + torch.arange(len(q))).clamp(max=len(k)), scale)


@check
def a_segment_has_its_specifications_bits() -> None:
    for width, rows, keys, visible in (
        (64, 5, 300, 290),
        (64, 20, 20, 1),
        (128, 3, 130, 128),
        (256, 4, 170, 160),
    ):
        q, k, v = rand(rows, 2, width, scale=2.0), rand(keys, 1, width), rand(keys, 1, width)
        got = segment(q, k, v, visible, width**-0.5)
        for a, b in zip(got, specified(q, k, v, visible, width**-0.5), strict=True):
            same(a, b, (width, rows, keys, visible))


@check
def a_row_of_a_segment_has_the_same_bits_alone_and_among_others() -> None:
    q, k, v = rand(20, 2, D), rand(150, 1, D), rand(150, 1, D)
    out, lse = segment(q, k, v, 131)
    for row in (0, 7, 19):
        alone = segment(q[row : row + 1], k, v, 131 + row)
        same(alone[0], out[row : row + 1], row)
        same(alone[1], lse[:, row : row + 1], row)
    shorter = segment(q[:7], k[:137], v[:137], 131)
    same(shorter[0], out[:7], "keys beyond the last row")


@check
def a_segment_differs_with_blocks_in_the_other_order_or_of_another_size() -> None:
    q, k, v = rand(16, 2, D, scale=2.0), rand(300, 1, D), rand(300, 1, D)
    _, lse = segment(q, k, v, 285)
    other(segment(q, k, v, 285, ascending=True)[1], lse, "ascending")
    other(segment(q, k, v, 285, keys=64)[1], lse, "blocks of 64")


@check
def a_segment_is_attention() -> None:
    q, k, v = rand(9, 2, D, scale=2.0), rand(200, 1, D), rand(200, 1, D)
    out, lse = segment(q, k, v, 192)
    s = torch.einsum("rhd,kd->hrk", q.double(), k[:, 0].double()) * SCALE
    s = s.masked_fill(torch.arange(200) >= (192 + torch.arange(9))[:, None], -torch.inf)
    exact = torch.einsum("hrk,kd->rhd", s.softmax(-1), v[:, 0].double())
    assert float((out.double() - exact).norm() / exact.norm()) < 4e-3
    assert float((lse.double() - s.logsumexp(-1)).abs().max()) < 1e-5


@check
def a_merge_has_its_specifications_bits() -> None:
    for slots in (1, 2, 5):
        for sinks in (None, rand(3, dtype=torch.float32)):
            parts, lse = rand(slots, 4, 3, D), rand(slots, 3, 4, dtype=torch.float32, scale=4.0)
            position = torch.tensor([0, S - 1, (slots - 1) * S, slots * S - 1], dtype=torch.int32)
            want = torch.stack(
                [
                    naive.merge(parts[: p // S + 1, t], lse[: p // S + 1, :, t], sinks)
                    for t, p in enumerate(position.tolist())
                ]
            )
            out = poisoned(4, 3, D)
            launch_merge(None, None, parts, lse, position, sinks, out, kv_segment=S)
            same(out, want, (slots, sinks is not None, "together"))
            mine = (position // S).long()
            own = parts[mine, torch.arange(4)].clone()
            own_lse = lse[mine, :, torch.arange(4)].t().contiguous()
            launch_merge(own, own_lse, parts, lse, position, sinks, own, kv_segment=S)
            same(own, want, (slots, sinks is not None, "own apart"))
    parts, lse = rand(5, 200, D), rand(5, 200, dtype=torch.float32)
    other(naive.merge(parts, lse), naive.merge(parts.flip(0), lse.flip(0)), "order")


@check
def a_merge_s_log_sum_exps_windows_and_totals_have_their_specifications_bits() -> None:
    position = torch.tensor([0, S - 1, S, 2 * S + 3, 5 * S - 1], dtype=torch.int32)
    rows = len(position)
    for window in (0, 1, S + 5):
        slots = 5 if not window else (window + S - 2) // S + 1
        for sinks in (None, rand(3, dtype=torch.float32)):
            for totalled in (False, True):
                parts = rand(slots, rows, 3, D, dtype=torch.float32 if totalled else torch.bfloat16)
                lse = rand(slots, 3, rows, dtype=torch.float32, scale=4.0)
                totals = rand(slots, 3, rows, dtype=torch.float32).abs() + 0.5 if totalled else None
                found = []
                for merge in (launch_merge, specified_merge):
                    out, whole = poisoned(rows, 3, D), poisoned(3, rows, dtype=torch.float32)
                    given = {"kv_segment": S, "window": window, "totals": totals, "whole_lse": whole}
                    tensors = (None, None, parts, lse, position, sinks, out)
                    merge(*tensors, **given, hardware=False)
                    found.append((out, whole))
                for a, b in zip(*found, strict=True):
                    same(a, b, (window, sinks is not None, totalled))
    own, own_lse = rand(rows, 3, D), rand(3, rows, dtype=torch.float32)
    parts, lse = rand(4, rows, 3, D), rand(4, 3, rows, dtype=torch.float32)
    for sinks in (None, rand(3, dtype=torch.float32)):
        results = []
        for merge in (launch_merge, specified_merge):
            out, whole = own.clone(), own_lse.clone()
            merge(out, whole, parts, lse, position, sinks, out, kv_segment=S, whole_lse=whole)
            results.append((out, whole))
        for a, b in zip(*results, strict=True):
            same(a, b, ("own apart", sinks is not None))


@check
def packed_batches_have_the_specifications_bits_on_every_path() -> None:
    cache = Cache()
    want = cache.whole()
    for past in fa3.PAST.values():
        for folded in (False, True):
            with stand_in(past):
                same(cache.packed(folded=folded), want, (past, folded))


@check
def the_references_own_segments_and_merge_have_the_specifications_bits() -> None:
    cache = Cache()
    sinks = rand(2, dtype=torch.float32)
    part = slice(STARTS[3], STARTS[4])
    for given in (None, sinks):
        with slowly():
            got, lse = reference.reference(
                cache.q[part], cache.k[part], cache.v[part], SCALE, kv_segment=S, sinks=given, hardware=False
            )
        want, want_lse = cache.whole_with_lse(given)
        same(got, want[part], given is not None)
        same(lse, want_lse[:, part], given is not None)


@check
def decode_prefill_and_chunks_through_pages_have_the_bits_of_the_packed_batch() -> None:
    cache = Cache()
    for sinks in (None, rand(2, dtype=torch.float32)):
        with stand_in():
            want = cache.packed(sinks)
            for of in (
                {b: (0, n) for b, n in enumerate(LENGTHS)},  # prefill
                {b: (n - 1, n) for b, n in enumerate(LENGTHS)},  # decode
                {0: (0, 1)},  # the first token alone
                {0: (S, S + 1), 3: (S - 1, S)},  # at the edge of a segment
                {0: (3, 2 * S + 4)},  # a chunk over three segments that starts inside one
                {0: (S - 6, S + 7)},  # draft tokens over an edge
                {3: (S, S + 1), 0: (10, 2 * S), 1: (0, 7)},  # decode and prefill in one step
            )[: None if sinks is None else 2]:
                got, index = cache.rows(of, sinks)
                same(got, want[index], of)
                if len(index) > 1 and sinks is None:
                    got, index = cache.rows(of, most_keys=6 * S, folded=False)
                    same(got, want[index], (of, "larger bounds, a call a segment"))


@check
def decode_split_by_keys_and_columns_has_the_bits_of_the_packed_batch() -> None:
    cache = Cache()
    want = cache.whole()
    of = [(0, 2 * S + 4), (0, S), (0, S - 1), (1, 6), (3, S)]
    index = torch.tensor([STARTS[b] + p for b, p in of])
    for paged in (True, False):
        step = plan(
            requests=len(of) + 1,
            tokens=len(of),
            most_rows=1,
            most_keys=5 * S,
            kv_segment=S,
            page=PAGE if paged else 0,
            device="cpu",
        )
        # the last request has no row
        blocks, starts = cache.blocks[[b for b, _ in of] + [2]], ints([STARTS[b] for b, _ in of] + [0])
        step.fill(
            ints([*range(len(of) + 1), len(of)]),
            ints([p + 1 for _, p in of] + [S]),
            **({"blocks": blocks} if paged else {"k_start": starts}),
        )
        k, v = (cache.keys, cache.values) if paged else (cache.k, cache.v)
        parts, totals, lse = split.launch_split(
            cache.q[index],
            *(k, v, step.own, step.own_pages),
            requests=len(of) + 1,
            kv_segment=S,
            scale=SCALE,
            tuning=split.Tuning(
                columns=32, warps=4, stages=3, score_blocks=2, score_warps=4, score_stages=3, ahead=2
            ),
            hardware=False,
        )
        out, n = poisoned(len(of), 2, D), len(parts) // len(of)
        kernel.launch_merge(
            None,
            None,
            parts.view(n, len(of), 2, D),
            lse.view(2, n, -1).transpose(0, 1),
            cache.position[index],
            None,
            out,
            kv_segment=S,
            totals=totals.view(2, n, -1).transpose(0, 1),
            hardware=False,
        )
        same(out, want[index], paged)


@check
def split_decode_has_the_same_bits_however_many_blocks_an_iteration_takes() -> None:
    long = 512  # four blocks a segment
    lengths = (long + 130, 385)
    q, k, v = (rand(2, 2, D, scale=2.0), *(rand(sum(lengths), 1, D) for _ in range(2)))
    step = plan(requests=2, tokens=2, most_rows=1, most_keys=2 * long, kv_segment=long, device="cpu")
    step.fill(ints([0, 1, 2]), ints(lengths), k_start=ints([0, lengths[0]]))
    found = []
    for unrolled in (1, 2, 3):
        sizes = {"columns": 32, "warps": 4, "stages": 3, "score_blocks": 4, "score_warps": 4}
        tuning = split.Tuning(**sizes, score_stages=3, ahead=2, unrolled=unrolled)
        given = {"requests": 2, "kv_segment": long, "scale": SCALE, "tuning": tuning, "hardware": False}
        found.append(split.launch_split(q, k, v, step.own, None, **given))
        parts, totals, lse = found[-1]
        for a, b, name in zip(found[-1], found[0], ("values", "sums", "log-sum-exps"), strict=True):
            at = [0, 1, 2]  # the second request has one segment
            same(a[at] if name == "values" else a[:, at], b[at] if name == "values" else b[:, at], name)
    whole = segment(q[1:], k[lengths[0] :], v[lengths[0] :], lengths[1])
    same((parts[1] * (1.0 / totals[:, 1].double()).float()[:, None]).bfloat16(), whole[0][0], "one segment")
    same(lse[:, 1], whole[1][:, 0], "its log-sum-exp")


@check
def the_log_sum_exp_of_every_row_is_the_specifications() -> None:
    cache = Cache()
    for sinks in (None, rand(2, dtype=torch.float32)):
        want = cache.whole_with_lse(sinks)
        for provider in ("fa3", "triton"):
            step = plan(
                requests=len(LENGTHS),
                tokens=len(cache.q),
                most_rows=max(LENGTHS),
                most_keys=max(LENGTHS),
                kv_segment=S,
                device="cpu",
                provider=provider,
            )
            step.fill(ints(STARTS), ints(LENGTHS), k_start=ints(STARTS[:-1]))
            with stand_in():
                got = run_with_lse(step, cache.q, cache.k, cache.v, cache.position, sinks)
            for a, b in zip(got, want, strict=True):
                same(a, b, (provider, sinks is not None))


@check
def requests_without_rows_and_pages_without_keys_change_nothing() -> None:
    cache = Cache()
    with stand_in():
        want = cache.packed()
        got, index = cache.rows({1: (6, 7), 2: (5, 5), 0: (60, 61)})
        same(got, want[index])


@check
def attention_differs_with_another_segment_and_without_its_sinks() -> None:
    cache = Cache()
    sinks = rand(2, dtype=torch.float32)
    with stand_in():
        other(cache.packed(sinks), cache.packed(), "sinks")
    part = slice(0, S + 8)
    rows = cache.q[part], cache.k[part], cache.v[part]
    other(
        reference.reference(*rows, SCALE, kv_segment=S, hardware=False)[0],
        reference.reference(*rows, SCALE, kv_segment=2 * S, hardware=False)[0],
        "kv_segment",
    )


@check
def what_is_outside_the_domain_is_refused() -> None:
    cache = Cache()
    for bounds in ({"most_keys": 33 * S}, {"kv_segment": 100, "page": 16}, {"most_rows": 0}):
        given = {"requests": 1, "tokens": 4, "most_rows": 4, "most_keys": 9, "kv_segment": S, "device": "cpu"}
        try:
            plan(**{**given, **bounds})
        except DomainError:
            continue
        raise AssertionError(bounds)
    step = plan(requests=1, tokens=4, most_rows=4, most_keys=9, kv_segment=S, device="cpu")
    for q, k in (
        (cache.q[:4, :, :32], cache.k[..., :32]),
        (cache.q[:4].float(), cache.k.float()),
        (cache.q[:5], cache.k),
    ):
        try:
            run(step, q, k, k, torch.arange(len(q), dtype=torch.int32))
        except DomainError:
            continue
        raise AssertionError((q.shape, q.dtype))


if __name__ == "__main__":
    base.CHECKS.clear()
    base.CHECKS.update({n: c for n, c in CHECKS.items() if n in sys.argv[1:] or len(sys.argv) == 1})
    with quickly():
        base.main()
