# SPDX-License-Identifier: Apache-2.0
"""Process groups of ranks that share a GPU: what they exchange goes through host memory, and there over gloo.

NCCL wants a GPU a rank. What ranks exchange in a check are a few megabytes whose bits matter and whose time does not, so a
backend of torch.distributed copies them to the host, lets a gloo group move them, and copies them back. It knows the calls that
the kernels make: broadcast, all_reduce, all_gather, all_gather_into_tensor, send, recv, batches of those, and barrier.

Order is that of the current stream. A copy to the host is made when a call is made, behind what the stream does by then, and
waits for it; a copy back is made where the call's work is waited for, on the stream that is current there, behind what the call
found before it. Nothing of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store

__all__ = ["NAME", "Staged", "register"]

NAME = "staged"


class _Work(dist.Work):
    """One call on its way: the host's work, what it reads and writes there, and the copies back that are still to be made."""

    def __init__(self, work: Any, held: Sequence[Tensor], back: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        super().__init__()
        self._work = work
        self._held = held  # gloo reads and writes these until its work is done
        self._back = list(back)
        on_gpu = bool(back) and back[0][0].is_cuda
        self._before = torch.cuda.current_stream().record_event() if on_gpu else None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait on the host, then copy back on the current stream; raises what gloo does where a peer is lost."""
        if timeout is None:
            self._work.wait()
        else:
            self._work.wait(timeout)
        if self._before is not None:
            torch.cuda.current_stream().wait_event(self._before)
        while self._back:
            there, here = self._back.pop()
            there.detach().copy_(here)
        self._held = ()
        return True

    def is_completed(self) -> bool:
        """Whether the result lies where it was asked for: only a wait brings it there."""
        return not self._back and bool(self._work.is_completed())


_Group: Any = dist.ProcessGroup  # whose methods are overloads, of other signatures in each torch


class Staged(_Group):
    """A group whose calls are those of a gloo group between the ranks' host memories."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = ProcessGroupGloo(store, rank, size, timeout)  # torch's stub lacks its calls
        self._name = ""

    # the base keeps a name with a backend of its own, and has none here

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """The name under which torch.distributed keeps the group."""
        return self._name

    def getBackendName(self) -> str:
        """What torch.distributed calls it."""
        return NAME

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> _Work:
        """`dist.all_reduce`."""
        return self._in_place(lambda own: self._gloo.allreduce(own, opts), tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> _Work:
        """`dist.broadcast`."""
        return self._in_place(lambda own: self._gloo.broadcast(own, opts), tensors)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> _Work:
        """`dist.all_gather`."""
        own = [_sent(t) for t in inputs]
        every = [[_fresh(t) for t in some] for some in outputs]
        back = [
            pair for there, here in zip(outputs, every, strict=True) for pair in zip(there, here, strict=True)
        ]
        return _Work(self._gloo.allgather(every, own, opts), [*own, *(here for _, here in back)], back)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any) -> _Work:
        """`dist.all_gather_into_tensor`, whose name has changed; `output` is contiguous."""
        return self.allgather([output.view(-1).tensor_split(self.size())], [given.reshape(-1)], opts)

    _allgather_base = all_gather_single  # torch 2.11 and before

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> _Work:
        """`dist.send` and `dist.isend`: the tensor may be written as soon as this returns."""
        own = [_sent(t) for t in tensors]
        return _Work(self._gloo.send(own, rank, tag), own)

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> _Work:
        """`dist.recv` and `dist.irecv`."""
        came = [_fresh(t) for t in tensors]
        return _Work(self._gloo.recv(came, rank, tag), came, list(zip(tensors, came, strict=True)))

    def barrier(self, opts: Any) -> _Work:
        """`dist.barrier`: other ranks' kernels that were launched before it have run."""
        if torch.cuda.is_initialized():
            _refuse_capture()
            torch.cuda.current_stream().synchronize()
        host = dist.BarrierOptions()
        host.timeout = opts.timeout
        return _Work(self._gloo.barrier(host), ())

    def _in_place(self, call: Callable[[list[Tensor]], Any], tensors: Sequence[Tensor]) -> _Work:
        own = [_sent(t) for t in tensors]
        return _Work(call(own), own, list(zip(tensors, own, strict=True)))


def _refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the {NAME} backend copies through the host, and a CUDA graph is being captured: capture over NCCL, one GPU a rank"
        )


def _sent(x: Tensor) -> Tensor:
    """A copy on the host, laid out alike, made behind what the current stream does by now; the host waits for it."""
    if x.is_cuda:
        _refuse_capture()
    return torch.empty_like(x, device="cpu", requires_grad=False).copy_(x.detach())


def _fresh(x: Tensor) -> Tensor:
    """Memory on the host for what will be `x`."""
    if x.is_cuda:
        _refuse_capture()
    return torch.empty_like(x, device="cpu", requires_grad=False)


def register() -> None:
    """Make the backend known to torch.distributed in this process."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, Staged, devices=["cpu", "cuda"])
