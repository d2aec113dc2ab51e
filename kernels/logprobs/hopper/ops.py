# SPDX-License-Identifier: Apache-2.0
"""Token logprobs and entropy of the sm90 function as one opaque torch op with its gradient, also by ranks with whole leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.groups import gather_rows, name_of, rank_of, size_of
from isoexec.kernels.hopper.library import define, require_model_dtype
from isoexec.kernels.logprobs.hopper.kernel import (
    cut_for,
    launch_gradient,
    launch_merge,
    launch_nodes,
    launch_partials,
    nodes_of,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["fresh", "joined", "own_leaves", "token_logprobs", "token_logprobs_and_entropy"]

Made = tuple["Tensor", "Tensor", "Tensor"]  # log p [rows], entropy [rows] or [0], stats [rows, 3]


def own_leaves(op: str, width: int, vocab_leaves: int, size: int) -> int:
    """The leaves of `width` columns that one of `size` ranks holds; raises `DomainError` where they are not whole and equal."""
    own = vocab_leaves // size
    require(
        vocab_leaves > 0
        and vocab_leaves & (vocab_leaves - 1) == 0
        and vocab_leaves % size == 0
        and width > 0
        and width % own == 0,
        op,
        f"{width} columns on each of {size} ranks with {vocab_leaves} leaves",
        "a power-of-two number of leaves that the ranks divide and that divide the vocabulary",
    )
    return own


def require_rows(op: str, rows: int, target: Tensor, temperature: Tensor | None) -> None:
    """Raise `DomainError` unless there is a target, and a temperature where one is given, for each row."""
    require(
        target.shape == (rows,) and target.dtype == torch.int64 and target.is_contiguous(),
        op,
        f"target {list(target.shape)} {target.dtype} with {rows} rows",
        "a contiguous int64 target a row",
    )
    require(
        temperature is None
        or (
            temperature.shape == (rows,)
            and temperature.dtype == torch.float32
            and temperature.is_contiguous()
        ),
        op,
        f"temperature {None if temperature is None else (list(temperature.shape), temperature.dtype)} with {rows} rows",
        "a contiguous float32 temperature a row, or none",
    )


def fresh(like: Tensor, *shape: int) -> Tensor:
    """Uninitialised fp32 beside a tensor."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def joined(
    picked: Tensor, target: Tensor, m: Tensor, s: Tensor, w: Tensor | None, width: int, group: str
) -> Made:
    """The rows' results from this rank's nodes `[rows, leaves, nodes]` and `picked [rows]`, x at the targets it holds.

    One exchange a call: each rank sends a maximum and a sum a leaf, and its targets' x; every rank joins all of them alike.
    """
    rows = len(picked)
    if group:
        parts = [m, s] if w is None else [m, s, w]
        leaves = [fresh(picked, rows, m.shape[1]) for _ in parts]
        flat = [t.view(-1, t.shape[-1]) for t in parts]
        ups = [t.view(-1) for t in leaves]
        both = w is not None
        launch_nodes(flat[0], flat[1], flat[2] if both else None, ups[0], ups[1], ups[2] if both else None)
        sent = torch.cat([*leaves, picked.unsqueeze(1)], 1)
        every = gather_rows(sent.unsqueeze(0), group)  # [ranks, rows, ...]
        own = m.shape[1]
        nodes = [
            every[:, :, i * own : (i + 1) * own].transpose(0, 1).contiguous().view(rows, -1, 1)
            for i in range(len(parts))
        ]
        m, s, w = nodes[0], nodes[1], nodes[2] if both else None
        holder = torch.div(target, width, rounding_mode="floor")
        known = (holder >= 0) & (holder < len(every))
        picked = every[:, :, -1].gather(0, holder.clamp(0, len(every) - 1).unsqueeze(0)).squeeze(0)
        picked = torch.where(known, picked, torch.nan)
    log_p, stats = fresh(picked, rows), fresh(picked, rows, 3)
    entropy = fresh(picked, 0 if w is None else rows)
    launch_merge(picked, None, None, m, s, w, log_p, None if w is None else entropy, stats)
    return log_p, entropy, stats


def _token_logprobs(
    logits: Tensor, target: Tensor, temperature: Tensor | None, group: str, vocab_leaves: int, entropy: bool
) -> Made:
    op = "sm90_token_logprobs"
    require_model_dtype(op, logits)
    require(logits.dim() == 2, op, f"logits {list(logits.shape)}", "logits [rows, V]")
    rows, width = logits.shape
    leaves = own_leaves(op, width, vocab_leaves, size_of(group))
    require_rows(op, rows, target, temperature)
    cut = cut_for(rows, logits.dtype)
    shape = (rows, leaves, nodes_of(width, leaves, cut.join))
    m, s = fresh(logits, *shape), fresh(logits, *shape)
    w = fresh(logits, *shape) if entropy else None
    launch_partials(logits, temperature, m, s, w, cut)
    if group:
        local = target - rank_of(group) * width
        inside = (local >= 0) & (local < width)
        picked = logits.gather(1, local.clamp(0, width - 1).unsqueeze(1)).squeeze(1).float()
        picked = picked if temperature is None else picked / temperature
        return joined(torch.where(inside, picked, torch.nan), target, m, s, w, width, group)
    log_p, stats = fresh(logits, rows), fresh(logits, rows, 3)
    spread = fresh(logits, rows if entropy else 0)
    launch_merge(logits, target, temperature, m, s, w, log_p, spread if entropy else None, stats)
    return log_p, spread, stats


def _fake(
    logits: Tensor, target: Tensor, temperature: Tensor | None, group: str, vocab_leaves: int, entropy: bool
) -> Made:
    rows = logits.shape[0]
    return (
        logits.new_empty((rows,), dtype=torch.float32),
        logits.new_empty((rows if entropy else 0,), dtype=torch.float32),
        logits.new_empty((rows, 3), dtype=torch.float32),
    )


def _gradient(
    grad: Tensor,
    grad_entropy: Tensor | None,
    logits: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    entropy: Tensor,
    stats: Tensor,
    group: str,
) -> Tensor:
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    first = rank_of(group) * logits.shape[1]
    asked = None if grad_entropy is None else grad_entropy.contiguous()
    launch_gradient(grad.contiguous(), asked, logits, target, temperature, entropy, stats, out, first=first)
    return out


def _gradient_fake(
    grad: Tensor,
    grad_entropy: Tensor | None,
    logits: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    entropy: Tensor,
    stats: Tensor,
    group: str,
) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Made) -> None:
    logits, target, temperature, ctx.group, _, ctx.asked = inputs
    _, entropy, stats = output
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, temperature, entropy, stats)


def _backward(
    ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    logits, target, temperature, entropy, stats = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
    asked = grad_entropy if ctx.asked else None
    d = _gradient_op(grad, asked, logits, target, temperature, entropy, stats, ctx.group)
    return d, None, None, None, None, None


_gradient_op = define(
    "sm90_token_logprobs_grad(Tensor grad, Tensor? grad_entropy, Tensor logits, Tensor target, Tensor? temperature, "
    "Tensor entropy, Tensor stats, str group) -> Tensor",
    _gradient,
    _gradient_fake,
)
_op = define(
    "sm90_token_logprobs(Tensor logits, Tensor target, Tensor? temperature, str group, int vocab_leaves, bool entropy)"
    " -> (Tensor, Tensor, Tensor)",
    _token_logprobs,
    _fake,
    backward=_backward,
    setup_context=_setup,
)


def token_logprobs(
    logits: Tensor,
    target: Tensor,
    group: ProcessGroup | None = None,
    *,
    vocab_leaves: int,
    temperature: Tensor | None = None,
) -> Tensor:
    """fp32 `[rows]`: log p(target) from `logits [rows, V / ranks]`, bf16 or fp32, and global ids; differentiable in the logits.

    `temperature [rows]` fp32 divides the logits in fp32, rounded once, as an engine's sampler does. A target outside the
    vocabulary, a row that holds NaN, no finite logit or one beyond 2^20 gives NaN. Any number of ranks has the bits of one.
    """
    out: Tensor = _op(logits, target, temperature, name_of(group), vocab_leaves, False)[0]
    return out


def token_logprobs_and_entropy(
    logits: Tensor,
    target: Tensor,
    group: ProcessGroup | None = None,
    *,
    vocab_leaves: int,
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `token_logprobs`, and the entropy of each row's distribution in nats, fp32 `[rows]`; both differentiable."""
    log_p, entropy, _ = _op(logits, target, temperature, name_of(group), vocab_leaves, True)
    return log_p, entropy
