# SPDX-License-Identifier: Apache-2.0
"""Runs every sm90 op in Triton's interpreter beside its fake kernel and prints `{op: what went wrong, or ""}` as JSON.

`torch.library.opcheck` compares shapes, dtypes, strides and aliases of what both return, and looks at schema and gradient.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

import gated  # type: ignore[import-not-found]  # ops get CPU kernels, and tables tiny weights
import torch
from torch import Tensor

from isoexec.kernels import registry
from isoexec.kernels.gates.inputs import fill
from isoexec.kernels.linear.hopper import table
from isoexec.kernels.linear.hopper.gate import claimed
from isoexec.kernels.rms_norm.hopper import kernel as norm

BF16, FP32 = torch.bfloat16, torch.float32
# asked elsewhere: attention by `test_attention.py`, and ops between ranks by ranks, in `handoff_interpreted.py`
ELSEWHERE = ("sm90_attention", "sm90_latent_attention", "sm90_handoff")
EPS = 1e-6
Arguments = Callable[[], list[tuple[Any, ...]]]


def half(*shape: int, salt: int = 1) -> Tensor:
    return fill(*shape, salt=salt, dtype=BF16)


def grad(*shape: int, salt: int = 1) -> Tensor:
    return half(*shape, salt=salt).requires_grad_()


def strided(*shape: int, salt: int = 1) -> Tensor:
    """Rows that lie further apart than they are wide, as a part of a projection."""
    *rows, width = shape
    return half(*rows, 2 * width, salt=salt)[..., :width]


IDS = torch.tensor([3, 0, 7, 3, 5])
EXPERTS = torch.tensor([[0, 3], [1, 0], [3, 2], [3, 1], [0, 2]])
SLOTS = torch.tensor([0, 3, 8, 1, 7, 9, 2, 4, 5, 6])
PLACED = torch.tensor([0, 3, 6, 1, 7, 8, 9, 4, 2, 5], dtype=torch.int32)
OFFSETS = torch.tensor([0, 2, 2, 4], dtype=torch.int32)
STATS = torch.tensor([[0.0, 1.0, 0.0]] * 5)


def _norm() -> list[tuple[Any, ...]]:
    return [
        (x, grad(24, salt=2), EPS, "none", "")
        for x in (grad(5, 24), grad(5, 2, 24), strided(5, 24).requires_grad_(), fill(5, 24, salt=1))
    ]


def _added() -> list[tuple[Any, ...]]:
    return [
        (x, grad(*x.shape, salt=3), grad(24, salt=2), EPS, "none", "")
        for x in (grad(5, 24), strided(5, 24).requires_grad_())
    ]


def _norm_grad() -> list[tuple[Any, ...]]:
    g, x, w, gate, more = (half(5, 24, salt=s) for s in range(1, 6))
    w = w[0]
    return [
        (g, x, w, None, None, EPS, norm.PLAIN, True, "none", ""),
        (g, strided(5, 24), w, None, more, EPS, norm.CENTRED, True, "none", ""),
        (g, x, w, gate, None, EPS, norm.PLAIN, True, "none", ""),
        (g, x, None, None, None, EPS, norm.BARE, False, "none", ""),
    ]


def _rope() -> list[tuple[Any, ...]]:
    table = [fill(9, 8, salt=s) for s in (3, 4)]
    x, wide = grad(5, 2, 16), strided(5, 4, 16).requires_grad_()
    places = torch.arange(5)
    return [
        (x, places, None, *table, False, False),
        (wide, places.int(), None, *table, True, True),
        (grad(5, 2, 24), places, None, *table, False, False),
        (x, places.expand(3, 5).contiguous(), torch.arange(8, dtype=torch.int32) % 3, *table, False, False),
    ]


def _logprobs() -> list[tuple[Any, ...]]:
    logits, some = grad(5, 600), torch.tensor([3, 5, 599, 0, 7])
    warmth = fill(5, salt=3).abs() + 1
    return [
        (logits, some, None, "", 2, False),
        (strided(5, 600).requires_grad_(), some, warmth, "", 2, True),
        (fill(5, 600, salt=2).requires_grad_(), some, None, "", 2, True),
    ]


def _logprobs_grad() -> list[tuple[Any, ...]]:
    g, some, entropy = fill(5, salt=1), torch.tensor([3, 5, 599, 0, 7]), fill(5, salt=2)
    return [
        (g, None, half(5, 600), some, None, entropy, STATS, ""),
        (g, g, strided(5, 600), some, entropy.abs() + 1, entropy, STATS, ""),
    ]


def _fused() -> list[tuple[Any, ...]]:
    x, w, some = grad(5, 64), grad(768, 64, salt=2), torch.tensor([3, 5, 599, 0, 7])
    return [(x, w, some, None, "", 2, False), (x, w, some, fill(5, salt=3).abs() + 1, "", 2, True)]


def _fused_grad() -> list[tuple[Any, ...]]:
    g, some, entropy = fill(5, salt=1), torch.tensor([3, 5, 599, 0, 7]), fill(5, salt=2)
    return [(g, None, half(5, 64), half(768, 64, salt=2), some, None, entropy, STATS, "", 2)]


ARGUMENTS: dict[str, Arguments] = {
    "rms_norm": _norm,
    "rms_norm_centred": _norm,
    "rms_norm_gated": lambda: [
        (x, grad(24, salt=2), grad(*x.shape, salt=4), EPS, "none", "")
        for x in (grad(5, 24), strided(5, 24).requires_grad_(), fill(5, 24, salt=1))
    ],
    "add_rms_norm": _added,
    "add_rms_norm_centred": _added,
    "residual_add": lambda: [(grad(5, 24), grad(5, 24, salt=2)), (strided(5, 24), half(5, 24, salt=2))],
    "l2_norm": lambda: [(grad(5, 24), EPS), (strided(5, 2, 24).requires_grad_(), EPS)],
    "norm_grad": _norm_grad,
    "silu_mul": lambda: [(grad(5, 32), grad(5, 32, salt=2)), tuple(grad(5, 64).chunk(2, -1))],
    "silu_mul_grad": lambda: [(half(5, 32), half(5, 32, salt=2), half(5, 32, salt=3))],
    "silu_mul_halves": lambda: [(grad(5, 64),), (strided(5, 64).requires_grad_(),)],
    "silu_mul_halves_grad": lambda: [(half(5, 32), half(5, 64, salt=2))],
    "sigmoid_mul": lambda: [
        (grad(5, 24), grad(5, 24, salt=2)),
        (strided(5, 24).requires_grad_(), grad(5, 24, salt=2)),
    ],
    "sigmoid_mul_grad": lambda: [(half(5, 24), half(5, 24, salt=2), half(5, 24, salt=3))],
    "rope": _rope,
    "embedding": lambda: [(ids, grad(8, 24), 0, 8, "", False) for ids in (IDS, IDS[:4].view(2, 2).int())],
    "embedding_grad": lambda: [(half(5, 24), IDS, half(8, 24, salt=2), 0, "", False)],
    "bias_add": lambda: [(grad(5, 24), grad(24, salt=2)), (strided(5, 24), half(24, salt=2))],
    "bias_grad": lambda: [(half(5, 24), half(24, salt=2))],
    "grad_norm_greatest": lambda: [([half(5, 24), fill(7, salt=2)],)],
    "grad_norm_sums": lambda: [([half(5, 24), fill(7, salt=2)], torch.tensor([2.0**20, 1.0]).double())],
    "router_softmax_topk": lambda: [(fill(5, 16, salt=1).requires_grad_(), 2)],
    "router_softmax_topk_grad": lambda: [(fill(5, 2, salt=1), fill(5, 2, salt=2).abs(), EXPERTS, 16)],
    "router_sigmoid_topk": lambda: [
        (fill(5, 16, salt=1).requires_grad_(), fill(16, salt=2), 2, 4, 2, 1.5),
    ],
    "router_sigmoid_topk_grad": lambda: [(fill(5, 2, salt=1), fill(5, 16, salt=2), EXPERTS, 1.5)],
    "moe_plan": lambda: [(EXPERTS, 0, 4), (EXPERTS, 1, 2)],
    "moe_dispatch": lambda: [(x, SLOTS, PLACED, 2, "") for x in (grad(5, 24), strided(5, 24))],
    "moe_dispatch_grad": lambda: [(half(10, 24), PLACED, 2, "")],
    "moe_by_slot": lambda: [(grad(10, 24), SLOTS, PLACED, "")],
    "moe_combine": lambda: [
        (grad(10, 24), None, fill(5, 2, salt=2).requires_grad_(), None),
        (grad(10, 24), PLACED, fill(5, 2, salt=2).requires_grad_(), grad(5, 24, salt=3)),
        (strided(10, 24), PLACED, fill(5, 2, salt=2), strided(5, 24, salt=3)),
    ],
    "moe_combine_grad": lambda: [
        (half(5, 24), half(10, 24, salt=2), rows, fill(5, 2, salt=3)) for rows in (None, PLACED)
    ],
    "shared_gate": lambda: [(grad(5, 64), grad(5, 64, salt=2), grad(1, 64, salt=3))],
    "shared_gate_grad": lambda: [
        (half(5, 64), half(5, 64, salt=2), half(5, 64, salt=3), half(1, 64, salt=4), fill(5, salt=5))
    ],
    "grouped_chain": lambda: [
        (half(5, 64), half(3, 32, 64, salt=2), OFFSETS, None, False, BF16),
        (half(5, 64), half(3, 32, 64, salt=2), OFFSETS, fill(5, 32, salt=3), False, FP32),
        (half(5, 32), half(3, 32, 64, salt=2), OFFSETS, None, True, BF16),
    ],
    "grouped_weight_gradient": lambda: [
        (half(5, 32), half(5, 64, salt=2), OFFSETS, dtype) for dtype in (BF16, FP32)
    ],
    "grouped_linear": lambda: [(grad(5, 64), grad(3, 32, 64, salt=2), OFFSETS, "", 1)],
    "grouped_column_gradient": lambda: [(half(5, 32), half(3, 32, 64, salt=2), OFFSETS, "", 2)],
    "row_grouped_linear": lambda: [(grad(5, 64), grad(3, 32, 64, salt=2), OFFSETS, "")],
    "linear": lambda: [(grad(5, 64), grad(32, 64, salt=2), wide) for wide in (False, True)],
    "linear_chain": lambda: [
        (half(5, 64), half(32, 64, salt=2), None, BF16),
        (half(5, 64), half(32, 64, salt=2), fill(5, 32, salt=3), FP32),
    ],
    "linear_input_gradient": lambda: [(half(5, 32), half(32, 64, salt=2), None, d) for d in (BF16, FP32)],
    "linear_weight_gradient": lambda: [(half(5, 32), half(5, 64, salt=2), dtype) for dtype in (BF16, FP32)],
    "column_linear": lambda: [
        (x, grad(32, 64, salt=2), "", False, [16, 16], dtype)
        for x, dtype in ((grad(5, 1, 64), BF16), (grad(5, 64), FP32), (strided(5, 2, 64), BF16))
    ],
    "column_input_gradient": lambda: [
        (x, half(32, 64, salt=2), "", False, [32]) for x in (half(5, 2, 32), strided(5, 32))
    ],
    "parallel_weight_gradient": lambda: [(half(5, 2, 32), half(5, 2, 64, salt=2), "", "")],
    "row_linear": lambda: [
        (x, grad(32, 64, salt=2), None, "", False) for x in (grad(5, 64), grad(5, 2, 64), strided(5, 64))
    ],
    "row_input_gradient": lambda: [(half(5, 2, 32), half(32, 64, salt=2), "")],
    "token_logprobs": _logprobs,
    "token_logprobs_grad": _logprobs_grad,
    "linear_logprobs": _fused,
    "linear_logprobs_grad": _fused_grad,
}
TESTS = ("test_schema", "test_autograd_registration", "test_faketensor")


def defined() -> set[str]:
    """Names of the ops that the registry's sm90 kernels define."""
    for function in registry.FUNCTIONS.values():
        if "sm90" in function.arch:
            import_module(function.kernel("sm90").module)
    names = {
        name.partition("::")[2].partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("isoexec::sm90_")
    }
    return {name.removeprefix("sm90_") for name in names if not name.startswith(ELSEWHERE)}


def main() -> None:
    gated.smaller()
    gated.replace(
        table,
        tiles=lambda: {
            **dict.fromkeys(gated.WEIGHTS, ((8192, gated.TILE),)),
            gated.HEAD: ((8192, gated.HEAD_TILE),),
        },
    )
    results = dict.fromkeys(defined(), "no arguments are listed")
    for name, arguments in ARGUMENTS.items():
        try:
            op = getattr(torch.ops.isoexec, f"sm90_{name}").default
            with claimed():
                for given in arguments():
                    torch.library.opcheck(op, given, test_utils=TESTS)
            results[name] = ""
        except Exception:  # noqa: BLE001 - reported to the test that asked
            results[name] = traceback.format_exc(limit=-6)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
