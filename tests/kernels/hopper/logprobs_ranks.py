# SPDX-License-Identifier: Apache-2.0
"""Two and four real ranks over gloo run the sm90 logprobs in Triton's interpreter; prints `{check: what went wrong, or ""}`.

What ranks exchange is code of the ops, not of their kernels; a GPU adds nothing to it but NCCL.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import on_cpu  # type: ignore[import-not-found]  # noqa: F401 - before any op is defined
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.kernels.gates import ranks
from isoexec.kernels.linear.hopper import cublaslt, kernel, table
from isoexec.kernels.linear_logprobs.hopper import plan
from isoexec.kernels.logprobs.hopper import kernel as logprobs

VOCAB, LEAVES, ROWS = 2400, 8, 24
HEAD = (1920, 64)
TILE = kernel.Tile(kind="pointers", rows=32, columns=64, depth=64, warps=4, stages=2)
CHAIN = kernel.Tile(kind="maps", rows=32, columns=64, depth=64, warps=4, stages=2)
_MANY = logprobs.Cut(blocks=4, join=2, rows=32, warps=4)

np.seterr(all="ignore")
logprobs.cut_for = lambda *_: _MANY
logprobs.launch_merge.__kwdefaults__["rows_per_program"] = 32  # type: ignore[index]
logprobs.launch_gradient.__kwdefaults__.update(rows_per_program=32, columns_per_program=1024)  # type: ignore[union-attr]
table.tiles = lambda: {HEAD: ((8192, TILE),)}  # type: ignore[assignment]
table.UNTUNED = dict.fromkeys(table.PRODUCTS, ((table.ANY, CHAIN),))
plan.BACKWARD_ROWS = 10
cublaslt.switches = lambda: cublaslt.WANTED
cublaslt.restore = lambda _: None  # type: ignore[assignment]

from isoexec.kernels.linear_logprobs.hopper import gate as from_hidden  # noqa: E402
from isoexec.kernels.logprobs.hopper import gate as from_logits  # noqa: E402


def logits(rank: int, size: int, group: ProcessGroup | None) -> list[Tensor]:
    """Log p beside the entropy, and the gradient of a rank's logits."""
    return from_logits.shared(rank, size, group, torch.bfloat16, VOCAB, LEAVES, ROWS, "cpu")


def wrongly(rank: int, size: int, group: ProcessGroup | None) -> dict[str, Tensor]:
    """What the gate plants."""
    return from_logits.faults(rank, size, group, VOCAB, LEAVES, 200, "cpu")


def hidden(rank: int, size: int, group: ProcessGroup | None) -> list[Tensor]:
    """Log p beside the entropy, the gradient of hidden states and of a rank's head."""
    return from_hidden.shared(rank, size, group, HEAD, LEAVES, ROWS, False, "cpu")


def same(got: Tensor, want: Tensor) -> str:
    if got.shape != want.shape:
        return f"{list(got.shape)} for {list(want.shape)}"
    count = int((got.contiguous().view(torch.uint8) != want.contiguous().view(torch.uint8)).sum())
    return f"{count} bytes differ" if count else ""


def main() -> None:
    """Print what each check found."""
    torch.set_num_threads(1)
    results: dict[str, str] = {}
    one, whole = logits(0, 1, None), hidden(0, 1, None)
    for size in (2, 4):
        found = ranks.launch(size, logits, ())
        results[f"logprobs on {size}"] = "".join(same(mine[0], one[0]) for mine in found)
        results[f"their gradient on {size}"] = same(torch.cat([mine[1] for mine in found], 1), one[1])
        found = ranks.launch(size, hidden, ())
        results[f"fused logprobs on {size}"] = "".join(same(mine[0], whole[0]) for mine in found)
        results[f"the input's gradient on {size}"] = "".join(same(mine[1], whole[1]) for mine in found)
        results[f"the head's gradient on {size}"] = same(torch.cat([mine[2] for mine in found]), whole[2])
    planted = ranks.launch(4, wrongly, ())[0]
    right = planted.pop("right")
    for name, wrong in planted.items():
        results[name] = "" if same(wrong, right) else "a fault that does not show"
    json.dump(results, sys.stdout)
