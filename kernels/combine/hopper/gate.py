# SPDX-License-Identifier: Apache-2.0
"""What proves moe.combine/1 on sm90: its specification on the GPU and the CPU, by slot, through a map, with a shared expert."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.kernels.combine import naive
from isoexec.kernels.combine.hopper.kernel import launch_sum
from isoexec.kernels.combine.hopper.ops import combine, combine_rows
from isoexec.kernels.gates import Gate, Run, rows
from isoexec.kernels.gates.degrees import degrees, wants
from isoexec.kernels.gates.forward import many
from isoexec.kernels.gates.inputs import DTYPES, fill, odd_values
from isoexec.kernels.gates.recipes import gradients
from isoexec.kernels.gates.rows import Rows
from isoexec.kernels.gates.sharing import on_ranks

GATE = Gate("moe.combine/1", "sm90")
SHAPES = ((8, 2048), (8, 4096), (4, 7168), (10, 768))  # places, width: Qwen3-30B and 35B, 235B, DeepSeek-V3's
FREE = ((256, 2), (1024, 8), (2048, 4))  # block, warps
PLANTED = (512, 8, 2048)
TOKENS = 64  # over ranks
DEGREES = (1, 2, 4, 8)


def _inputs(run: Run, count: int, k: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    weights = many(run, count, k, salt=2, dtype=torch.float32).abs() + 0.01
    return (
        many(run, count, k, width, salt=1, dtype=dtype, scale=3.0),
        weights / weights.sum(1, keepdim=True),
        many(run, count, width, salt=3, dtype=dtype),
    )


def _op(y: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
    return combine(y.reshape(-1, y.shape[-1]), weights, shared)


def _moved(y: Tensor, weights: Tensor) -> Tensor:
    """Through a map: rows lie turned round."""
    flat = y.reshape(-1, y.shape[-1])
    index = torch.arange(len(flat) - 1, -1, -1, device=y.device)
    return combine_rows(flat.flip(0), index, weights)


def _spec(y: Tensor, weights: Tensor, shared: Tensor | None = None) -> Tensor:
    return naive.combine(y.reshape(-1, y.shape[-1]), weights, shared)


def _spec_gradients(grad: Tensor, y: Tensor, weights: Tensor, *shared: Tensor) -> list[Tensor]:
    dy, dw = naive.combine_backward(grad, y.reshape(-1, y.shape[-1]), weights)
    return [dy.view(y.shape), dw, *(grad for _ in shared)]


def _exact(y: Tensor, weights: Tensor, shared: Tensor | float = 0.0) -> Tensor:
    return (weights.unsqueeze(-1) * y).sum(1) + shared


def _written(y: Tensor, weights: Tensor, shared: Tensor, **free: int) -> Tensor:
    out = torch.full_like(shared, float("nan"))
    launch_sum(y.view(-1, y.shape[-1]), None, weights, shared, out, weights.shape[1], **free)
    return out


def _over(run: Run, count: int) -> Iterator[Rows]:
    for dtype in run.over("dtype", DTYPES):
        for k, width in SHAPES:
            run.covers(places=k, width=width)
            inputs = _inputs(run, count, k, width, dtype)
            yield Rows(
                op=_op,
                spec=_spec,
                by_row=inputs,
                free=[partial(_written, *inputs, block=block, num_warps=warps) for block, warps in FREE],
                spec_gradients=_spec_gradients,
                exact=_exact,
            )
        yield Rows(op=_moved, spec=_spec, by_row=inputs[:2], spec_gradients=_spec_gradients, exact=_exact)


def _planted(run: Run) -> None:
    y, weights, shared = _inputs(run, *PLANTED, torch.float32)
    want = _op(y, weights, shared)
    run.control("from_the_last_place", _op(y.flip(1), weights.flip(1), shared), want)
    acc = torch.zeros_like(shared)
    for j in range(weights.shape[1]):
        acc = (acc.double() + weights[:, j : j + 1].double() * y[:, j].double()).float()
    run.control("multiply_and_add_fused", acc + shared, want)
    run.control("another_experts_row", _op(y.roll(1, 0), weights, shared), want)
    y, weights, shared = _inputs(run, *PLANTED, torch.bfloat16)
    late = combine(y.reshape(-1, y.shape[-1]), weights) + shared
    run.control("shared_added_after_rounding", late, _op(y, weights, shared))


rows.hang(GATE, _over, _planted)


def ranks(
    rank: int, size: int, group: ProcessGroup | None, device: str, dtype: torch.dtype, axis: str
) -> list[Tensor]:
    """Output and gradients where ranks share experts (EP), compute all of them (TP, ETP), or share tokens (SP)."""
    from isoexec.kernels.dispatch.gate import chosen
    from isoexec.kernels.dispatch.hopper.ops import by_slot, dispatch, plan

    y = fill(TOKENS * 8, 96, salt=1, dtype=dtype, scale=3.0).to(device)
    weights = (fill(TOKENS, 8, salt=2).abs() + 0.01).to(device)
    shared, grad = (fill(TOKENS, 96, salt=salt, dtype=dtype).to(device) for salt in (3, 5))
    if axis == "SP":
        own = [t.chunk(size)[rank] for t in (y, weights, shared)]
        return [t.cpu() for t in gradients(combine, own, grad.chunk(size)[rank])]
    count = 16 // size if axis == "EP" else 16
    made = plan(chosen(TOKENS, 16, 8).to(device), rank * count if axis == "EP" else 0, count)
    among = group if axis == "EP" else None
    lying = dispatch(
        y, type(made)(**{**vars(made), "tokens": len(y), "places": 1})
    )  # each slot's row is its own

    def call(own: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return combine(by_slot(own, made, among), w, s)

    out, d_own, dw, ds = gradients(call, [lying, weights, shared], grad)
    return [t.cpu() for t in (out, by_slot(d_own, made, among), dw, ds)]


wants(GATE, "partition_invariance", TP=DEGREES, SP=DEGREES, EP=DEGREES, ETP=DEGREES)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """Real ranks; and experts' sums that are exchanged instead of rows, as a fault."""
    device = run.device.type
    for dtype in run.over("dtype", DTYPES):
        whole = on_ranks(run, 1, ranks, device, dtype, "EP")[0]
        for axis in ("TP", "EP", "ETP"):
            for size in degrees(run, axis, DEGREES):
                for one in on_ranks(run, size, ranks, device, dtype, axis):
                    run.equal(one, whole)
        for size in degrees(run, "SP", DEGREES):
            parts = zip(*on_ranks(run, size, ranks, device, dtype, "SP"), strict=True)
            run.equal([torch.cat(part) for part in parts], whole)
        y, weights, _ = _inputs(run, *PLANTED, dtype)
        for size in (2, 4):
            sums = [_spec(y, weights * (torch.arange(8, device=run.device) % size == i)) for i in range(size)]
            total = torch.stack(sums).sum(0)
            run.control("partial_sums_exchanged", total, _spec(y, weights))


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    with run.poisoned():
        for dtype in run.over("dtype", DTYPES):
            for count in run.over("rows", (0, 1, 3)):
                for k, width in ((1, 1), (3, 5), (16, 1025)):
                    inputs = _inputs(run, count, k, width, dtype)
                    run.equal(_op(*inputs), _spec(*inputs))
                    run.equal(_moved(*inputs[:2]), _spec(*inputs[:2]))
            odd = odd_values(dtype).to(run.device)
            y, weights, shared = _inputs(run, len(odd), 2, 8, dtype)
            clean = _op(y, weights, shared)
            y[:, 0, 3] = odd
            got = _op(y, weights, shared)
            run.equal(got, _spec(y, weights, shared), any_nan=True)
            run.control("the_odd_values", got, clean)
            none = torch.full((6,), -1, dtype=torch.int32, device=run.device)
            kept = combine_rows(y.view(-1, 8), none, weights[:3])
            run.equal(kept, torch.zeros_like(kept))  # no row is of these slots
    zeros = torch.zeros(8, 4, device=run.device)
    run.refuses(partial(combine, zeros[:6], zeros[:4, :2]))
    run.refuses(partial(combine, zeros, zeros[:4, :2].bfloat16()))
    run.refuses(partial(combine, zeros.half(), zeros[:4, :2]))
    run.refuses(partial(combine, zeros, zeros[:4, :2], zeros))
    run.refuses(partial(combine_rows, zeros, none.float(), zeros[:4, :2]))
