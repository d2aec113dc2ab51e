# SPDX-License-Identifier: Apache-2.0
"""SiLU times up of the sm90 function as an opaque torch op; forward only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.hopper.library import define, require_model_dtype
from isoexec.kernels.silu_mul.hopper.kernel import launch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["silu_mul"]


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    require_model_dtype("sm90_silu_mul", gate, up)
    require(
        gate.dim() == 2 and gate.shape == up.shape and gate.dtype == up.dtype,
        "sm90_silu_mul",
        f"gate {list(gate.shape)} {gate.dtype} with up {list(up.shape)} {up.dtype}",
        "equal shapes [rows, width] and dtypes",
    )
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    launch(gate, up, out)
    return out


def _fake(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


_op = define("sm90_silu_mul(Tensor gate, Tensor up) -> Tensor", _silu_mul, _fake)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of `[rows, width]`, in gate.dtype; halves of one projection are welcome as they lie."""
    out: Tensor = _op(gate, up)
    return out
