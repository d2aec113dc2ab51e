# SPDX-License-Identifier: Apache-2.0
"""The gradient op of every sm90 norm, and how norms with a weight are registered with it.

Where ranks share tokens or heads they exchange sums of the scale's gradient, as they are, and each adds all in the one order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.groups import gather_rows, rank_of, size_of
from isoexec.kernels.hopper.library import define, require_model_dtype
from isoexec.kernels.rms_norm.hopper.backward import launch_gradient, launch_total, launch_trees
from isoexec.kernels.rms_norm.hopper.kernel import launch
from isoexec.kernels.rms_norm.hopper.naive import CHAINS, TOKENS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["WIDEST", "check", "define_norms", "gradients", "rows_of"]

WIDEST = 16384


def check(op: str, x: Tensor, w: Tensor, dims: tuple[int, ...] = (2, 3)) -> None:
    """Raise `DomainError` unless `x` and a weight of its width are what a norm takes."""
    require_model_dtype(op, x, w)
    require(
        x.dim() in dims and w.shape == x.shape[-1:] and x.shape[-1] <= WIDEST,
        op,
        f"x {list(x.shape)} with weight {list(w.shape)}",
        f"x of {' or '.join(map(str, dims))} dimensions, weight [x.shape[-1]], at most {WIDEST} wide",
    )


def rows_of(x: Tensor, shard: str) -> Tensor:
    """A trainer's `[s, b, width]` as `[tokens, width]`, its `[s, b, heads, width]` as `[tokens, heads, width]`."""
    require(
        shard in ("none", "sequence", "heads"),
        "sm90_rms_norm",
        f"shard {shard!r}",
        "none, sequence and heads",
    )
    require(
        x.dim() == 4 or (x.dim() == 3 and shard != "heads"),
        "sm90_rms_norm",
        f"x {list(x.shape)}, shard {shard}",
        "x [s, b, width], or [s, b, heads, width]",
    )
    return x.flatten(0, 1)


def whole_scale(chains: Tensor, tokens: int, dtype: torch.dtype, shard: str, group: str) -> Tensor:
    """The scale's gradient from this rank's chains; whole on rank 0, zeros elsewhere, so that a later sum over ranks is exact."""
    if shard == "sequence" and group:
        require(
            tokens % TOKENS == 0,
            "sm90_rms_norm",
            f"{tokens} tokens on a rank of {size_of(group)}",
            f"whole chains of {TOKENS} tokens on every rank",
        )
        if tokens % (TOKENS * CHAINS):
            trees = launch_trees(gather_rows(chains, group))
        else:  # trees are whole, and 64 times smaller
            trees = gather_rows(launch_trees(chains), group)
    else:
        trees = launch_trees(chains)
    if shard == "heads" and group:
        own = torch.empty(chains.shape[1:], dtype=torch.float32, device=chains.device)
        launch_total(trees, own)
        trees = gather_rows(own, group).unsqueeze(0)
    if group and shard != "none" and rank_of(group):
        return torch.zeros(chains.shape[-1:], dtype=dtype, device=chains.device)
    out = torch.empty(chains.shape[-1:], dtype=dtype, device=chains.device)
    launch_total(trees, out)
    return out


def _gradient(
    g: Tensor,
    x: Tensor,
    w: Tensor | None,
    gate: Tensor | None,
    g_sum: Tensor | None,
    eps: float,
    scale: int,
    mean: bool,
    shard: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    g = g.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = x.new_empty((0,)) if gate is None else torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    chains = launch_gradient(
        g,
        x,
        w,
        dx,
        eps,
        gate=gate,
        dgate=dgate,
        g_sum=None if g_sum is None else g_sum.contiguous(),
        scale=scale,
        mean=mean,
    )
    if chains is None or w is None:
        return dx, x.new_empty((0,)), dgate
    return dx, whole_scale(chains, x.shape[0], w.dtype, shard, group), dgate


def _gradient_fake(
    g: Tensor,
    x: Tensor,
    w: Tensor | None,
    gate: Tensor | None,
    g_sum: Tensor | None,
    eps: float,
    scale: int,
    mean: bool,
    shard: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        x.new_empty((0,)) if w is None else w.new_empty(w.shape),
        x.new_empty((0,)) if gate is None else gate.new_empty(x.shape),
    )


gradients = define(
    "sm90_norm_grad(Tensor g, Tensor x, Tensor? w, Tensor? gate, Tensor? g_sum, float eps, int scale, bool mean,"
    " str shard, str group) -> (Tensor, Tensor, Tensor)",
    _gradient,
    _gradient_fake,
)


def define_norms(name: str, scale: int) -> tuple[Any, Any]:
    """Register `sm90_<name>` and `sm90_add_<name>`, norms by a weight of this kind, with their gradients."""

    def norm(x: Tensor, w: Tensor, eps: float, shard: str, group: str) -> Tensor:
        check(f"sm90_{name}", x, w)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        launch(x, None, w, y, None, eps, scale=scale)
        return y

    def fake(x: Tensor, w: Tensor, eps: float, shard: str, group: str) -> Tensor:
        return x.new_empty(x.shape)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, *ctx.rest = inputs
        ctx.save_for_backward(x, w)

    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        eps, shard, group = ctx.rest
        dx, dw, _ = gradients(g, x, w, None, None, eps, scale, True, shard, group)
        return dx, dw, None, None, None

    def add(
        x: Tensor, residual: Tensor, w: Tensor, eps: float, shard: str, group: str
    ) -> tuple[Tensor, Tensor]:
        check(f"sm90_add_{name}", x, w, (2,))
        require_model_dtype(f"sm90_add_{name}", residual)
        require(
            residual.shape == x.shape and residual.dtype == x.dtype,
            f"sm90_add_{name}",
            f"residual {list(residual.shape)} {residual.dtype} with x {list(x.shape)} {x.dtype}",
            "a residual of x's shape and dtype",
        )
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        h = torch.empty_like(y)
        launch(x, residual, w, y, h, eps, scale=scale)
        return y, h

    def add_fake(
        x: Tensor, residual: Tensor, w: Tensor, eps: float, shard: str, group: str
    ) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape), x.new_empty(x.shape)

    def add_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, _, w, *ctx.rest = inputs
        ctx.set_materialize_grads(False)  # adding the zeros of an unused output would turn -0 into +0
        ctx.save_for_backward(output[1], w)

    def add_backward(ctx: Any, g: Tensor | None, g_sum: Tensor | None) -> tuple[Tensor | None, ...]:
        h, w = ctx.saved_tensors
        eps, shard, group = ctx.rest
        if g is None:
            return g_sum, g_sum, None, None, None, None
        dx, dw, _ = gradients(g, h, w, None, g_sum, eps, scale, True, shard, group)
        return dx, dx, dw, None, None, None

    signature = "Tensor w, float eps, str shard, str group) -> "
    norm_op = define(
        f"sm90_{name}(Tensor x, {signature}Tensor", norm, fake, backward=backward, setup_context=setup
    )
    add_op = define(
        f"sm90_add_{name}(Tensor x, Tensor residual, {signature}(Tensor, Tensor)",
        add,
        add_fake,
        backward=add_backward,
        setup_context=add_setup,
    )
    return norm_op, add_op
