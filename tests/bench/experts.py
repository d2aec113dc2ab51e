# SPDX-License-Identifier: Apache-2.0
"""The sm90 expert ops for `kernels.py`: router, plan, moved rows, grouped products, combine, and their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from subjects import (  # type: ignore[import-not-found]
    BF16,
    DEVICE,
    FP32,
    TRAINED,
    AbsentError,
    Call,
    Model,
    Subject,
    rand,
    vllm,
)
from torch import Tensor

from isoexec.contracts.errors import EvidenceError
from isoexec.kernels.combine.hopper.ops import combine_rows
from isoexec.kernels.dispatch.hopper.ops import DevicePlan, dispatch, plan
from isoexec.kernels.grouped_linear.hopper import ops, products, table
from isoexec.kernels.providers import fused_moe
from isoexec.kernels.router.hopper.ops import softmax_topk
from isoexec.kernels.shared_gate.hopper.ops import shared_gate

__all__ = ["FUNCTIONS", "routed", "subjects"]

FUNCTIONS = (
    "router.softmax_topk/1",
    "moe.dispatch/1",
    "linear.grouped_mma_chain/1",
    "moe.combine/1",
    "moe.shared_gate/1",
)


def routed(model: Model, M: int) -> tuple[Tensor, Tensor, DevicePlan]:
    """Weights, experts and plan of random logits, so unequal loads as a router has them."""
    weights, ids = softmax_topk(rand(M, model.experts, dtype=FP32), model.places)
    return weights, ids, plan(ids, 0, model.experts)


def _one(*shape: int, dtype: torch.dtype = BF16) -> tuple[Tensor]:
    return (rand(*shape, dtype=dtype),)


def _native_router(logits: Tensor, k: int) -> Tensor:
    weights, _ = torch.softmax(logits, -1).topk(k)
    return weights / weights.sum(-1, keepdim=True)


def _invariant_router(logits: Tensor, k: int) -> Any:
    weights, _ = vllm("softmax_batch_invariant")(logits, -1).topk(k)
    return weights / weights.sum(-1, keepdim=True)


def _native_plan(ids: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    ordered = ids.view(-1).sort(stable=True)  # a bincount reads a size back: it is not for a graph
    return ordered.indices, torch.searchsorted(ordered.values, edges)


def _native_combine(y: Tensor, weights: Tensor, made: DevicePlan, index: Tensor) -> Tensor:
    out = torch.zeros(made.tokens, y.shape[1], dtype=FP32, device=y.device)
    flat = weights.view(-1).index_select(0, made.slots)
    return out.index_add_(0, index, y.float() * flat.unsqueeze(1)).to(y.dtype)


def _planned(offsets: Tensor, R: int) -> fused_moe.Blocks | AbsentError:
    """The plan of vLLM's kernel, made beforehand."""
    try:
        fused_moe.version()
    except EvidenceError as why:
        return AbsentError("not installed" if "no vllm" in str(why) else str(why)[:120])
    return fused_moe.blocks(offsets[1:], R)


def _fused(x: Tensor, w: Tensor, _: Tensor, made: fused_moe.Blocks | AbsentError) -> Tensor:
    if isinstance(made, AbsentError):
        raise made
    return fused_moe.multiply(x, w, made)


def _only(call: Call) -> Call:
    """A call without the plan that vLLM's kernel needs."""
    return lambda a, b, offsets, _: call(a, b, offsets)


def subjects(model: Model, M: int) -> Iterator[Subject]:
    """Every expert op of a model at M tokens; none where it has no experts."""
    if not model.experts:
        return
    yield from _products(model, M)
    yield from _moves(model, M)
    yield from _routes(model, M)


def _routes(model: Model, M: int) -> Iterator[Subject]:
    E, k = model.experts, model.places
    shape = f"{model.name} {k} of {E}"
    yield from Subject(
        op="router",
        shape=shape,
        rows=M,
        function=FUNCTIONS[0],
        nbytes=4.0 * M * E + 12 * M * k,
        make=partial(_one, M, E, dtype=FP32),
        native=partial(_native_router, k=k),
        ours=lambda logits: softmax_topk(logits, k)[0],
        peers={"vllm": partial(_invariant_router, k=k)},
        learned=(0,),
        back_bytes=4.0 * M * E,
    ).both_ways()
    yield Subject(
        op="plan",
        shape=shape,
        rows=M,
        function=FUNCTIONS[1],
        nbytes=16.0 * M * k,
        make=lambda: (softmax_topk(rand(M, E, dtype=FP32), k)[1],),
        shared=lambda: (torch.arange(E + 1, device=DEVICE),),
        native=_native_plan,
        ours=lambda ids, _: plan(ids, 0, E).offsets,
    )


def _moves(model: Model, M: int) -> Iterator[Subject]:
    hidden, slots = model.hidden, M * model.places
    moved = 2.0 * (slots + M) * hidden
    shape = f"{model.name} {model.places} x {hidden}"

    def shared() -> tuple[Any, ...]:
        weights, _, made = routed(model, M)
        return weights, made, made.slots // model.places

    common: dict[str, Any] = {"shape": shape, "rows": M, "shared": shared, "copied": True}
    yield from Subject(
        op="combine",
        function=FUNCTIONS[3],
        nbytes=moved,
        make=partial(_one, slots, hidden),
        native=_native_combine,
        ours=lambda y, weights, made, _: combine_rows(y, made.rows, weights),
        learned=(0, 1),
        back_bytes=moved + 2.0 * slots * hidden,
        **common,
    ).both_ways()
    yield Subject(
        op="combine_shared",
        function=FUNCTIONS[3],
        nbytes=moved + 2 * M * hidden,
        make=lambda: (rand(slots, hidden), rand(M, hidden)),
        native=lambda y, more, weights, made, at: _native_combine(y, weights, made, at) + more,
        ours=lambda y, more, weights, made, _: combine_rows(y, made.rows, weights, more),
        **common,
    )
    yield from Subject(
        op="dispatch",
        function=FUNCTIONS[1],
        nbytes=moved,
        make=partial(_one, M, hidden),
        native=lambda x, *rest: x.index_select(0, rest[2]),
        ours=lambda x, *rest: dispatch(x, rest[1]),
        learned=(0,),
        back_bytes=moved,
        **common,
    ).both_ways()
    yield from Subject(
        op="shared_gate",
        shape=f"{model.name} {hidden}",
        rows=M,
        function=FUNCTIONS[4],
        nbytes=6.0 * M * hidden,
        make=lambda: (rand(M, hidden), rand(M, hidden), rand(1, hidden, scale=hidden**-0.5)),
        native=lambda y, x, w: torch.sigmoid(x @ w.t()) * y,
        ours=shared_gate,
        learned=(0, 1, 2),
        back_bytes=10.0 * M * hidden,
        copied=True,
    ).both_ways()


def _products(model: Model, M: int) -> Iterator[Subject]:
    """Both linears of the experts and, where M is of training, their gradients, next to torch's grouped product."""
    for name, N, K in (("fc1", 2 * model.inner, model.hidden), ("fc2", model.hidden, model.inner)):
        R, E = M * model.places, model.experts
        busy = E * (1 - (1 - model.places / E) ** M)  # experts with rows, as random routing has them
        moved, flops = 2.0 * (busy * N * K + R * (N + K)), 2.0 * R * N * K

        def ends() -> tuple[Tensor, Any]:
            offsets = routed(model, M)[2].offsets
            return offsets, _planned(offsets, M * model.places)

        def operands(width: int, *, N: int = N, K: int = K) -> tuple[Tensor, Tensor]:
            return rand(M * model.places, width), rand(model.experts, N, K, scale=K**-0.5)

        def two(N: int = N, K: int = K) -> tuple[Tensor, Tensor]:
            return rand(M * model.places, N), rand(M * model.places, K)

        def provider(layout: str, *, N: int = N, K: int = K, R: int = R) -> str:
            tile = table.tile_for(layout, N, K, R)
            return "torch" if tile is None and table.library_serves(layout) else "own tiles"

        one = Subject(
            op="grouped_linear",
            shape=f"{model.name} {name} {E}x{N}x{K}",
            rows=M,
            function=FUNCTIONS[2],
            nbytes=moved,
            flops=flops,
            make=partial(operands, K),
            shared=ends,
            native=_only(products.library),
            ours=_only(ops.grouped_linear),
            peers={"vllm": _fused},
            provider=provider("forward"),
            most=4,
        )
        yield one
        if M < TRAINED:
            continue
        yield replace(
            one,
            op="grouped_linear_input_gradient",
            make=partial(operands, N),
            native=_only(products.library_input),
            ours=_only(ops.input_gradient),
            peers={},
            provider=provider("input"),
        )
        yield replace(
            one,
            op="grouped_linear_weight_gradient",
            nbytes=2.0 * (E * N * K + R * (N + K)),
            make=two,
            native=lambda dy, x, at, _: products._grouped(dy.t(), x, at[1:]),
            ours=_only(ops.weight_gradient),
            peers={},
            provider=provider("weight"),
            most=2,
        )
