# SPDX-License-Identifier: Apache-2.0
"""cuDNN's deterministic gradient of causal attention, by its frontend: a graph of one node for each shape, a sequence a call.

Why this is a function of its own. cuDNN adds up a gradient in another order than `attention.mma_segments/1` says, so its dq, dk
and dv have other bits, and a function is one way of rounding: it cannot be a provider of that one. Its own order is written down
nowhere; what can be proven is what training needs of a gradient. Only the trainer computes one, so there is no second side to
agree with, but a step has to have the same bits when it is run again, whatever else is in the batch, however long the padding,
and on any number of ranks. So `attention.mma_segments_cudnn/1` is defined as

    the result    that of attention.mma_segments/1, bit for bit, by the same kernels and providers
    dq, dk, dv    this library's deterministic gradient of each sequence by itself, padded with zeros to `padded(rows)` rows

and is compared with itself: its gate runs it again, alone and in company, padded, and with the heads of one rank of several,
and holds it to float64 within the bound of the own gradient. Company cannot change a bit by construction, since no call sees
another sequence, and neither can a page, a segment or who computed the result, which has one set of bits. That a rank's heads and
another length give the same bits is the library's doing: the gate asks, and a build that fails it stays out of `BUILDS`.

Which kernel serves a shape is the choice of the library's heuristics, a function of build, shape and GPU; so `identity` names
all of them, it stands in the domain of every check, and another one is refused until its gate has run. The two gradients are
never mixed within a run: a contract binds the one function or the other.

Sizes. A graph is built for each number of rows, which costs more than a call; so rows are padded to sixteen sizes an octave, at
most a sixteenth more, and short ones to multiples of UNIT. A padded row has zeros for q, k, v, out, g and its log-sum-exp: no
row sees its key, its delta and its ds are 0, and what it adds is exact zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from isoexec.contracts.errors import IsoExecError
from isoexec.kernels.domain import DomainError, require
from isoexec.kernels.hopper.arithmetic import power_of_two

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BUILDS",
    "HEAD_DIMS",
    "MOST_WORKSPACE",
    "UNIT",
    "Graph",
    "LibraryMissingError",
    "admit",
    "gradients",
    "identity",
    "load",
    "padded",
    "require_certified",
]

NAME = "sm90_attention_cudnn"
HEAD_DIMS = (64, 128, 256)
UNIT = 128  # rows; sizes of short sequences are its multiples
MOST_WORKSPACE = 32 << 30  # bytes; 32k rows of head dim 64 want twice as many
BUILDS = frozenset({"cudnn 91900, frontend 1.32.0, CUDA 13.0, NVIDIA H200 of 132 multiprocessors"})
"""What the gate of attention.mma_segments_cudnn/1 has certified, as `identity` gives it."""
_INPUTS = ("q", "k", "v", "o", "dO")
_admitted: set[str] = set()


class LibraryMissingError(IsoExecError):
    """cuDNN's frontend could not be loaded: `reason`."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)

    def __str__(self) -> str:
        return (
            f"cuDNN's frontend is not here: {self.reason}. Install nvidia-cudnn-frontend beside a CUDA build of torch, or bind "
            "attention.mma_segments/1, whose gradient is our own"
        )


def admit(build: str) -> None:
    """Let this process compute with a build that is not certified, to certify it."""
    _admitted.add(build)


@cache
def load() -> Any:
    """The frontend's module, which loads cuDNN; raises `LibraryMissingError`."""
    try:
        return import_module("cudnn")
    except (ImportError, OSError, RuntimeError) as error:
        raise LibraryMissingError(f"{type(error).__name__}: {error}") from error


@cache
def identity() -> str:
    """Versions of cuDNN and its frontend, as they say themselves, and the GPU: all that chooses a shape's kernel."""
    library = load()
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return (
        f"cudnn {library.backend_version()}, frontend {library.__version__}, CUDA {torch.version.cuda}, "
        f"{gpu.name} of {gpu.multi_processor_count} multiprocessors"
    )


def require_certified() -> None:
    """Raise `DomainError` for a build that nothing has certified, and `LibraryMissingError` without one."""
    build = identity()
    require(
        build in BUILDS | _admitted,
        NAME,
        f"gradients by {build}, which nothing has certified",
        f"the certified {sorted(BUILDS) or 'builds (none yet)'}, or another after its gate: `isoexec gate run --arch sm90 "
        "--function attention.mma_segments_cudnn/1`, then a line in frontend.BUILDS",
    )


def padded(rows: int) -> int:
    """Rows of the graph that serves a sequence of `rows`."""
    step = max(UNIT, power_of_two(rows) // 32)
    return -(-rows // step) * step


@cache
def _handle(device: int, thread: int) -> Any:
    """A handle of a device, which one thread uses at a time."""
    with torch.cuda.device(device):
        return load().create_handle()


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The built plan of one shape."""

    library: Any
    handle: Any
    graph: Any
    nodes: dict[str, Any]
    ends: tuple[Any, ...]
    workspace: int

    @classmethod
    def build(
        cls, given: dict[str, Tensor], stats: Tensor, *, scale: float, handle: Any, repeats: bool = True
    ) -> Graph:
        """A graph for tensors laid out as these: `given` q, o, dO [1, rows, H, D], k, v [1, rows, KV, D], stats [1, H, rows].

        `repeats` asks for the deterministic way; the other is another function, timed and never served.
        """
        library = load()
        wide = library.data_type.FLOAT
        graph = library.pygraph(
            io_data_type=library.data_type.BFLOAT16,
            intermediate_data_type=wide,
            compute_data_type=wide,
            handle=handle,
        )
        nodes = {name: graph.tensor_like(x) for name, x in _laid_out(given, stats).items()}
        ends = graph.sdpa_backward(
            **nodes,
            attn_scale=scale,
            use_causal_mask=True,
            use_deterministic_algorithm=repeats,
        )
        for end, name in zip(ends, _INPUTS, strict=False):
            like = torch.empty_like(given[name], memory_format=torch.contiguous_format).transpose(1, 2)
            end.set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride()))
            end.set_data_type(library.data_type.BFLOAT16)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([library.heur_mode.A, library.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return cls(
            library=library,
            handle=handle,
            graph=graph,
            nodes=nodes,
            ends=tuple(ends),
            workspace=int(graph.get_workspace_size()),
        )

    def run(self, given: dict[str, Tensor], stats: Tensor, to: tuple[Tensor, ...], room: Tensor) -> None:
        """Write dq, dk, dv into `to`, contiguous as q, k, v; `room` are `workspace` bytes. On the current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        self.library.set_stream(handle=self.handle, stream=stream)
        pack = {self.nodes[name]: x for name, x in _laid_out(given, stats).items()}
        pack |= dict(zip(self.ends, (x.transpose(1, 2) for x in to), strict=True))
        self.graph.execute(pack, room, handle=self.handle)


def _laid_out(given: dict[str, Tensor], stats: Tensor) -> dict[str, Tensor]:
    """As the library names them, heads before rows."""
    found = {name: given[name].detach().transpose(1, 2) for name in _INPUTS}
    found["stats"] = stats[..., None]
    return found


@lru_cache(maxsize=512)
def _graph(device: int, thread: int, rows: int, H: int, KV: int, D: int, scale: float) -> Graph:
    with torch.cuda.device(device):
        heads = dict(zip(_INPUTS, (H, KV, KV, H, H), strict=True))
        at = f"cuda:{device}"
        given = {n: torch.empty(1, rows, h, D, dtype=torch.bfloat16, device=at) for n, h in heads.items()}
        stats = torch.empty(1, H, rows, dtype=torch.float32, device=at)
        try:
            return Graph.build(given, stats, scale=scale, handle=_handle(device, thread))
        except RuntimeError as error:  # the library's own errors
            raise DomainError(
                NAME,
                f"{rows} rows of {H} heads of {D} over {KV}, for which cuDNN has no plan: {error!s:.300}",
                "the shapes that its deterministic gradient has",
            ) from error


def _filled(x: Tensor, rows: int) -> Tensor:
    """[1, rows, ...] contiguous: x itself where it is, else a copy, zeros behind its end."""
    if len(x) == rows and x.is_contiguous():
        return x[None]
    found = x.new_zeros(1, rows, *x.shape[1:])
    found[0, : len(x)] = x
    return found


def gradients(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    to: tuple[Tensor, Tensor, Tensor],
    *,
    scale: float,
) -> None:
    """Write one sequence's dq, dk, dv into `to`, contiguous as q [n, H, D], k and v [n, KV, D]; lse [H, n] fp32, all else bf16.

    Raises `DomainError` for other head dims, for a shape that the library has no plan for, and where one wants more than
    `MOST_WORKSPACE` bytes.
    """
    n, H, D = q.shape
    require(D in HEAD_DIMS, NAME, f"heads of {D}", f"head dims {list(HEAD_DIMS)}")
    rows = padded(n)
    graph = _graph(q.device.index or 0, get_ident(), rows, H, k.shape[1], D, scale)
    require(
        graph.workspace <= MOST_WORKSPACE,
        NAME,
        f"{n} rows of {H} heads of {D}, which want {graph.workspace} bytes of workspace",
        f"at most {MOST_WORKSPACE}; bind attention.mma_segments/1 for longer sequences",
    )
    given = {name: _filled(x, rows) for name, x in zip(_INPUTS, (q, k, v, out, g), strict=True)}
    stats = lse.new_zeros(1, H, rows)
    stats[0, :, :n] = lse
    whole = n == rows
    found = tuple(x[None] if whole else x.new_empty(1, rows, *x.shape[1:]) for x in to)
    graph.run(given, stats, found, torch.empty(graph.workspace, dtype=torch.uint8, device=q.device))
    if not whole:
        for x, y in zip(to, found, strict=True):
            x.copy_(y[0, :n])
