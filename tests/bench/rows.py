# SPDX-License-Identifier: Apache-2.0
"""The sm90 row ops for `kernels.py`: norms, rotations, products of a gate, lookups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from subjects import DEVICE, FP32, Model, Subject, rand, vllm  # type: ignore[import-not-found]
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from isoexec.kernels.bias.hopper.ops import bias_add
from isoexec.kernels.embedding.hopper.ops import embedding
from isoexec.kernels.grad_norm.hopper.ops import exact_sq_sum
from isoexec.kernels.l2_norm.hopper.ops import l2_norm
from isoexec.kernels.rms_norm.hopper.ops import add_rms_norm, residual_add, rms_norm
from isoexec.kernels.rms_norm_centred.hopper import ops as centred
from isoexec.kernels.rms_norm_gated.hopper import ops as gated
from isoexec.kernels.rope.hopper.ops import rope, tables
from isoexec.kernels.rope_interleaved.hopper.ops import rope as rope_interleaved
from isoexec.kernels.sigmoid_mul.hopper.ops import sigmoid_mul
from isoexec.kernels.silu_mul.hopper.ops import silu_mul, silu_mul_halves

__all__ = ["BASE", "EPS", "FUNCTIONS", "others", "subjects"]

EPS, BASE = 1e-6, 1e6
FUNCTIONS = (
    *("rms_norm.pairs/1", "rms_norm.pairs_centred/1", "rms_norm.pairs_gated/1", "l2_norm.pairs/1"),
    *("rope.neox_fp32/1", "rope.interleaved_fp32/1", "silu_mul.poly/1", "gate.sigmoid_mul/1", "bias.add/1"),
    *("embedding.lookup/1", "grad_norm.exact/1"),
)
# of no model in the table: heads and width of GLM's rotation, width of MiMo's bias, numbers of a gradient a row
GLM, MIMO, NUMBERS = (20, 64), 6144, 4096


def _norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, w.shape, w, EPS)


def _add_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x + r
    return F.rms_norm(h, w.shape, w, EPS), h


def _invariant_norm(x: Tensor, w: Tensor) -> Any:
    return vllm("rms_norm_batch_invariant")(x, w, EPS)


def _invariant_add_norm(x: Tensor, r: Tensor, w: Tensor) -> Any:
    return vllm("rms_norm_batch_invariant")(x, w, EPS, r)  # writes over x and r


def _centred(x: Tensor, w: Tensor) -> Tensor:
    xf = x.float()
    return (xf * (xf.square().mean(-1, keepdim=True) + EPS).rsqrt() * (1.0 + w.float())).to(x.dtype)


def _add_centred(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x + r
    return _centred(h, w), h


def _gated(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    return (F.rms_norm(x, w.shape, w, EPS) * F.silu(z.float())).to(x.dtype)


def _l2(x: Tensor) -> Tensor:
    xf = x.float()
    return (xf * (xf.square().sum(-1, keepdim=True) + EPS).rsqrt()).to(x.dtype)


def _rope(x: Tensor, p: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    c, s = cos[p].unsqueeze(1), sin[p].unsqueeze(1)
    turned = 2 * cos.shape[-1]
    a, b = x[..., :turned].float().chunk(2, -1)
    out = torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)
    return torch.cat((out, x[..., turned:]), -1) if turned < x.shape[-1] else out


def _rope_interleaved(x: Tensor, p: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    c, s = cos[p].unsqueeze(1), sin[p].unsqueeze(1)
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2).to(x.dtype)


def _silu(both: Tensor) -> Tensor:
    g, u = both.chunk(2, -1)
    return F.silu(g) * u


def _sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


def _sq_sum(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x).square()


def _like(shape: tuple[int, ...], count: int, width: int = 0) -> tuple[Tensor, ...]:
    """As many tensors of a shape, and where a width is given a weight of it."""
    return (*(rand(*shape) for _ in range(count)), *((rand(width),) if width else ()))


def _places(M: int, turned: int) -> tuple[Tensor, ...]:
    return torch.arange(M, device=DEVICE) % 8192, *tables(turned, BASE, DEVICE)


def _norms(
    M: int,
    shape: str,
    sizes: tuple[int, ...],
    op: str,
    function: str,
    calls: tuple[Callable[..., Any], Callable[..., Any]],
    peers: dict[str, Callable[..., Any]],
    inputs: int = 1,
) -> Iterator[Subject]:
    """A norm of `[M, *sizes]` over its last dimension, with 1 or 2 inputs and, but for a unit one, a weight."""
    native, ours = calls
    count = 2.0 * M * torch.Size(sizes).numel()
    weighted = function != "l2_norm.pairs/1"
    residual = op.startswith("add_")
    yield from Subject(
        op=op,
        shape=shape,
        rows=M,
        function=function,
        nbytes=count * (inputs + (2 if residual else 1)),
        make=partial(_like, (M, *sizes), inputs, sizes[-1] if weighted else 0),
        native=native,
        ours=ours,
        peers=peers,
        learned=tuple(range(inputs + weighted)),
        back_bytes=count * (2 * inputs + (0 if residual else 1)),
        copied=True,
    ).both_ways()


def subjects(model: Model, M: int) -> Iterator[Subject]:
    """Every row op of a model at M rows."""
    hidden, width = model.hidden, model.width
    wide, queries, keys = f"{model.name} {hidden}", *(f"{model.name} {n}x{width}" for n in model.heads)
    plain = (_norm, lambda x, w: rms_norm(x, w, EPS))
    peers = {"vllm": _invariant_norm}
    yield from _norms(M, wide, (hidden,), "rms_norm", "rms_norm.pairs/1", plain, peers)
    both = (_add_norm, lambda x, r, w: add_rms_norm(x, r, w, EPS))
    more = {"vllm": _invariant_add_norm}
    yield from _norms(M, wide, (hidden,), "add_rms_norm", "rms_norm.pairs/1", both, more, 2)
    for shape, heads in zip((queries, keys), model.heads, strict=True):
        yield from _norms(M, shape, (heads, width), "head_norm", "rms_norm.pairs/1", plain, peers)
        part = f" of {model.turned}" if model.turned < width else ""
        yield from Subject(
            op="rope",
            shape=shape + part,
            rows=M,
            function="rope.neox_fp32/1",
            nbytes=4.0 * M * heads * width,
            make=partial(_like, (M, heads, width), 1),
            shared=partial(_places, M, model.turned),
            native=_rope,
            ours=rope,
            learned=(0,),
            back_bytes=4.0 * M * heads * width,
            copied=True,
        ).both_ways()
    if model.gated[0]:
        yield from _hybrid(model, M)
    ffn: dict[str, Any] = {
        "shape": f"{model.name} {model.ffn}",
        "rows": M,
        "function": "silu_mul.poly/1",
        "nbytes": 6.0 * M * model.ffn,
        "make": partial(_like, (M, 2 * model.ffn), 1),
        "native": _silu,
        "copied": True,
    }
    yield from Subject(
        op="silu_mul", ours=silu_mul_halves, learned=(0,), back_bytes=10.0 * M * model.ffn, **ffn
    ).both_ways()
    yield Subject(op="silu_mul_apart", ours=lambda both: silu_mul(*both.chunk(2, -1)), **ffn)
    yield Subject(
        op="residual_add",
        shape=wide,
        rows=M,
        function="rms_norm.pairs/1",
        nbytes=6.0 * M * hidden,
        make=partial(_like, (M, hidden), 2),
        native=torch.add,
        ours=residual_add,
        copied=True,
    )
    yield from Subject(
        op="embedding",
        shape=f"{model.name} {model.vocab}x{hidden}",
        rows=M,
        function="embedding.lookup/1",
        nbytes=4.0 * M * hidden,
        make=lambda: (torch.randint(model.vocab, (M,), device=DEVICE),),
        shared=lambda: (rand(model.vocab, hidden),),
        native=F.embedding,
        ours=embedding,
        learned=(1,),
        back_bytes=2.0 * model.vocab * hidden + 4.0 * M * hidden,
    ).both_ways()


def _hybrid(model: Model, M: int) -> Iterator[Subject]:
    """Norms and gates of a model with gated attention and Gated DeltaNet."""
    hidden, (heads, width) = model.hidden, model.gated
    wide, outputs = f"{model.name} {hidden}", f"{model.name} {model.heads[0]}x{model.width}"
    one = (_centred, lambda x, w: centred.rms_norm(x, w, EPS))
    yield from _norms(M, wide, (hidden,), "rms_norm_centred", "rms_norm.pairs_centred/1", one, {})
    two = (_add_centred, lambda x, r, w: centred.add_rms_norm(x, r, w, EPS))
    yield from _norms(M, wide, (hidden,), "add_rms_norm_centred", "rms_norm.pairs_centred/1", two, {}, 2)
    three = (_gated, lambda x, z, w: gated.rms_norm(x, w, z, EPS))
    shape = f"{model.name} {heads}x{width}"
    yield from _norms(M, shape, (heads, width), "rms_norm_gated", "rms_norm.pairs_gated/1", three, {}, 2)
    four = (_l2, lambda x: l2_norm(x, EPS))
    shape = f"{model.name} {model.unit[0]}x{model.unit[1]}"
    yield from _norms(M, shape, model.unit, "l2_norm", "l2_norm.pairs/1", four, {})
    flat = M * model.heads[0] * model.width
    yield from Subject(
        op="sigmoid_mul",
        shape=outputs,
        rows=M,
        function="gate.sigmoid_mul/1",
        nbytes=6.0 * flat,
        make=partial(_like, (M, model.heads[0], model.width), 2),
        native=_sigmoid,
        ours=sigmoid_mul,
        learned=(0, 1),
        back_bytes=10.0 * flat,
        copied=True,
    ).both_ways()


def others(M: int) -> Iterator[Subject]:
    """Row ops that neither model has."""
    heads, width = GLM
    yield from Subject(
        op="rope_interleaved",
        shape=f"GLM {heads}x{width}",
        rows=M,
        function="rope.interleaved_fp32/1",
        nbytes=4.0 * M * heads * width,
        make=partial(_like, (M, heads, width), 1),
        shared=partial(_places, M, width),
        native=_rope_interleaved,
        ours=rope_interleaved,
        learned=(0,),
        back_bytes=4.0 * M * heads * width,
        copied=True,
    ).both_ways()
    yield from Subject(
        op="bias",
        shape=f"MiMo {MIMO}",
        rows=M,
        function="bias.add/1",
        nbytes=4.0 * M * MIMO,
        make=partial(_like, (M, MIMO), 1, MIMO),
        native=torch.add,
        ours=bias_add,
        learned=(0, 1),
        back_bytes=2.0 * M * MIMO,
        copied=True,
    ).both_ways()
    yield Subject(
        op="squares",
        shape=f"{M * NUMBERS} fp32",
        rows=M,
        function="grad_norm.exact/1",
        nbytes=8.0 * M * NUMBERS,  # the greatest first, then the squares
        make=lambda: (rand(M, NUMBERS, dtype=FP32, scale=1e-3),),
        native=_sq_sum,
        ours=lambda x: exact_sq_sum([x]),
    )
