# SPDX-License-Identifier: Apache-2.0
"""attention.mma_segments/1's result with cuDNN's deterministic gradient: `frontend` says why this is a function of its own.

The result is computed by `attention`'s op; only a plan with `gradients` differs. A gradient asks how long its sequences are, so
it waits for the device once and cannot stand in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.attention.hopper import ops
from isoexec.kernels.attention.hopper.ops import Maker, Plan, attention
from isoexec.kernels.attention_cudnn.hopper import frontend
from isoexec.kernels.domain import require
from isoexec.kernels.hopper.library import define

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Plan", "attention", "plan"]

GRADIENT = "cudnn"


def plan(
    *,
    requests: int,
    tokens: int,
    most_rows: int,
    most_keys: int,
    kv_segment: int,
    page: int = 0,
    provider: Maker = "fa3",
    gradients: bool = False,
    folded: bool | None = None,
    device: torch.device | str = "cuda",
) -> Plan:
    """An empty plan as `attention.hopper.ops.plan` makes it, whose gradients are cuDNN's.

    With `gradients` raises `frontend.LibraryMissingError` without the library, `DomainError` for a build that is not certified.
    """
    if gradients:
        frontend.require_certified()
    made = ops.plan(
        requests=requests,
        tokens=tokens,
        most_rows=most_rows,
        most_keys=most_keys,
        kv_segment=kv_segment,
        page=page,
        provider=provider,
        gradients=gradients,
        folded=folded,
        device=device,
    )
    return replace(made, gradient=GRADIENT)


def _grad(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Tensor,
    units: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    most_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    require(
        sinks is None and window == 0,
        frontend.NAME,
        "sinks" if window == 0 else f"a window of {window}",
        "neither sinks nor a window",
    )
    require(
        not (g.is_cuda and torch.cuda.is_current_stream_capturing()),
        frontend.NAME,
        "a gradient under capture",
        "gradients outside CUDA graphs: they ask how long their sequences are",
    )
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for a, rows, keys, b in zip(*spans.tolist(), strict=True):
        require(
            rows == keys,
            frontend.NAME,
            f"{rows} rows of a sequence of {keys} keys",
            "whole sequences: each request's rows are those of all its keys",
        )
        if rows:
            of, at = slice(a, a + rows), slice(b, b + rows)
            frontend.gradients(
                *(g[of], q[of], k[at], v[at], out[of], lse[:, of], (dq[of], dk[at], dv[at])), scale=scale
            )
    return dq, dk, dv, torch.empty(0, dtype=torch.float32, device=q.device)


_grad_op: Any = define(
    "sm90_attention_cudnn_grad(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor spans, Tensor units, "
    "Tensor? sinks, float scale, int window, int most_rows) -> (Tensor, Tensor, Tensor, Tensor)",
    _grad,
    ops._grad_fake,
)
ops.GRADIENTS[GRADIENT] = _grad_op
