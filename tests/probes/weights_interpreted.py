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
    found = {}
    for name, (shape, whole, at, dtype) in CASES.items():
        t = _made(shape, dtype)
        changed = t.clone()
        changed.view(-1)[-1] = 1
        found[name] = {
            "torch": [lane & weights._MASK for lane in weights._in_torch(t, whole, at)],
            "kernel": [lane & weights._MASK for lane in weights._on_gpu(t, whole, at)],
            "changed": [lane & weights._MASK for lane in weights._on_gpu(changed, whole, at)],
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
