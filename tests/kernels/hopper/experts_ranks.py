# SPDX-License-Identifier: Apache-2.0
"""What one rank of the experts' linears does on a CPU: products are the specification's chain, all else is the real code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isoexec.kernels.grouped_linear.hopper import gate, naive, ops, products, table
from isoexec.kernels.hopper import library

SHARED = (4, 128, 64, 64)  # experts, twice the inner width, hidden, inner width


def _rows(
    a: Tensor,
    w: Tensor,
    offsets: Tensor,
    acc: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    *,
    down: bool = False,
) -> Tensor:
    y = torch.full((len(a), w.shape[2 if down else 1]), float("nan"), dtype=out_dtype)
    call = naive.input_gradient if down else naive.forward
    found = call(a, w, offsets, acc, out_dtype=out_dtype)
    y[: len(found)] = found
    return y if out is None else out.copy_(y)


def _weight(dy: Tensor, x: Tensor, offsets: Tensor, experts: int, out_dtype: torch.dtype) -> Tensor:
    return naive.weight_gradient(dy, x, offsets, out_dtype=out_dtype)


_OPS = {
    "sm90_grouped_chain": ops._chain,
    "sm90_grouped_weight_gradient": ops._weight,
    "sm90_grouped_column_gradient": ops._column_gradient,
    "sm90_grouped_linear": ops._column,
    "sm90_row_grouped_linear": ops._row,
}


def on_rank(rank: int, size: int, group: Any, axis: str) -> list[Tensor]:
    """`gate.ranks` on this rank; the first call puts the chain in the place of the products."""
    if products.rows_product is not _rows:
        products.rows_product, products.weight_product = _rows, _weight
        table.weights = lambda: ((128, 64), (64, 64))  # and their shares
        table._served.cache_clear()
        gate.SHARED = SHARED
        for name, kernel in _OPS.items():
            library._LIBRARY.impl(name, kernel, "CPU")
    return gate.ranks(rank, size, group, "cpu", axis)
