# SPDX-License-Identifier: Apache-2.0
"""gate.sigmoid_mul/1: x * (1 / (1 + exp(-gate))) in fp32, rounded once; exp is the written-out one.

The output gate of Qwen3-Next's and Qwen3.5's attention. Megatron keeps its sigmoid in fp32 too; Hugging Face and vLLM round it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isoexec.kernels.hopper.spec import sigmoid

if TYPE_CHECKING:
    from torch import Tensor


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    return (x.float() * sigmoid(gate.float())).to(x.dtype)


def sigmoid_mul_backward(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Of x: d * s; of gate: d * x * (s * (1 - s))."""
    d, s = grad.float(), sigmoid(gate.float())
    return (d * s).to(x.dtype), (d * x.float() * (s * (1.0 - s))).to(gate.dtype)
