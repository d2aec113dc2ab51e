# SPDX-License-Identifier: Apache-2.0
"""What proves linear.grouped_mma_chain/1 on sm90: a row is the dense chain with its expert's weight, and so are the gradients.

The op, the library it calls and every own tile are compared with one tile for all shapes (`kernel.reference`), and that one,
expert by expert, with the dense linear's (`linear.hopper.chains.reference`).
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.degrees import degrees, wants
from isoexec.kernels.gates.forward import cases, every_batch, many, reruns_at_full_size, touched
from isoexec.kernels.gates.inputs import fill
from isoexec.kernels.gates.recipes import gradients, trainer_forwards
from isoexec.kernels.gates.sharing import on_ranks
from isoexec.kernels.grouped_linear.hopper import naive, ops
from isoexec.kernels.grouped_linear.hopper.candidates import TILES
from isoexec.kernels.grouped_linear.hopper.kernel import launch, launch_weight, reference, weight_reference
from isoexec.kernels.linear.hopper import chains, transport
from isoexec.kernels.linear.hopper.gate import transports

GATE = Gate("linear.grouped_mma_chain/1", "sm90")
BF16, FP32 = torch.bfloat16, torch.float32
# experts, N, K: Qwen3.5-35B-A3B and Qwen3-30B-A3B
SHAPES = ((256, 1024, 2048), (256, 2048, 512), (128, 1536, 2048), (128, 2048, 768))
TOKENS = 4096
TOP = 8
SOME = 333
PLANTED = (8, 512, 2048)
FEW = 256  # rows of planted faults
TINY = (16, 1024, 2048)  # of checks that walk single rows
SHARED = (8, 1536, 2048, 768)  # experts, twice the inner width, hidden, inner width
DEGREES = (1, 2, 4, 8)
TOO_FAR = 1e-2  # of a product's norm: bits that agree of a wrong product prove nothing


def loads(run: Run, rows: int, experts: int) -> Tensor:
    """int32 offsets: one expert has a quarter of the rows, some have none, the rest what a hash gives them."""
    owner = (torch.arange(rows, dtype=torch.int64) * 7919 + 31) % max(1, experts - experts // 8)
    owner[: rows // 4] = experts // 2
    count = torch.bincount(owner, minlength=experts)
    return torch.cat([torch.zeros(1, dtype=torch.int64), count.cumsum(0)]).to(torch.int32).to(run.device)


def operands(run: Run, rows: int, experts: int, N: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [rows, K], weights [experts, N, K], offsets."""
    run.covers(dtype=BF16, weights=f"{experts}x{N}x{K}")
    w = many(run, experts, N, K, salt=2, scale=(3 / K) ** 0.5)
    return many(run, rows, K, salt=1), w, loads(run, rows, experts)


def _dense(x: Tensor, w: Tensor, offsets: Tensor, layout: chains.Layout) -> Tensor:
    """The dense linear's chain of one expert after another."""
    ends = offsets.tolist()
    parts = [
        chains.reference(layout, x[a:b].contiguous(), w[e], None, FP32)
        for e, (a, b) in enumerate(pairwise(ends))
        if a < b
    ]
    return torch.cat(parts)


def _controls(run: Run) -> None:
    experts, N, K = PLANTED
    x, w, offsets = operands(run, FEW, experts, N, K)
    want = reference(x, w, offsets, None, FP32)
    run.control("another_experts_weight", reference(x, w.roll(1, 0), offsets, None, FP32), want)
    halves = [
        reference(x[:, i::2].contiguous(), w[..., i::2].contiguous(), offsets, None, FP32) for i in (0, 1)
    ]
    run.control("k_in_two_sums", halves[0] + halves[1], want)
    run.control("k_from_the_other_end", reference(x.flip(1), w.flip(2), offsets, None, FP32), want)
    moved = offsets.clone()
    moved[experts // 2] += 1
    run.control("an_offset_one_row_on", reference(x, w, moved, None, FP32), want)


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    for experts, N, K in run.pick(SHAPES[1:2], SHAPES):
        for tokens in run.over("tokens", run.pick((SOME,), (1, 16, SOME, TOKENS))):
            x, w, offsets = operands(run, tokens * TOP, experts, N, K)
            want = reference(x, w, offsets, None, FP32)
            run.equal(ops.grouped_linear(x, w, offsets), want.bfloat16())
            run.equal(ops.chain(x, w, offsets), want)
            run.equal(_dense(x, w, offsets, "forward"), want)
            dy = many(run, len(x), N, salt=4)
            down = reference(dy, w, offsets, None, FP32, down=True)
            run.equal(ops.input_gradient(dy, w, offsets), down.bfloat16())
            run.equal(_dense(dy, w, offsets, "input"), down)
            if tokens == SOME:
                for tile in TILES:
                    for own, back, right in ((x, False, want), (dy, True, down)):
                        out = torch.full_like(right, float("nan"))
                        launch(own, w, offsets, None, out, tile, down=back)
                        run.equal(out, right)
                half = K // 2
                acc = reference(x[:, :half], w[..., :half], offsets, None, FP32)
                run.equal(ops.chain(x[:, half:], w[..., half:], offsets, acc), want)
            few = slice(0, min(64, len(x)))
            exact = naive.forward(x[few], w, offsets.clamp(0, few.stop), out_dtype=FP32).double()
            error = (want[few].double() - exact).norm() / exact.norm()
            run.holds((error < TOO_FAR).view(1))
            del x, w, want, down, dy
    _controls(run)


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    """A token's row of one expert, whatever rows the expert has beside it, and whatever experts there are beside it."""
    experts, N, K = TINY
    x, w, _ = operands(run, TOKENS, experts, N, K)
    owner = (torch.arange(TOKENS) * experts // TOKENS).to(run.device)  # by expert already

    def call(cut: slice) -> Tensor:
        own = owner[cut]
        bounds = torch.arange(experts + 1, device=run.device)
        return ops.grouped_linear(x[cut], w, torch.searchsorted(own, bounds).to(torch.int32))

    every_batch(run, call, call(slice(0, TOKENS)))
    _controls(run)


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    experts, N, K = TINY
    x, w, _ = operands(run, SOME, experts, N, K)
    owner = (torch.arange(SOME) * experts // SOME).to(run.device)
    bounds = torch.arange(experts + 1, device=run.device)

    def call(cut: slice) -> Tensor:
        return ops.grouped_linear(x[cut], w, torch.searchsorted(owner[cut], bounds).to(torch.int32))

    packed = cases(run, call, SOME)
    offsets = torch.searchsorted(owner, bounds).to(torch.int32)
    for op in (ops.grouped_linear, ops.row_grouped_linear):
        for case, out in trainer_forwards(lambda a, b: op(a, b, offsets), x, w).items():
            run.covers(case=case)
            run.equal(out, packed)
    capped = packed.clone()
    capped[SOME // 2] = 0.0
    run.control("a_row_dropped", capped, packed)
    _controls(run)


def ranks(
    rank: int, size: int, group: ProcessGroup | None, device: str, axis: str, name: str | None = None
) -> list[Tensor]:
    """Both linears of experts and all gradients, where ranks shard each expert (ETP), share experts out (EP), or do neither.

    `name` is the transport over which an accumulator is handed on.
    """
    if axis == "ETP":
        transport.use(name)
    E, N, H, F = SHARED
    x, dy = fill(100, H, salt=1, dtype=BF16).to(device), fill(100, H, salt=5, dtype=BF16).to(device)
    up = fill(E, N, H, salt=3, dtype=BF16, scale=(3 / H) ** 0.5).to(device)
    down = fill(E, H, F, salt=4, dtype=BF16, scale=(3 / F) ** 0.5).to(device)
    ends = torch.tensor([0, 3, 3, 40, 41, 60, 77, 77, 100][: E + 1], dtype=torch.int32, device=device)
    ends[-1] = 100
    etp = group if axis == "ETP" else None
    if axis == "ETP":
        up = torch.cat([part.chunk(size, 1)[rank] for part in up.chunk(2, 1)], 1)
        down = down.chunk(size, 2)[rank].contiguous()
    if axis == "EP":
        own = slice(rank * E // size, (rank + 1) * E // size)
        up, down = up[own], down[own]
        a, b = (int(ends[i]) for i in (own.start, own.stop))
        x, dy, ends = x[a:b], dy[a:b], ends[own.start : own.stop + 1] - a

    def layer(rows: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        h = ops.grouped_linear(rows, w_in, ends, group=etp, laps=2)
        half = h.shape[1] // 2
        return ops.row_grouped_linear(h[:, :half] * h[:, half:], w_out, ends, group=etp)

    done = [t.cpu() for t in gradients(layer, [x, up, down], dy)]
    if etp is not None:
        transport.finish(etp)
    return done


def _whole(found: list[list[Tensor]], axis: str) -> list[Tensor]:
    """What the ranks have, as one rank has it."""
    if axis == "EP":
        return [torch.cat(part) for part in zip(*found, strict=True)]
    y, dx = found[0][:2]
    if axis != "ETP":
        return found[0]
    halves = [one[2].chunk(2, 1) for one in found]
    d_up = torch.cat([h[0] for h in halves] + [h[1] for h in halves], 1)
    return [y, dx, d_up, torch.cat([one[3] for one in found], 2)]


wants(GATE, "partition_invariance", TP=DEGREES, SP=DEGREES, EP=DEGREES, ETP=DEGREES)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """Real ranks. TP and SP place tokens and cut no expert: every rank has all rows of the experts it computes."""
    run.covers(dtype=BF16)
    device = run.device.type
    whole = on_ranks(run, 1, ranks, device, "TP")[0]
    for axis in ("TP", "SP", "EP", "ETP"):
        for size in degrees(run, axis, DEGREES):
            handed = axis == "ETP" and size > 1
            for name in run.over("transport", transports(run, size)) if handed else (None,):
                found = on_ranks(run, size, ranks, device, axis, name)
                run.equal(_whole(found, axis), whole)
                if axis == "ETP":
                    for one in found:
                        run.equal(one[:2], whole[:2])
    experts, N, K = PLANTED
    x, w, offsets = operands(run, FEW, experts, N, K)
    want = reference(x, w, offsets, None, FP32)
    for shares in (2, 4):
        parts = [
            reference(a, b, offsets, None, FP32)
            for a, b in zip(x.chunk(shares, 1), w.chunk(shares, 2), strict=True)
        ]
        run.control("rank_sums_added", torch.stack(parts).sum(0), want)
        run.control("hand_over_missing", parts[-1], want)
        acc: Tensor | None = None
        for a, b in zip(x.chunk(shares, 1), w.chunk(shares, 2), strict=True):
            acc = reference(a, b, offsets, acc, FP32)
        assert acc is not None
        run.equal(acc, want)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    run.covers(dtype=BF16)
    _, N, K = TINY
    with run.poisoned():
        for load in ((0,), (1,), (0, 0, 0), (0, 1, 0), (15, 0, 17), (64, 65, 0)):
            rows = sum(load)
            run.covers(rows=rows)
            x, w, _ = operands(run, rows + 5, len(load), N, K)
            offsets = torch.tensor([0, *load]).cumsum(0).to(torch.int32).to(run.device)
            want = reference(x, w, offsets)
            run.equal(ops.grouped_linear(x, w, offsets)[:rows], want[:rows])
            dy = many(run, rows + 5, N, salt=4)
            x[rows:], dy[rows:] = float("nan"), float("nan")  # rows of no expert
            dw = ops.weight_gradient(dy, x, offsets)
            run.equal(dw, weight_reference(dy, x, offsets))
            for e, count in enumerate(load):
                if not count:
                    run.equal(dw[e], torch.zeros_like(dw[e]))
        odd = x[:rows].clone()
        odd[3, 5], odd[70, 7] = float("inf"), float("nan")
        got = ops.grouped_linear(odd, w, offsets)
        run.equal(got, reference(odd, w, offsets), any_nan=True)
        run.holds(~got[3].isfinite() & ~got[70].isfinite())
        others = [i for i in range(rows) if i not in (3, 70)]
        run.equal(got[others], want[others])
        run.control("the_odd_rows", got[[3, 70]], want[[3, 70]])
    for wrong in (
        (x.float(), w.float(), offsets),
        (x[:, : K // 2], w, offsets),
        (x, w, offsets.long()),
        (x, w, offsets[:-1]),
        (x, w[:, : N - 8], offsets),  # a weight no one has certified
    ):
        run.refuses(partial(ops.grouped_linear, *wrong))


@GATE.check("rerun_determinism")
def _rerun(run: Run) -> None:
    for experts, N, K in run.pick(SHAPES[1:2], SHAPES):
        x, w, offsets = operands(run, run.pick(SOME, TOKENS) * TOP, experts, N, K)
        dy = many(run, len(x), N, salt=4)
        for call in (
            partial(ops.grouped_linear, x, w, offsets),
            partial(ops.input_gradient, dy, w, offsets),
            partial(ops.weight_gradient, dy, x, offsets),
        ):
            first = reruns_at_full_size(run, call)
            run.control("the_last_bit_of_one_in_seven", touched(first[:64]), first[:64])
            del first


@GATE.check("backward")
def _backward(run: Run) -> None:
    for experts, N, K in run.pick(SHAPES[1:2], SHAPES):
        x, w, offsets = operands(run, run.pick(SOME, TOKENS) * TOP, experts, N, K)
        dy = many(run, len(x), N, salt=4)
        want = weight_reference(dy, x, offsets)
        for op in (ops.grouped_linear, ops.row_grouped_linear):
            _, dx, dw = gradients(lambda a, b: op(a, b, offsets), [x, w], dy)
            run.equal(dx, reference(dy, w, offsets, down=True))
            run.equal(dw, want)
        run.equal(ops.weight_gradient(dy, x, offsets, out_dtype=FP32).bfloat16(), want)
        ends = offsets.tolist()
        busy = [e for e, (a, b) in enumerate(pairwise(ends)) if a < b][:: max(1, experts // 8)]
        for e in busy:  # the dense linear's gradient of that expert's rows
            a, b = ends[e], ends[e + 1]
            own = chains.reference("weight", dy[a:b].contiguous(), x[a:b].contiguous(), None, BF16)
            run.equal(dw[e], own)
            exact = dy[a:b].double().t() @ x[a:b].double()
            run.holds(((own.double() - exact).norm() / exact.norm() < TOO_FAR).view(1))
        del x, w, dy, want
    experts, N, K = PLANTED
    x, _, offsets = operands(run, FEW, experts, N, K)
    dy = many(run, len(x), N, salt=4)
    right = weight_reference(dy, x, offsets, FP32)
    for tile in TILES:
        out = torch.full_like(right, float("nan"))
        launch_weight(dy, x, offsets, out, tile)
        run.equal(out, right)
    long_dy, long_x = (torch.cat([t, torch.zeros_like(t[:30])]) for t in (dy, x))
    more = offsets.clone()
    more[-1] += 30  # padding behind the last expert's rows
    run.equal(weight_reference(long_dy, long_x, more, FP32), right)
    run.control(
        "tokens_descending",
        weight_reference(dy.flip(0), x.flip(0), (len(x) - offsets).flip(0), FP32).flip(0),
        right,
    )
    run.control("another_experts_rows", weight_reference(dy, x.roll(1, 0), offsets, FP32), right)
