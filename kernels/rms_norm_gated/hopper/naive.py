# SPDX-License-Identifier: Apache-2.0
"""rms_norm.pairs_gated/1: (x * (1 / sqrt(pairs(x * x) / width + eps)) * w) * (z * sigmoid(z)) in fp32, rounded once.

The output norm of Gated DeltaNet, norm before gate. Flash Linear Attention and vLLM keep fp32 to the end, as here; Hugging
Face's `Qwen3NextRMSNormGated` in torch and Megatron's GDN round the norm to the model dtype before the gate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isoexec.kernels.hopper.spec import sigmoid
from isoexec.kernels.rms_norm.hopper.naive import input_gradient, inverse_root, over_tokens

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: Tensor, w: Tensor, gate: Tensor, eps: float) -> Tensor:
    xf, z = x.float(), gate.float()
    return (xf * inverse_root(xf, eps) * w.float() * (z * sigmoid(z))).to(x.dtype)


def dx(g: Tensor, x: Tensor, w: Tensor, gate: Tensor, eps: float) -> Tensor:
    z = gate.float()
    return input_gradient(g.float() * (z * sigmoid(z)) * w.float(), x.float(), eps).to(x.dtype)


def dgate(g: Tensor, x: Tensor, w: Tensor, gate: Tensor, eps: float) -> Tensor:
    """G * n * (s * (1 + z * (1 - s))), n the norm before its gate, s = sigmoid(z)."""
    xf, z = x.float(), gate.float()
    s = sigmoid(z)
    n = xf * inverse_root(xf, eps) * w.float()
    return ((g.float() * n) * (s * (1.0 + z * (1.0 - s)))).to(gate.dtype)


def dgamma(g: Tensor, x: Tensor, gate: Tensor, eps: float) -> Tensor:
    """fp32 [width], in the order of `rms_norm`'s."""
    xf, z = x.float(), gate.float()
    terms = (g.float() * (z * sigmoid(z))) * (xf * inverse_root(xf, eps))
    return over_tokens(terms if x.dim() == 3 else terms.unsqueeze(1))
