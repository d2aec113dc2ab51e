# SPDX-License-Identifier: Apache-2.0
"""Temperature and entropy beside the token logprobs on CPU, by the same leaf sums.

`temper` divides fp32 logits by the temperature with one IEEE division, as an engine's sampler does before it takes logprobs, so
`token_logprobs(temper(z, t))` is what an engine gives for processed logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from isoexec.kernels.domain import DomainError
from isoexec.kernels.groups import all_reduce, gather_rows, name_of, size_of
from isoexec.kernels.library import define
from isoexec.kernels.logprobs.ops import _check, _sum_exp
from isoexec.kernels.slices import row_slices, rows_of
from isoexec.kernels.sums import pair_tree

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["entropy", "temper"]


def _temper(logits: Tensor, temperature: Tensor) -> Tensor:
    if temperature.shape != logits.shape[:-1] or temperature.dtype != torch.float32:
        raise DomainError(
            "temper",
            f"logits {list(logits.shape)} with temperature {list(temperature.shape)} {temperature.dtype}",
            "float32 temperatures shaped as logits without the vocabulary",
        )
    return logits.to(torch.float32) / temperature.unsqueeze(-1)


def _temper_fake(logits: Tensor, temperature: Tensor) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


def _temper_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype
    ctx.save_for_backward(inputs[1])


def _temper_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (temperature,) = ctx.saved_tensors
    return (grad / temperature.unsqueeze(-1)).to(ctx.dtype), None


def _entropy(logits: Tensor, group: str, vocab_leaves: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    leaves = _check(logits, vocab_leaves, size_of(group))
    flat = rows_of(logits)
    top = all_reduce(flat.amax(-1).to(torch.float32), group, dist.ReduceOp.MAX)
    total, mean = torch.empty_like(top), torch.empty_like(top)
    for at in row_slices(*flat.shape):
        z = flat[at].to(torch.float32) - top[at].unsqueeze(-1)
        e = torch.exp(z)
        total[at] = _sum_exp(e, leaves)
        # a word that cannot come adds nothing
        mean[at] = _sum_exp(torch.where(e == 0, e, e * z), leaves)
    if group:
        total, mean = (pair_tree(gather_rows(t.unsqueeze(0), group).unbind(0)) for t in (total, mean))
    shape = logits.shape[:-1]
    spread = total.log() - mean / total
    return spread.view(shape), top.view(shape), total.view(shape), mean.view(shape)


def _entropy_fake(logits: Tensor, group: str, vocab_leaves: int) -> tuple[Tensor, ...]:
    return tuple(logits.new_empty(logits.shape[:-1], dtype=torch.float32) for _ in range(4))


def _entropy_grad(grad: Tensor, logits: Tensor, top: Tensor, total: Tensor, mean: Tensor) -> Tensor:
    """-grad p (z - mean / total), p = exp(z) / total; nothing where p is zero."""
    flat = rows_of(logits)
    out = torch.empty(flat.shape, dtype=logits.dtype)
    g, m, s, u = (t.reshape(-1, 1) for t in (grad, top, total, mean))
    for at in row_slices(*flat.shape):
        z = flat[at].to(torch.float32) - m[at]
        p = torch.exp(z) / s[at]
        out[at] = torch.where(p == 0, p, -(g[at] * (p * (z - u[at] / s[at]))))
    return out.view(logits.shape)


def _entropy_grad_fake(grad: Tensor, logits: Tensor, top: Tensor, total: Tensor, mean: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(inputs[0], *output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return _entropy_grad_op(grad, *ctx.saved_tensors), None, None


_temper_op = define(
    "temper(Tensor logits, Tensor temperature) -> Tensor",
    _temper,
    _temper_fake,
    backward=_temper_backward,
    setup_context=_temper_setup,
)
_entropy_grad_op = define(
    "entropy_grad(Tensor grad, Tensor logits, Tensor top, Tensor total, Tensor mean) -> Tensor",
    _entropy_grad,
    _entropy_grad_fake,
)
_entropy_op = define(
    "entropy(Tensor logits, str group, int vocab_leaves) -> (Tensor, Tensor, Tensor, Tensor)",
    _entropy,
    _entropy_fake,
    backward=_backward,
    setup_context=_setup,
)


def temper(logits: Tensor, temperature: Tensor) -> Tensor:
    """fp32 `[..., V]`: logits divided by `temperature [...]` fp32, rounded once; its gradient likewise, in the logits' dtype."""
    out: Tensor = _temper_op(logits, temperature)
    return out


def entropy(logits: Tensor, group: ProcessGroup | None = None, *, vocab_leaves: int) -> Tensor:
    """fp32 `[...]`: entropy in nats of the softmax of `logits [..., V / ranks]`, log(sum) - sum(e z) / sum; differentiable.

    Both sums are `token_logprobs`' trees over leaves, so any number of ranks with whole leaves has the bits of one.
    """
    out: Tensor = _entropy_op(logits, name_of(group), vocab_leaves)[0]
    return out
