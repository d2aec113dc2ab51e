# SPDX-License-Identifier: Apache-2.0
"""Embedding lookup on sm90 as opaque torch ops, whole or with the vocabulary shared by ranks: the CPU function's bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.embedding.hopper.kernel import launch, launch_gradient
from isoexec.kernels.groups import all_reduce, gather_rows, name_of, own_rows, size_of
from isoexec.kernels.hopper.library import define, require_model_dtype

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["embedding", "shard_lookup", "vocab_parallel_embedding"]


def _lookup(ids: Tensor, w: Tensor, vocab_start: int, vocab: int, group: str, sp: bool) -> Tensor:
    require_model_dtype("sm90_embedding", w)
    require(
        w.dim() == 2 and ids.dtype in (torch.int32, torch.int64),
        "sm90_embedding",
        f"ids {ids.dtype}, table {list(w.shape)}",
        "integer ids, table [rows, width]",
    )
    out = torch.empty((*ids.shape, w.shape[1]), dtype=w.dtype, device=w.device)
    launch(ids.reshape(-1), w, out.view(ids.numel(), w.shape[1]), first=vocab_start, vocab=vocab)
    out = all_reduce(out, group)  # one rank's row and zeros: exact in any order and dtype
    return own_rows(out, group, "sm90_embedding").contiguous() if sp else out


def _lookup_fake(ids: Tensor, w: Tensor, vocab_start: int, vocab: int, group: str, sp: bool) -> Tensor:
    lead = list(ids.shape)
    if sp:
        lead[0] //= size_of(group)
    return w.new_empty((*lead, w.shape[1]))


def _gradient(grad: Tensor, ids: Tensor, w: Tensor, vocab_start: int, group: str, sp: bool) -> Tensor:
    if sp:
        grad = gather_rows(grad, group)
    dw = torch.zeros(w.shape, dtype=w.dtype, device=w.device)
    launch_gradient(
        grad.reshape(ids.numel(), grad.shape[-1]).contiguous(), ids.reshape(-1), dw, first=vocab_start
    )
    return dw


def _gradient_fake(grad: Tensor, ids: Tensor, w: Tensor, vocab_start: int, group: str, sp: bool) -> Tensor:
    return w.new_empty(w.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, w, ctx.vocab_start, _, ctx.group, ctx.sp = inputs
    ctx.save_for_backward(ids, w)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    ids, w = ctx.saved_tensors
    return None, _gradient_op(grad, ids, w, ctx.vocab_start, ctx.group, ctx.sp), None, None, None, None


_gradient_op = define(
    "sm90_embedding_grad(Tensor grad, Tensor ids, Tensor w, int vocab_start, str group, bool sequence_parallel) -> Tensor",
    _gradient,
    _gradient_fake,
)
_op = define(
    "sm90_embedding(Tensor ids, Tensor w, int vocab_start, int vocab, str group, bool sequence_parallel) -> Tensor",
    _lookup,
    _lookup_fake,
    backward=_backward,
    setup_context=_setup,
)


def embedding(ids: Tensor, w: Tensor) -> Tensor:
    """Rows of `w [vocab, width]` at `ids [...]`, plus 0.0, in w.dtype; NaN for an id outside the table; differentiable."""
    out: Tensor = _op(ids, w, 0, w.shape[0], "", False)
    return out


def shard_lookup(ids: Tensor, w: Tensor, *, vocab_start: int, vocab: int) -> Tensor:
    """One rank's term of `vocab_parallel_embedding`, where a runtime adds ranks itself: zeros for ids of other ranks.

    NaN for an id that is not in [0, vocab).
    """
    out: Tensor = _op(ids, w, vocab_start, vocab, "", False)
    return out


def vocab_parallel_embedding(
    ids: Tensor,
    w: Tensor,
    *,
    vocab_start: int,
    group: ProcessGroup | None,
    sequence_parallel: bool = False,
) -> Tensor:
    """`embedding` with rank r holding rows `vocab_start ...` of the table, all as many; the same bits; differentiable.

    With `sequence_parallel`, ids are `[s, b]` and the result is this rank's block of dim 0.
    """
    name = name_of(group)
    vocab = w.shape[0] * size_of(name) if name else vocab_start + w.shape[0]
    out: Tensor = _op(ids, w, vocab_start, vocab, name, sequence_parallel and bool(name))
    return out
