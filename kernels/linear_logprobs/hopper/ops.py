# SPDX-License-Identifier: Apache-2.0
"""Token logprobs and entropy from hidden states and the head's weight as one opaque torch op with its gradient.

The logits are never kept: tiles of them live in registers, or chunks in memory that is used again, and the gradient makes them
once more. On one rank the backward pass holds d logits of one leaf, on several those of a rank's leaves, in bf16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from isoexec.kernels.domain import require
from isoexec.kernels.groups import name_of, rank_of, resolve, size_of
from isoexec.kernels.hopper.library import define
from isoexec.kernels.linear.hopper.products import product
from isoexec.kernels.linear_logprobs.hopper import kernel
from isoexec.kernels.linear_logprobs.hopper.plan import BACKWARD_ROWS, Chunks, plan_for, spans
from isoexec.kernels.logprobs.hopper.kernel import cut_for, launch_gradient, launch_partials, nodes_of
from isoexec.kernels.logprobs.hopper.ops import fresh, joined, own_leaves, require_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from isoexec.kernels.linear_logprobs.hopper.kernel import Tile
    from isoexec.kernels.logprobs.hopper.ops import Made

__all__ = ["linear_logprobs", "linear_logprobs_and_entropy", "nodes"]

OP = "sm90_linear_logprobs"
BF16, FP32 = torch.bfloat16, torch.float32
STEP = 16  # columns of a leaf come in whole steps of the gradient's chain


def nodes(
    x: Tensor, w: Tensor, temperature: Tensor | None, leaves: int, *, entropy: bool, plan: Tile | Chunks
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(m, s, and w where `entropy`) `[T, leaves, nodes]` of the logits `x [T, K] @ w [V, K]^T`; any plan gives the same rows."""
    rows, width = len(x), len(w)
    if not isinstance(plan, Chunks):
        shape = (rows, leaves, kernel.nodes_of(width, leaves, plan))
        m, s = fresh(x, *shape), fresh(x, *shape)
        u = fresh(x, *shape) if entropy else None
        kernel.launch_nodes(x, w, temperature, m, s, u, plan)
        return m, s, u
    cut = cut_for(rows, FP32)
    shape = (rows, leaves, nodes_of(width, leaves, cut.join))
    m, s = fresh(x, *shape), fresh(x, *shape)
    u = fresh(x, *shape) if entropy else None
    per_leaf, many = width // leaves, min(plan.leaves, leaves)
    for a, b in spans(rows, plan.rows):
        heat = None if temperature is None else temperature[a:b]
        for leaf in range(0, leaves, many):
            z = product("forward", x[a:b], w[leaf * per_leaf : (leaf + many) * per_leaf], None, FP32)
            own = (slice(a, b), slice(leaf, leaf + many))
            launch_partials(z, heat, m[own], s[own], None if u is None else u[own], cut)
            del z  # before the next one is asked for, which then takes its place
    return m, s, u


def _check(
    x: Tensor, w: Tensor, target: Tensor, temperature: Tensor | None, group: str, vocab_leaves: int
) -> int:
    require(
        x.dtype == w.dtype == BF16
        and x.dim() == w.dim() == 2
        and x.is_contiguous()
        and w.is_contiguous()
        and x.shape[1] == w.shape[1]
        and x.shape[1] % STEP == 0,
        OP,
        f"x {x.dtype} {list(x.shape)} strides {x.stride()} with w {w.dtype} {list(w.shape)} strides {w.stride()}",
        f"contiguous bfloat16 x [T, K] and w [V, K], K in whole {STEP}s",
    )
    leaves = own_leaves(OP, len(w), vocab_leaves, size_of(group))
    require(
        len(w) // leaves % STEP == 0,
        OP,
        f"leaves of {len(w) // leaves} columns",
        f"leaves of whole {STEP}s",
    )
    require_rows(OP, len(x), target, temperature)
    return leaves


def _forward(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    group: str,
    vocab_leaves: int,
    entropy: bool,
) -> Made:
    leaves = _check(x, w, target, temperature, group, vocab_leaves)
    m, s, u = nodes(x, w, temperature, leaves, entropy=entropy, plan=plan_for(len(x)))
    picked = fresh(x, len(x))
    kernel.launch_picked(x, w, target, temperature, picked, first=rank_of(group) * len(w))
    return joined(picked, target, m, s, u, len(w), group)


def _fake(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    group: str,
    vocab_leaves: int,
    entropy: bool,
) -> Made:
    rows = x.shape[0]
    return (
        x.new_empty((rows,), dtype=FP32),
        x.new_empty((rows if entropy else 0,), dtype=FP32),
        x.new_empty((rows, 3), dtype=FP32),
    )


def _hand_on(acc: Tensor, go_on: Callable[[Tensor | None, int, int], Tensor], group: str) -> Tensor:
    """The chain over all ranks' columns in rank order: bf16 `[T, K]` on every rank.

    Blocks of rows follow one another, so that ranks work at the same time. `go_on(acc, a, b)` adds this rank's columns.
    """
    handle, rank, size = resolve(group), rank_of(group), size_of(group)
    out = torch.empty(acc.shape, dtype=BF16, device=acc.device)
    sent = []
    for a, b in spans(len(acc), max(1, min(BACKWARD_ROWS, -(-len(acc) // (2 * size))))):
        block = acc[a:b]
        if rank:
            dist.recv(block, group=handle, group_src=rank - 1)
        total = go_on(block if rank else None, a, b)
        if rank < size - 1:
            work = dist.isend(total, group=handle, group_dst=rank + 1)
            assert work is not None, "this rank is one of the group"
            sent.append((work, total))  # what is on its way stays alive
        else:
            out[a:b] = total
    for work, _ in sent:
        work.wait()
    dist.broadcast(out, group=handle, group_src=size - 1)
    return out


def _gradient(
    grad: Tensor,
    grad_entropy: Tensor | None,
    x: Tensor,
    w: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    entropy: Tensor,
    stats: Tensor,
    group: str,
    vocab_leaves: int,
) -> tuple[Tensor, Tensor]:
    rows, width = len(x), len(w)
    leaves = vocab_leaves // size_of(group)
    per_leaf = width // leaves
    first = rank_of(group) * width
    grad = grad.contiguous()
    grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
    dw = torch.empty_like(w)
    acc: Tensor | None = None
    kept: list[tuple[Tensor, Tensor]] = []
    for leaf in range(leaves if rows else 0):
        own = w[leaf * per_leaf : (leaf + 1) * per_leaf]
        d = torch.empty(rows, per_leaf, dtype=BF16, device=x.device)
        for a, b in spans(rows, BACKWARD_ROWS):
            z = product("forward", x[a:b], own, None, FP32)
            launch_gradient(
                grad[a:b],
                None if grad_entropy is None else grad_entropy[a:b],
                z,
                target[a:b],
                None if temperature is None else temperature[a:b],
                entropy[a:b],
                stats[a:b],
                d[a:b],
                first=first + leaf * per_leaf,
            )
            del z
        dw[leaf * per_leaf : (leaf + 1) * per_leaf] = product("weight", d, x, None, BF16)
        if group:
            kept.append((d, own))
        else:
            acc = product("input", d, own, acc, FP32)
    if not rows:
        return torch.empty_like(x), dw.zero_()
    if not group:
        assert acc is not None, "a vocabulary has a leaf"
        return acc.to(BF16), dw

    def go_on(total: Tensor | None, a: int, b: int) -> Tensor:
        for d, own in kept:
            total = product("input", d[a:b], own, total, FP32)
        assert total is not None, "a rank has a leaf"
        return total

    return _hand_on(fresh(x, *x.shape), go_on, group), dw


def _gradient_fake(
    grad: Tensor,
    grad_entropy: Tensor | None,
    x: Tensor,
    w: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    entropy: Tensor,
    stats: Tensor,
    group: str,
    vocab_leaves: int,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Made) -> None:
    x, w, target, temperature, ctx.group, ctx.leaves, ctx.asked = inputs
    _, entropy, stats = output
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w, target, temperature, entropy, stats)


def _backward(
    ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, w, target, temperature, entropy, stats = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros(len(x), dtype=FP32, device=x.device)
    asked = grad_entropy if ctx.asked else None
    dx, dw = _gradient_op(grad, asked, x, w, target, temperature, entropy, stats, ctx.group, ctx.leaves)
    return dx, dw, None, None, None, None, None


_gradient_op = define(
    "sm90_linear_logprobs_grad(Tensor grad, Tensor? grad_entropy, Tensor x, Tensor w, Tensor target, "
    "Tensor? temperature, Tensor entropy, Tensor stats, str group, int vocab_leaves) -> (Tensor, Tensor)",
    _gradient,
    _gradient_fake,
)
_op = define(
    "sm90_linear_logprobs(Tensor x, Tensor w, Tensor target, Tensor? temperature, str group, int vocab_leaves, "
    "bool entropy) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake,
    backward=_backward,
    setup_context=_setup,
)


def linear_logprobs(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    group: ProcessGroup | None = None,
    *,
    vocab_leaves: int,
    temperature: Tensor | None = None,
) -> Tensor:
    """fp32 `[T]`: log p(target) of the logits `x [T, K] @ w [V / ranks, K]^T`, bf16 in, without the logits; differentiable.

    `x` is whole on every rank, targets are global ids, and the input's gradient comes whole to every rank. The bits, of the
    gradients too, are those of a linear with fp32 logits followed by `logprobs.blocks/2`, for any number of ranks. Raises
    `DomainError` for a weight that the linear's table does not know.
    """
    out: Tensor = _op(x, w, target, temperature, name_of(group), vocab_leaves, False)[0]
    return out


def linear_logprobs_and_entropy(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    group: ProcessGroup | None = None,
    *,
    vocab_leaves: int,
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `linear_logprobs`, and each row's entropy in nats, fp32 `[T]`; both differentiable."""
    log_p, entropy, _ = _op(x, w, target, temperature, name_of(group), vocab_leaves, True)
    return log_p, entropy
