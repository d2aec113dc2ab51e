# SPDX-License-Identifier: Apache-2.0
"""What the checks of forward-only ops on an accelerator have in common: large inputs made there, every batch size, the cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from isoexec.kernels.gates.checking import bits
from isoexec.kernels.gates.inputs import PERIOD, fill

if TYPE_CHECKING:
    from torch import Tensor

    from isoexec.kernels.gates.checking import Run

__all__ = ["CASES", "cases", "every_batch", "many", "reruns_at_full_size", "touched"]

Cut = Callable[[slice], "Tensor"]

# a kernel without a gradient serves the cases without one
CASES = ("engine_prefill", "engine_decode", "trainer_score")
EVERY = 256  # each batch size up to here, then some
LARGER = (257, 300, 384, 500, 512, 513, 777, 1000, 1024, 1025, 1500, 2048, 3000, 4096, 5000, 8191, 8192)
QUICK = (1, 2, 3, 7, 16, 17, 33, 64, 65, 128, 129, 256)


def many(run: Run, *shape: int, salt: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    """As `inputs.wide`, laid out on the run's device: only its pattern travels there."""
    count = torch.Size(shape).numel()
    pattern = fill(min(count, PERIOD), salt=salt, dtype=dtype, scale=scale).to(run.device)
    return pattern.repeat(-(-count // PERIOD))[:count].view(shape)


def every_batch(run: Run, call: Cut, whole: Tensor) -> None:
    """`call(cut)` computes a slice of one batch's rows: the bits are `whole`'s for every number of rows, and wherever a row lies.

    Every size up to 256 and larger ones, from the front; the same sizes from the end where they are few; single rows.
    """
    rows = len(whole)
    sizes = run.pick(QUICK, (*range(1, EVERY + 1), *LARGER))
    for size in run.over("rows", [s for s in sizes if s <= rows]):
        run.equal(call(slice(0, size)), whole[:size])
        if size in QUICK:
            run.equal(call(slice(rows - size, rows)), whole[rows - size :])
    for row in range(0, rows, max(1, rows // run.pick(4, 32))):
        run.equal(call(slice(row, row + 1)), whole[row : row + 1])


def cases(run: Run, call: Cut, rows: int) -> Tensor:
    """`call(cut)` as every case calls it: prompts in chunks, tokens one by one and in small batches, all rows packed.

    Decoding is also replayed from a CUDA graph, as an engine does, once a batch size. Returns the packed result.
    """
    packed = call(slice(0, rows))
    run.covers(case=CASES)
    for chunk in (rows // 2, rows // 3 + 1, 100):
        parts = [call(slice(at, min(rows, at + chunk))) for at in range(0, rows, chunk)]
        run.equal(torch.cat(parts), packed)
    for batch in run.over("decode_batch", (1, 8, 64)):
        for at in range(0, rows - batch, max(batch, rows // run.pick(2, 16))):
            cut = slice(at, at + batch)
            run.equal(call(cut), packed[cut])
            if run.device.type == "cuda" and at == 0:
                run.equal(_replayed(call, cut), packed[cut])
    return packed


def _replayed(call: Cut, cut: slice) -> Tensor:
    from isoexec.kernels.hopper.timing import capture

    outs: list[Tensor] = []
    graph = capture(lambda _: outs.append(call(cut)), 1)
    outs[-1].zero_()
    graph.replay()
    torch.cuda.synchronize()
    return outs[-1].clone()


def reruns_at_full_size(run: Run, call: Callable[[], Tensor]) -> Tensor:
    """The same call again and again has the same bits; returns the first result."""
    first = call()
    runs = run.pick(2, 10)
    for i in range(runs):
        junk = torch.full_like(first, float(i) + 0.5)
        del junk
        run.equal(call(), first)
    run.covers(runs=runs + 1)
    return first


def touched(x: Tensor, every: int = 7) -> Tensor:
    """A copy with the last bit of every `every`-th element flipped."""
    copy = x.detach().clone(memory_format=torch.contiguous_format)
    bits(copy)[::every] ^= 1
    return copy
