# SPDX-License-Identifier: Apache-2.0
"""Tensors of one process under another's hands on the same host, by handles of plain builtins: nothing is copied or pickled.

On a GPU these are CUDA's handles of memory between processes, on a CPU torch's named shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isoexec.contracts.errors import InstallError

__all__ = ["Offer", "handle_of", "opened"]

_CUDA, _CPU = "cuda", "cpu"


class Offer:
    """Tensors held out by name to other processes of this host, as long as this object holds them.

    ``handles`` are [name, handle] of each, plain builtins that go over any wire; what is behind them has been written when they
    are there. Their memory stays until `withdraw`, which is for when the others have read.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        made = {name: handle_of(t) for name, t in tensors.items()}
        self.handles: list[list[Any]] = [[name, handle] for name, (_, handle) in made.items()]
        self._held = [t for t, _ in made.values()]
        for device in {t.device for t in self._held if t.is_cuda}:
            torch.cuda.synchronize(device)

    def withdraw(self) -> None:
        """Let go of them."""
        self._held = []
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()


def handle_of(t: Tensor) -> tuple[Tensor, list[Any]]:
    """What must stay alive until the other side is done, and the handle: ``t`` itself on a GPU where it is contiguous.

    A CPU tensor is copied, for its storage would move into shared memory under whoever holds it.
    """
    t = t.detach()
    t = t.contiguous() if t.is_cuda else t.clone(memory_format=torch.contiguous_format)
    storage = t.untyped_storage()
    shape = [str(t.dtype).removeprefix("torch."), list(t.shape), int(t.storage_offset())]
    if t.is_cuda:
        _, *rest = storage._share_cuda_()
        uuid = str(torch.cuda.get_device_properties(t.device).uuid)
        return t, [_CUDA, *shape, uuid, *rest]
    return t, [_CPU, *shape, *storage._share_filename_cpu_()]


def opened(handle: list[Any]) -> Tensor:
    """The tensor behind a handle.  Raises InstallError where its GPU is not among those this process sees."""
    kind, dtype, shape, offset, *rest = handle
    if kind == _CUDA:
        uuid, *rest = rest
        storage = torch.UntypedStorage._new_shared_cuda(_device(uuid), *rest)
    else:
        storage = torch.UntypedStorage._new_shared_filename_cpu(*rest)
    out = torch.empty(0, dtype=getattr(torch, dtype), device=storage.device)
    strides = torch.empty(shape, device="meta").stride()
    return out.set_(storage, offset, tuple(shape), strides)


def _device(uuid: str) -> int:
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise InstallError(
            region="weight sync",
            wanted=f"the trainer's GPU {uuid} among this process's",
            found=", ".join(seen) or "none",
            fix="let the engine see the trainer's GPU (CUDA_VISIBLE_DEVICES), or sync by files",
        )
    return seen.index(uuid)
