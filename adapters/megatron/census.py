# SPDX-License-Identifier: Apache-2.0
"""Lists the arithmetic a scoring forward does outside every contract region.

A dispatch mode sees every operator.  Those of the ``isoexec`` library are inside a region; copies, views, lookups and collectives
that move data are not arithmetic, nor is work on integers.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isoexec.adapters.base import CensusEntry
from isoexec.adapters.megatron.logprobs import score
from isoexec.adapters.megatron.weights import unwrap

__all__ = ["census"]

_MOVES = frozenset(
    """_reshape_alias _to_copy _unsafe_view alias as_strided cat chunk clone constant_pad_nd contiguous copy copy_ detach empty
    empty_like empty_strided expand fill fill_ full full_like index_select lift_fresh narrow new_empty new_empty_strided new_zeros
    ones pad permute repeat reshape resize_ select select_scatter set_ slice slice_scatter split split_with_sizes squeeze stack t
    transpose unbind unsafe_split unsqueeze view zero_ zeros zeros_like""".split()  # noqa: SIM905 fifty names read better in lines
)
_CARRIES = frozenset(
    (
        "allgather_",
        "_allgather_base_",
        "broadcast_",
        "send",
        "recv_",
        "scatter_",
        "alltoall_",
        "alltoall_base_",
        "barrier",
    )
)


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.outside: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func.name().partition("::")
        base = name.partition(".")[0]
        moves = (
            namespace == "isoexec"
            or (namespace == "aten" and base in _MOVES)
            or (namespace == "c10d" and base in _CARRIES)
        )
        tensors = (t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor))
        if not moves and any(t.is_floating_point() for t in tensors):
            self.outside[f"{namespace}::{base}"] += 1
        return result


def census(model: Any, *, rows: int = 2, length: int = 8) -> tuple[CensusEntry, ...]:
    """Operators outside the contract in one scoring of ``rows`` x ``length`` fixed tokens, most called first."""
    inner = unwrap(model)
    size = length * inner.pg_collection.tp.size()
    device = next(inner.parameters()).device
    tokens = torch.arange(rows * size, device=device).view(rows, size) % inner.vocab_size
    with _Watch() as watch:
        score(model, tokens, microbatch=rows)
    return tuple(CensusEntry(operator=op, calls=n) for op, n in watch.outside.most_common())
