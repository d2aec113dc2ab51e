# SPDX-License-Identifier: Apache-2.0
"""What the census takes for arithmetic.

An operator that torch ran is **arithmetic** when it touches floating-point data and is none of
`MOVES` (copies, views, gathers, comparisons and allocations round nothing): every other ``aten`` operator, in place, fused or in
backward; a cast that cannot keep every value (`exact_cast`); an accumulating ``index_put``; a collective that adds (those of
`CARRIES` only move); a value read out of torch into Python, where no mode sees what becomes of it; and every operator of another
library, whose kernel is a closed box.  An operator written in Python is opened instead, and what it runs is judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["CARRIES", "COLLECTIVES", "MOVES", "exact_cast", "floats_in", "kind_of"]

MOVES = frozenset(
    """
    _reshape_alias _to_copy _unsafe_view alias all any arange argmax argmin argsort as_strided as_strided_ bucketize cat chunk
    clone constant_pad_nd contiguous copy copy_ detach detach_ diagonal embedding empty empty_like empty_permuted empty_strided
    eq equal expand eye fill fill_ flip full full_like gather ge gt index index_copy index_copy_ index_put index_put_ index_select
    is_same_size isfinite isinf isnan le lift_fresh lift_fresh_copy logical_and logical_not logical_or lt masked_fill masked_fill_
    masked_scatter masked_select movedim narrow ne new_empty new_empty_strided new_full new_ones new_zeros nonzero ones ones_like
    pad permute pin_memory record_stream repeat repeat_interleave reshape resize_ resolve_conj resolve_neg roll scalar_tensor
    scatter scatter_ searchsorted select select_backward select_scatter set_ slice slice_backward slice_scatter sort split
    split_with_sizes squeeze squeeze_ stack t to topk transpose transpose_ tril triu unbind unfold unsafe_split
    unsafe_split_with_sizes unsqueeze unsqueeze_ view view_as where zero_ zeros zeros_like
    """.split()  # noqa: SIM905  (a hundred quoted words are no easier to read)
)
"""``aten`` operators that move, select or compare values; they round nothing (but see `kind_of` for casts and accumulation)."""
CARRIES = frozenset(
    """
    _allgather_base_ allgather_ allgather_coalesced_ allgather_into_tensor_coalesced_ alltoall_ alltoall_base_ barrier broadcast_
    gather_ monitored_barrier_ recv_ recv_any_source_ scatter_ send
    all_gather_into_tensor all_gather_into_tensor_coalesced all_gather_into_tensor_out all_to_all_single broadcast broadcast_
    wait_tensor
    """.split()  # noqa: SIM905
)
"""Collectives of ``c10d`` and ``_c10d_functional`` that add nothing."""

_CASTS = frozenset(("_to_copy", "to", "copy", "copy_"))
_PUTS = frozenset(("index_put", "index_put_", "_index_put_impl_"))
_READS = frozenset(("_local_scalar_dense", "item"))
COLLECTIVES = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd"))
_PICKS = ("MAX", "MIN", "BAND", "BOR", "BXOR")  # reductions in which order cannot matter


def exact_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of ``source`` is one of ``target``: bfloat16 to float32 is, to float16 is not."""
    if source == target:
        return True
    if source is torch.bool:
        return True
    if source.is_complex or target.is_complex:
        return target.is_complex and exact_cast(source.to_real(), target.to_real())
    if source.is_floating_point:
        if not target.is_floating_point:
            return False
        a, b = torch.finfo(source), torch.finfo(target)
        return b.eps <= a.eps and b.max >= a.max and b.tiny <= a.tiny
    if not target.is_floating_point:
        return True  # integers to integers: no floating-point value is made or lost
    return torch.iinfo(source).max <= 2 / torch.finfo(target).eps


def floats_in(leaves: Iterable[Any]) -> list[Tensor]:
    return [
        t
        for t in leaves
        if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) and t.device.type != "meta"
    ]


def _adds(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a collective combines values in an order; one whose reduction cannot be read does."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, str):
            return value.upper() not in _PICKS
        if isinstance(value, torch.ScriptObject) and getattr(value, "_has_method")("op"):  # noqa: B009
            kinds = torch.distributed.ReduceOp.RedOpType
            return int(getattr(value, "op")()) not in [int(getattr(kinds, name)) for name in _PICKS]  # noqa: B009
    return True


def kind_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> str | None:
    """What an operator that ran is: ``arithmetic``, ``cast``, ``collective``, ``read-out`` or ``foreign``; None for a move.

    ``foreign`` is an operator of a library that is neither torch's nor ours: what its kernel computes cannot be seen.
    """
    if not (floats := floats_in(tree_leaves((result, args, dict(kwargs))))):
        return None  # positions, slots, token ids: integers are exact
    namespace, _, name = str(func.name()).partition("::")
    base = name.partition(".")[0]
    if namespace in COLLECTIVES:
        return None if base in CARRIES or not _adds(args, kwargs) else "collective"
    if namespace not in ("aten", "prims"):
        return "foreign"
    if base in _READS:
        return "read-out"
    if base in _CASTS:
        target = args[0] if base == "copy_" else result
        source = args[1] if base in ("copy_", "copy") else args[0]
        if not isinstance(target, Tensor) or not isinstance(source, Tensor):
            return "cast"
        return None if exact_cast(source.dtype, target.dtype) else "cast"
    if base in _PUTS and (kwargs.get("accumulate") or (len(args) > 3 and args[3])):
        return "arithmetic"
    if base in MOVES and namespace == "aten":
        return None
    assert floats
    return "arithmetic"
