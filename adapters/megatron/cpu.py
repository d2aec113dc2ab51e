# SPDX-License-Identifier: Apache-2.0
"""Answers megatron-core's CUDA questions with the CPU, so that the unmodified trainer runs where there is no GPU.

Only ``torch`` is touched, never a Megatron symbol, and only a process that calls :func:`install` is changed: the demo and the
tests do, the adapter never does.  Each shim exists for the Megatron code it names; there is one test per shim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from isoexec.contracts.errors import InstallError

__all__ = [
    "CudaOnCpu",
    "answer_current_device",
    "answer_rng",
    "answer_splits",
    "answer_streams",
    "install",
    "installed",
    "remove",
]

_CPU = torch.device("cpu")
_undo: list[Callable[[], None]] = []


def _replace(owner: Any, name: str, value: Any) -> None:
    missing = object()
    before = getattr(owner, name, missing)
    setattr(owner, name, value)
    _undo.append(lambda: delattr(owner, name) if before is missing else setattr(owner, name, before))


def answer_current_device() -> None:
    """``torch.cuda.current_device()`` is the CPU: buffers, mappings, rotary table and DDP allocate on it."""
    _replace(torch.cuda, "current_device", lambda: _CPU)


class _Event:
    """A point in a stream where everything is already done."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class _Stream:
    """The one stream of a CPU, always in order."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _Event:
        return _Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def answer_streams() -> None:
    """Streams, events and synchronisation do nothing: DDP, pipeline p2p and checkpoint writers ask for them."""
    only = _Stream()
    _replace(torch.cuda, "Stream", _Stream)
    _replace(torch.cuda, "Event", _Event)
    _replace(torch.cuda, "current_stream", lambda *_: only)
    _replace(torch.cuda, "default_stream", lambda *_: only)
    _replace(torch.cuda, "stream", lambda *_: contextlib.nullcontext())
    _replace(torch.cuda, "synchronize", lambda *_: None)
    _replace(torch.cuda, "empty_cache", lambda: None)
    _replace(torch.cuda, "set_device", lambda *_: None)
    _replace(torch.cuda.nvtx, "range_push", lambda *_: None)
    _replace(torch.cuda.nvtx, "range_pop", lambda *_: None)


class _Generators:
    """Indexed by whatever ``current_device`` answers."""

    def __getitem__(self, _: Any) -> torch.Generator:
        return torch.default_generator


def answer_rng() -> None:
    """The CPU generator stands in for the GPU's: activation recompute saves and restores its state.

    ``_initialized`` makes torch run a queued CUDA callback at once instead of keeping it for a GPU that never comes.
    """
    _replace(torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state())
    _replace(torch.cuda.random, "get_rng_state", lambda *_, **__: torch.get_rng_state())
    _replace(torch.cuda, "default_generators", _Generators())
    _replace(torch.cuda, "manual_seed", torch.manual_seed)
    _replace(torch.cuda, "_initialized", True)


def answer_splits() -> None:
    """``all_to_all_single`` takes split sizes that are tensors: Megatron's token dispatcher makes numbers of a GPU's alone."""
    whole = torch.distributed.all_to_all_single

    def numbers(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    def exchange(
        output: Any,
        input: Any,  # noqa: A002 - torch's keyword
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **more: Any,
    ) -> Any:
        return whole(output, input, numbers(output_split_sizes), numbers(input_split_sizes), **more)

    _replace(torch.distributed, "all_to_all_single", exchange)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return _CPU
    if isinstance(value, torch.device) and value.type == "cuda":
        return _CPU
    return value


class CudaOnCpu(TorchFunctionMode):
    """Turns the literal device ``cuda`` into the CPU, and lets a CPU tensor's ``type()`` say ``torch.cuda``.

    Pipeline schedules, the optimizer and gradient clipping write the literal; the optimizer and clipping compare the type's name
    with ``torch.cuda.FloatTensor``.  The mode holds for the thread that entered it; a CPU backward runs on that thread.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not options:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if options.get("pin_memory"):
            options["pin_memory"] = False
        if "device" in options:
            options["device"] = _on_cpu(options["device"])
        if func is torch.Tensor.to:
            args = tuple(_on_cpu(a) for a in args)
        return func(*args, **options)


_SHIMS: tuple[Callable[[], None], ...] = (
    answer_current_device,
    answer_streams,
    answer_rng,
    answer_splits,
)


def installed() -> bool:
    """Whether this process runs with the shims."""
    return bool(_undo)


def install() -> None:
    """Put every shim in place, once; InstallError where a GPU is available, since there the answers would be wrong."""
    if installed():
        return
    if torch.cuda.is_available():
        raise InstallError(
            region="cpu shims",
            wanted="a process without a CUDA device",
            found=f"{torch.cuda.device_count()} CUDA device(s)",
            fix="do not load the shims on a GPU, or hide it with CUDA_VISIBLE_DEVICES=''",
        )
    for shim in _SHIMS:
        shim()
    mode = CudaOnCpu()
    mode.__enter__()
    _undo.append(lambda: mode.__exit__(None, None, None))


def remove() -> None:
    """Take the shims away in reverse order; for tests, which share their process with others."""
    while _undo:
        _undo.pop()()
