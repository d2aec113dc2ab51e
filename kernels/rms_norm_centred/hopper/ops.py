# SPDX-License-Identifier: Apache-2.0
"""RMSNorm by 1 + w on sm90: the kernels of `rms_norm`, their signatures and the order of their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isoexec.kernels.groups import name_of
from isoexec.kernels.rms_norm.hopper.gradient import define_norms, rows_of
from isoexec.kernels.rms_norm.hopper.kernel import CENTRED
from isoexec.kernels.rms_norm.hopper.ops import Shard, residual_add

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["add_rms_norm", "residual_add", "rms_norm", "rms_norm_grad"]

_norm_op, _add_norm_op = define_norms("rms_norm_centred", CENTRED)


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Norm of the rows of `x [tokens, width]` or `[tokens, heads, width]`, times 1 + w, in x.dtype; differentiable."""
    out: Tensor = _norm_op(x, w, eps, "none", "")
    return out


def rms_norm_grad(
    x: Tensor, w: Tensor, eps: float, *, shard: Shard = "none", group: ProcessGroup | None = None
) -> Tensor:
    """`rms_norm` for a trainer: x `[s, b, width]` or `[s, b, heads, width]`; `shard` and `group` as in `rms_norm`'s."""
    out: Tensor = _norm_op(rows_of(x, shard), w, eps, shard, name_of(group))
    return out.view(x.shape)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    w: Tensor,
    eps: float,
    *,
    shard: Shard = "none",
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """(norm of h, h) with h = x + residual rounded to the model dtype; `[tokens, width]` each; differentiable."""
    y, h = _add_norm_op(x, residual, w, eps, shard, name_of(group))
    return y, h
