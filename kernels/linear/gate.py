# SPDX-License-Identifier: Apache-2.0
"""The gate of linear.chain/1 on CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.gloo import DEGREES, on_ranks
from isoexec.kernels.gates.inputs import DTYPES, fill, nudged, odd_values, shuffled, wide
from isoexec.kernels.gates.recipes import close, company, gradients, reruns, trainer_forwards
from isoexec.kernels.groups import all_reduce, name_of
from isoexec.kernels.linear import chain, column_linear, hand_off, naive, pack_weight, row_linear

GATE = Gate("linear.chain/1", "cpu")
TOKEN_BLOCK = 64


def _inputs(rows: int, K: int, N: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return fill(rows, K, salt=1, dtype=dtype), fill(N, K, salt=2, dtype=dtype)


def _k(run: Run) -> int:
    return int(run.constants["k_block"])


def _out(run: Run, dtype: torch.dtype) -> torch.dtype:
    """What the result is rounded to: the model's dtype, or fp32 at a float32 boundary (a head's logits)."""
    return torch.float32 if run.constants["boundary"] == "float32" else dtype


def _column(run: Run, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    return partial(column_linear, k_block=_k(run), out_dtype=_out(run, dtype))


def _split_k(x: Tensor, w: Tensor, k_block: int, out: torch.dtype) -> Tensor:
    """Two half sums, added: what a library may do for few rows, and an all-reduce always does."""
    halves = [
        chain(a, pack_weight(b, k_block=k_block)) for a, b in zip(x.chunk(2, -1), w.chunk(2, 1), strict=True)
    ]
    return (halves[0] + halves[1]).to(out)


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    k_block = _k(run)
    for dtype in run.over("dtype", DTYPES):
        column, out = _column(run, dtype), _out(run, dtype)
        shapes = [(2 * k_block, 256), (k_block, 100), (16 * k_block, 48), (4 * k_block, 2)]
        for K, N in shapes + run.pick([], [(64 * k_block, 272), (3 * k_block, 7), (12 * k_block, 1024)]):
            run.covers(K=K, N=N)
            for rows in run.over("rows", run.pick((1, 17, 40), (1, 2, 3, 15, 16, 17, 33, 63, 100, 200))):
                x, w = _inputs(rows, K, N, dtype)
                want = naive.linear(x, w, k_block=k_block, out_dtype=out)
                run.equal(column(x, w), want)
                run.equal(chain(x, pack_weight(w, k_block=k_block)).to(out), want)
                acc = fill(rows, N, salt=3)
                kept, packed = acc.clone(), pack_weight(w, k_block=k_block)
                run.equal(chain(x, packed, acc), naive.chain(x, packed, acc))
                run.equal(acc, kept)  # what is handed over is not written to
    x, w = _inputs(64, 8 * k_block, 256, dtype)
    want = naive.linear(x, w, k_block=k_block)
    # by the specification, for half of the narrowest block is none that the kernel takes
    run.control("half_the_k_block", naive.linear(x, w, k_block=k_block // 2), want)
    run.control("twice_the_k_block", chain(x, pack_weight(w, k_block=2 * k_block)), want)
    run.control("split_k", _split_k(x, w, k_block, torch.float32), want)
    run.control("blocks_in_reverse", chain(x.flip(1), pack_weight(w.flip(1), k_block=k_block)), want)
    run.control("one_ulp_of_the_weight", column(x, nudged(w)), want)
    run.control("stock_linear", F.linear(x, w), want)


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    k_block = _k(run)
    for dtype in run.over("dtype", DTYPES):
        x, w = _inputs(60, 8 * k_block, 192, dtype)
        out = _out(run, dtype)
        packed = pack_weight(w, k_block=k_block)  # an engine packs when it loads
        prefill = chain(x, packed).to(out)
        run.covers(case=["engine_prefill", "engine_decode"])
        run.equal(torch.cat([chain(row, packed).to(out) for row in x.split(1)]), prefill)
        run.equal(hand_off(x, packed, None).to(out), prefill)
        shape = (20, 3, 8 * k_block)
        calls = [_column(run, dtype)] + ([partial(row_linear, k_block=k_block)] if out == dtype else [])
        for call in calls:
            for case, got in trainer_forwards(call, x.view(shape), w).items():
                run.covers(case=case)
                run.equal(got.view(60, 192), prefill)
    # float32 now: bfloat16 results hide nearly all of another sum, which the accumulator that is handed on does not
    run.control("split_k_in_one_case", _split_k(x, w, k_block, out), prefill)
    run.control(
        "half_the_k_block_in_one_case", naive.linear(x, w, k_block=k_block // 2, out_dtype=out), prefill
    )


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    k_block = _k(run)
    for dtype in run.over("dtype", DTYPES):
        out = _out(run, dtype)
        x, w = _inputs(run.pick(65, 300), 8 * k_block, 320, dtype)
        packed = pack_weight(w, k_block=k_block)
        whole = chain(x, packed).to(out)
        company(run, lambda rows: chain(x[rows], packed).to(out), len(x), whole)
        for width in run.over("N", (2, 3, 16, 31, 64, 100, 256)):
            for first in (0, 33, 320 - width):
                part = pack_weight(w[first : first + width], k_block=k_block)
                run.equal(chain(x, part).to(out), whole[:, first : first + width])
        apart = torch.cat([fill(len(x), 3, salt=9, dtype=dtype), x, fill(len(x), 2, salt=8, dtype=dtype)], 1)
        run.equal(chain(apart[:, 3:-2], packed).to(out), whole)
        run.equal(chain(x.t().contiguous().t(), packed).to(out), whole)
    run.control("split_k_for_few_rows", _split_k(x[:4], w, k_block, out), whole[:4])
    run.control("one_row_by_stock_linear", F.linear(x[:1], w), whole[:1])


def shards(
    rank: int, size: int, group: ProcessGroup | None, dtype: torch.dtype, k_block: int, sp: bool, head: bool
) -> dict[str, list[Tensor]]:
    """Outputs and gradients of a rank's part of a head, or of a column-parallel and a gate-and-up, and a row-parallel linear."""
    S, B, K, N = 24, 3, 4 * k_block, 8 * k_block
    x, h = fill(S, B, K, salt=1, dtype=dtype), fill(S, B, N, salt=5, dtype=dtype)
    w_in, w_out = fill(2 * N, K, salt=3, dtype=dtype), fill(K, N, salt=4, dtype=dtype)
    g_in = fill(S, B, 2 * N, salt=11) if head else fill(S, B, 2 * N, salt=10, dtype=dtype)
    g_out = fill(S, B, K, salt=9, dtype=dtype)

    def own(t: Tensor, dim: int) -> Tensor:
        return t.chunk(size, dim)[rank].clone()

    def halves(t: Tensor, dim: int) -> Tensor:
        return torch.cat([own(part, dim) for part in t.chunk(2, dim)], dim)

    column = partial(column_linear, k_block=k_block, group=group, sequence_parallel=sp)
    row = partial(row_linear, k_block=k_block, group=group, sequence_parallel=sp)
    x_own, g_own = (own(t, 0) if sp else t for t in (x, g_out))
    done = {"row": gradients(row, [own(h, 2), own(w_out, 1)], g_own)}
    if head:
        call = partial(column, out_dtype=torch.float32)
        done["head"] = gradients(call, [x_own, own(w_in, 0)], own(g_in, 2))
    else:
        done["column"] = gradients(column, [x_own, own(w_in, 0)], own(g_in, 2))
        turns = partial(column, interleave=2)
        done["gate_up"] = gradients(turns, [x_own, halves(w_in, 0)], halves(g_in, 2))
    many, w_many = fill(1304, N, salt=13, dtype=dtype), fill(32, N, salt=14, dtype=dtype)
    packed = pack_weight(own(w_many, 1), k_block=k_block)
    done["hand_off"] = [
        hand_off(own(t, 1), packed, group, scatter=sp) for t in (many, *(() if sp else (many[:1],)))
    ]
    return done


def faults(rank: int, size: int, group: ProcessGroup | None, k_block: int) -> dict[str, Tensor]:
    """A row-parallel linear done wrongly: nothing handed over, rank sums added up, ranks in another order."""
    h, w = fill(60, 8 * k_block, salt=5), fill(4 * k_block, 8 * k_block, salt=4)

    def part(of: int) -> tuple[Tensor, Tensor]:
        return h.chunk(size, 1)[of], pack_weight(w.chunk(size, 1)[of], k_block=k_block)

    return {
        "hand_over_missing": chain(*part(rank)),
        "rank_sums_added": all_reduce(chain(*part(rank)), name_of(group)),
        "ranks_in_another_order": hand_off(*part(size - 1 - rank), group),
    }


def _merge_halves(parts: tuple[Tensor, ...], dim: int) -> Tensor:
    halves = [p.chunk(2, dim) for p in parts]
    return torch.cat([h[0] for h in halves] + [h[1] for h in halves], dim)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    k_block, head = _k(run), run.constants["boundary"] == "float32"
    for dtype in run.over("dtype", DTYPES):
        whole = on_ranks(1, shards, dtype, k_block, False, head)[0]
        for axis, sp in (("TP", False), ("SP", True)):
            for size in run.over(axis, DEGREES):
                ranks = on_ranks(size, shards, dtype, k_block, sp and size > 1, head)
                for name in ("head",) if head else ("column", "gate_up"):
                    y, dx, dw = zip(*(r[name] for r in ranks), strict=True)
                    join = _merge_halves if name == "gate_up" else torch.cat
                    run.equal([join(y, 2), join(dw, 0)], [whole[name][0], whole[name][2]])
                    for got in [torch.cat(dx)] if sp else dx:
                        run.equal(got, whole[name][1])
                y, dx, dw = zip(*(r["row"] for r in ranks), strict=True)
                for got in [torch.cat(y)] if sp else y:
                    run.equal(got, whole["row"][0])
                run.equal([torch.cat(dx, 2), torch.cat(dw, 1)], whole["row"][1:])
                handed = list(zip(*(r["hand_off"] for r in ranks), strict=True))
                for got in [torch.cat(handed[0])] if sp else handed[0]:
                    run.equal(got, whole["hand_off"][0])
                for got in [] if sp and size > 1 else handed[1]:
                    run.equal(got, whole["hand_off"][1])
    right = hand_off(
        fill(60, 8 * k_block, salt=5),
        pack_weight(fill(4 * k_block, 8 * k_block, salt=4), k_block=k_block),
        None,
    )
    for size in DEGREES[1:]:
        for name, wrong in on_ranks(size, faults, k_block)[0].items():
            run.control(name, wrong, right)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    k_block = _k(run)
    with run.poisoned():
        for dtype in run.over("dtype", DTYPES):
            column, out = _column(run, dtype), _out(run, dtype)
            for rows in run.over("rows", (0, 1, 2, 15, 17)):
                for N in run.over("N", (2, 3, 5, 17)):
                    x, w = _inputs(rows, k_block, N, dtype)
                    run.equal(column(x, w), naive.linear(x, w, k_block=k_block, out_dtype=out))
            odd = odd_values(dtype)
            x, w = _inputs(len(odd), 2 * k_block, 32, dtype)
            x[:, 3] = odd  # one odd value a row: a row's non-finite stays in its row
            clean = column(x[:11], w)
            run.equal(column(x, w), naive.linear(x, w, k_block=k_block, out_dtype=out), any_nan=True)
            run.equal(column(x, w)[:11], clean)
            run.holds(clean.isfinite() | (x[:11, 3:4].abs() > 1e30))
            run.control("non_finite_taken_for_zero", column(x.nan_to_num(0.0, 0.0, 0.0), w), column(x, w))
    run.refuses(lambda: pack_weight(torch.zeros(4, k_block + 1), k_block=k_block))
    run.refuses(lambda: pack_weight(torch.zeros(1, k_block), k_block=k_block))
    run.refuses(lambda: pack_weight(torch.zeros(4, 64), k_block=8))
    run.refuses(lambda: pack_weight(torch.zeros(4, k_block, dtype=torch.float16), k_block=k_block))
    run.refuses(lambda: chain(torch.zeros(3, k_block), torch.zeros(2, k_block, 8)))


@GATE.check("rerun_determinism")
def _reruns(run: Run) -> None:
    k_block = _k(run)
    # Qwen3-8B's and MiMo-7B's widths; of a head, what one of eight ranks holds
    model = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096), (11008, 4096))
    shapes = ((4096, 18992),) if run.constants["boundary"] == "float32" else model
    for dtype in run.over("dtype", run.pick(DTYPES[:1], DTYPES)):
        for K, N in run.pick(shapes[:1], shapes):
            if K % k_block:
                continue
            w, out = wide(N, K, salt=2, dtype=dtype, scale=2.0**-5), _out(run, dtype)
            packed = pack_weight(w, k_block=k_block)
            for rows in run.over("rows", run.pick((17,), (1, 17))):
                run.covers(K=K, N=N)
                x = wide(rows, K, salt=1, dtype=dtype)
                reruns(run, lambda: chain(x, packed).to(out), 2)
            order = shuffled(K // k_block)  # as atomics would add
            blocks = x.view(rows, -1, k_block)[:, order].reshape(rows, K)
            run.control("blocks_in_another_order", chain(blocks, packed[order]), chain(x, packed))
    if run.full and run.constants["boundary"] == "model":
        w, x, g = wide(4096, 4096, salt=2), wide(64, 1, 4096, salt=1), wide(64, 1, 4096, salt=4)
        reruns(run, lambda: gradients(partial(row_linear, k_block=k_block), [x, w], g), 1)
    if not run.full:
        run.covers(dtype="float32")
        x, w = wide(17, 1024, salt=1), wide(1024, 1024, salt=2)
        reruns(run, lambda: chain(x, pack_weight(w, k_block=k_block)), 2)


@GATE.check("backward")
def _backward(run: Run) -> None:
    k_block = _k(run)
    for dtype in run.over("dtype", DTYPES):
        out, column = _out(run, dtype), _column(run, dtype)
        for S in run.over("rows", run.pick((1, 50), (1, 7, 32, 50, 100))):
            x, w = (
                fill(S, 2, 2 * k_block, salt=1, dtype=dtype),
                fill(4 * k_block, 2 * k_block, salt=2, dtype=dtype),
            )
            g = fill(S, 2, 4 * k_block, salt=4, dtype=out)
            for turns in (1, 2):
                call = partial(column, interleave=turns)  # type: ignore[call-arg]
                whole = gradients(call, [x, w], g)
                run.equal(whole[1], naive.dgrad(g, w, n_block=k_block, interleave=turns).to(dtype))
                run.equal(whole[2], naive.wgrad(g, x, m_block=TOKEN_BLOCK).to(dtype))
                padded = [torch.cat([t, torch.zeros(30, 2, t.shape[-1], dtype=t.dtype)]) for t in (x, g)]
                long = gradients(call, [padded[0], w], padded[1])
                run.equal([long[1][:S], long[2]], whole[1:])
            if out == dtype:
                _, dx, dw = gradients(partial(row_linear, k_block=k_block), [x, w], g)
                run.equal(dx, naive.dgrad(g, w, n_block=k_block).to(dtype))
                run.equal(dw, naive.wgrad(x, g, m_block=TOKEN_BLOCK).t().to(dtype))
        close(run, column, F.linear, [x, w], g)
    turned = naive.dgrad(g, w, n_block=k_block, interleave=2)
    plain = naive.dgrad(g, w, n_block=k_block)
    run.control("gate_and_up_not_in_turns", plain, turned)
    run.control(
        "half_the_token_block",
        naive.wgrad(g, x, m_block=TOKEN_BLOCK // 2),
        naive.wgrad(g, x, m_block=TOKEN_BLOCK),
    )
    run.control("half_the_n_block", naive.dgrad(g, w, n_block=k_block // 2), plain)
