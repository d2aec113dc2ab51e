# SPDX-License-Identifier: Apache-2.0
"""The symmetric transport: the kernels of `handoff`, which write accumulators straight into the next rank's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.groups import name_of
from isoexec.kernels.linear.hopper.handoff import buffers, relay
from isoexec.kernels.linear.hopper.handoff import ops as handoff
from isoexec.kernels.linear.hopper.handoff.protocol import MOST_RANKS
from isoexec.kernels.linear.hopper.transport import schedule_for

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    "row_product",
]

ONE_HOST = True
OWN_GPU = True  # its kernels wait on the GPU for other ranks', which may never run beside them on one
# of the group's memory, 6 bytes each: products that are larger take several launches. `handoff.ops.setup` before the first
# product makes another size
ELEMENTS = 1 << 25


def available(group: ProcessGroup, device: torch.device) -> str:
    """`Transport.available`."""
    if device.type != "cuda":
        return f"it needs GPUs, and this is {device.type}"
    if group.size() > MOST_RANKS:
        return f"{group.size()} ranks, and it knows at most {MOST_RANKS}"
    return ""


def open_group(group: ProcessGroup, device: torch.device) -> None:
    """Allocate the group's symmetric memory, unless it has some."""
    del device
    handoff.setup(group, ELEMENTS)


def check(group: ProcessGroup) -> None:
    """Raise `handoff.buffers.PeerLostError` where a product of this process waited in vain."""
    del group
    handoff.check()


def row_product(x: Tensor, w: Tensor, group: ProcessGroup, form: Form, out_dtype: torch.dtype) -> Tensor:
    """`Transport.row_product`."""
    return handoff.row_product(x.contiguous(), w.contiguous(), group, form, out_dtype)


def column_gradient(
    dy: Tensor, w: Tensor, group: ProcessGroup, parts: Sequence[int], form: Form, out_dtype: torch.dtype
) -> Tensor:
    """`Transport.column_gradient`; bf16 only."""
    require(
        out_dtype == torch.bfloat16,
        "sm90_linear input gradient",
        f"a result in {out_dtype}",
        "torch.bfloat16",
    )
    return handoff.column_gradient(dy.contiguous(), w.contiguous(), group, parts, form)


def gathered_product(
    x: Tensor, w_outputs: Tensor, group: ProcessGroup, form: Form, out_dtype: torch.dtype
) -> Tensor:
    """`Transport.gathered_product`."""
    return handoff.columns_product(x.contiguous(), w_outputs.contiguous(), group, form, out_dtype)


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
) -> Tensor:
    """`Transport.hand_off`: a stage reads and writes symmetric memory itself."""
    out = torch.empty(rows, width, dtype=out_dtype, device=device)
    if rows:
        blocks = schedule_for("symmetric", group.size(), rows).blocks
        relay.hand_off(make, out, buffers.room_of(name_of(group)), stages=stages, blocks=blocks, name=name)
    return out
