# SPDX-License-Identifier: Apache-2.0
"""The gate of attention.segments/1 on CPU: the trainer's whole sequences and the engine's paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from isoexec.kernels.attention import PagedPlan, attention_paged, attention_varlen, naive
from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.gloo import DEGREES, on_ranks
from isoexec.kernels.gates.inputs import DTYPES, fill, nudged, odd_values, shuffled, wide
from isoexec.kernels.gates.recipes import BATCHES, close, gradients, reruns, trainer_forwards
from isoexec.kernels.sums import halving_tree

GATE = Gate("attention.segments/1", "cpu")
D = 32
SCALE = D**-0.5
QKV = tuple[Tensor, Tensor, Tensor]
Request = tuple[int, int, int]  # sequence, first query token, past the last


def _segment(run: Run) -> int:
    return int(run.constants["kv_segment"])


def _qkv(b: int, s: int, H: int, KV: int, dtype: torch.dtype, head_dim: int = D) -> QKV:
    return (
        fill(b, s, H, head_dim, salt=1, dtype=dtype, scale=4.0),
        fill(b, s, KV, head_dim, salt=2, dtype=dtype, scale=4.0),
        fill(b, s, KV, head_dim, salt=3, dtype=dtype),
    )


class Cache:
    """A paged cache of several sequences in scattered blocks, with old values in every other place."""

    def __init__(self, k: Tensor, v: Tensor, block: int, salt: int = 0) -> None:
        b, s, KV, head_dim = k.shape
        per = -(-s // block)
        blocks = b * per + 3
        self.kv = fill(blocks, KV, block, 2 * head_dim, salt=77 + salt, dtype=k.dtype, scale=50.0)
        self.table = shuffled(blocks)[: b * per].view(b, per).to(torch.int32)
        self.block = block
        for i in range(b):
            self.write(i, 0, torch.cat([k[i], v[i]], -1))

    def write(self, sequence: int, first: int, kv: Tensor) -> None:
        """Put `kv [tokens, KV, 2 * D]` at places `first ...` of a sequence."""
        place = torch.arange(first, first + len(kv))
        self.kv[self.table[sequence, place // self.block].long(), :, place % self.block] = kv


def _step(
    cache: Cache, q: Tensor, requests: Sequence[Request], kv_segment: int, scale: float = SCALE
) -> Tensor:
    """One engine step; outputs in the order of the requests."""
    starts, lens, rows = [0], [], []
    for i, first, past in requests:
        starts.append(starts[-1] + past - first)
        lens.append(past)
        rows.append(q[i, first:past])
    flat = torch.cat(rows)
    out = torch.empty_like(flat)
    plan = PagedPlan(starts, lens, q.shape[2] // cache.kv.shape[1], kv_segment=kv_segment)
    attention_paged(flat, cache.kv, cache.table[[i for i, _, _ in requests]], plan, scale, out)
    return out


def _want(whole: Tensor, requests: Sequence[Request]) -> Tensor:
    return torch.cat([whole[i, first:past] for i, first, past in requests])


def _merged(q: Tensor, k: Tensor, v: Tensor, at: int, kv_segment: int) -> Tensor:
    """The last row by two softmaxes, over keys before and from `at`, merged by their sums: what a split over keys does."""
    group = q.shape[2] // k.shape[2]
    parts = []
    for here in (slice(0, at), slice(at, None)):
        kf, vf = (t[:, here].float().repeat_interleave(group, 2) for t in (k, v))
        s = torch.einsum("bhd,bkhd->bhk", q[:, -1].float() * SCALE, kf)
        top = s.amax(-1, keepdim=True)
        p = torch.exp(s - top)
        parts.append((top, p.sum(-1, keepdim=True), torch.einsum("bhk,bkhd->bhd", p, vf)))
    top = torch.maximum(parts[0][0], parts[1][0])
    weights = [torch.exp(t - top) for t, _, _ in parts]
    total, out = (sum(w * part[i] for w, part in zip(weights, parts, strict=True)) for i in (1, 2))
    assert isinstance(out, torch.Tensor)
    out = out / total
    return out.to(q.dtype)


def _exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True).transpose(
        1, 2
    )


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    seg = _segment(run)
    heads = run.pick(((4, 2, 32), (5, 5, 64)), ((4, 2, 32), (3, 1, 16), (5, 5, 64), (16, 1, 32), (6, 2, 80)))
    for dtype in run.over("dtype", DTYPES):
        for H, KV, head_dim in heads:
            run.covers(head_dim=head_dim, group=H // KV)
            for s in run.over("rows", run.pick((1, 17, 67), (1, 2, 3, 17, 31, 32, 33, 63, 100, 161))):
                q, k, v = _qkv(2, s, H, KV, dtype, head_dim)
                want = naive.attention(q, k, v, SCALE, kv_segment=seg)
                run.equal(attention_varlen(q, k, v, SCALE, kv_segment=seg), want)
                requests = [(1, 0, s), (0, s - 1, s), (0, 0, s // 2 + 1)]
                run.equal(_step(Cache(k, v, 2 * seg), q, requests, seg), _want(want, requests))
    q, k, v = _qkv(1, 3 * seg + 4, 4, 2, torch.float32)
    want = naive.attention(q, k, v, SCALE, kv_segment=seg)
    call = partial(attention_varlen, q, k, v, SCALE)
    run.control("half_the_segment", call(kv_segment=seg // 2), want)
    run.control("twice_the_segment", call(kv_segment=2 * seg), want)
    run.control("one_ulp_of_a_value", attention_varlen(q, k, nudged(v), SCALE, kv_segment=seg), want)
    run.control("stock_attention", _exact(q, k, v), want)


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    seg, s = _segment(run), run.pick(70, 150)
    for dtype in run.over("dtype", DTYPES):
        q, k, v = _qkv(2, s, 4, 2, dtype)
        cache = Cache(k, v, 2 * seg)
        everything = [(0, 0, s), (1, 0, s)]
        prefill = _step(cache, q, everything, seg)
        run.covers(case=["engine_prefill", "engine_decode"])
        for t in range(s):
            row = [(0, t, t + 1), (1, s - 1 - t, s - t)]
            run.equal(_step(cache, q, row, seg), _want(prefill.view(2, s, 4, D), row))
        for case, out in trainer_forwards(
            partial(attention_varlen, scale=SCALE, kv_segment=seg), q, k, v
        ).items():
            run.covers(case=case)
            run.equal(out.view(2 * s, 4, D), prefill)
    short = _step(cache, q, [(0, s - 1, s)], seg // 2)
    run.control("half_the_segment_in_decode", short, _want(prefill.view(2, s, 4, D), [(0, s - 1, s)]))
    split = _merged(q, k, v, s // 2, seg)
    run.control("decode_split_over_keys", split, prefill.view(2, s, 4, D)[:, -1])
    run.control("one_key_short_in_decode", _step(cache, q, [(0, s - 2, s - 1)], seg), prefill[s - 1 : s])


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    seg, requests = _segment(run), run.pick(65, 300)
    for dtype in run.over("dtype", DTYPES):
        q, k, v = _qkv(requests, seg + 9, 4, 2, dtype)
        cache = Cache(k, v, 2 * seg)
        every = [(i, n - 1, n) for i, n in enumerate(1 + i * 7 % (seg + 9) for i in range(requests))]
        whole = _step(cache, q, every, seg)
        order = shuffled(requests).tolist()
        for size in run.over("rows", [b for b in BATCHES if b <= requests]):
            for some in (range(size), range(requests - size, requests), order[:size]):
                run.equal(_step(cache, q, [every[i] for i in some], seg), whole[list(some)])
        for i in range(0, requests, run.pick(8, 5)):
            run.equal(_step(cache, q, [every[i]], seg), whole[i : i + 1])
        run.control("another_request", _step(cache, q, every[1:] + every[:1], seg), whole)
    long = [(0, 0, seg + 9), *every[1:9]]  # decodes beside a prefill
    run.equal(_step(cache, q, long, seg)[seg + 9 :], whole[1:9])
    run.control(
        "half_the_segment_for_few_rows", _step(cache, q, every[seg : seg + 4], seg // 2), whole[seg : seg + 4]
    )
    for dtype in DTYPES:
        s = 2 * seg + 3
        q, k, v = _qkv(3, s, 4, 2, dtype)
        whole = attention_varlen(q, k, v, SCALE, kv_segment=seg)
        for i in range(3):
            run.equal(
                attention_varlen(q[i : i + 1], k[i : i + 1], v[i : i + 1], SCALE, kv_segment=seg),
                whole[i : i + 1],
            )
        for n in (1, 3, 17, seg + 1):
            run.equal(attention_varlen(q[:, :n], k[:, :n], v[:, :n], SCALE, kv_segment=seg), whole[:, :n])
        padded = [torch.cat([t, fill(3, 70, *t.shape[2:], salt=9, dtype=dtype)], 1) for t in (q, k, v)]
        qp, kp, vp = padded
        run.equal(attention_varlen(qp, kp, vp, SCALE, kv_segment=seg)[:, :s], whole)


def shards(
    rank: int, size: int, group: ProcessGroup | None, dtype: torch.dtype, seg: int, fault: bool
) -> list[Tensor]:
    """Output and gradients of this rank's KV groups, and its rows of an engine step; `fault` gives it another rank's keys."""
    qkv, g = _qkv(2, 70, 16, 8, dtype), fill(2, 70, 16, D, salt=5, dtype=dtype)
    q, k, v = (t.chunk(size, 2)[rank].contiguous() for t in qkv)
    if fault:
        k = qkv[1].chunk(size, 2)[size - 1 - rank].contiguous()
    done = gradients(
        partial(attention_varlen, scale=SCALE, kv_segment=seg), [q, k, v], g.chunk(size, 2)[rank]
    )
    requests = [(0, 69, 70), (1, 0, 40)]
    return [*done, _step(Cache(k, v, 2 * seg), q, requests, seg).unsqueeze(0)]


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    seg = _segment(run)
    for dtype in run.over("dtype", DTYPES):
        whole = on_ranks(1, shards, dtype, seg, False)[0]
        for size in run.over("TP", DEGREES):
            parts = on_ranks(size, shards, dtype, seg, False)
            run.equal([torch.cat(p, 2) for p in zip(*parts, strict=True)], whole)
    exchanged = on_ranks(2, shards, dtype, seg, True)
    run.control("keys_of_another_rank", torch.cat([p[0] for p in exchanged], 2), whole[0])
    q, k, v = _qkv(2, 70, 16, 8, torch.float32)  # a cut of the keys, which no admitted axis makes
    run.control("keys_shared_by_two_ranks", _merged(q, k, v, 35, seg), whole[0][:, -1])


@GATE.check("resume_exactness")
def _resume(run: Run) -> None:
    seg = _segment(run)
    s = 3 * seg + 4
    for dtype in run.over("dtype", DTYPES):
        q, k, v = _qkv(3, s, 4, 2, dtype)
        dense = attention_varlen(q, k, v, SCALE, kv_segment=seg)
        for pages in run.over("block", (seg, 2 * seg, 4 * seg)):
            cache = Cache(k, v, pages, salt=pages)
            # prefill in chunks that end inside, at and past a segment; beside decodes; after a prefix that was found
            cuts = run.pick((1, seg - 1, seg, seg + 5, 2 * seg + 1), tuple(range(1, s, 3)))
            for cut in run.over("cut", cuts):
                for requests in ([(0, 0, cut), (1, cut, s)], [(2, cut, s), (0, s - 1, s), (1, 0, cut)]):
                    run.equal(_step(cache, q, requests, seg), _want(dense, requests))
            for size in run.over("chunk", (1, 7, seg)):
                for first in range(0, s, size):
                    requests = [(0, first, min(first + size, s))]
                    run.equal(_step(cache, q, requests, seg), _want(dense, requests))
            # a prefix held once and read by two requests: their tables name the same blocks
            shared = Cache(k, v, pages, salt=1)
            whole_pages = s // pages
            shared.table[1, :whole_pages] = shared.table[0, :whole_pages]
            shared.write(1, whole_pages * pages, torch.cat([k[0], v[0]], -1)[whole_pages * pages :])
            twin = q.clone()
            twin[1] = q[0]
            for requests in ([(0, s - 1, s), (1, s - 1, s)], [(1, seg + 3, s)]):
                run.equal(_step(shared, twin, requests, seg), _want(torch.stack([dense[0]] * 2), requests))
            # moved to other blocks after a preemption
            run.equal(_step(Cache(k, v, pages, salt=9), q, [(1, cut, s)], seg), dense[1, cut:])
    decode = [(0, s - 1, s), (1, s - 1, s)]
    want = _want(dense, decode)
    stale = Cache(k, v, seg)
    stale.write(0, seg, fill(seg, 2, 2 * D, salt=78, dtype=dtype))
    run.control("stale_block", _step(stale, q, decode, seg)[:1], want[:1])
    lost = Cache(k, v, seg)
    lost.kv[lost.table[0, s // seg].long(), :, (s - 1) % seg] = 0
    run.control("last_token_not_written", _step(lost, q, decode, seg)[:1], want[:1])
    crossed = Cache(k, v, seg)
    crossed.table = crossed.table[[1, 0, 2]]
    run.control("block_tables_exchanged", _step(crossed, q, decode, seg), want)
    moved = Cache(k, v, seg)
    moved.table[:, [0, 2]] = moved.table[:, [2, 0]]  # the first two would add to the same sum
    run.control("two_blocks_exchanged", _step(moved, q, decode, seg), want)
    # a chunk that counts segments from its own first key, and one that merges by its own maximum
    qc, kc, vc = (t[:1, seg // 2 + 1 :] for t in (q, k, v))
    run.control("prefix_forgotten", attention_varlen(qc, kc, vc, SCALE, kv_segment=seg)[:, -1], want[:1])
    run.control("chunks_merged_by_their_sums", _merged(q, k, v, seg + 5, seg)[:2], want)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    seg = _segment(run)
    with run.poisoned():
        for dtype in run.over("dtype", DTYPES):
            for s in run.over("rows", (1, 2, 3)):
                for H, KV, head_dim in ((1, 1, 16), (3, 1, 17), (16, 1, 16), (7, 7, 33)):
                    q, k, v = _qkv(1, s, H, KV, dtype, head_dim)
                    want = naive.attention(q, k, v, SCALE, kv_segment=seg)
                    run.equal(attention_varlen(q, k, v, SCALE, kv_segment=seg), want)
                    run.equal(_step(Cache(k, v, seg), q, [(0, 0, s)], seg), want[0])
            q, k, v = _qkv(1, 21, 2, 1, dtype)
            for none in (slice(0, 0), (slice(None), slice(0, 0))):  # no sequence, no token
                run.equal(attention_varlen(q[none], k[none], v[none], SCALE, kv_segment=seg), q[none])
            for which in range(3):
                several = _qkv(1, 21, 2, 1, dtype)
                several[which][0, :, :, 3] = odd_values(dtype)[:21].unsqueeze(1)
                qo, ko, vo = several
                want = naive.attention(qo, ko, vo, SCALE, kv_segment=seg)
                run.equal(attention_varlen(qo, ko, vo, SCALE, kv_segment=seg), want, any_nan=True)
                run.equal(_step(Cache(ko, vo, seg), qo, [(0, 0, 21)], seg), want[0], any_nan=True)
            far = q * 1e4, k * 1e4  # one key takes all the weight
            want = naive.attention(*far, v, SCALE, kv_segment=seg)
            run.equal(attention_varlen(*far, v, SCALE, kv_segment=seg), want)
            run.holds(want.isfinite())
            run.control("future_seen", attention_varlen(q.flip(1), k.flip(1), v.flip(1), SCALE, kv_segment=seg).flip(1)[:, :20],
                        attention_varlen(q, k, v, SCALE, kv_segment=seg)[:, :20])  # fmt: skip
    q, k, v = _qkv(1, 4, 4, 3, torch.float32)
    run.refuses(lambda: attention_varlen(q, k, v, SCALE, kv_segment=seg))
    run.refuses(lambda: attention_varlen(q, k, v, SCALE, kv_segment=24))
    run.refuses(lambda: PagedPlan([0, 2], [1], 2))
    q, k, v = _qkv(1, 4, 4, 2, torch.float32)
    run.refuses(lambda: _step(Cache(k, v, seg + 1), q, [(0, 0, 4)], seg))
    run.refuses(lambda: attention_varlen(q.half(), k.half(), v.half(), SCALE, kv_segment=seg))


@GATE.check("rerun_determinism")
def _reruns(run: Run) -> None:
    seg, s = _segment(run), run.pick(128, 1024)
    H, KV, head_dim = 32, 8, 128  # Qwen3-8B and MiMo-7B
    for dtype in run.over("dtype", DTYPES):
        shapes = ((1, s, H, head_dim), (1, s, KV, head_dim), (1, s, KV, head_dim))
        q, k, v = (wide(*shape, salt=i, dtype=dtype, scale=2.0) for i, shape in enumerate(shapes))
        run.covers(rows=s, heads=H, kv_heads=KV, head_dim=head_dim)
        scale = head_dim**-0.5
        (first,) = reruns(run, lambda: attention_varlen(q, k, v, scale, kv_segment=seg), 2)
        cache = Cache(k, v, 4 * seg)
        requests = [(0, n - 1, n) for n in range(1, s, 37)] + [(0, s // 3, s // 2)]
        (step,) = reruns(run, lambda: _step(cache, q, requests, seg, scale), 2)
        run.equal(step, _want(first, requests))
    g = wide(1, s // 2, H, head_dim, salt=5)
    half = [t[:, : s // 2] for t in (q, k, v)]
    reruns(run, lambda: gradients(partial(attention_varlen, scale=scale, kv_segment=seg), half, g), 1)
    order = torch.arange(s).view(-1, seg)[shuffled(s // seg)].view(-1)  # segments as atomics would add them
    other = attention_varlen(q, k[:, order], v[:, order], scale, kv_segment=seg)
    run.control("segments_in_another_order", other[:, -1], first[:, -1])


def _reference_grad(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, g: Tensor, scale: float, seg: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient by its definition, tile by tile: a query's terms by segments, a key's and a value's by query tiles."""
    b, s, H, head_dim = q.shape
    KV = k.shape[2]
    group, tile = H // KV, naive.QUERY_TILE
    per = tile // group
    dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float32) for t in (q, k, v))
    padded = -(-s // seg) * seg
    for i in range(b):
        for kv in range(KV):
            keys, values = torch.zeros(2, padded, head_dim)
            keys[:s], values[:s] = k[i, :, kv].float(), v[i, :, kv].float()
            dkeys, dvalues = torch.zeros(2, padded, head_dim)
            heads = slice(kv * group, (kv + 1) * group)
            for a in range(0, s, per):
                n = min(per, s - a)
                need = -(-min(a + per, s) // seg) * seg
                rows = torch.zeros(3, tile, head_dim)
                for at, t in enumerate((q, g, out)):
                    rows[at, : n * group] = t[i, a : a + n, heads].float().reshape(n * group, head_dim)
                queries, grads, outs = rows[0] * scale, rows[1], rows[2]
                limit = a + torch.arange(tile) // group + 1
                scores = torch.cat([part @ queries.t() for part in keys[:need].split(seg)])
                scores = scores.masked_fill(torch.arange(need).unsqueeze(1) >= limit, float("-inf"))
                p = torch.exp(scores - scores.amax(0))
                total = torch.zeros(tile)
                for part in p.split(seg):
                    total = total + halving_tree(part, 0)
                p = p / total
                ds = (values[:need] @ grads.t() - halving_tree(outs * grads)) * p
                dvalues[:need] = dvalues[:need] + p @ grads
                dkeys[:need] = dkeys[:need] + ds @ queries
                mine = torch.zeros(tile, head_dim)
                for at in range(0, need, seg):
                    mine = mine + ds[at : at + seg].t() @ keys[at : at + seg]
                dq[i, a : a + n, heads] = (mine * scale)[: n * group].view(n, group, head_dim)
            dk[i, :, kv], dv[i, :, kv] = dkeys[:s], dvalues[:s]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@GATE.check("backward")
def _backward(run: Run) -> None:
    seg = _segment(run)
    call = partial(attention_varlen, scale=SCALE, kv_segment=seg)
    for dtype in run.over("dtype", DTYPES):
        for s in run.over("rows", run.pick((1, 67), (1, 2, 17, 33, 67, 100))):
            for H, KV in ((4, 2), (3, 1)):
                qkv, g = _qkv(2, s, H, KV, dtype), fill(2, s, H, D, salt=5, dtype=dtype)
                out, *grads = gradients(call, qkv, g)
                run.equal(grads, _reference_grad(*qkv, out, g, SCALE, seg))
                run.equal(gradients(call, [t[1:] for t in qkv], g[1:]), [t[1:] for t in (out, *grads)])
                long = [torch.cat([t, fill(2, 70, *t.shape[2:], salt=9, dtype=dtype)], 1) for t in qkv]
                padded = gradients(call, long, torch.cat([g, torch.zeros(2, 70, H, D, dtype=dtype)], 1))
                run.equal([t[:, :s] for t in padded], [out, *grads])
                run.holds(padded[2][:, s:] == 0)
        close(run, call, _exact, qkv, g)
    run.control("half_the_segment", gradients(partial(call, kv_segment=seg // 2), qkv, g)[1:], grads)
    stock = gradients(_exact, qkv, g)
    run.control("stock_gradient", stock[1:], grads)
    run.control("one_ulp_of_a_gradient", gradients(call, qkv, nudged(g))[1:], grads)
