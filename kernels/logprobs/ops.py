# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities over fixed vocabulary leaves as torch ops, whole or with the vocabulary shared by ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from isoexec.kernels.domain import DomainError, require_float
from isoexec.kernels.groups import all_reduce, gather_rows, name_of, rank_of, size_of
from isoexec.kernels.library import define
from isoexec.kernels.slices import row_slices, rows_of
from isoexec.kernels.sums import halving_tree, pair_tree

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["log_softmax", "token_logprobs"]


def _check(logits: Tensor, vocab_leaves: int, size: int) -> int:
    """Leaves this rank owns."""
    require_float("logprobs", logits)
    own = vocab_leaves // size
    if not (
        vocab_leaves & (vocab_leaves - 1) == 0
        and vocab_leaves % size == 0
        and logits.shape[-1] % own == 0
        and logits.shape[-1] > 0
    ):
        raise DomainError(
            "logprobs",
            f"logits {list(logits.shape)} on {size} ranks with {vocab_leaves} leaves",
            "a power-of-two number of leaves that the ranks divide and that divide the vocabulary",
        )
    return own


def _sum_exp(e: Tensor, leaves: int) -> Tensor:
    return pair_tree(halving_tree(e.view(*e.shape[:-1], leaves, e.shape[-1] // leaves)).unbind(-1))


def _log_softmax(logits: Tensor, vocab_leaves: int) -> Tensor:
    leaves = _check(logits, vocab_leaves, 1)
    flat = rows_of(logits)
    out = torch.empty(flat.shape, dtype=torch.float32)
    for at in row_slices(*flat.shape):
        z = out[at].copy_(flat[at])
        z.sub_(z.amax(-1, keepdim=True))
        z.sub_(_sum_exp(torch.exp(z), leaves).log_().unsqueeze(-1))
    return out.view(logits.shape)


def _log_softmax_fake(logits: Tensor, vocab_leaves: int) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


_log_softmax_op = define(
    "log_softmax(Tensor logits, int vocab_leaves) -> Tensor", _log_softmax, _log_softmax_fake
)


def log_softmax(logits: Tensor, *, vocab_leaves: int) -> Tensor:
    """fp32 `[..., V]` of `logits [..., V]`; not differentiable (a trainer uses `token_logprobs`)."""
    out: Tensor = _log_softmax_op(logits, vocab_leaves)
    return out


def _token(logits: Tensor, target: Tensor, group: str, vocab_leaves: int) -> tuple[Tensor, Tensor, Tensor]:
    size = size_of(group)
    leaves = _check(logits, vocab_leaves, size)
    if target.shape != logits.shape[:-1]:
        raise DomainError(
            "logprobs",
            f"logits {list(logits.shape)} with target {list(target.shape)}",
            "target shaped as logits without the vocabulary",
        )
    width = logits.shape[-1]
    flat = rows_of(logits)
    top = all_reduce(flat.amax(-1).to(torch.float32), group, dist.ReduceOp.MAX)
    local = target.reshape(-1) - rank_of(group) * width
    inside = (local >= 0) & (local < width)
    if not group and not bool(inside.all()):
        raise DomainError("logprobs", "a target outside the vocabulary", f"targets 0 to {width - 1}")
    local = local.clamp(0, width - 1).unsqueeze(-1)
    pick, total = torch.empty_like(top), torch.empty_like(top)
    for at in row_slices(*flat.shape):
        z = flat[at].to(torch.float32) - top[at].unsqueeze(-1)
        pick[at] = z.gather(-1, local[at]).squeeze(-1)
        total[at] = _sum_exp(z.exp_(), leaves)
    if group:
        pick = all_reduce(pick.masked_fill_(~inside, 0.0), group)
        total = pair_tree(gather_rows(total.unsqueeze(0), group).unbind(0))
    shape = target.shape
    return (pick - total.log()).view(shape), top.view(shape), total.view(shape)


def _token_fake(
    logits: Tensor, target: Tensor, group: str, vocab_leaves: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = target.shape
    return tuple(logits.new_empty(shape, dtype=torch.float32) for _ in range(3))  # type: ignore[return-value]


def _token_grad(
    grad: Tensor, logits: Tensor, target: Tensor, top: Tensor, total: Tensor, group: str
) -> Tensor:
    width = logits.shape[-1]
    flat, rows = rows_of(logits), grad.reshape(-1, 1)
    local = (target - rank_of(group) * width).reshape(-1, 1)
    inside = (local >= 0) & (local < width)
    local = local.clamp(0, width - 1)
    out = torch.empty(flat.shape, dtype=logits.dtype)
    for at in row_slices(*flat.shape):
        z = flat[at].to(torch.float32) - top.view(-1, 1)[at]
        d = z.exp_().div_(total.view(-1, 1)[at]).neg_()
        # one_hot - p = 1 + (-p) at the target, 0 + (-p) elsewhere
        d.scatter_add_(-1, local[at], inside[at].to(torch.float32))
        out[at] = d.mul_(rows[at])
    return out.view(logits.shape)


def _token_grad_fake(
    grad: Tensor, logits: Tensor, target: Tensor, top: Tensor, total: Tensor, group: str
) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, ctx.group, _ = inputs
    _, top, total = output
    ctx.mark_non_differentiable(top, total)
    ctx.save_for_backward(logits, target, top, total)


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return _token_grad_op(grad, *ctx.saved_tensors, ctx.group), None, None, None


_token_grad_op = define(
    "token_logprobs_grad(Tensor grad, Tensor logits, Tensor target, Tensor top, Tensor total, str group) -> Tensor",
    _token_grad,
    _token_grad_fake,
)
_token_op = define(
    "token_logprobs(Tensor logits, Tensor target, str group, int vocab_leaves) -> (Tensor, Tensor, Tensor)",
    _token,
    _token_fake,
    backward=_backward,
    setup_context=_setup,
)


def token_logprobs(
    logits: Tensor, target: Tensor, group: ProcessGroup | None = None, *, vocab_leaves: int
) -> Tensor:
    """fp32 `[...]`: log p(target) from `logits [..., V / ranks]` and global ids `target [...]`; differentiable.

    Bits are those of `log_softmax` on one rank.
    """
    out: Tensor = _token_op(logits, target, name_of(group), vocab_leaves)[0]
    return out
