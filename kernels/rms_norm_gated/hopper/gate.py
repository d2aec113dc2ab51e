# SPDX-License-Identifier: Apache-2.0
"""What proves rms_norm.pairs_gated/1 on sm90: its specification on the GPU and on the CPU, for heads and the gate beside them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from isoexec.kernels.gates import Gate, Run, rows
from isoexec.kernels.gates.degrees import wants
from isoexec.kernels.gates.forward import many
from isoexec.kernels.gates.inputs import DTYPES, odd_values, wide
from isoexec.kernels.gates.norms import DEGREES, EPS, SHARED, free_settings, real_ranks, shared_scale
from isoexec.kernels.gates.recipes import gradients
from isoexec.kernels.gates.rows import Rows
from isoexec.kernels.gates.sharing import here
from isoexec.kernels.rms_norm.hopper.kernel import launch
from isoexec.kernels.rms_norm_gated.hopper import naive
from isoexec.kernels.rms_norm_gated.hopper.ops import rms_norm, rms_norm_grad

GATE = Gate("rms_norm.pairs_gated/1", "sm90")
SHAPES = ((32, 128), (5, 96))  # value heads of Qwen3.5-35B-A3B and their width; none that is a power of two
PLANTED = (512, 1024)


def _formula(x: Tensor, gate: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w * F.silu(gate)


def _op(x: Tensor, gate: Tensor, w: Tensor, eps: float) -> Tensor:
    return rms_norm(x, w, gate, eps)


def _spec(x: Tensor, gate: Tensor, w: Tensor, eps: float) -> Tensor:
    return naive.rms_norm(x, w, gate, eps)


def _spec_gradients(g: Tensor, x: Tensor, gate: Tensor, w: Tensor, eps: float) -> list[Tensor]:
    dw = naive.dgamma(g, x, gate, eps).to(w.dtype)
    return [naive.dx(g, x, w, gate, eps), naive.dgate(g, x, w, gate, eps), dw]


def _over(run: Run, count: int) -> Iterator[Rows]:
    for dtype in run.over("dtype", DTYPES):
        for heads, width in SHAPES:
            run.covers(shape=f"{heads}x{width}")
            x = many(run, count, heads, width, salt=1, dtype=dtype, scale=3.0)
            z = many(run, count, heads + 1, width, salt=2, dtype=dtype, scale=8.0)[:, :heads]
            w = many(run, width, salt=3, dtype=dtype)
            yield Rows(
                op=_op,
                spec=_spec,
                by_row=(x, z),
                shared=(w, EPS),
                free=free_settings(launch, x, w, gate=z),
                spec_gradients=_spec_gradients,
                exact=_formula,
            )


def _planted(run: Run) -> None:
    x, z = (many(run, *PLANTED, salt=s, dtype=torch.float32, scale=3.0) for s in (4, 5))
    w = many(run, PLANTED[1], salt=6, dtype=torch.float32)
    want = rms_norm(x, w, z, EPS)
    fused = torch.full_like(x, float("nan"))
    launch(x, None, w, fused, None, EPS, gate=z, fused_multiply_add=True)
    run.control("fused_multiply_add", fused, want)
    plain = torch.full_like(x, float("nan"))
    launch(x, None, w, plain, None, EPS)
    run.control("gate_before_the_scale", plain / w * (z * torch.sigmoid(z)) * w, want)
    rounded = plain.bfloat16() * F.silu(z)  # as Hugging Face's torch code and Megatron do it
    run.control("norm_rounded_before_the_gate", rounded, want)


rows.hang(GATE, _over, _planted)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """Heads and rows on several ranks: a row needs no other; the scale's gradient adds their chains in one order."""
    for dtype in run.over("dtype", DTYPES):
        x, z, g = (many(run, SHARED, 8, 128, salt=s, dtype=dtype, scale=3.0) for s in (1, 2, 3))
        w = many(run, 128, salt=4, dtype=dtype)
        whole = rms_norm(x, w, z, EPS)
        for shards in run.over("head_shards", DEGREES):
            parts = zip(x.chunk(shards, 1), z.chunk(shards, 1), strict=True)
            run.equal(torch.cat([rms_norm(a, w, b, EPS) for a, b in parts], 1), whole)
        run.control("the_next_gate", rms_norm(x, w, z.roll(1, 1), EPS), whole)
        shared_scale(run, partial(_op, eps=EPS), (x, z), w, g)
        real_ranks(run, ranks, "", dtype, "TP")


wants(GATE, "partition_invariance", TP=DEGREES)


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
    """Output and gradients of a norm whose heads, and their gates, real ranks share; the scale's come last."""
    del module, axis
    x, z, g = (wide(*shape, salt=s, dtype=dtype).to(here(device)).chunk(size, 2)[rank] for s in (1, 2, 4))
    w = wide(shape[-1], salt=3, dtype=dtype).to(here(device))
    out, dx, dw, dz = gradients(
        lambda x, w, z: rms_norm_grad(x, w, z, EPS, shard="heads" if group else "none", group=group),
        [x, w, z],
        g,
    )
    return [t.cpu() for t in (out, dx, dz, dw)]


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for width in run.over("width", (1, 3, 96)):
            w = many(run, width, salt=1, dtype=dtype)
            for count in run.over("rows", (0, 1, 5)):
                x, z = (many(run, count, width, salt=s, dtype=dtype, scale=3.0) for s in (2, 3))
                run.equal(rms_norm(x, w, z, EPS), naive.rms_norm(x, w, z, EPS))
                found = gradients(partial(_op, eps=EPS), [x, z, w], x)[1:]
                run.equal(found, _spec_gradients(x, x, z, w, EPS))
        values = odd_values(dtype)
        w = many(run, 64, salt=1, dtype=dtype)
        x, z = (many(run, len(values), 64, salt=s, dtype=dtype) for s in (2, 3))
        plain = rms_norm(x, w, z, EPS)
        z[:, 7] = values.to(z.device)
        run.equal(rms_norm(x, w, z, EPS), naive.rms_norm(x, w, z, EPS), any_nan=True)
        run.control("odd_gates", rms_norm(x, w, z, EPS), plain)
        found = gradients(partial(_op, eps=EPS), [x, z, w], x)[1:]
        run.equal(found, _spec_gradients(x, x, z, w, EPS), any_nan=True)
        run.refuses(partial(rms_norm, x, w, z[:3], EPS))
        run.refuses(partial(rms_norm, x, w[:3], z, EPS))
        run.refuses(partial(rms_norm, x.half(), w, z, EPS))
        run.refuses(partial(rms_norm_grad, x, w, z, EPS))
