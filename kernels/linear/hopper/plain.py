# SPDX-License-Identifier: Apache-2.0
"""The plain transport: an accumulator handed from rank to rank by torch.distributed, row blocks one behind the other.

A chain over ranks is a row of stages, one a rank and lap; stage s belongs to rank s mod ranks and goes on from what stage s - 1
made. All ranks walk the same clock: at tick t, stage s computes row block t - 2s while what was computed at tick t - 1 travels,
so that a transfer hides behind the next product. Each tick's transfers are one group call, in one order on every rank, which is
what NCCL needs to be free of deadlock and to be captured in a CUDA graph. Results travel as they are rounded, the last stage's
rank sending them to all ranks or to their owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from isoexec.kernels.domain import require
from isoexec.kernels.linear.hopper import products, transport
from isoexec.kernels.linear.hopper.parts import require_parts

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from isoexec.kernels.linear.hopper.transport import Form, Make

__all__ = [
    "ONE_HOST",
    "OWN_GPU",
    "available",
    "check",
    "column_gradient",
    "gathered_product",
    "hand_off",
    "open_group",
    "outputs_shard",
    "row_product",
]

ONE_HOST = False
OWN_GPU = False


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One group and what is being done over it, for waits that end in vain."""

    group: ProcessGroup
    name: str
    on_gpu: bool

    def wait(self, works: list[Any], step: str) -> None:
        """Wait for works: on a GPU the stream does, on a CPU this thread does, with patience."""
        said = f"{self.name}, {step}"
        for work in works:
            if self.on_gpu:
                work.wait()
                continue
            try:
                work.wait(timedelta(seconds=transport.PATIENCE))
            except RuntimeError as error:
                raise self._lost(said, error) from error
        if self.on_gpu and works:
            transport.track(self.group, said)

    def exchange(self, ops: list[dist.P2POp], step: str) -> list[Any]:
        """Start the transfers of one tick."""
        try:
            works: list[Any] = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise self._lost(f"{self.name}, {step}", error) from error
        return works

    def _lost(self, step: str, error: RuntimeError) -> transport.LostPeerError:
        return transport.LostPeerError(
            rank=self.group.rank(),
            size=self.group.size(),
            step=step,
            seconds=transport.PATIENCE,
            said=str(error).partition("\n")[0],
        )


def available(group: ProcessGroup, device: torch.device) -> str:
    """Always: what torch.distributed offers for the device is all it needs."""
    del group, device
    return ""


def open_group(group: ProcessGroup, device: torch.device) -> None:
    """`Transport.open_group`: the agreement on a transport has made the group's communicator."""
    del group, device


def check(group: ProcessGroup) -> None:
    """`Transport.check`: its waits are tracked."""
    del group


def _blocks(rows: int, size: int, form: Form, count: int) -> list[tuple[int, int]]:
    """Row blocks, none of which crosses from one owner's rows to another's."""
    per = rows // size if form == "rows" else rows
    length = max(1, -(-per // max(1, count // (size if form == "rows" else 1))))
    return [
        (a, min(a + length, base + per))
        for base in range(0, rows, max(per, 1))
        for a in range(base, base + per, length)
    ]


def hand_off(
    make: Make,
    *,
    rows: int,
    width: int,
    device: torch.device,
    group: ProcessGroup,
    stages: int,
    out_dtype: torch.dtype,
    name: str,
    form: Form = "all",
    blocks: int | None = None,
) -> Tensor:
    """`Transport.hand_off`, or by `rows` of it each rank's `[rows / ranks, width]`; in `blocks`, or as many as the schedule says.

    Raises `LostPeerError`.
    """
    size, rank, last = group.size(), group.rank(), stages - 1
    require(
        form != "rows" or rows % size == 0,
        f"sm90_linear {name}",
        f"{rows} rows over {size} ranks",
        "equal row blocks on every rank",
    )
    call = _Call(group=group, name=name, on_gpu=device.type == "cuda")
    per = rows // size if form == "rows" else rows
    result = torch.empty(per, width, dtype=out_dtype, device=device)
    count = blocks or transport.schedule_for("plain", size, rows).blocks
    cuts = _blocks(rows, size, form, count)
    made: dict[tuple[int, int], Tensor] = {}  # (stage, block) that this rank computed and has not sent
    taken: dict[tuple[int, int], Tensor] = {}  # accumulators that came for (stage, block)

    def own(block: int) -> Tensor:
        a, b = cuts[block]
        base = rank * per if form == "rows" else 0
        return result[a - base : b - base]

    for tick in range(len(cuts) + 2 * last + 1 if cuts else 0):
        step = f"tick {tick} of {len(cuts) + 2 * last}"
        ops: list[dist.P2POp] = []
        kept: list[Tensor] = []  # alive until the wait
        for stage in range(last):
            block = tick - 1 - 2 * stage
            source, target = stage % size, (stage + 1) % size
            if not 0 <= block < len(cuts):
                continue
            if rank == source:
                kept.append(made.pop((stage, block)))
                ops.append(dist.P2POp(dist.isend, kept[-1], group=group, group_peer=target, tag=stage))
            if rank == target:
                a, b = cuts[block]
                taken[stage + 1, block] = torch.empty(b - a, width, dtype=torch.float32, device=device)
                ops.append(
                    dist.P2POp(dist.irecv, taken[stage + 1, block], group=group, group_peer=source, tag=stage)
                )
        done = tick - 1 - 2 * last
        whole = 0 <= done < len(cuts)
        sender = last % size
        owner = cuts[done][0] // per if whole and form == "rows" else sender
        if whole and form == "rows" and owner != sender:
            if rank == sender:
                kept.append(made.pop((last, done)))
                ops.append(dist.P2POp(dist.isend, kept[-1], group=group, group_peer=owner, tag=last))
            if rank == owner:
                ops.append(dist.P2POp(dist.irecv, own(done), group=group, group_peer=sender, tag=last))
        works = call.exchange(ops, step)
        if whole and form == "all":
            works.append(dist.broadcast(own(done), group=group, group_src=sender, async_op=True))
        for stage in range(rank, stages, size):
            block = tick - 2 * stage
            if not 0 <= block < len(cuts):
                continue
            a, b = cuts[block]
            acc = taken.pop((stage, block), None)
            if stage != last:
                made[stage, block] = make(stage, slice(a, b), acc, torch.float32, None)
            elif form == "rows" and a // per != rank:
                made[stage, block] = make(stage, slice(a, b), acc, out_dtype, None)
            else:
                make(stage, slice(a, b), acc, out_dtype, own(block))
        call.wait(works, step)
        del kept
    return result


def row_product(x: Tensor, w: Tensor, group: ProcessGroup, form: Form, out_dtype: torch.dtype) -> Tensor:
    """`Transport.row_product`."""

    def make(stage: int, rows: slice, acc: Tensor | None, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        return products.product("forward", x[rows], w, acc, dtype, out)

    return hand_off(
        make,
        rows=len(x),
        width=len(w),
        device=x.device,
        group=group,
        stages=group.size(),
        form=form,
        out_dtype=out_dtype,
        name="row product",
    )


def column_gradient(
    dy: Tensor, w: Tensor, group: ProcessGroup, parts: Sequence[int], form: Form, out_dtype: torch.dtype
) -> Tensor:
    """`Transport.column_gradient`."""
    size = group.size()
    require_parts("sm90_linear input gradient", parts, len(w))
    starts = [0, *accumulate(parts)]

    def make(stage: int, rows: slice, acc: Tensor | None, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        part = slice(starts[stage // size], starts[stage // size + 1])
        return products.product("input", dy[rows, part], w[part], acc, dtype, out)

    return hand_off(
        make,
        rows=len(dy),
        width=w.shape[1],
        device=dy.device,
        group=group,
        stages=len(parts) * size,
        form=form,
        out_dtype=out_dtype,
        name="column gradient",
    )


# The second schedule: inputs travel instead of accumulators. It needs the weight cut the other way.


def outputs_shard(w: Tensor, group: ProcessGroup) -> Tensor:
    """`w [N, K / ranks]`, sharded by inputs, as this rank's `[N / ranks, K]` by outputs, for `gathered_product`.

    Made once a weight, by all ranks together.
    """
    size, N = group.size(), len(w)
    require(
        N % size == 0, "sm90_linear gather-K", f"{N} outputs over {size} ranks", "equal shares of the outputs"
    )
    call = _Call(group=group, name="weights for gather-K", on_gpu=w.is_cuda)
    parts = _transposed(call, w.contiguous(), "exchange of weights")
    return parts.transpose(0, 1).reshape(N // size, -1)


def gathered_product(
    x: Tensor, w_outputs: Tensor, group: ProcessGroup, form: Form, out_dtype: torch.dtype
) -> Tensor:
    """`Transport.gathered_product`; the chain of each element is the same, so its bits are."""
    size, (M, share) = group.size(), x.shape
    require(
        form != "rows" or M % size == 0,
        "sm90_linear row product",
        f"{M} rows over {size} ranks",
        "equal row blocks on every rank",
    )
    call = _Call(group=group, name="row product by gather-K", on_gpu=x.is_cuda)
    every = torch.empty(size, M, share, dtype=x.dtype, device=x.device)
    if M:
        call.wait([_gathered(every, x.contiguous(), group)], "inputs of all ranks")
    y = products.product(
        "forward", every.transpose(0, 1).reshape(M, size * share), w_outputs, None, out_dtype, None
    )
    if form == "rows":
        own = _transposed(call, y, "outputs by their owner") if M else y.view(size, 0, len(w_outputs))
        return own.transpose(0, 1).reshape(M // size, size * len(w_outputs))
    outputs = torch.empty(size, M, len(w_outputs), dtype=out_dtype, device=x.device)
    if M:
        call.wait([_gathered(outputs, y, group)], "outputs of all ranks")
    return outputs.transpose(0, 1).reshape(M, size * len(w_outputs))


def _gathered(out: Tensor, x: Tensor, group: ProcessGroup) -> Any:
    return dist.all_gather_into_tensor(out.view(-1, *x.shape[1:]), x, group=group, async_op=True)


def _transposed(call: _Call, x: Tensor, step: str) -> Tensor:
    """`x [ranks * rows, width]`, block r for rank r -> `[ranks, rows, width]`, block r from rank r."""
    size, rank = call.group.size(), call.group.rank()
    blocks = x.view(size, -1, x.shape[1])
    got = torch.empty_like(blocks)
    got[rank] = blocks[rank]
    ops = []
    for peer in (r for r in range(size) if r != rank):
        ops.append(dist.P2POp(dist.isend, blocks[peer], group=call.group, group_peer=peer))
        ops.append(dist.P2POp(dist.irecv, got[peer], group=call.group, group_peer=peer))
    call.wait(call.exchange(ops, step), step)
    return got
