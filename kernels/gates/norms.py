# SPDX-License-Identifier: Apache-2.0
"""The gate of an RMSNorm by pairs on an accelerator: hidden rows, residuals and heads, and the sums that ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isoexec.kernels.gates import rows
from isoexec.kernels.gates.degrees import degrees, wants
from isoexec.kernels.gates.forward import many
from isoexec.kernels.gates.inputs import DTYPES, odd_values, wide
from isoexec.kernels.gates.recipes import gradients
from isoexec.kernels.gates.rows import Rows
from isoexec.kernels.gates.sharing import here, on_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from isoexec.kernels.gates.checking import Gate, Run

__all__ = ["free_settings", "hang_norm", "real_ranks", "shared_scale"]

EPS = 1e-6
PLANTED = (512, 4096)  # rows and width where another sum shows
# hidden sizes and, by heads of the projection they lie in, head widths: Qwen3-0.6B, Qwen3.5-35B-A3B, Qwen3-8B
SHAPES = (("hidden", 1, 1024), ("hidden", 1, 2048), ("hidden", 1, 4096), ("heads", 9, 128), ("heads", 5, 256))
FREE = ((1, 1, 1, 1), (1, 4, 3, 8), (4, 1, 1, 4), (4, 2, 2, 8), (8, 1, 1, 2))  # rows, tiles, stages, warps
SHARED = 8192  # tokens that ranks share
DEGREES = (1, 2, 4, 8)
PLACES = {"SP": ("sequence", 0), "TP": ("heads", 2)}  # what ranks share, and the dimension it is
RANKED = {"SP": (512, 2, 256), "TP": (64, 2, 8, 128)}  # of real ranks

Launch = Callable[..., None]


def free_settings(launch: Launch, x: Tensor, *inputs: Any, **fixed: Any) -> Iterator[Callable[[], Tensor]]:
    """The norm of `x` written with other rows, tiles, stages and warps a program; `inputs` and `fixed` as `launch` takes them."""

    def write(per: int, tiles: int, stages: int, warps: int) -> Tensor:
        out = torch.full(x.shape, float("nan"), dtype=x.dtype, device=x.device)
        free = {"rows_per_program": per, "tiles": tiles, "stages": stages, "num_warps": warps}
        launch(x, None, *inputs, out, None, EPS, **free, **fixed)
        return out

    for per, tiles, stages, warps in FREE:
        if per * x.shape[-1] <= max(4096, x.shape[-1]):
            yield partial(write, per, tiles, stages, warps)


def hang_norm(
    gate: Gate,
    ops: ModuleType,
    naive: ModuleType,
    launch: Launch,
    *,
    centred: bool,
    widest: Callable[[], int],
) -> None:
    """Hang every check of a norm on its gate; `launch` writes it, `widest` is the width its ops end at."""

    def formula(x: Tensor, w: Tensor, eps: float) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (1.0 + w if centred else w)

    def formula_of_sum(x: Tensor, r: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return formula(x + r, w, eps), x + r

    def of_norm(g: Tensor, x: Tensor, w: Tensor, eps: float) -> list[Tensor]:
        return [naive.dx(g, x, w, eps), naive.dgamma(g, x, eps).to(w.dtype)]

    def of_sum(g: Tensor, x: Tensor, r: Tensor, w: Tensor, eps: float) -> list[Tensor]:
        own, of_h = g.chunk(2, -1)
        h = naive.residual_add(x, r)
        dx = naive.add_dx(own, of_h, h, w, eps)
        return [dx, dx, naive.dgamma(own, h, eps).to(w.dtype)]

    def over(run: Run, count: int) -> Iterator[Rows]:
        for dtype in run.over("dtype", DTYPES):
            for kind, heads, width in SHAPES:
                run.covers(shape=f"{kind} {width}", residual=[False, True])
                w = many(run, width, salt=1, dtype=dtype)
                x = many(run, count, heads * width, salt=2, dtype=dtype, scale=3.0)
                if heads > 1:  # as they lie in a projection
                    x = x.view(count, heads, width)[:, : heads - 1]
                yield Rows(
                    op=ops.rms_norm,
                    spec=naive.rms_norm,
                    by_row=(x,),
                    shared=(w, EPS),
                    free=free_settings(launch, x, w, scale=2 if centred else 1),
                    spec_gradients=of_norm,
                    exact=formula,
                )
                if heads == 1:
                    yield Rows(
                        op=ops.add_rms_norm,
                        spec=naive.add_rms_norm,
                        by_row=(x, many(run, count, width, salt=3, dtype=dtype)),
                        shared=(w, EPS),
                        spec_gradients=of_sum,
                        exact=formula_of_sum,
                    )

    def planted(run: Run) -> None:
        x = many(run, *PLANTED, salt=4, dtype=torch.float32, scale=3.0)
        w = many(run, PLANTED[1], salt=5, dtype=torch.float32)
        want = naive.rms_norm(x, w, EPS)
        fused = torch.full_like(x, float("nan"))
        launch(x, None, w, fused, None, EPS, scale=2 if centred else 1, fused_multiply_add=True)
        run.control("fused_multiply_add", fused, want)
        xf, scale = x.cpu(), (1.0 + w if centred else w).cpu()
        halves = naive.inverse_root(torch.stack((xf[:, ::2], xf[:, 1::2])).movedim(0, 1).flatten(1), EPS)
        run.control("another_order_of_the_sum", xf * halves * scale, want.cpu())
        other = torch.full_like(x, float("nan"))
        launch(x, None, w, other, None, EPS, scale=1 if centred else 2)
        run.control("without_the_one" if centred else "with_a_one", other, want)

    rows.hang(gate, over, planted)
    gate.check("partition_invariance")(partial(_partition, ops=ops))
    wants(gate, "partition_invariance", TP=DEGREES, SP=DEGREES)
    gate.check("degenerate_shapes")(partial(_degenerate, ops=ops, naive=naive, widest=widest))


def shared_scale(
    run: Run, call: Callable[..., Tensor], by_row: tuple[Tensor, ...], w: Tensor, grad: Tensor
) -> None:
    """The scale's gradient from the chains of shards of tokens, and from heads, is that of all; nothing here starts a process.

    `call(*by_row, w)` is the op, `by_row` are `[tokens, heads, width]`; what ranks exchange is put together as they do it.
    """
    from isoexec.kernels.rms_norm.hopper.backward import launch_gradient, launch_total, launch_trees
    from isoexec.kernels.rms_norm.hopper.naive import CHAINS, TOKENS

    x = by_row[0]
    gate = by_row[1] if len(by_row) > 1 else None
    dw = gradients(call, [*by_row, w], grad)[-1]

    def chains(tokens: slice, heads: slice) -> Tensor:
        part = x[tokens, heads]
        free: dict[str, Any] = {}
        if gate is not None:
            free = {"gate": gate[tokens, heads], "dgate": torch.empty_like(part).contiguous()}
        dx = torch.empty(part.shape, dtype=x.dtype, device=x.device)
        found = launch_gradient(grad[tokens, heads].contiguous(), part, w, dx, EPS, **free)
        assert found is not None
        return found

    def total(trees: Tensor) -> Tensor:
        out = torch.empty_like(w)
        launch_total(trees, out)
        return out

    every, tokens, heads = slice(None), len(x), x.shape[1]
    for shards in run.over("token_shards", DEGREES):
        step = tokens // shards
        if step % TOKENS == 0:
            parts = [chains(slice(i * step, (i + 1) * step), every) for i in range(shards)]
            run.equal(total(launch_trees(torch.cat(parts))), dw)
            if step % (TOKENS * CHAINS) == 0:
                run.equal(total(torch.cat([launch_trees(part) for part in parts])), dw)
    for shards in run.over("head_shards", DEGREES):
        step = heads // shards
        if step * shards == heads:
            sums = []
            for i in range(shards):
                own = torch.empty(step, x.shape[-1], dtype=torch.float32, device=x.device)
                launch_total(launch_trees(chains(every, slice(i * step, (i + 1) * step))), own)
                sums.append(own)
            run.equal(total(torch.cat(sums).unsqueeze(0)), dw)
    halves = [total(launch_trees(chains(every, slice(i, None, 2)))) for i in range(2)]
    run.control("sums_of_ranks_added", (halves[0].float() + halves[1].float()).to(w.dtype), dw)


def ranks(
    rank: int,
    size: int,
    group: ProcessGroup | None,
    module: str,
    axis: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: str,
) -> list[Tensor]:
    """Output and gradients of a norm whose tokens (SP) or heads (TP) real ranks share; the scale's come last."""
    shard, dim = PLACES[axis]
    call = import_module(module).rms_norm_grad
    inputs = wide(*shape, salt=1, dtype=dtype), wide(shape[-1], salt=3, dtype=dtype)
    x, w, g = (t.to(here(device)) for t in (*inputs, wide(*shape, salt=2, dtype=dtype)))
    x, g = (t.chunk(size, dim)[rank] for t in (x, g))
    return [
        t.cpu()
        for t in gradients(partial(call, eps=EPS, shard=shard if group else "none", group=group), [x, w], g)
    ]


def real_ranks(
    run: Run, worker: Callable[..., list[Tensor]], module: str, dtype: torch.dtype, *axes: str
) -> None:
    """Results of `worker` by rank, put together, are those of one; its last, the scale's gradient, lies on the first rank."""
    for axis in axes:
        given = (module, axis, dtype, RANKED[axis], run.device.type)
        whole = on_ranks(run, 1, worker, *given)[0]
        for size in degrees(run, axis, DEGREES):
            found = on_ranks(run, size, worker, *given)
            *by_rank, scale = zip(*found, strict=True)
            run.equal([torch.cat(parts, PLACES[axis][1]) for parts in by_rank], whole[:-1])
            run.equal(list(scale), [whole[-1], *(torch.zeros_like(whole[-1]) for _ in scale[1:])])


def _partition(run: Run, ops: ModuleType) -> None:
    """Heads on several ranks, and rows on several: a row needs no other; the scale's gradient adds their chains in one order."""
    for dtype in run.over("dtype", DTYPES):
        for width in (128, 256):
            w = many(run, width, salt=1, dtype=dtype)
            x = many(run, rows.SOME, 17 * width, salt=2, dtype=dtype, scale=3.0)
            x = x.view(rows.SOME, 17, width)[:, :16]
            whole = ops.rms_norm(x, w, EPS)
            for shards in run.over("head_shards", (1, 2, 4, 8)):
                run.equal(torch.cat([ops.rms_norm(part, w, EPS) for part in x.chunk(shards, 1)], 1), whole)
            for shards in run.over("token_shards", (1, 2, 4, 8)):
                run.equal(torch.cat([ops.rms_norm(part, w, EPS) for part in x.chunk(shards)]), whole)
            run.control("the_next_heads", ops.rms_norm(x.roll(1, 1), w, EPS), whole)
        x = many(run, SHARED, 8, 128, salt=6, dtype=dtype, scale=3.0)
        grad, w = many(run, SHARED, 8, 128, salt=7, dtype=dtype), many(run, 128, salt=1, dtype=dtype)
        shared_scale(run, partial(ops.rms_norm, eps=EPS), (x,), w, grad)
        real_ranks(run, ranks, ops.__name__, dtype, "TP", "SP")


def _degenerate(run: Run, ops: ModuleType, naive: ModuleType, widest: Callable[[], int]) -> None:
    for dtype in run.over("dtype", DTYPES):
        for width in run.over("width", (1, 3, 96, widest())):
            w = many(run, width, salt=1, dtype=dtype)
            for count in run.over("rows", (0, 1, 5)):
                x = many(run, count, width, salt=2, dtype=dtype, scale=3.0)
                run.equal(ops.rms_norm(x, w, EPS), naive.rms_norm(x, w, EPS))
                run.equal(ops.add_rms_norm(x, x, w, EPS), naive.add_rms_norm(x, x, w, EPS))
                _, dx, dw = gradients(partial(ops.rms_norm, eps=EPS), [x, w], x)
                run.equal([dx, dw], [naive.dx(x, x, w, EPS), naive.dgamma(x, x, EPS).to(dtype)])
        w = many(run, 64, salt=1, dtype=dtype)
        odd = many(run, len(odd_values(dtype)), 64, salt=2, dtype=dtype)
        odd[:, 7] = odd_values(dtype).to(odd.device)
        run.equal(ops.rms_norm(odd, w, EPS), naive.rms_norm(odd, w, EPS), any_nan=True)
        run.equal(
            ops.residual_add(odd, odd.roll(3, 0)), naive.residual_add(odd, odd.roll(3, 0)), any_nan=True
        )
        _, dx, dw = gradients(partial(ops.rms_norm, eps=EPS), [odd, w], odd)
        run.equal(dx, naive.dx(odd, odd, w, EPS), any_nan=True)
        run.equal(dw, naive.dgamma(odd, odd, EPS).to(dtype), any_nan=True)
        zeros = torch.zeros_like(odd)
        run.equal(ops.rms_norm(zeros, w, EPS), naive.rms_norm(zeros, w, EPS))
        run.control("zeros_for_odd_values", ops.rms_norm(zeros, w, EPS), ops.rms_norm(odd, w, EPS))
        # a sum that nothing else reads is not a sum of zeros: -0 stays
        minus = torch.full_like(odd, -0.0)
        alone = gradients(lambda x, r, w: ops.add_rms_norm(x, r, w, EPS)[0], [zeros, zeros, w], minus)[1]
        run.equal(alone, gradients(partial(ops.rms_norm, eps=EPS), [zeros, w], minus)[1])
        x = many(run, 4, widest() + 1, salt=2, dtype=dtype)
        run.refuses(partial(ops.rms_norm, x, x[0], EPS))
        run.refuses(partial(ops.rms_norm, odd, w[:32], EPS))
        run.refuses(partial(ops.rms_norm, odd.half(), w, EPS))
        run.refuses(partial(ops.add_rms_norm, odd, odd[:1], w, EPS))
        run.refuses(partial(ops.residual_add, odd, odd[:1]))
        run.refuses(partial(ops.rms_norm, x[:, :64].t(), x[0, :4], EPS))
        run.refuses(partial(ops.rms_norm_grad, odd.view(1, -1, 64), w, EPS, shard="heads"))
        run.refuses(partial(ops.rms_norm_grad, odd, w, EPS))
