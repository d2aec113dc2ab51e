# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_sharing.py do: every call that kernels make, over a staged group and over gloo itself, and more."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.kernels.gates import sharing
from isoexec.kernels.gates.checking import differing
from isoexec.kernels.gates.inputs import fill
from isoexec.kernels.groups import name_of, resolve
from isoexec.kernels.linear.hopper import transport

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)


def made(rank: int, dtype: torch.dtype, salt: int) -> Tensor:
    """Another rank's values are others; two dimensions, of which one is turned round in memory."""
    x = fill(6, 5, salt=salt + 10 * rank, scale=100.0)
    x[0, 0], x[0, 1] = -0.0, float("inf") if dtype.is_floating_point else 7.0
    return x.to(dtype).t()


def every_call(rank: int, size: int, group: ProcessGroup) -> list[Tensor]:
    """What each call leaves behind, in their order; the group is used by name, as an op does."""
    found: list[Tensor] = []
    group = resolve(name_of(group))
    after, before = (rank + 1) % size, (rank - 1) % size
    for dtype in DTYPES:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            x = made(rank, dtype, 1)
            dist.all_reduce(x, op=op, group=group)
            found.append(x)
        x = made(rank, dtype, 2)
        late = dist.all_reduce(x, group=group, async_op=True)
        assert late is not None
        late.wait(timedelta(seconds=60))
        found.append(x)
        for root in {0, size - 1}:
            x = made(rank, dtype, 3).contiguous()
            dist.broadcast(x, group=group, group_src=root)
            found.append(x)
        x = made(rank, dtype, 4).contiguous()
        late = dist.broadcast(x, group=group, group_src=1, async_op=True)
        assert late is not None
        late.wait()
        found.append(x)
        own = made(rank, dtype, 5).contiguous()
        whole = own.new_empty(size * len(own), own.shape[1])
        dist.all_gather(list(whole.chunk(size)), own, group=group)
        found.append(whole)
        whole = torch.empty_like(whole)
        dist.all_gather_into_tensor(whole, own, group=group)
        found.append(whole)
        whole = torch.empty_like(whole)
        late = dist.all_gather_into_tensor(whole, own, group=group, async_op=True)
        late.wait()
        found.append(whole)
        found += moved(rank, size, group, dtype, after, before)
    dist.barrier(group=group)
    return found


def moved(
    rank: int, size: int, group: ProcessGroup, dtype: torch.dtype, after: int, before: int
) -> list[Tensor]:
    """Rows sent on: one after the other, at once, and in batches whose tags lie crosswise."""
    own, came = made(rank, dtype, 6).contiguous(), made(rank, dtype, 7).contiguous()
    if rank % 2 == 0:
        dist.send(own, group=group, group_dst=after)
        dist.recv(came, group=group, group_src=before)
    else:
        dist.recv(came, group=group, group_src=before)
        dist.send(own, group=group, group_dst=after)
    found = [came]
    sent = own.clone()
    out = dist.isend(sent, group=group, group_dst=after)
    if dist.get_backend(group) == "staged":
        sent.zero_()  # its values have been copied; gloo still reads them here
    part = torch.zeros_like(own)
    late = dist.irecv(part, group=group, group_src=before)
    assert late is not None
    assert out is not None
    late.wait()
    out.wait()
    found.append(part)
    got = [torch.zeros_like(own) for _ in range(2)]
    batch = [
        dist.P2POp(dist.isend, own + 1, group=group, group_peer=after, tag=1),
        dist.P2POp(dist.isend, own, group=group, group_peer=after, tag=2),
        dist.P2POp(dist.irecv, got[0], group=group, group_peer=before, tag=2),
        dist.P2POp(dist.irecv, got[1], group=group, group_peer=before, tag=1),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return [*found, *got]


def compared(rank: int, size: int, host: ProcessGroup) -> dict[str, Tensor]:
    """How many results there are, how many elements are unlike gloo's own in any bit, and what the group calls itself."""
    group = sharing.subgroup(*range(size))
    ours, theirs = every_call(rank, size, group), every_call(rank, size, host)
    return {
        "count": torch.tensor(len(ours)),
        "unlike": torch.tensor(sum(differing(a, b) for a, b in zip(ours, theirs, strict=True))),
        "staged": torch.tensor((dist.get_backend(group), dist.get_backend(host)) == ("staged", "gloo")),
        "pid": torch.tensor(os.getpid()),
    }


def dies_while_others_wait(rank: int, size: int, group: ProcessGroup) -> Tensor:
    """The last rank ends in the middle of what the others wait for."""
    x = torch.ones(4)
    dist.all_reduce(x, group=group)
    if rank == size - 1:
        os._exit(3)
    dist.all_reduce(x, group=group)
    return x


# a transport that wants a GPU a rank, and that a CPU has
ONE_HOST = OWN_GPU = True
opened: list[str] = []


def available(group: ProcessGroup, device: torch.device) -> str:
    """`Transport.available`."""
    del group, device
    return ""


def open_group(group: ProcessGroup, device: torch.device) -> None:
    """`Transport.open_group`."""
    opened.append(f"{group.group_name} {device}")


def chosen(rank: int, size: int, group: ProcessGroup, gpus: int) -> dict[str, list[Tensor]]:
    """Which transport the ranks take where they lie on this many GPUs, and what is said of the others; as bytes."""
    transport.register("owner", __name__)
    place = transport._place
    try:
        transport._place = lambda *_: f"GPU {rank % gpus}"
        found = transport.prepare(group, torch.device("cpu"))
        said = [found.name, found.reason, *transport.able(group, torch.device("cpu")).values()]
    finally:
        transport._place = place
        del transport.TRANSPORTS["owner"]
        transport._choices.clear()
    return {"said": [torch.frombuffer(bytearray(one.encode() or b" "), dtype=torch.uint8) for one in said]}


def counted(rank: int, size: int, group: ProcessGroup) -> Tensor:
    """How many ranks there are, as they count themselves."""
    one = torch.ones(1, dtype=torch.int64)
    dist.all_reduce(one, group=group)
    return one
