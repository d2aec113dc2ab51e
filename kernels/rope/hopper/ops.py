# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding as an opaque torch op over one table, with its gradient: the same rotation the other way."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from isoexec.contracts.digests import digest_bytes
from isoexec.kernels.domain import require
from isoexec.kernels.hopper.library import define, require_model_dtype
from isoexec.kernels.rope.hopper import rotation
from isoexec.kernels.rope.hopper.kernel import launch
from isoexec.kernels.rope.naive import table

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rope", "rope_sections", "rotate", "section_axes", "table_digest", "tables"]


@lru_cache(maxsize=16)
def tables(head_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cos and sin, fp32 `[8192, head_dim / 2]`, made on the host and copied: a GPU's float64 cosine has other bits.

    `head_dim` is the rotated part of a head. Call it once before a CUDA graph is captured; a copy from the host cannot be
    captured.
    """
    cos, sin = table(head_dim, base)
    return cos.to(device), sin.to(device)


def table_digest(head_dim: int, base: float, device: torch.device) -> str:
    """`sha256:...` of the table as it lies on the device, for attestation."""
    both = torch.stack(tables(head_dim, base, device)).cpu()
    return digest_bytes(both.view(torch.uint8).numpy().tobytes())


@lru_cache(maxsize=16)
def section_axes(sections: tuple[int, ...], interleaved: bool, device: torch.device) -> Tensor:
    """int32 `[half]`: the axis of positions (text and time, height, width) that each frequency reads; as `tables`, made once.

    `sections` is the model's `mrope_section`, `interleaved` its `mrope_interleaved`.
    """
    require(
        bool(sections) and min(sections) >= 0,
        "sm90_rope",
        f"sections {list(sections)}",
        "how many frequencies each axis has",
    )
    return rotation.section_axes(sections, interleaved=interleaved).to(device)


def _rotate(
    x: Tensor,
    positions: Tensor,
    axes: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    reverse: bool,
) -> Tensor:
    require_model_dtype("sm90_rope", x)
    require(
        x.dim() == 3
        and x.shape[-1] >= 2 * cos.shape[-1] > 0
        and positions.shape[-1:] == x.shape[:1]
        and positions.dim() == (1 if axes is None else 2)
        and positions.dtype in (torch.int32, torch.int64)
        and cos.shape == sin.shape
        and cos.dtype == sin.dtype == torch.float32
        and all(t.is_contiguous() for t in (positions, cos, sin)),
        "sm90_rope",
        f"x {list(x.shape)}, positions {list(positions.shape)} {positions.dtype}, table {list(cos.shape)} {cos.dtype}",
        "x [tokens, heads, head_dim], integer positions [tokens] (with axes [n, tokens]), contiguous fp32 tables"
        " [length, half] with 2 * half at most head_dim",
    )
    require(
        axes is None or (axes.shape == cos.shape[1:] and axes.dtype == torch.int32 and axes.is_contiguous()),
        "sm90_rope",
        f"axes {None if axes is None else list(axes.shape)}",
        "int32 axes, one a frequency",
    )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(x, positions, cos, sin, out, axes=axes, interleaved=interleaved, reverse=reverse)
    return out


def _fake(
    x: Tensor,
    positions: Tensor,
    axes: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    reverse: bool,
) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, positions, axes, cos, sin, ctx.interleaved, ctx.reverse = inputs
    ctx.save_for_backward(positions, axes, cos, sin)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    dx = _op(g.contiguous(), *ctx.saved_tensors, ctx.interleaved, not ctx.reverse)
    return dx, None, None, None, None, None, None


_op = define(
    "sm90_rope(Tensor x, Tensor positions, Tensor? axes, Tensor cos, Tensor sin, bool interleaved, bool reverse) -> Tensor",
    _rotate,
    _fake,
    backward=_backward,
    setup_context=_setup,
)


def rotate(
    x: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    axes: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """The op behind the functions that rotate: halves, or with `interleaved` neighbours, by any fp32 table; differentiable."""
    out: Tensor = _op(x, positions, axes, cos, sin, interleaved, False)
    return out


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x [tokens, heads, head_dim]` (views welcome) rotated at `positions [tokens]` by `tables`; NaN outside the table.

    A table narrower than half a head rotates its first columns and copies the others (partial rotary). Differentiable.
    """
    return rotate(x, positions, cos, sin)


def rope_sections(x: Tensor, positions: Tensor, axes: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rope` at `positions [n, tokens]`, each frequency at that of its axis (mRoPE, `section_axes`).

    The bits are `rope`'s where a token's positions are equal, as those of text are.
    """
    return rotate(x, positions, cos, sin, axes=axes)
