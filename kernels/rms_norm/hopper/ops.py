# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of the sm90 function as opaque torch ops, with gradients whose bits do not depend on how ranks share rows or heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from isoexec.kernels.domain import require
from isoexec.kernels.groups import name_of
from isoexec.kernels.hopper.elementwise import launch_add
from isoexec.kernels.hopper.library import define, require_model_dtype
from isoexec.kernels.rms_norm.hopper.gradient import define_norms, rows_of
from isoexec.kernels.rms_norm.hopper.kernel import PLAIN

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["add_rms_norm", "residual_add", "rms_norm", "rms_norm_grad"]

Shard = Literal["none", "sequence", "heads"]

_norm_op, _add_norm_op = define_norms("rms_norm", PLAIN)


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Norm of the rows of `x [tokens, width]` or `[tokens, heads, width]`, views welcome, in x.dtype; differentiable."""
    out: Tensor = _norm_op(x, w, eps, "none", "")
    return out


def rms_norm_grad(
    x: Tensor, w: Tensor, eps: float, *, shard: Shard = "none", group: ProcessGroup | None = None
) -> Tensor:
    """`rms_norm` for a trainer: x `[s, b, width]` or `[s, b, heads, width]`, differentiable.

    Where ranks of `group` share the sequence (by whole chains of 16 tokens) or the heads, the weight's gradient is whole on
    rank 0 and zero on the others, so that a later sum over the group is exact.
    """
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
    """(norm of h, h) with h = x + residual rounded to the model dtype; `[tokens, width]` each; differentiable.

    Its gradients are those of `residual_add` and `rms_norm_grad` one after the other, bit for bit.
    """
    y, h = _add_norm_op(x, residual, w, eps, shard, name_of(group))
    return y, h


def _add(x: Tensor, residual: Tensor) -> Tensor:
    require_model_dtype("sm90_residual_add", x, residual)
    require(
        x.shape == residual.shape and x.dtype == residual.dtype,
        "sm90_residual_add",
        f"x {list(x.shape)} {x.dtype} with residual {list(residual.shape)} {residual.dtype}",
        "equal shapes and dtypes",
    )
    return launch_add(x.contiguous(), residual.contiguous())


def _add_fake(x: Tensor, residual: Tensor) -> Tensor:
    return residual.new_empty(residual.shape)


def _add_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pass


def _add_backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    return g, g


_add_op = define(
    "sm90_residual_add(Tensor x, Tensor residual) -> Tensor",
    _add,
    _add_fake,
    backward=_add_backward,
    setup_context=_add_setup,
)


def residual_add(x: Tensor, residual: Tensor) -> Tensor:
    """`x + residual` of equal shapes in fp32, rounded once; differentiable."""
    out: Tensor = _add_op(x, residual)
    return out
