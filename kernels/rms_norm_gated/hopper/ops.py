# SPDX-License-Identifier: Apache-2.0
"""The gated RMSNorm on sm90 as an opaque torch op, by the kernels of `rms_norm`; differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.groups import name_of
from isoexec.kernels.hopper.library import define, require_model_dtype
from isoexec.kernels.rms_norm.hopper.gradient import check, gradients, rows_of
from isoexec.kernels.rms_norm.hopper.kernel import PLAIN, launch
from isoexec.kernels.rms_norm.hopper.ops import Shard

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["rms_norm", "rms_norm_grad"]


def _norm(x: Tensor, w: Tensor, gate: Tensor, eps: float, shard: str, group: str) -> Tensor:
    check("sm90_rms_norm_gated", x, w)
    require_model_dtype("sm90_rms_norm_gated", gate)
    require(
        gate.shape == x.shape,
        "sm90_rms_norm_gated",
        f"gate {list(gate.shape)} with x {list(x.shape)}",
        "a gate of x's shape",
    )
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(x, None, w, y, None, eps, gate=gate)
    return y


def _fake(x: Tensor, w: Tensor, gate: Tensor, eps: float, shard: str, group: str) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, gate, *ctx.rest = inputs
    ctx.save_for_backward(x, w, gate)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, w, gate = ctx.saved_tensors
    eps, shard, group = ctx.rest
    dx, dw, dgate = gradients(g, x, w, gate, None, eps, PLAIN, True, shard, group)
    return dx, dw, dgate, None, None, None


_op = define(
    "sm90_rms_norm_gated(Tensor x, Tensor w, Tensor gate, float eps, str shard, str group) -> Tensor",
    _norm,
    _fake,
    backward=_backward,
    setup_context=_setup,
)


def rms_norm(x: Tensor, w: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Norm of `x [tokens, width]` or `[tokens, heads, width]` by `w`, times silu of `gate` of its shape, in x.dtype.

    Views are welcome for both; differentiable.
    """
    out: Tensor = _op(x, w, gate, eps, "none", "")
    return out


def rms_norm_grad(
    x: Tensor,
    w: Tensor,
    gate: Tensor,
    eps: float,
    *,
    shard: Shard = "none",
    group: ProcessGroup | None = None,
) -> Tensor:
    """`rms_norm` for a trainer: x and gate `[s, b, heads, width]`; `shard` and `group` as in `rms_norm`'s."""
    out: Tensor = _op(rows_of(x, shard), w, rows_of(gate, shard), eps, shard, name_of(group))
    return out.view(x.shape)
