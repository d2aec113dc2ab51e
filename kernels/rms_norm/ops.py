# SPDX-License-Identifier: Apache-2.0
"""RMSNorm by a halving tree as torch ops, with a gradient whose bits do not depend on how ranks share rows or heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from isoexec.kernels.domain import DomainError, require_float
from isoexec.kernels.groups import name_of, resolve
from isoexec.kernels.library import define
from isoexec.kernels.rms_norm.naive import reciprocal_root
from isoexec.kernels.sums import halving_tree

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["add_rms_norm", "residual_add", "rms_norm", "rms_norm_grad"]


def _inverse_rms(xf: Tensor, eps: float) -> Tensor:
    return reciprocal_root(halving_tree(xf * xf).unsqueeze(-1).div_(xf.shape[-1]).add_(eps))


def _norm(x: Tensor, w: Tensor, eps: float, shard: str, group: str) -> Tensor:
    require_float("rms_norm", x, w)
    if w.shape != x.shape[-1:]:
        raise DomainError(
            "rms_norm", f"x {list(x.shape)} with weight {list(w.shape)}", "weight [x.shape[-1]]"
        )
    xf = x.to(torch.float32)
    return (xf * _inverse_rms(xf, eps)).mul_(w.to(torch.float32)).to(x.dtype)


def _norm_fake(x: Tensor, w: Tensor, eps: float, shard: str, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _norm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, ctx.eps, ctx.shard, ctx.group = inputs
    ctx.save_for_backward(x, w)


def _norm_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    dx, dw = _norm_grad_op(g, x, w, ctx.eps, ctx.shard, ctx.group)
    return dx, dw, None, None, None


def _norm_grad(g: Tensor, x: Tensor, w: Tensor, eps: float, shard: str, group: str) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    xf, gf = x.to(torch.float32), g.to(torch.float32)
    r = _inverse_rms(xf, eps)
    xh, gw = xf * r, gf * w.to(torch.float32)
    mean = halving_tree(gw * xh).unsqueeze(-1).div_(width)
    dx = (r * (gw - xh * mean)).to(x.dtype)
    terms = gf * xh
    heads = x.shape[2] if x.dim() == 4 else 1
    batch = x.shape[1] if x.dim() > 2 else 1
    places = halving_tree(terms.reshape(-1, batch, heads, width), 1)
    sequence = group if shard == "sequence" else ""
    per_head = _receive((heads, width), sequence)
    for place in places.unbind(0):
        per_head.add_(place)
    per_head = _pass_on(per_head, sequence)
    by_head = group if shard == "heads" else ""
    total = _receive((width,), by_head)
    for head in per_head.unbind(0):
        total.add_(head)
    total = _pass_on(total, by_head)
    return dx, total.to(w.dtype)


def _receive(shape: tuple[int, ...], group_name: str) -> Tensor:
    """Zeros, or what the rank before this one has summed so far."""
    acc = torch.zeros(shape, dtype=torch.float32)
    if group_name and (rank := resolve(group_name).rank()):
        dist.recv(acc, group=resolve(group_name), group_src=rank - 1)
    return acc


def _pass_on(acc: Tensor, group_name: str) -> Tensor:
    """Hand the sum to the next rank; the last hands the whole to rank 0, every other rank keeps zeros."""
    if not group_name:
        return acc
    group = resolve(group_name)
    size, rank = group.size(), group.rank()
    dist.send(acc, group=group, group_dst=(rank + 1) % size)
    if rank:
        return torch.zeros_like(acc)
    whole = torch.empty_like(acc)
    dist.recv(whole, group=group, group_src=size - 1)
    return whole


def _norm_grad_fake(
    g: Tensor, x: Tensor, w: Tensor, eps: float, shard: str, group: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(w)


_norm_grad_op = define(
    "rms_norm_grad(Tensor g, Tensor x, Tensor w, float eps, str shard, str group) -> (Tensor, Tensor)",
    _norm_grad,
    _norm_grad_fake,
)
_norm_op = define(
    "rms_norm(Tensor x, Tensor w, float eps, str shard, str group) -> Tensor",
    _norm,
    _norm_fake,
    backward=_norm_backward,
    setup_context=_norm_setup,
)


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """`x [..., width]` normalised and scaled by `w [width]`, in x.dtype."""
    out: Tensor = _norm_op(x, w, eps, "none", "")
    return out


def rms_norm_grad(
    x: Tensor,
    w: Tensor,
    eps: float,
    *,
    shard: Literal["none", "sequence", "heads"] = "none",
    group: ProcessGroup | None = None,
) -> Tensor:
    """`rms_norm` for a trainer: x `[s, b, width]` or `[s, b, heads, width]`, differentiable.

    Where ranks of `group` share the sequence or the heads, the weight's gradient is whole on rank 0 and zero on the others,
    so that a later sum over the group is exact.
    """
    if shard not in ("none", "sequence", "heads"):
        raise DomainError("rms_norm", f"shard {shard!r}", "none, sequence and heads")
    if shard == "heads" and x.dim() != 4:
        raise DomainError("rms_norm", f"x {list(x.shape)} sharded by heads", "x [s, b, heads, width]")
    out: Tensor = _norm_op(x, w, eps, shard, name_of(group))
    return out


def _add(x: Tensor, residual: Tensor) -> Tensor:
    require_float("residual_add", x, residual)
    return (x.to(torch.float32) + residual.to(torch.float32)).to(residual.dtype)


def _add_fake(x: Tensor, residual: Tensor) -> Tensor:
    return torch.empty_like(residual, memory_format=torch.contiguous_format)


def _add_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype


def _add_backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    return g.to(ctx.dtype), g


_add_op = define(
    "residual_add(Tensor x, Tensor residual) -> Tensor",
    _add,
    _add_fake,
    backward=_add_backward,
    setup_context=_add_setup,
)


def residual_add(x: Tensor, residual: Tensor) -> Tensor:
    """`x + residual` in fp32, rounded once to residual.dtype; differentiable."""
    out: Tensor = _add_op(x, residual)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of h, h) with h = `residual_add(x, residual)`: the norm reads the rounded sum."""
    h = residual_add(x, residual)
    return rms_norm(h, w, eps), h
