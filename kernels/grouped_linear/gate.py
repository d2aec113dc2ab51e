# SPDX-License-Identifier: Apache-2.0
"""The gate of linear.grouped_chain/1 on CPU."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.kernels import linear
from isoexec.kernels.dispatch import by_slot, dispatch, plan
from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.gloo import DEGREES, on_ranks
from isoexec.kernels.gates.inputs import DTYPES, fill, nudged, odd_values, shuffled, wide
from isoexec.kernels.gates.recipes import close, company, gradients, reruns, trainer_forwards
from isoexec.kernels.grouped_linear import (
    chain,
    grouped_linear,
    hand_off,
    naive,
    pack_weights,
    row_grouped_linear,
)
from isoexec.kernels.groups import all_reduce, gather_rows, name_of

GATE = Gate("linear.grouped_chain/1", "cpu")
TOKEN_BLOCK = 64
# rows an expert, as loads lie: idle ones, single rows, tiles and a row more
LOADS = ((0, 1, 16, 17), (5, 0, 0, 33), (60, 0, 0, 0), (1, 2, 3, 4))


def _k(run: Run) -> int:
    return int(run.constants["k_block"])


def offsets_of(load: tuple[int, ...]) -> Tensor:
    """int64 [experts + 1] from rows an expert."""
    return torch.tensor([0, *load]).cumsum(0)


def _inputs(load: tuple[int, ...], K: int, N: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, the experts' weights, offsets."""
    x, w = fill(sum(load), K, salt=1, dtype=dtype), fill(len(load), N, K, salt=2, dtype=dtype)
    return x, w, offsets_of(load)


def _one_by_one(x: Tensor, w: Tensor, load: tuple[int, ...], k_block: int) -> Tensor:
    """Each row alone by the dense op with its expert's weight."""
    owner = torch.repeat_interleave(torch.arange(len(load)), torch.tensor(load)).tolist()
    rows = [linear.column_linear(x[i : i + 1], w[e], k_block=k_block) for i, e in enumerate(owner)]
    return torch.cat(rows)


def _exact(x: Tensor, w: Tensor, load: tuple[int, ...]) -> Tensor:
    return torch.cat([part @ one.t() for part, one in zip(x.split(load), w, strict=True)])


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    k_block = _k(run)
    for dtype in run.over("dtype", DTYPES):
        for load in LOADS:
            run.covers(experts=len(load), rows=sum(load))
            for K, N in [(2 * k_block, 256), (k_block, 100), *run.pick([], [(16 * k_block, 48)])]:
                run.covers(K=K, N=N)
                x, w, offsets = _inputs(load, K, N, dtype)
                want = naive.grouped_linear(x, w, offsets, k_block=k_block)
                packed = pack_weights(w, k_block=k_block)
                run.equal(grouped_linear(x, w, offsets, k_block=k_block), want)
                run.equal(row_grouped_linear(x, w, offsets, k_block=k_block), want)
                run.equal(_one_by_one(x, w, load, k_block), want)
                run.equal(chain(x, packed, offsets).to(dtype), want)
                half = K // 2 if k_block < K else 0
                if half:  # from where another rank's part ended
                    left, right = (pack_weights(part, k_block=k_block) for part in w.chunk(2, 2))
                    acc = chain(x[:, :half], left, offsets)
                    kept = acc.clone()
                    run.equal(chain(x[:, half:], right, offsets, acc), chain(x, packed, offsets))
                    run.equal(acc, kept)
    load = (5, 9, 33, 17)
    x, w, offsets = _inputs(load, 8 * k_block, 256, dtype)
    want = grouped_linear(x, w, offsets, k_block=k_block)
    run.control("another_experts_weight", grouped_linear(x, w.roll(1, 0), offsets, k_block=k_block), want)
    run.control("an_offset_one_row_on", grouped_linear(x, w, offsets + _ONE, k_block=k_block), want)
    run.control("half_the_k_block", naive.grouped_linear(x, w, offsets, k_block=k_block // 2), want)
    halves = [
        chain(a, pack_weights(b, k_block=k_block), offsets)
        for a, b in zip(x.chunk(2, 1), w.chunk(2, 2), strict=True)
    ]
    run.control("split_k", halves[0] + halves[1], want)
    run.control("one_ulp_of_the_weights", grouped_linear(x, nudged(w), offsets, k_block=k_block), want)
    run.control("stock_product", _exact(x, w, load), want)


_ONE = torch.tensor([0, 1, 0, 0, 0])


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    k_block = _k(run)
    for dtype in run.over("dtype", DTYPES):
        load = (13, 0, 30, 17)
        x, w, offsets = _inputs(load, 8 * k_block, 192, dtype)
        packed = pack_weights(w, k_block=k_block)
        prefill = chain(x, packed, offsets).to(dtype)
        run.covers(case=["engine_prefill", "engine_decode"])
        owner = torch.repeat_interleave(torch.arange(4), torch.tensor(load)).tolist()
        ends = [(torch.arange(5) > e).to(torch.int64) for e in owner]
        run.equal(
            torch.cat([chain(x[i : i + 1], packed, end).to(dtype) for i, end in enumerate(ends)]), prefill
        )
        for call in (grouped_linear, row_grouped_linear):
            bound = partial(call, k_block=k_block)
            for case, out in trainer_forwards(lambda a, b: bound(a, b, offsets), x, w).items():
                run.covers(case=case)
                run.equal(out, prefill)
    run.control("stock_product_in_one_case", _exact(x, w, load), prefill)
    capped = prefill.clone()
    capped[load[0] - 1] = 0.0
    run.control("a_row_dropped_in_one_case", capped, prefill)


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    k_block = _k(run)
    for dtype in run.over("dtype", DTYPES):
        rows, experts = run.pick(65, 300), 8
        x, w = (
            fill(rows, 4 * k_block, salt=1, dtype=dtype),
            fill(experts, 64, 4 * k_block, salt=2, dtype=dtype),
        )
        packed = pack_weights(w, k_block=k_block)
        ids = fill(rows, experts, salt=7).sort(dim=1, descending=True, stable=True).indices[:, :2]

        def call(some: Tensor) -> Tensor:
            made = plan(ids[some], 0, experts)
            y = chain(dispatch(x[some], made), packed, made.offsets).to(dtype)
            return by_slot(y, made).view(len(some), -1)

        whole = call(torch.arange(rows))
        company(run, call, rows, whole)
    few = plan(ids[:4], 0, experts)
    stock = _exact(x[:4][few.slots // 2], w, tuple(few.offsets.diff().tolist()))
    run.control("stock_product_for_few_rows", by_slot(stock, few).view(4, -1), whole[:4])


def ranks(
    rank: int, size: int, group: ProcessGroup | None, dtype: torch.dtype, k_block: int, axis: str
) -> list[Tensor]:
    """Both linears of experts and all gradients, put together again as one rank would have them.

    ETP shards each expert, EP shares experts out, SP shares out the tokens, of which TP has all on every rank.
    """
    # eight shards of whole blocks, or eight ranks with an expert each
    T, H, E, F = 40, 2 * k_block, *((4, 8 * k_block) if axis == "ETP" else (8, 2 * k_block))
    x, ids = fill(T, H, salt=1, dtype=dtype), fill(T, E, salt=7).sort(dim=1, descending=True).indices[:, :3]
    w_in, w_out = fill(E, 2 * F, H, salt=3, dtype=dtype), fill(E, H, F, salt=4, dtype=dtype, scale=0.2)
    grad = fill(3 * T, H, salt=5, dtype=dtype)
    etp, ep = (group if axis == one else None for one in ("ETP", "EP"))
    count = E // size if axis == "EP" else E
    made = plan(ids, rank * count if axis == "EP" else 0, count)

    def halves(t: Tensor) -> Tensor:
        return torch.cat([part.chunk(size, 1)[rank] for part in t.chunk(2, 1)], 1)

    if axis == "EP":
        w_in, w_out = w_in.chunk(size)[rank], w_out.chunk(size)[rank]
    if axis == "ETP":
        w_in, w_out = halves(w_in), w_out.chunk(size, 2)[rank]
    tokens = gather_rows(x.chunk(size)[rank], name_of(group)) if axis == "SP" else x

    def layer(tokens: Tensor, up: Tensor, down: Tensor) -> Tensor:
        rows = dispatch(tokens, made, ep)
        h = grouped_linear(rows, up, made.offsets, k_block=k_block, group=etp, interleave=2)
        h = h[:, : h.shape[1] // 2] * h[:, h.shape[1] // 2 :]
        return by_slot(row_grouped_linear(h, down, made.offsets, k_block=k_block, group=etp), made, ep)

    y, dx, d_in, d_out = gradients(layer, [tokens, w_in, w_out], grad)
    if axis == "SP":
        rows = [t.chunk(size)[rank] for t in (y, dx)]
        y, dx = (gather_rows(t, name_of(group)) for t in rows)
    if axis == "EP":
        d_in, d_out = gather_rows(d_in, name_of(group)), gather_rows(d_out, name_of(group))
    if axis == "ETP":
        gates, ups = (gather_rows(p.transpose(0, 1), name_of(group)) for p in d_in.chunk(2, 1))
        d_in = torch.cat([gates, ups]).transpose(0, 1)
        d_out = gather_rows(d_out.permute(2, 0, 1), name_of(group)).permute(1, 2, 0)
    return [y, dx, d_in.contiguous(), d_out.contiguous()]


def faults(rank: int, size: int, group: ProcessGroup | None, k_block: int) -> dict[str, Tensor]:
    """A row form done wrongly over ETP: nothing handed over, rank sums added up, ranks in another order."""
    load = (5, 9, 33, 17)
    x, w, offsets = _inputs(load, 8 * k_block, 64, torch.float32)

    def part(of: int) -> tuple[Tensor, Tensor, Tensor]:
        return x.chunk(size, 1)[of], pack_weights(w.chunk(size, 2)[of], k_block=k_block), offsets

    return {
        "hand_over_missing": chain(*part(rank)),
        "rank_sums_added": all_reduce(chain(*part(rank)), name_of(group)),
        "ranks_in_another_order": hand_off(*part(size - 1 - rank), group),
    }


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    k_block = _k(run)
    for dtype in run.over("dtype", DTYPES):
        for axis in ("TP", "SP", "EP", "ETP"):
            whole = on_ranks(1, ranks, dtype, k_block, axis)[0]
            for size in run.over(axis, DEGREES):
                for one in on_ranks(size, ranks, dtype, k_block, axis) if size > 1 else ():
                    run.equal(one, whole)
    x, w, offsets = _inputs((5, 9, 33, 17), 8 * k_block, 64, torch.float32)
    right = chain(x, pack_weights(w, k_block=k_block), offsets)
    for size in DEGREES[1:]:
        for name, wrong in on_ranks(size, faults, k_block)[0].items():
            run.control(name, wrong, right)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    k_block = _k(run)
    with run.poisoned():
        for dtype in run.over("dtype", DTYPES):
            for load in ((0,), (1,), (0, 0, 0), (0, 1, 0), (15, 0, 17)):
                for N in run.over("N", (2, 3, 17)):
                    run.covers(rows=sum(load))
                    x, w, offsets = _inputs(load, k_block, N, dtype)
                    want = naive.grouped_linear(x, w, offsets, k_block=k_block)
                    run.equal(grouped_linear(x, w, offsets, k_block=k_block), want)
            odd = odd_values(dtype)
            load = (len(odd), 0, 4)
            x, w, offsets = _inputs(load, 2 * k_block, 32, dtype)
            clean = grouped_linear(x, w, offsets, k_block=k_block)
            x[: len(odd), 3] = odd
            got = grouped_linear(x, w, offsets, k_block=k_block)
            run.equal(got, naive.grouped_linear(x, w, offsets, k_block=k_block), any_nan=True)
            run.equal(got[len(odd) :], clean[len(odd) :])
            run.control("the_odd_rows", got[: len(odd)], clean[: len(odd)])
    x, w, offsets = _inputs((3, 5), k_block, 32, torch.float32)
    for bad in (offsets[:-1], offsets + 1, torch.tensor([0, 5, 3, 8])[:3], torch.tensor([0, 3, 7])):
        run.refuses(lambda: grouped_linear(x, w, bad, k_block=k_block))
    run.refuses(lambda: grouped_linear(x[:, :-1], w, offsets, k_block=k_block))
    run.refuses(lambda: grouped_linear(x, w[:, :1], offsets, k_block=k_block))
    run.refuses(lambda: grouped_linear(x.half(), w.half(), offsets, k_block=k_block))
    run.refuses(lambda: grouped_linear(x, w[0], offsets, k_block=k_block))
    run.refuses(lambda: pack_weights(w, k_block=8))


@GATE.check("rerun_determinism")
def _reruns(run: Run) -> None:
    k_block = _k(run)
    # the experts of Qwen3-30B-A3B, four of them
    for dtype in run.over("dtype", DTYPES):
        for K, N in ((2048, 1536), (768, 2048)):
            run.covers(K=K, N=N)
            load = (0, 7, 1, 16)
            x, w = wide(sum(load), K, salt=1, dtype=dtype), wide(4, N, K, salt=2, dtype=dtype, scale=2.0**-5)
            packed, offsets = pack_weights(w, k_block=k_block), offsets_of(load)
            reruns(run, lambda: chain(x, packed, offsets).to(dtype), 2)
            order = shuffled(K // k_block)  # as atomics would add
            blocks = x.view(len(x), -1, k_block)[:, order].reshape(len(x), K)
            run.control(
                "blocks_in_another_order", chain(blocks, packed[:, order], offsets), chain(x, packed, offsets)
            )


@GATE.check("backward")
def _backward(run: Run) -> None:
    k_block = _k(run)
    for dtype in run.over("dtype", DTYPES):
        for load in ((0, 1, 16, 17), (70, 0, 1, 65)):
            run.covers(rows=sum(load))
            x, w, offsets = _inputs(load, 2 * k_block, 4 * k_block, dtype)
            g = fill(len(x), 4 * k_block, salt=4, dtype=dtype)
            for turns in (1, 2):
                call = partial(grouped_linear, offsets=offsets, k_block=k_block, interleave=turns)
                whole = gradients(call, [x, w], g)
                run.equal(whole[1], naive.dgrad(g, w, offsets, n_block=k_block, interleave=turns).to(dtype))
                run.equal(whole[2], naive.wgrad(g, x, offsets, m_block=TOKEN_BLOCK).to(dtype))
            row = partial(row_grouped_linear, offsets=offsets, k_block=k_block)
            _, dx, dw = gradients(row, [x, w], g)
            run.equal(dx, naive.dgrad(g, w, offsets, n_block=k_block).to(dtype))
            run.equal(dw, naive.wgrad(x, g, offsets, m_block=TOKEN_BLOCK).transpose(1, 2).to(dtype))
            longer = torch.cat(
                [offsets[:-1], offsets[-1:] + 30]
            )  # rows without gradient at the end of the last
            pad = [torch.cat([t, torch.zeros(30, t.shape[1], dtype=dtype)]) for t in (x, g)]
            padded = partial(row_grouped_linear, offsets=longer, k_block=k_block)
            run.equal(gradients(padded, [pad[0], w], pad[1])[2], dw)
        close(run, row, lambda a, b: _exact(a, b, load), [x, w], g)
    plain = naive.dgrad(g, w, offsets, n_block=k_block)
    turned = naive.dgrad(g, w, offsets, n_block=k_block, interleave=2)
    run.control("gate_and_up_not_in_turns", plain, turned)
    right = naive.wgrad(g, x, offsets, m_block=TOKEN_BLOCK)
    run.control("half_the_token_block", naive.wgrad(g, x, offsets, m_block=TOKEN_BLOCK // 2), right)
    last = [naive.wgrad(g[a:b].flip(0), x[a:b].flip(0), offsets_of((b - a,)), m_block=TOKEN_BLOCK)[0]
            for a, b in zip(offsets.tolist(), offsets.tolist()[1:], strict=False)]  # fmt: skip
    run.control("tokens_descending", torch.stack(last), right)
