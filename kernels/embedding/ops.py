# SPDX-License-Identifier: Apache-2.0
"""Embedding lookup as torch ops, whole or with the vocabulary shared by ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.domain import DomainError, require_float
from isoexec.kernels.groups import all_reduce, gather_rows, name_of, own_rows, size_of
from isoexec.kernels.library import define

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["embedding", "vocab_parallel_embedding"]


def _lookup(ids: Tensor, w: Tensor, vocab_start: int, group: str, sp: bool) -> Tensor:
    require_float("embedding", w)
    flat = ids.reshape(-1)
    rows, width = w.shape
    if not group:
        try:
            return w.index_select(0, flat).add_(0.0).view(*ids.shape, width)
        except (IndexError, RuntimeError) as error:
            raise DomainError(
                "embedding", f"ids outside a table of {rows} rows", f"ids 0 to {rows - 1}"
            ) from error
    local = flat - vocab_start
    inside = (local >= 0) & (local < rows)
    out = w.index_select(0, local.clamp(0, rows - 1)).to(torch.float32)
    out.masked_fill_(~inside.unsqueeze(-1), 0.0)
    out = all_reduce(out, group).add_(0.0).to(w.dtype).view(*ids.shape, width)
    return own_rows(out, group, "embedding").contiguous() if sp else out


def _lookup_fake(ids: Tensor, w: Tensor, vocab_start: int, group: str, sp: bool) -> Tensor:
    lead = list(ids.shape)
    if sp:
        lead[0] //= size_of(group)
    return w.new_empty((*lead, w.shape[1]))


def _grad(grad: Tensor, ids: Tensor, rows: int, vocab_start: int, group: str, sp: bool) -> Tensor:
    if sp:
        grad = gather_rows(grad, group)
    local = ids.reshape(-1) - vocab_start
    # a token of another shard falls on one extra row, which is dropped
    local = torch.where((local >= 0) & (local < rows), local, rows)
    terms = grad.reshape(-1, grad.shape[-1]).to(torch.float32)
    return torch.ops.aten.embedding_dense_backward(terms, local, rows + 1, -1, False)[:rows]


def _grad_fake(grad: Tensor, ids: Tensor, rows: int, vocab_start: int, group: str, sp: bool) -> Tensor:
    return grad.new_empty((rows, grad.shape[-1]), dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, w, ctx.vocab_start, ctx.group, ctx.sp = inputs
    ctx.rows, ctx.dtype = w.shape[0], w.dtype
    ctx.save_for_backward(ids)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (ids,) = ctx.saved_tensors
    dw = _grad_op(grad, ids, ctx.rows, ctx.vocab_start, ctx.group, ctx.sp).to(ctx.dtype)
    return None, dw, None, None, None


_grad_op = define(
    "embedding_grad(Tensor grad, Tensor ids, SymInt rows, int vocab_start, str group, bool sequence_parallel) -> Tensor",
    _grad,
    _grad_fake,
)
_op = define(
    "embedding(Tensor ids, Tensor w, int vocab_start, str group, bool sequence_parallel) -> Tensor",
    _lookup,
    _lookup_fake,
    backward=_backward,
    setup_context=_setup,
)


def embedding(ids: Tensor, w: Tensor) -> Tensor:
    """Rows of `w [vocab, width]` at `ids [...]`, plus 0.0, in w.dtype; differentiable."""
    out: Tensor = _op(ids, w, 0, "", False)
    return out


def vocab_parallel_embedding(
    ids: Tensor,
    w: Tensor,
    *,
    vocab_start: int,
    group: ProcessGroup | None,
    sequence_parallel: bool = False,
) -> Tensor:
    """`embedding` with rank r holding rows `vocab_start ...` of the table; the same bits; differentiable.

    With `sequence_parallel`, ids are `[s, b]` and the result is this rank's block of dim 0.
    """
    name = name_of(group)
    out: Tensor = _op(ids, w, vocab_start, name, sequence_parallel and bool(name))
    return out
