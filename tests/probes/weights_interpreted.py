# SPDX-License-Identifier: Apache-2.0
"""The digest's kernel in Triton's interpreter next to plain torch, as JSON; a process of its own: Triton decides at import."""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from isoexec.probes import weights

CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.dtype]] = {
    "whole matrix, several blocks": ((24, 300), (24, 300), (0, 0), torch.bfloat16),
    "rows of a matrix": ((6, 37), (24, 37), (12, 0), torch.float32),
    "columns of a matrix": ((5, 70), (5, 210), (0, 140), torch.bfloat16),
    "both cut": ((3, 11), (7, 33), (4, 22), torch.bfloat16),
    "a vector": ((5000,), (9000,), (4000,), torch.bfloat16),
    "bytes": ((16, 9), (16, 18), (0, 9), torch.uint8),
    "three dimensions, the last cut": ((2, 3, 8), (4, 3, 16), (2, 0, 8), torch.float32),
    "three dimensions, the first cut": ((2, 3, 8), (4, 3, 8), (2, 0, 0), torch.int64),
    "far behind 2**32 elements": ((2, 40), (1 << 30, 64), ((1 << 30) - 2, 24), torch.bfloat16),
}


def _made(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, generator=generator, dtype=dtype)


def main() -> None:
    blocks, changed, zeros = [], [], []
    for shape, whole, at, dtype in CASES.values():
        t = _made(shape, dtype)
        blocks.append(weights.Block(t, whole, at))
        other = t.clone()
        other.view(-1)[-1] = 1
        changed.append(weights.Block(other, whole, at))
        zero = torch.zeros(shape, dtype=dtype)
        zeros.append(weights.Block(-zero if dtype.is_floating_point else zero, whole, at))
    made = {
        "torch": weights.tensor_partials(blocks),
        "kernel": weights._on_gpu(blocks),  # all of them in one table
        "changed": weights._on_gpu(changed),
        "zeros": weights._on_gpu(zeros),
        "torch zeros": weights.tensor_partials(zeros),
    }
    single = torch.zeros(5, 300, dtype=torch.bfloat16)
    single[3, 299] = -(2.0**-133)  # the least a bfloat16 can be
    made["single"] = weights._on_gpu([weights.Block(single.T, (300, 5), (0, 0))])
    weights._COPIED = 0  # each block that is copied goes at once
    made["apart"] = weights._on_gpu(
        [b._replace(tensor=b.tensor.mT.contiguous().mT) if b.tensor.dim() > 1 else b for b in blocks]
    )
    names = list(CASES)
    print(json.dumps({of: dict(zip(names, found, strict=False)) for of, found in made.items()}))


if __name__ == "__main__":
    main()
