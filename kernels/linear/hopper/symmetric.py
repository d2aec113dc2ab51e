# SPDX-License-Identifier: Apache-2.0
"""The symmetric transport: the kernels of `handoff`, which write accumulators straight into the next rank's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.linear.hopper.handoff import ops as handoff
from isoexec.kernels.linear.hopper.handoff.protocol import MOST_RANKS

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from isoexec.kernels.linear.hopper.transport import Form

__all__ = [
    "ONE_HOST",
    "available",
    "check",
    "column_gradient",
    "gathered_product",
    "open_group",
    "row_product",
]

ONE_HOST = True
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
    dy: Tensor, w: Tensor, group: ProcessGroup, laps: int, form: Form, out_dtype: torch.dtype
) -> Tensor:
    """`Transport.column_gradient`; bf16 only."""
    require(
        out_dtype == torch.bfloat16,
        "sm90_linear input gradient",
        f"a result in {out_dtype}",
        "torch.bfloat16",
    )
    return handoff.column_gradient(dy.contiguous(), w.contiguous(), group, laps, form)


def gathered_product(
    x: Tensor, w_outputs: Tensor, group: ProcessGroup, form: Form, out_dtype: torch.dtype
) -> Tensor:
    """`Transport.gathered_product`."""
    return handoff.columns_product(x.contiguous(), w_outputs.contiguous(), group, form, out_dtype)
