# SPDX-License-Identifier: Apache-2.0
"""Compares providers of the chain with its reference as integers, over given weights and numbers of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.linear.hopper.kernel import launch, reference
from isoexec.kernels.linear.hopper.table import tile_for

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

__all__ = ["Certificate", "certify", "differing", "few_rows"]

Provider = Callable[["Tensor", "Tensor", torch.dtype], "Tensor"]
INTEGER = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """One provider at one weight: every M compared, elements compared, and the M values with differing elements.

    `error` is ||out - exact|| / ||exact|| of the first rows against fp64: equal bits of a wrong product prove nothing.
    """

    provider: str
    N: int
    K: int
    out_dtype: str
    rows: tuple[int, ...]
    elements: int
    differing: tuple[tuple[int, int], ...]
    error: float

    @property
    def holds(self) -> bool:
        """Whether at least one element was compared, none differs, and the product is right."""
        return self.elements > 0 and not self.differing and self.error < 4e-3


def differing(a: Tensor, b: Tensor) -> int:
    """Elements whose bits differ; shapes and dtypes must be equal."""
    require(
        a.shape == b.shape and a.dtype == b.dtype,
        "certify",
        f"{list(a.shape)} {a.dtype} against {list(b.shape)} {b.dtype}",
        "equal shapes and dtypes",
    )
    view = INTEGER[a.dtype]
    return int((a.view(view) != b.contiguous().view(view)).sum())


def few_rows(x: Tensor, w: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The Triton chain at any number of rows: by the table's tile, by the one for a single row where it has none."""
    N, K = w.shape
    tile = tile_for(N, K, len(x)) or tile_for(N, K, 1)
    assert tile is not None, "the table serves one row by Triton"
    out = torch.empty(len(x), N, dtype=out_dtype, device=x.device)
    launch(x, w, out, tile)
    return out


def certify(
    name: str,
    provider: Provider,
    weights: Iterable[tuple[int, int]],
    rows: Iterable[int],
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    seed: int = 0,
) -> list[Certificate]:
    """One certificate a weight. The reference runs once at the most rows; every M takes the first M of the same rows."""
    found = []
    counts = tuple(sorted(set(rows)))
    for N, K in weights:
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(counts[-1], K, device=device, generator=generator).bfloat16()
        w = (torch.randn(N, K, device=device, generator=generator) / K**0.5).bfloat16()
        want = reference(x, w, out_dtype)
        elements, wrong = 0, []
        for M in counts:
            got = provider(x[:M], w, out_dtype)
            elements += got.numel()
            if count := differing(got, want[:M]):
                wrong.append((M, count))
        few, cols = min(64, counts[-1]), min(2048, N)
        exact = x[:few].double() @ w[:cols].double().t()
        error = float((want[:few, :cols].double() - exact).norm() / exact.norm())
        found.append(
            Certificate(
                provider=name,
                N=N,
                K=K,
                out_dtype=str(out_dtype).removeprefix("torch."),
                rows=counts,
                elements=elements,
                differing=tuple(wrong),
                error=error,
            )
        )
    return found
