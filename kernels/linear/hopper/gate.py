# SPDX-License-Identifier: Apache-2.0
"""What proves linear.mma_chain/1 on sm90: every weight and number of rows against one tile, and against the exact product.

Gradients likewise, each against a tile that reads the same layout; shards in one process by accumulators handed on, and in real
processes, which may share a GPU, over each transport that is available there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn import functional as F

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.degrees import degrees, wants
from isoexec.kernels.gates.forward import cases, every_batch, many, reruns_at_full_size, touched
from isoexec.kernels.gates.recipes import gradients, trainer_forwards
from isoexec.kernels.gates.sharing import here, on_ranks
from isoexec.kernels.linear.hopper import chains, cublaslt, naive, plain, table, transport
from isoexec.kernels.linear.hopper.kernel import launch, reference
from isoexec.kernels.linear.hopper.ops import (
    chain,
    column_linear,
    input_gradient,
    linear,
    row_linear,
    weight_gradient,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["GATE", "ROWS", "chain_controls", "claimed", "operands", "out_dtype", "transports", "weights"]

GATE = Gate("linear.mma_chain/1", "sm90")
RANKS = (1, 2, 4, 8)
wants(GATE, "partition_invariance", TP=RANKS, SP=RANKS)
# around every size at which a tile or the library's choice may change
ROWS = (
    *(
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        12,
        15,
        16,
        17,
        24,
        31,
        32,
        33,
        40,
        48,
        63,
        64,
        65,
        80,
        96,
        112,
        127,
        128,
        129,
    ),
    *(
        160,
        192,
        200,
        255,
        256,
        257,
        300,
        384,
        500,
        512,
        513,
        640,
        777,
        1000,
        1024,
        1025,
        1500,
        2000,
        2048,
        3000,
    ),
    *(4096, 5000, 6144, 8191, 8192),
)
MOST = 8192
SOME = 777
PLANTED = (64, 512, 4096)  # M, N, K where another chain shows
TOO_FAR = (
    4e-3  # relative error of a bf16 result against float64; one rounding to bf16 makes 1.7e-3 on average
)
TILED = (4096, 4096)  # the weight that every tile in use computes
QUICK_WEIGHTS = ((1024, 3072), (4096, 4096))
GRADIENT_ROWS = (
    *(1, 2, 7, 15, 16, 17, 31, 64, 65, 100, 128, 129, 250, 512, 777, 1024, 2000),
    *(4096, 8191, 8192),
)
NARROW = (
    32768  # a wider weight is a head's: fewer rows of its gradients are compared, and no ranks share it here
)
HEAD_ROWS = 1024
# what ranks share in real processes, and with how many rows; weight gradients are compared with WEIGHT_ROWS of them
SHARED_WEIGHTS = ((4096, 4096), (4096, 12288), (2048, 4096), (6144, 1024))
SHARED_ROWS = (1, 64, 776)
SHARED_HEADS = ((4096, 4096), (151936, 1024))  # whose outputs ranks share, to fp32
WEIGHT_ROWS = 64
PADDED = 37  # rows to which zeros are appended


@contextlib.contextmanager
def claimed() -> Iterator[None]:
    """The library's switches as the chain needs them, and afterwards as they were."""
    before = cublaslt.claim()
    try:
        yield
    finally:
        cublaslt.restore(before)


@contextlib.contextmanager
def _shipped() -> Iterator[None]:
    before = cublaslt.switches()
    cublaslt.restore(cublaslt.SHIPPED)
    try:
        yield
    finally:
        cublaslt.restore(before)


def weights(run: Run) -> Sequence[tuple[int, int]]:
    """The weights [N, K] of a run: all that the table lists."""
    every = table.shapes()
    return run.pick([w for w in every if w in QUICK_WEIGHTS] or every[:2], every)


def operands(run: Run, rows: int, N: int, K: int) -> tuple[Tensor, Tensor]:
    """Rows [rows, K] and a weight [N, K], bf16."""
    run.covers(dtype=torch.bfloat16, weight=f"{N}x{K}")
    return many(run, rows, K, salt=1), many(run, N, K, salt=2, scale=(3 / K) ** 0.5)


def out_dtype(run: Run) -> torch.dtype:
    """What the accumulator is rounded to under the run's constants."""
    return torch.float32 if run.constants["boundary"] == "float32" else torch.bfloat16


def _op(run: Run, x: Tensor, w: Tensor) -> Tensor:
    return linear(x, w, fp32_out=out_dtype(run) == torch.float32)


def _rows(run: Run, x: Tensor, w: Tensor) -> Callable[[slice], Tensor]:
    return lambda cut: _op(run, x[cut], w)


def chain_controls(run: Run) -> None:
    """Products that are not the chain: K in two halves, K from its other end, and the library as it is shipped."""
    M, N, K = PLANTED
    x, w = many(run, M, K, salt=3), many(run, N, K, salt=4, scale=(3 / K) ** 0.5)
    want = reference(x, w, torch.float32)
    halves = [reference(x[:, i::2].contiguous(), w[:, i::2].contiguous(), torch.float32) for i in (0, 1)]
    run.control("k_in_two_sums", halves[0] + halves[1], want)
    run.control("k_from_the_other_end", reference(x.flip(1), w.flip(1), torch.float32), want)
    with _shipped():
        pairs = []
        for M, N, K in cublaslt.PROBES:
            x, w = operands(run, M, N, K)
            pairs.append((F.linear(x, w), reference(x, w)))
    run.control("split_k_allowed", [got for got, _ in pairs], [want for _, want in pairs])


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    dtype = out_dtype(run)
    with claimed():
        for N, K in weights(run):
            x, w = operands(run, MOST, N, K)
            want = reference(x, w, dtype)
            for M in run.over("rows", run.pick(ROWS[::5], ROWS)):
                run.equal(_op(run, x[:M], w), want[:M])
            few, columns = x[:64].double(), w[:2048].double()
            exact = few @ columns.t()
            error = (want[:64, :2048].double() - exact).norm() / exact.norm()
            run.holds((error < TOO_FAR).view(1))  # equal bits of a wrong product prove nothing
            del x, w, want
        x, w = operands(run, PLANTED[0], *TILED)
        want = reference(x, w, dtype)
        for tile in sorted({t for steps in table.tiles().values() for _, t in steps if t}, key=str):
            out = torch.full_like(want, float("nan"))
            launch(x, w, out, tile)
            run.equal(out, want)
    chain_controls(run)


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    with claimed():
        for N, K in weights(run):
            x, w = operands(run, MOST, N, K)
            every_batch(run, _rows(run, x, w), _op(run, x, w))
    chain_controls(run)


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    with claimed():
        for N, K in weights(run):
            x, w = operands(run, SOME, N, K)
            packed = cases(run, _rows(run, x, w), len(x))
            for case, out in trainer_forwards(partial(_op, run), x, w).items():
                run.covers(case=case)
                run.equal(out, packed)
    chain_controls(run)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """Both sides of every weight cut, in one process; then in real processes."""
    dtype = out_dtype(run)
    with claimed():
        for N, K in weights(run):
            x, w = operands(run, SOME, N, K)
            for M in run.over("rows", [M for M in (1, 16, 64, SOME) if M <= SOME]):
                whole = _op(run, x[:M], w)
                for shards in run.over("n_shards", [n for n in RANKS if N % (16 * n) == 0]):
                    run.equal(torch.cat([_op(run, x[:M], part) for part in w.chunk(shards)], 1), whole)
                for shards in run.over("k_shards", [n for n in RANKS[1:] if K % (16 * n) == 0]):
                    acc = None
                    cut = list(zip(x[:M].chunk(shards, 1), w.chunk(shards, 1), strict=True))
                    for a, b in cut[:-1]:
                        acc = chain(a, b, acc)
                    run.equal(chain(*cut[-1], acc, out_dtype=dtype), whole)
            _input_gradient_in_laps(run, x, w)
    x, w = operands(run, *PLANTED)
    pairs = zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)
    parts = [reference(a.contiguous(), b.contiguous(), torch.float32) for a, b in pairs]
    run.control("k_shards_summed", parts[0] + parts[1], reference(x, w, torch.float32))
    _real_ranks(run, dtype)


def _input_gradient_in_laps(run: Run, x: Tensor, w: Tensor) -> None:
    """Shards `[gate_r; up_r]` of a merged weight, the accumulator going around the ranks once a part."""
    N = len(w)
    dy = many(run, len(x), N, salt=5)
    whole = input_gradient(dy, w)
    for shards in [n for n in RANKS if N % (32 * n) == 0]:
        run.covers(laps=2, gradient_shards=shards)
        own = [naive.shard_rows((N // 2, N // 2), rank, shards).to(w.device) for rank in range(shards)]
        held = [(dy[:, rows].chunk(2, 1), w[rows].chunk(2)) for rows in own]
        acc = None
        for lap in (0, 1):
            for g, part in held:
                acc = input_gradient(g[lap], part[lap], acc, out_dtype=torch.float32)
        assert acc is not None
        run.equal(acc.bfloat16(), whole)


def able(rank: int, size: int, group: ProcessGroup | None, device: str) -> dict[str, Tensor]:
    """Which transports the ranks of the group could use, as they agree it."""
    del rank, size
    assert group is not None
    return {name: torch.tensor(not why) for name, why in transport.able(group, here(device)).items()}


def _layouts(N: int, size: int, out: torch.dtype) -> dict[str, tuple[int, ...]]:
    """The rows of each part of a weight: of one part, of two equal ones as gate and up, and of two that differ in width."""
    if out == torch.float32:
        return {"column": (N,)}
    return {"column": (N,), "merged": (N // 2, N // 2), "unequal": (16 * size, N - 16 * size)}


def shared(
    rank: int,
    size: int,
    group: ProcessGroup | None,
    name: str,
    weight: tuple[int, int],
    rows: int,
    sp: bool,
    out: torch.dtype,
    device: str,
) -> dict[str, list[Tensor]]:
    """Outputs and gradients of a rank's part of column-parallel, merged and row-parallel linears, and of gather-K.

    To fp32 only of a column-parallel one: a head and a router are no other.
    """
    run = Run(
        constants={},
        full=True,
        device=here(device),
    )
    if group is not None:
        transport.use(name)
    N, K = weight
    x, w = operands(run, rows, N, K)
    dy, dz = many(run, rows, N, salt=5, dtype=out), many(run, rows, N, salt=6)
    x_own, dz_own = (t.chunk(size)[rank] if sp else t for t in (x, dz))
    done: dict[str, list[Tensor]] = {}
    with claimed():
        for what, parts in _layouts(N, size, out).items():
            own = naive.shard_rows(parts, rank, size).to(w.device)
            laps = [part // size for part in parts]
            call = partial(column_linear, group=group, sequence_parallel=sp, laps=laps, out_dtype=out)
            done[what] = gradients(call, [x_own, w[own]], dy[:, own])
        if out == torch.float32:
            return _sent(done, rows)
        part, w_part = (t.chunk(size, 1)[rank].contiguous() for t in (x, w))
        done["row"] = gradients(
            partial(row_linear, group=group, sequence_parallel=sp), [part, w_part], dz_own
        )
        done["gathered"] = [done["row"][0]]
        if group is not None:
            by_outputs = plain.outputs_shard(w_part, group)
            done["gathered"] = [
                transport.prepare(group, x.device).module.gathered_product(
                    part, by_outputs, group, "rows" if sp else "all", torch.bfloat16
                )
            ]
            transport.finish(group)
    return _sent(done, rows)


def _sent(done: dict[str, list[Tensor]], rows: int) -> dict[str, list[Tensor]]:
    """What goes back to the check: gradients of weights at one number of rows only."""
    return {what: [t.cpu() for t in some[: 3 if rows == WEIGHT_ROWS else 2]] for what, some in done.items()}


def faults(rank: int, size: int, group: ProcessGroup | None, name: str, device: str) -> dict[str, Tensor]:
    """Shared products done wrongly, in fp32, and the right one."""
    run = Run(
        constants={},
        full=True,
        device=here(device),
    )
    assert group is not None
    transport.use(name)
    x, w = operands(run, *PLANTED)
    dy = many(run, len(x), len(w), salt=5)
    half = len(w) // 2
    own = naive.shard_rows((half, half), rank, size).to(w.device)

    def part(of: int) -> tuple[Tensor, Tensor]:
        a, b = (t.chunk(size, 1)[of].contiguous() for t in (x, w))
        return a, b

    with claimed():
        moved = transport.prepare(group, x.device).module
        alone = chain(*part(rank))
        summed = alone.clone()
        dist.all_reduce(summed, group=group)
        wide = torch.float32
        found = {
            "right": moved.row_product(*part(rank), group, "all", wide),
            "hand_over_missing": alone,
            "rank_sums_added": summed,
            "ranks_in_another_order": moved.row_product(*part(size - 1 - rank), group, "all", wide),
            **{
                what: moved.column_gradient(
                    dy[:, own].contiguous(), w[own], group, parts, "all", torch.bfloat16
                )
                for what, parts in (
                    ("right_gradient", [half // size] * 2),
                    ("one_lap_for_two_parts", [2 * half // size]),
                    ("parts_of_another_width", [16, 2 * half // size - 16]),
                )
            },
        }
        transport.finish(group)
    return {what: t.cpu() for what, t in found.items()}


def transports(run: Run, size: int) -> list[str]:
    """Which transports `size` ranks could use."""
    return [name for name, yes in on_ranks(run, size, able, run.device.type)[0].items() if bool(yes)]


def _real_ranks(run: Run, out: torch.dtype) -> None:
    device, wide = run.device.type, out == torch.float32
    cut = SHARED_HEADS if wide else SHARED_WEIGHTS
    narrow, counts = run.pick(cut[:1], cut), SHARED_ROWS[:2] if wide else SHARED_ROWS
    whole: dict[tuple[tuple[int, int], int], dict[str, list[Tensor]]] = {}
    served: dict[int, list[str]] = {}
    for axis, sp in (("TP", False), ("SP", True)):
        for size in degrees(run, axis, RANKS):
            if size > 1 and size not in served:
                served[size] = transports(run, size)
            names = ["none"] if size == 1 else served[size]
            for name in run.over("transport", names):
                for weight in narrow:
                    if weight[0] % ((16 if wide else 32) * size) or weight[1] % (16 * size):
                        continue
                    for rows in run.over("shared_rows", counts):
                        if sp and rows % size:
                            continue
                        if (weight, rows) not in whole:
                            (whole[weight, rows],) = on_ranks(
                                run, 1, shared, name, weight, rows, False, out, device
                            )
                        one = whole[weight, rows]
                        many_ranks = (
                            on_ranks(run, size, shared, name, weight, rows, sp, out, device)
                            if size > 1
                            else [one]
                        )
                        _compare(run, many_ranks, one, sp, out)
            if size > 1 and not sp and not wide:
                for name in names:
                    wrong = on_ranks(run, size, faults, name, device)[0]
                    x, w = operands(run, *PLANTED)
                    dy = many(run, len(x), len(w), salt=5)
                    with claimed():
                        right = chain(x, w).cpu()
                        gradient = input_gradient(dy, w).cpu()
                    run.equal([wrong.pop("right"), wrong.pop("right_gradient")], [right, gradient])
                    for fault in ("one_lap_for_two_parts", "parts_of_another_width"):
                        run.control(fault, wrong.pop(fault), gradient)
                    for fault, got in wrong.items():
                        run.control(fault, got, right)


def _compare(
    run: Run,
    ranks: Sequence[dict[str, list[Tensor]]],
    whole: dict[str, list[Tensor]],
    sp: bool,
    out: torch.dtype,
) -> None:
    """Results by rank, put together, are those of one rank."""

    def same(parts: Sequence[Tensor], want: Tensor) -> None:
        for got in [torch.cat(list(parts))] if sp else parts:
            run.equal(got, want)

    for what, parts in _layouts(whole["column"][0].shape[1], len(ranks), out).items():
        y, dx, *dw = zip(*(r[what] for r in ranks), strict=True)
        run.equal(_joined(y, parts, 1), whole[what][0])
        same(dx, whole[what][1])
        run.equal([_joined(d, parts, 0) for d in dw], whole[what][2:])
    if out == torch.float32:
        if len(ranks) > 1:
            turned = torch.cat([r["column"][0] for r in reversed(ranks)], 1)
            run.control("outputs_of_another_rank", turned, whole["column"][0])
        return
    y, dx, *dw = zip(*(r["row"] for r in ranks), strict=True)
    same(y, whole["row"][0])
    run.equal(torch.cat(dx, 1), whole["row"][1])
    run.equal([torch.cat(d, 1) for d in dw], whole["row"][2:])
    same([r["gathered"][0] for r in ranks], whole["row"][0])


def _joined(shards: Sequence[Tensor], parts: Sequence[int], dim: int) -> Tensor:
    """Shards of a weight merged of `parts`, as one rank holds them."""
    pieces = [one.split([part // len(shards) for part in parts], dim) for one in shards]
    return torch.cat([piece[lap] for lap in range(len(parts)) for piece in pieces], dim)


@GATE.check("backward")
def _backward(run: Run) -> None:
    logits = out_dtype(run)
    with claimed():
        for N, K in weights(run):
            most = min(MOST, HEAD_ROWS if N > NARROW else MOST)
            x, w = operands(run, most, N, K)
            dy = many(run, most, N, salt=5, dtype=logits)
            g = dy.bfloat16()
            want = chains.reference("input", g, w)
            for M in run.over("rows", [m for m in run.pick(GRADIENT_ROWS[::4], GRADIENT_ROWS) if m <= most]):
                run.equal(input_gradient(dy[:M], w), want[:M])
                dw = chains.reference("weight", g[:M], x[:M])
                run.equal(weight_gradient(dy[:M], x[:M]), dw)
                wide = weight_gradient(dy[:M], x[:M], out_dtype=torch.float32)
                run.equal(wide.bfloat16(), dw)
            del want, dw, wide
            few = [t[:64].double() for t in (g, x)]
            exact = ((few[0] @ w.double())[:, :2048], few[0][:, :2048].t() @ few[1])
            found = input_gradient(dy[:64], w)[:, :2048], weight_gradient(dy[:64], x[:64])[:2048]
            for got, true in zip(found, exact, strict=True):
                run.holds(((got.double() - true).norm() / true.norm() < TOO_FAR).view(1))
            some = min(PADDED, most)
            _, dx, dw = gradients(partial(linear, fp32_out=logits == torch.float32), [x[:some], w], dy[:some])
            run.equal([dx, dw], [input_gradient(dy[:some], w), weight_gradient(dy[:some], x[:some])])
            long = [torch.cat([t[:some], t.new_zeros(27, t.shape[1])]) for t in (dy, x)]
            run.equal(weight_gradient(*long), dw)
            del x, w, dy, g, few, exact, found, dx, dw, long
        _tiles_of_gradients(run)
    M, N, K = PLANTED
    dy, w = many(run, M, K, salt=5), many(run, K, N, salt=2)
    dx = chains.reference("input", dy, w, None, torch.float32)
    halves = [
        chains.reference("input", dy[:, i::2].contiguous(), w[i::2], None, torch.float32) for i in (0, 1)
    ]
    run.control("n_in_two_sums", halves[0] + halves[1], dx)
    run.control(
        "n_from_the_other_end", chains.reference("input", dy.flip(1), w.flip(0), None, torch.float32), dx
    )
    tall, deep = many(run, K, N, salt=5), many(run, K, N, salt=1)
    dw = chains.reference("weight", tall, deep, None, torch.float32)
    halves = [chains.reference("weight", tall[i::2], deep[i::2], None, torch.float32) for i in (0, 1)]
    run.control("tokens_in_two_sums", halves[0] + halves[1], dw)
    acc = many(run, M, N, salt=9, dtype=torch.float32)
    went_on = chains.reference("input", dy, w, acc, torch.float32)
    run.control("accumulator_added_after_the_loop", dx + acc, went_on)
    run.control("no_gradient", torch.zeros_like(dx), dx)


def _tiles_of_gradients(run: Run) -> None:
    """Every tile in use, in every layout, from zero and going on, against the one of reference; that one against the op's."""
    N, K = TILED
    x, w = operands(run, PLANTED[0], N, K)
    dy = many(run, PLANTED[0], N, salt=5)
    run.equal(chains.reference("forward", x, w), reference(x, w))
    held = [*table.UNTUNED.values(), *table._chain_tiles().values()]
    tiles = sorted({tile for steps in held for _, tile in steps if tile}, key=str)
    for layout, a, b in (("forward", x, w), ("input", dy, w), ("weight", dy, x)):
        run.covers(layout=layout)
        rows, columns, _ = chains.sizes(layout, a, b)  # type: ignore[arg-type]
        for acc in (None, many(run, rows, columns, salt=9, dtype=torch.float32)):
            want = chains.reference(layout, a, b, acc, torch.float32)  # type: ignore[arg-type]
            for tile in tiles:
                for dtype in (torch.float32, torch.bfloat16):
                    out = torch.full((rows, columns), float("nan"), dtype=dtype, device=a.device)
                    chains.launch(layout, a, b, acc, out, tile)  # type: ignore[arg-type]
                    run.equal(out, want.to(dtype))


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    N, K = weights(run)[0]
    x, w = operands(run, 16, N, K)
    with claimed():
        run.holds(torch.tensor([_op(run, x[:0], w).shape == (0, N)]))
        whole = _op(run, x, w)
        for row, value in ((3, float("nan")), (0, float("inf")), (15, float("-inf"))):
            odd = x.clone()
            odd[row, 5] = value
            got = _op(run, odd, w)
            others = [i for i in range(16) if i != row]
            run.equal(got[others], whole[others])
            run.holds(~got[row].isfinite())
            run.equal(got, reference(odd, w, out_dtype(run)), any_nan=True)
            run.control("the_odd_row", got[row], whole[row])
        for wrong_x, wrong_w in (
            (x.float(), w.float()),
            (x[:, : K // 2], w),
            (x, w[: N - 8]),  # a weight no one has certified
            (x, w.t().contiguous().t()),
        ):
            run.refuses(partial(_op, run, wrong_x, wrong_w))
    _signs_and_refusals(run, x, w)
    with _shipped():  # the library is asked for, and its switches are not the chain's
        refused = False
        try:
            cublaslt.linear(x, w)
        except cublaslt.SwitchError:
            refused = True
    run.holds(torch.tensor([refused]))


def _signs_and_refusals(run: Run, x: Tensor, w: Tensor) -> None:
    """Zeros of either sign give the same zero in every layout; what has no certified provider is refused."""
    with claimed():
        for zero in (0.0, -0.0):
            none = torch.full_like(x, zero)
            for down in (w.abs(), -w.abs()):
                run.equal(_op(run, none, down), reference(none, down, out_dtype(run)))
            dy = torch.full((16, len(w)), zero, dtype=x.dtype, device=x.device)
            run.equal(input_gradient(dy, -w.abs()), chains.reference("input", dy, -w.abs()))
            run.equal(weight_gradient(dy, -x.abs()), chains.reference("weight", dy, -x.abs()))
        run.holds(torch.tensor([weight_gradient(dy[:0], x[:0]).eq(0).all()]))
        acc = torch.zeros(16, len(w), device=x.device)
        for wrong in (
            partial(chain, x, w, acc.double()),
            partial(chain, x, w, acc[:15]),
            partial(input_gradient, dy[:, :-8], w),
            partial(weight_gradient, dy[:15], x),
            partial(chain, x[:, 1:], w[:, 1:], acc),
        ):
            run.refuses(wrong)


@GATE.check("rerun_determinism")
def _rerun(run: Run) -> None:
    with claimed():
        for N, K in weights(run):
            x, w = operands(run, MOST, N, K)
            for M in run.over("rows", (1, 16, MOST)):
                first = reruns_at_full_size(run, partial(_op, run, x[:M], w))
            if N < NARROW:
                dy = many(run, MOST, N, salt=5)
                reruns_at_full_size(run, partial(input_gradient, dy, w))
                reruns_at_full_size(run, partial(weight_gradient, dy, x))
                del dy
            run.control("the_last_bit_of_one_in_seven", touched(first[:64]), first[:64])
