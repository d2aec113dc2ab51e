# SPDX-License-Identifier: Apache-2.0
"""The head and the logprobs of the sampled tokens as CUDA graphs, as the engine's own graphs hold the rest of a decode step.

A decode step of few rows waits for the host, and an opaque op costs it more than a library's call: recorded, a launch of its
own and a copy are left of each.  Rows are padded to the next size that is recorded; no bit of a row depends on how many come
with it, and each size is held to that where it is recorded.

What a graph makes lies where the next replay writes.  So the logits of one are given out only while the runner samples a step,
which looks at them and keeps none, and only the first time it asks; the logprobs, which it copies to the host behind its own
back, are handed out as copies.  Every other caller of the head has fresh logits of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isoexec.adapters.vllm import state
from isoexec.adapters.vllm.hooks import refuse_unless
from isoexec.contracts.errors import InstallError
from isoexec.kernels.linear.hopper.products import product
from isoexec.kernels.logprobs.hopper.ops import token_logprobs

__all__ = ["MOST_ROWS", "SampleGraphs"]

MOST_ROWS = 128
"""Above it the GPU has work enough for the host to keep up, and logits take memory: 78 MB here for 151,936 tokens."""


@dataclass(frozen=True, kw_only=True)
class _Size:
    """The graphs of so many rows, and where they read and write."""

    hidden: Tensor
    logits: Tensor
    head: torch.cuda.CUDAGraph
    target: Tensor
    logprobs: Tensor | None
    pick: torch.cuda.CUDAGraph | None


class SampleGraphs:
    """The graphs of one head; before `record` there are none, and `logits` and `logprobs` give None: compute them then."""

    def __init__(self) -> None:
        self._recorded: list[_Size] = []
        self._serving: list[_Size | None] = [None]  # by how many rows there are
        self._head: Any = None
        self._weight = 0
        self._vocab_leaves: int | None = None
        self._asks = False
        self._live: tuple[_Size, int] | None = None

    def record(self, head: Any, sizes: Iterable[int], vocab_leaves: int | None) -> None:
        """Record ``head``, whose weight is [V, K], for each of ``sizes`` up to `MOST_ROWS`, and with ``vocab_leaves`` logprobs.

        Raises InstallError where a graph cannot be recorded, or `disagrees` at once.
        """
        wanted = sorted({size for size in sizes if 0 < size <= MOST_ROWS})
        if not wanted:
            return
        weight = head.weight
        rows, (vocabulary, width) = wanted[-1], weight.shape
        hidden = torch.zeros(rows, width, dtype=weight.dtype, device=weight.device)
        logits = torch.zeros(rows, vocabulary, dtype=torch.float32, device=weight.device)
        target = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

        def recorded(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
            call()  # what can't be made inside a graph
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    made = call()
            except RuntimeError as error:
                raise InstallError(
                    region="lm_head",
                    wanted="a head that a CUDA graph can hold",
                    found=str(error),
                    fix="pass enforce_eager=True and report it",
                ) from error
            return graph, made

        for size in wanted:
            x, out, ids = hidden[:size], logits[:size], target[:size]
            graph, _ = recorded(partial(product, "forward", x, weight, None, torch.float32, out))
            second, made = None, None
            if vocab_leaves is not None:
                second, made = recorded(partial(token_logprobs, out, ids, vocab_leaves=vocab_leaves))
            self._recorded.append(
                _Size(hidden=x, logits=out, head=graph, target=ids, logprobs=made, pick=second)
            )
        self._head, self._weight, self._vocab_leaves = head, weight.data_ptr(), vocab_leaves
        problem = self.disagrees()
        refuse_unless(
            problem is None,
            "lm_head",
            "graphs with the bits of the functions they were recorded of",
            problem,
            "pass enforce_eager=True and report it",
        )
        self._serving = [next(one for one in self._recorded if len(one.hidden) >= n) for n in range(rows + 1)]

    def disagrees(self) -> str | None:
        """Where a graph has other bits than the functions, called for all of its rows and for the first alone; in words.

        To be called between steps.  Graphs of a weight that lies elsewhere now serve nobody, and are not asked.
        """
        if not self._recorded or self._head.weight.data_ptr() != self._weight:
            return None
        weight, leaves = self._head.weight, self._vocab_leaves
        counts, places = [], []
        for size in self._recorded:
            rows, width = size.hidden.shape
            at = torch.arange(rows * width, device=weight.device)
            size.hidden.copy_(((at * 7919 % 509 - 254) / 128).view(rows, width))
            size.target.copy_(torch.arange(rows, device=weight.device) * 104729 % len(weight))
            size.head.replay()
            asked = [(size.logits[:n], f"logits of the first {n}", size.hidden[:n]) for n in (rows, 1)]
            for found, what, x in asked:
                counts.append(_differing(found, product("forward", x, weight, None, torch.float32)))
                places.append((what, rows))
            if size.pick is not None and size.logprobs is not None and leaves is not None:
                size.pick.replay()
                own = token_logprobs(size.logits, size.target, vocab_leaves=leaves)
                counts.append(_differing(size.logprobs, own))
                places.append(("logprobs", rows))
        for count, (what, rows) in zip(torch.stack(counts).tolist(), places, strict=True):
            if count:
                return f"the graph of {rows} rows differs from its functions in {count} {what}"
        return None

    def sampling(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        """The runner's ``sample``, inside of which the graphs are used."""

        def within(*args: Any, **given: Any) -> Any:
            self._asks = True
            try:
                return sample(*args, **given)
            finally:
                self._asks, self._live = False, None

        return within

    def logits(self, weight: Tensor, x: Tensor) -> Tensor | None:
        """fp32 logits [rows, V] of ``x`` [rows, K] until the next call, or None where no graph serves it.

        A weight that lies elsewhere now, a step under capture and one of more rows are served by none.
        """
        rows = len(x)
        asks, self._asks = self._asks, False
        if (
            not asks
            or not 0 < rows < len(self._serving)
            or weight.data_ptr() != self._weight
            or torch.cuda.is_current_stream_capturing()
        ):
            return None
        size = self._serving[rows]
        assert size is not None
        size.hidden[:rows].copy_(x)
        size.head.replay()
        state.replays["lm_head"] += 1
        self._live = size, rows
        return size.logits[:rows]

    def logprobs(self, logits: Tensor, ids: Tensor) -> Tensor | None:
        """fp32 [rows] of ``ids`` [rows] int64 where ``logits`` are the whole of what `logits` has just given, else None."""
        if self._live is None:
            return None
        size, rows = self._live
        own = size.logits
        if (
            size.pick is None
            or size.logprobs is None
            or logits.data_ptr() != own.data_ptr()
            or logits.shape != (rows, own.shape[1])
            or logits.stride() != own.stride()
            or logits.dtype != own.dtype
        ):
            return None
        size.target[:rows].copy_(ids)
        size.pick.replay()
        state.replays["logprobs"] += 1
        return size.logprobs[:rows].clone()


def _differing(found: Tensor, wanted: Tensor) -> Tensor:
    return (found.view(torch.int32) != wanted.view(torch.int32)).sum()
