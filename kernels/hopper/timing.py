# SPDX-License-Identifier: Apache-2.0
"""Times a call on the GPU as replays of one CUDA graph over rotating inputs, so neither launches nor a warm L2 are measured."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["capture", "copies_for", "graph_time", "replay_times"]

_TOUCHED = 2.5e8  # bytes a replay should touch: several times the L2 of an H200


def copies_for(nbytes: int) -> int:
    """How many inputs of `nbytes` to rotate, 2 to 64."""
    return max(2, min(64, math.ceil(_TOUCHED / nbytes)))


def capture(call: Callable[[int], Any], copies: int) -> torch.cuda.CUDAGraph:
    """One graph of `call(i)`, i = 0 .. copies - 1, after a first call outside it (compilation, handles, tables)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            call(i)
    return graph


def replay_times(graphs: Sequence[torch.cuda.CUDAGraph], copies: int, *, replays: int = 9) -> list[float]:
    """Median microseconds of one call in each graph; they take turns in an order that changes, so clocks and heat are shared."""
    spans: list[list[float]] = [[] for _ in graphs]
    shuffled = random.Random(1)  # noqa: S311 - an order, no secret
    for turn in range(replays + 1):
        # whoever comes after a long product always, runs at its lower clocks always
        for which in shuffled.sample(range(len(graphs)), len(graphs)):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graphs[which].replay()
            end.record()
            torch.cuda.synchronize()
            if turn:  # the first turn warms up
                spans[which].append(begin.elapsed_time(end) * 1e3 / copies)
    return [sorted(own)[replays // 2] for own in spans]


def graph_time(call: Callable[[int], Any], copies: int, *, replays: int = 9) -> float:
    """Median microseconds of one `call(i)` alone."""
    return replay_times([capture(call, copies)], copies, replays=replays)[0]
