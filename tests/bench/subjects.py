# SPDX-License-Identifier: Apache-2.0
"""What `kernels.py` times: models, and one op at one shape next to its peers. Puts the package on the path."""

# ruff: noqa: E402 - where the package is not installed, its links are put on the path first

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
if importlib.util.find_spec("isoexec") is None:
    sys.path.insert(0, str(ROOT / ".src"))

from isoexec.kernels.linear.hopper.tuning import WEIGHTS

__all__ = [
    "BF16",
    "DEVICE",
    "FP32",
    "MODELS",
    "TRAINED",
    "AbsentError",
    "Call",
    "Model",
    "Subject",
    "rand",
    "vllm",
    "with_gradient",
]

BF16, FP32 = torch.bfloat16, torch.float32
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRAINED = 1024  # rows from which gradients are timed
Call = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a model; `weights` are the linears' by name: outputs, then inputs."""

    name: str
    hidden: int
    ffn: int
    heads: tuple[int, int]  # of queries and of keys
    width: int  # of a head
    turned: int  # how much of it is rotated
    vocab: int
    weights: dict[str, tuple[int, int]]
    experts: int = 0
    places: int = 0
    inner: int = 0
    gated: tuple[int, int] = (0, 0)  # heads and width of a gated norm
    unit: tuple[int, int] = (0, 0)  # heads and width of an L2 norm


def _weights(model: str) -> dict[str, tuple[int, int]]:
    return {name.removeprefix(model): (N, K) for name, N, K in WEIGHTS if name.startswith(model)}


MODELS = (
    Model(
        name="8B",
        hidden=4096,
        ffn=12288,
        heads=(32, 8),
        width=128,
        turned=128,
        vocab=151936,
        weights=_weights("8B "),
    ),
    Model(
        name="35B",
        hidden=2048,
        ffn=512,
        heads=(16, 2),
        width=256,
        turned=64,
        vocab=248320,
        weights=_weights("35B "),
        experts=256,
        places=8,
        inner=512,
        gated=(32, 128),
        unit=(16, 128),
    ),
)


def _nothing() -> tuple[Any, ...]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One op at one shape: the fewest `nbytes` that must move and `flops` of the tensor cores, and the calls that are timed.

    Every call gets what `make` gives, made anew for each copy that is rotated, then what `shared` gives, made once. `learned` are
    the places of those that get a gradient where forward and backward are timed together; `back_bytes` and `back_flops` are what
    that takes besides. `copied` where a copy of as many bytes is timed too.
    """

    op: str
    shape: str
    rows: int
    function: str  # of the registry
    nbytes: float
    make: Callable[[], tuple[Any, ...]]
    native: Call
    ours: Call
    shared: Callable[[], tuple[Any, ...]] = _nothing
    peers: dict[str, Call] = field(default_factory=dict)
    flops: float = 0.0
    learned: tuple[int, ...] = ()
    back_bytes: float = 0.0
    back_flops: float = 0.0
    copied: bool = False
    provider: str = ""
    most: int = 64  # copies

    def both_ways(self) -> Iterator[Subject]:
        """This, and where it trains and rows are many, its forward and backward together."""
        yield self
        if self.learned and self.rows >= TRAINED:
            yield replace(
                self,
                op=f"{self.op}+grad",
                nbytes=self.nbytes + self.back_bytes,
                flops=self.flops + self.back_flops,
                native=with_gradient(self.native, self.learned),
                ours=with_gradient(self.ours, self.learned),
                peers={},
                learned=(),
                copied=False,
            )


def rand(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    """Normal numbers on the device."""
    return torch.empty(shape, dtype=dtype, device=DEVICE).normal_(std=scale)


def with_gradient(call: Call, learned: tuple[int, ...]) -> Call:
    """Forward and backward of `call` in its `learned` inputs; gradients of its outputs are the outputs themselves."""

    def both(*inputs: Any) -> Any:
        with torch.enable_grad():
            grown = {i: inputs[i].detach().requires_grad_() for i in learned}
            outs = call(*(grown.get(i, one) for i, one in enumerate(inputs)))
            outs = [outs] if isinstance(outs, Tensor) else [t for t in outs if t.requires_grad]
            return torch.autograd.grad(outs, list(grown.values()), [t.detach() for t in outs])

    return both


class AbsentError(Exception):
    """A peer that this machine does not have, and why."""


_PLACES = ("vllm.model_executor.layers.batch_invariant", "vllm.model_executor.determinism.batch_invariant")


@cache
def _batch_invariant() -> Any:
    if importlib.util.find_spec("vllm") is None:
        return "not installed"
    troubles, path = [], sys.path[:]
    # a library that asks whether there is a package called kernels must not find the script
    sys.path[:] = [one for one in path if Path(one).resolve() != Path(__file__).resolve().parent]
    try:
        for place in _PLACES:
            try:
                return importlib.import_module(place)
            except Exception as error:  # noqa: BLE001 - a peer only; its absence is shown in the table
                troubles.append(f"{place}: {error!r:.150}")
    finally:
        sys.path[:] = path
    return f"does not import: {'; '.join(troubles)}"


def vllm(name: str) -> Call:
    """A function of vLLM's batch-invariant kernels; raises `AbsentError` where there is none."""
    module = _batch_invariant()
    if isinstance(module, str):
        raise AbsentError(module)
    if not hasattr(module, name):
        raise AbsentError(f"this vLLM has no {name}")
    found: Call = getattr(module, name)
    return found
