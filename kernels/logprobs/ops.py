# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities over fixed vocabulary leaves as torch ops, whole or with the vocabulary shared by ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from isoexec.kernels.domain import DomainError, require_float
from isoexec.kernels.groups import all_reduce, gather_rows, name_of, rank_of, size_of
from isoexec.kernels.library import define
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
    z = logits.to(torch.float32)
    z = z - z.amax(-1, keepdim=True)
    return z.sub_(_sum_exp(torch.exp(z), leaves).log_().unsqueeze(-1))


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
    z = logits.to(torch.float32)
    top = all_reduce(z.amax(-1), group, dist.ReduceOp.MAX)
    z = z - top.unsqueeze(-1)
    local = target - rank_of(group) * width
    inside = (local >= 0) & (local < width)
    pick = z.gather(-1, local.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
    if group:
        pick = all_reduce(pick.masked_fill_(~inside, 0.0), group)
    else:
        if not bool(inside.all()):
            raise DomainError("logprobs", "a target outside the vocabulary", f"targets 0 to {width - 1}")
    e = z.exp_()
    total = _sum_exp(e, leaves)
    if group:
        total = pair_tree(gather_rows(total.unsqueeze(0), group).unbind(0))
    return pick - total.log(), top, total


def _token_fake(
    logits: Tensor, target: Tensor, group: str, vocab_leaves: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = target.shape
    return tuple(logits.new_empty(shape, dtype=torch.float32) for _ in range(3))  # type: ignore[return-value]


def _token_grad(
    grad: Tensor, logits: Tensor, target: Tensor, top: Tensor, total: Tensor, group: str
) -> Tensor:
    width = logits.shape[-1]
    d = torch.exp(logits.to(torch.float32) - top.unsqueeze(-1)).div_(total.unsqueeze(-1)).neg_()
    local = (target - rank_of(group) * width).unsqueeze(-1)
    inside = (local >= 0) & (local < width)
    # one_hot - p = 1 + (-p) at the target, 0 + (-p) elsewhere
    d.scatter_add_(-1, local.clamp(0, width - 1), inside.to(torch.float32))
    return d.mul_(grad.unsqueeze(-1)).to(logits.dtype)


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
