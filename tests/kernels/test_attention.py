# SPDX-License-Identifier: Apache-2.0
"""attention.segments: trainer and engine, whole and in chunks, alone and in company, have the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from isoexec.kernels.attention import PagedPlan, attention_paged, attention_varlen, naive
from isoexec.kernels.canaries import fill
from isoexec.kernels.domain import DomainError

Differing = Callable[[Tensor, Tensor], int]

DTYPES = [torch.float32, torch.bfloat16]
SCALE = 32**-0.5


def _qkv(b: int, s: int, H: int, KV: int, D: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return (
        fill(b, s, H, D, salt=1, dtype=dtype, scale=4.0),
        fill(b, s, KV, D, salt=2, dtype=dtype, scale=4.0),
        fill(b, s, KV, D, salt=3, dtype=dtype),
    )


def _dense(qkv: Sequence[Tensor]) -> Tensor:
    return attention_varlen(qkv[0], qkv[1], qkv[2], SCALE, kv_segment=32)


def _cache(k: Tensor, v: Tensor, block: int, seed: int) -> tuple[Tensor, Tensor]:
    """A paged cache that holds k and v [b, s, KV, D] in shuffled blocks, with stale values in every other place."""
    b, s, KV, D = k.shape
    per = -(-s // block)
    blocks = b * per + 3
    cache = fill(blocks, KV, block, 2 * D, salt=77 + seed, dtype=k.dtype, scale=50.0)
    order = (
        (torch.arange(b * per) * 5 + seed) % blocks if blocks % 5 else (torch.arange(b * per) + seed) % blocks
    )
    table = order.view(b, per).to(torch.int32)
    for i in range(b):
        for t in range(s):
            cache[table[i, t // block], :, t % block] = torch.cat([k[i, t], v[i, t]], -1)
    return cache, table


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("s", [1, 3, 17, 63, 100])
@pytest.mark.parametrize(("H", "KV", "D"), [(4, 2, 32), (3, 1, 16), (5, 5, 64)])
def test_dense_attention_has_the_bits_of_the_specification(
    differing: Differing, s: int, H: int, KV: int, D: int, dtype: torch.dtype
) -> None:
    q, k, v = _qkv(2, s, H, KV, D, dtype)
    out = attention_varlen(q, k, v, SCALE, kv_segment=32)
    assert differing(out, naive.attention(q, k, v, SCALE, kv_segment=32)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_has_the_same_bits_alone_padded_and_with_fewer_heads(
    differing: Differing, dtype: torch.dtype
) -> None:
    q, k, v = _qkv(3, 63, 4, 2, 32, dtype)
    whole = attention_varlen(q, k, v, SCALE, kv_segment=32)
    for i in range(3):
        alone = _dense([t[i : i + 1] for t in (q, k, v)])
        assert differing(alone, whole[i : i + 1]) == 0
    for s in (1, 3, 17, 33):
        short = _dense([t[:, :s] for t in (q, k, v)])
        assert differing(short, whole[:, :s]) == 0
    padded = [torch.cat([t, fill(3, 70, *t.shape[2:], salt=9, dtype=dtype)], 1) for t in (q, k, v)]
    assert differing(_dense(padded)[:, :63], whole) == 0
    shard = attention_varlen(q[:, :, 2:], k[:, :, 1:], v[:, :, 1:], SCALE, kv_segment=32)
    assert differing(shard, whole[:, :, 2:]) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [32, 64, 128])
def test_paged_prefill_decode_and_chunks_have_the_bits_of_dense_attention(
    differing: Differing, block: int, dtype: torch.dtype
) -> None:
    b, s = 3, 100
    q, k, v = _qkv(b, s, 4, 2, 32, dtype)
    dense = attention_varlen(q, k, v, SCALE, kv_segment=32)
    cache, table = _cache(k, v, block, seed=1)

    def step(queries: list[tuple[int, int, int]]) -> None:
        """One engine step: (sequence, first, past) of each request; its outputs in order."""
        starts, lens, rows = [0], [], []
        for i, a, e in queries:
            starts.append(starts[-1] + e - a)
            lens.append(e)
            rows.append(q[i, a:e])
        flat = torch.cat(rows)
        out = torch.empty_like(flat)
        which = table[[i for i, _, _ in queries]]
        attention_paged(flat, cache, which, PagedPlan(starts, lens, 2), SCALE, out)
        want = torch.cat([dense[i, a:e] for i, a, e in queries])
        assert differing(out, want) == 0, queries

    step([(0, 0, 100), (1, 0, 63), (2, 0, 1)])
    step([(2, 0, 17), (0, 17, 63), (1, 63, 100)])
    step([(1, 99, 100)])
    step([(0, 0, 1), (1, 63, 64), (2, 99, 100)])
    step([(0, 50, 51), (1, 3, 40), (2, 64, 67)])


def test_a_decode_row_has_the_same_bits_in_a_batch_of_any_size(differing: Differing) -> None:
    q, k, v = _qkv(300, 40, 4, 2, 32, torch.bfloat16)
    cache, table = _cache(k, v, 64, seed=2)
    lens = [1 + i * 7 % 40 for i in range(300)]
    rows = torch.stack([q[i, n - 1] for i, n in enumerate(lens)])
    whole = torch.empty_like(rows)
    attention_paged(rows, cache, table, PagedPlan(list(range(301)), lens, 2), SCALE, whole)
    for i in (0, 1, 150, 299):
        one = torch.empty_like(rows[:1])
        attention_paged(
            rows[i : i + 1], cache, table[i : i + 1], PagedPlan([0, 1], lens[i : i + 1], 2), SCALE, one
        )
        assert differing(one, whole[i : i + 1]) == 0


def test_another_segment_width_and_one_unit_in_the_last_place_are_seen(differing: Differing) -> None:
    q, k, v = _qkv(1, 100, 4, 2, 32, torch.float32)
    out = attention_varlen(q, k, v, SCALE, kv_segment=32)
    assert differing(attention_varlen(q, k, v, SCALE, kv_segment=64), out) > 100
    assert differing(attention_varlen(q, k, v, SCALE, kv_segment=16), out) > 100
    v[0, 40, 1] = torch.nextafter(v[0, 40, 1], torch.tensor(9.0))
    seen = attention_varlen(q, k, v, SCALE, kv_segment=32)
    assert differing(seen[:, 40:], out[:, 40:]) > 0
    assert differing(seen[:, :40], out[:, :40]) == 0
    assert differing(seen[:, :, :2], out[:, :, :2]) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_do_not_depend_on_company_padding_or_shard(
    differing: Differing, dtype: torch.dtype
) -> None:
    qkv = [t.requires_grad_() for t in _qkv(3, 63, 4, 2, 32, dtype)]
    g = fill(3, 63, 4, 32, salt=5, dtype=dtype)
    whole = torch.autograd.grad(_dense(qkv), qkv, g)
    again = torch.autograd.grad(_dense(qkv), qkv, g)
    one = [t[1:2].detach().requires_grad_() for t in qkv]
    alone = torch.autograd.grad(_dense(one), one, g[1:2])
    long = [
        torch.cat([t.detach(), fill(3, 70, *t.shape[2:], salt=9, dtype=dtype)], 1).requires_grad_()
        for t in qkv
    ]
    glong = torch.cat([g, torch.zeros(3, 70, 4, 32, dtype=dtype)], 1)
    padded = torch.autograd.grad(_dense(long), long, glong)
    part = [qkv[0][:, :, 2:], qkv[1][:, :, 1:], qkv[2][:, :, 1:]]
    shard = torch.autograd.grad(_dense(part), part, g[:, :, 2:])
    for i, want in enumerate(whole):
        assert differing(again[i], want) == 0
        assert differing(alone[i], want[1:2]) == 0
        assert differing(padded[i][:, :63], want) == 0
        assert bool((padded[i][:, 63:] == 0).all())
        assert differing(shard[i], want[:, :, 2:] if i == 0 else want[:, :, 1:]) == 0


def test_heads_segments_blocks_and_plans_outside_the_domain_are_refused() -> None:
    q, k, v = _qkv(1, 4, 4, 3, 32, torch.float32)
    with pytest.raises(DomainError, match="4 query heads, 3 KV heads"):
        attention_varlen(q, k, v, SCALE, kv_segment=32)
    q, k, v = _qkv(1, 4, 4, 2, 32, torch.float32)
    with pytest.raises(DomainError, match="kv_segment 24"):
        attention_varlen(q, k, v, SCALE, kv_segment=24)
    with pytest.raises(DomainError, match="query_tile 32"):
        attention_varlen(q, k, v, SCALE, kv_segment=32, query_tile=32)
    out, table = torch.empty(1, 4, 32), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(DomainError, match="blocks of 48"):
        attention_paged(q[0, :1], torch.zeros(2, 2, 48, 64), table, PagedPlan([0, 1], [1], 2), SCALE, out)
    with pytest.raises(DomainError, match="groups of 4"):
        attention_paged(q[0, :1], torch.zeros(2, 2, 32, 64), table, PagedPlan([0, 1], [1], 4), SCALE, out)
    with pytest.raises(DomainError, match="2 queries, 1 keys"):
        PagedPlan([0, 2], [1], 2)
