# SPDX-License-Identifier: Apache-2.0
"""The sm90 linear as one opaque torch op: the Triton chain up to a tuned number of rows, cuBLASLt above; forward only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.hopper.library import define
from isoexec.kernels.linear.hopper import cublaslt
from isoexec.kernels.linear.hopper.kernel import launch
from isoexec.kernels.linear.hopper.table import tile_for

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["linear"]


def _linear(x: Tensor, w: Tensor, fp32_out: bool) -> Tensor:
    require(
        x.dtype == w.dtype == torch.bfloat16 and x.is_contiguous() and w.is_contiguous(),
        "sm90_linear",
        f"x {x.dtype} strides {x.stride()}, w {w.dtype} strides {w.stride()}",
        "contiguous bfloat16",
    )
    require(
        x.dim() == 2 and w.dim() == 2 and x.shape[1] == w.shape[1],
        "sm90_linear",
        f"x {list(x.shape)} with w {list(w.shape)}",
        "x [M, K] and w [N, K]",
    )
    M, N = len(x), len(w)
    out_dtype = torch.float32 if fp32_out else torch.bfloat16
    tile = tile_for(N, x.shape[1], M)
    if tile is None:
        return cublaslt.linear(x, w, out_dtype)
    out = torch.empty(M, N, dtype=out_dtype, device=x.device)
    launch(x, w, out, tile)
    return out


def _fake(x: Tensor, w: Tensor, fp32_out: bool) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[0]), dtype=torch.float32 if fp32_out else torch.bfloat16)


_op = define("sm90_linear(Tensor x, Tensor w, bool fp32_out) -> Tensor", _linear, _fake)


def linear(x: Tensor, w: Tensor, *, fp32_out: bool = False) -> Tensor:
    """`x [M, K] @ w [N, K]^T`, bf16 in, bf16 or fp32 out, bits independent of M.

    Raises `DomainError` for a weight that is not in the table and `SwitchError` where cuBLASLt's switches are not claimed.
    """
    out: Tensor = _op(x, w, fp32_out)
    return out
