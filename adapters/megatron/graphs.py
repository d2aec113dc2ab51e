# SPDX-License-Identifier: Apache-2.0
"""A trainer's microbatches as CUDA graphs: what a call launches is recorded once for each shape and replayed for what follows.

A layer of a small model costs the host more than the GPU, natively and the more so where every function is an opaque op.  A
replay costs it one launch for a whole microbatch.  Shapes must repeat for that: rows are padded on the right to whole `COLUMNS`,
which under a contract changes no bit.

A graph holds the kernels that were bound when it was recorded and the places of the weights: where another contract is installed,
or none, or where a weight or its gradient has moved, all are recorded anew.  Whoever looks at what is bound now (`verify`, the
canaries) does not see those kernels: a graph's own numbers are what the comparison of sampled tokens judges, as in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isoexec.adapters.megatron.cuda_attention import Step, steps_kept
from isoexec.contracts.errors import InstallError

__all__ = ["COLUMNS", "MOST", "Graphs"]

COLUMNS = 128
"""Of how many tokens a row's length is a multiple."""
MOST = 8
"""How many graphs are held at most; the one recorded first goes."""

_Key = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    given: tuple[Tensor, ...]
    made: tuple[Tensor, ...]
    steps: list[Step]  # whose tables it reads


class Graphs:
    """The graphs of one model, which share their memory: each result is copied out before the next replay.

    Raises InstallError for a model whose microbatch is not one GPU's work alone, waits for the host, or draws random numbers.
    """

    def __init__(self, model: Any) -> None:
        config, groups = model.config, model.pg_collection
        device = next(model.parameters()).device
        degrees = {axis: getattr(groups, axis.lower()).size() for axis in ("TP", "PP", "CP")}
        dropout = {name: getattr(config, name) for name in ("hidden_dropout", "attention_dropout")}
        experts, recompute = config.num_moe_experts, config.recompute_granularity
        for wanted, holds, found in (
            ("a model on a GPU", device.type == "cuda", f"one on {device}"),
            ("TP, PP and CP 1", set(degrees.values()) == {1}, degrees),
            ("a model without experts, whose rows the host counts", experts is None, f"{experts} experts"),
            ("recompute_granularity None", recompute is None, recompute),
            ("no dropout", not any(dropout.values()), dropout),
        ):
            if not holds:
                raise InstallError(
                    region="trainer",
                    wanted=f"{wanted}, for microbatches as CUDA graphs",
                    found=str(found),
                    fix="leave graphs=False",
                )
        self._model = model
        self._side = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._held: dict[_Key, _Graph] = {}
        self._seen: set[_Key] = set()
        self._stands: tuple[Any, ...] = ()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Work on the stream that graphs are recorded on.

        DDP is made here: autograd adds a parameter's gradients up on the stream where it first met the parameter.
        """
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield
        torch.cuda.current_stream().wait_stream(self._side)

    def __call__(
        self, name: str, call: Callable[..., Sequence[Tensor]], *given: Tensor
    ) -> tuple[Tensor, ...]:
        """What ``call`` makes of the tensors; ``name`` tells calls apart.

        The first time with these shapes it is called, which makes what cannot be made inside a graph, the second time
        recorded, and replayed from then on.  Raises InstallError for a call that cannot be recorded.
        """
        if (stands := self._standing()) != self._stands:
            self._held.clear()
            self._seen.clear()
            self._stands = stands
        key = (name, *((t.shape, t.dtype) for t in given))
        if key not in self._held:
            if key not in self._seen:
                self._seen.add(key)
                with self.stream():
                    return tuple(call(*given))
            if len(self._held) == MOST:
                oldest = next(iter(self._held))
                del self._held[oldest]
                self._seen.discard(oldest)
            self._held[key] = self._record(call, given)
        held = self._held[key]
        for mine, new in zip(held.given, given, strict=True):
            mine.copy_(new)
        held.graph.replay()
        return tuple(t.clone() for t in held.made)

    def _standing(self) -> tuple[Any, ...]:
        """What every graph rests on: the policy of the contract that is installed, and where weights and gradients lie."""
        adapter = getattr(self._model, "isoexec_adapter", None)
        bound = None if adapter is None else adapter.contract.numerical_policy
        held = (
            t for p in self._model.parameters() for t in (p, getattr(p, "main_grad", None)) if t is not None
        )
        return bound, *(t.data_ptr() for t in held)

    def _record(self, call: Callable[..., Sequence[Tensor]], given: Sequence[Tensor]) -> _Graph:
        graph = torch.cuda.CUDAGraph()
        own = tuple(t.clone() for t in given)
        # other threads, a process group's among them, may ask the GPU for something meanwhile
        recording = torch.cuda.graph(
            graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
        )
        try:
            with steps_kept() as steps, recording:
                made = tuple(call(*own))
        except RuntimeError as error:
            raise InstallError(
                region="trainer",
                wanted="a microbatch that a CUDA graph can hold",
                found=str(error),
                fix="leave graphs=False, or take out what waits for the GPU in the model or the loss",
            ) from error
        return _Graph(graph=graph, given=own, made=made, steps=steps)
