# SPDX-License-Identifier: Apache-2.0
"""Every op of the library is a well-formed torch op: schema, fake kernel, autograd, tracing with dynamic shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isoexec.kernels import registry  # noqa: F401  (defines every op)
from isoexec.kernels.attention import PagedPlan
from isoexec.kernels.canaries import fill


def _grad(*shape: int, salt: int) -> torch.Tensor:
    return fill(*shape, salt=salt).requires_grad_()


IDS = torch.arange(6).view(3, 2)
POSITIONS = torch.arange(5)


def _paged() -> tuple[Any, ...]:
    token, request, limit, visible, segments, full = PagedPlan([0, 1, 4], [9, 40], 2).batches[-1]
    cache, table = fill(4, 2, 32, 64, salt=1), torch.arange(4, dtype=torch.int32).view(2, 2)
    return (
        fill(4, 4, 32, salt=2),
        cache,
        table,
        token,
        request,
        limit,
        visible,
        segments,
        full,
        0.2,
        32,
        torch.zeros(4, 4, 32),
    )


def _attention_grad() -> tuple[Any, ...]:
    q, k, v = fill(1, 5, 4, 32, salt=1), fill(1, 5, 2, 32, salt=2), fill(1, 5, 2, 32, salt=3)
    out, top, total = torch.ops.isoexec.attention(q, k, v, 0.2, 32)
    return fill(1, 5, 4, 32, salt=4), q, k, v, out, top, total, 0.2, 32


EXPERTS = torch.tensor([[0, 3], [1, 0], [7, 2], [3, 15], [4, 5]])
SLOTS = torch.tensor([0, 3, 2, 5, 1])  # rows of five of the ten places, expert by expert
OFFSETS = torch.tensor([0, 2, 5])
PACKED = torch.stack([fill(2, 64, 32, salt=2), fill(2, 64, 32, salt=3)])

ARGUMENTS = {
    "router_softmax_topk": lambda: (_grad(5, 16, salt=1), 2),
    "router_softmax_topk_grad": lambda: (fill(5, 2, salt=1), fill(5, 2, salt=2).abs(), EXPERTS, 16),
    "router_sigmoid_topk": lambda: (_grad(5, 16, salt=1), fill(16, salt=2), 2, 4, 2, 1.5),
    "router_sigmoid_topk_grad": lambda: (fill(5, 2, salt=1), fill(5, 16, salt=2), EXPERTS, 1.5),
    "moe_dispatch": lambda: (_grad(5, 16, salt=1), SLOTS, 2, ""),
    "moe_dispatch_grad": lambda: (fill(5, 16, salt=1), SLOTS, 5, 2, ""),
    "moe_take": lambda: (fill(10, 16, salt=1), SLOTS),
    "moe_by_slot": lambda: (_grad(5, 16, salt=1), SLOTS, 10, ""),
    "moe_combine": lambda: (_grad(10, 16, salt=1), _grad(5, 2, salt=2), None),
    "moe_combine_grad": lambda: (fill(5, 16, salt=1), fill(10, 16, salt=2), fill(5, 2, salt=3)),
    "grouped_chain": lambda: (fill(5, 128, salt=1), PACKED, OFFSETS, None),
    "grouped_hand_off": lambda: (fill(5, 128, salt=1), PACKED, OFFSETS, ""),
    "grouped_wgrad": lambda: (fill(5, 64, salt=1), fill(5, 128, salt=2), OFFSETS, 2),
    "column_grouped_linear": lambda: (_grad(5, 128, salt=1), _grad(2, 64, 128, salt=2), OFFSETS, 64, "", 1),
    "row_grouped_linear": lambda: (_grad(5, 128, salt=1), _grad(2, 64, 128, salt=2), OFFSETS, 64, ""),
    "linear_chain": lambda: (fill(5, 128, salt=1), fill(2, 64, 32, salt=2), None),
    "linear_hand_off": lambda: (fill(5, 128, salt=1), fill(2, 64, 32, salt=2), "", False),
    "linear_wgrad": lambda: (fill(5, 64, salt=1), fill(5, 128, salt=2)),
    "gather_rows": lambda: (fill(5, 8, salt=1), ""),
    "column_linear": lambda: (
        _grad(5, 1, 128, salt=1),
        _grad(64, 128, salt=2),
        64,
        "",
        False,
        1,
        torch.float32,
    ),
    "row_linear": lambda: (_grad(5, 1, 128, salt=1), _grad(64, 128, salt=2), 64, "", False),
    "rms_norm": lambda: (_grad(5, 1, 32, salt=1), _grad(32, salt=2), 1e-6, "none", ""),
    "rms_norm_grad": lambda: (
        fill(5, 1, 32, salt=1),
        fill(5, 1, 32, salt=2),
        fill(32, salt=3),
        1e-6,
        "none",
        "",
    ),
    "bias_add": lambda: (_grad(5, 32, salt=1), _grad(32, salt=2)),
    "bias_grad": lambda: (fill(5, 32, salt=1),),
    "residual_add": lambda: (_grad(5, 32, salt=1), _grad(5, 32, salt=2)),
    "rope": lambda: (_grad(5, 2, 32, salt=1), POSITIONS, 1e4, False),
    "silu_mul": lambda: (_grad(5, 32, salt=1), _grad(5, 32, salt=2)),
    "silu_mul_grad": lambda: (fill(5, 32, salt=1), fill(5, 32, salt=2), fill(5, 32, salt=3)),
    "embedding": lambda: (IDS, _grad(8, 16, salt=1), 0, "", False),
    "embedding_grad": lambda: (fill(3, 2, 16, salt=1), IDS, 8, 0, "", False),
    "attention": lambda: (
        _grad(1, 5, 4, 32, salt=1),
        _grad(1, 5, 2, 32, salt=2),
        _grad(1, 5, 2, 32, salt=3),
        0.2,
        32,
    ),
    "attention_grad": _attention_grad,
    "attention_paged": _paged,
    "log_softmax": lambda: (fill(5, 64, salt=1), 8),
    "token_logprobs": lambda: (_grad(5, 64, salt=1), torch.arange(5), "", 8),
    "temper": lambda: (_grad(5, 64, salt=1), fill(5, salt=3).abs() + 1),
    "entropy": lambda: (_grad(5, 64, salt=1), "", 8),
    "entropy_grad": lambda: (
        fill(5, salt=1),
        fill(5, 64, salt=2),
        fill(5, salt=3) + 1,
        fill(5, salt=4).abs() + 1,
        -fill(5, salt=5).abs(),
    ),
    "token_logprobs_grad": lambda: (
        fill(5, salt=1),
        fill(5, 64, salt=2),
        torch.arange(5),
        fill(5, salt=3),
        fill(5, salt=4).abs() + 1,
        "",
    ),
}


def test_every_op_of_the_library_is_listed_here() -> None:
    defined = {
        name.removeprefix("isoexec::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("isoexec::") and not name.startswith("isoexec::sm90_")
    }
    assert defined == set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_op_passes_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.isoexec, name).default, ARGUMENTS[name]())
