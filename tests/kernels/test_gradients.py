# SPDX-License-Identifier: Apache-2.0
"""Every gradient agrees with autograd of the plain formula in float64, to the accuracy of its dtype, and repeats."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from isoexec.kernels.attention import attention_varlen
from isoexec.kernels.bias import bias_add
from isoexec.kernels.canaries import fill
from isoexec.kernels.embedding import embedding
from isoexec.kernels.linear import column_linear, row_linear
from isoexec.kernels.logprobs import token_logprobs
from isoexec.kernels.rms_norm import residual_add, rms_norm_grad
from isoexec.kernels.rope import rope_grad
from isoexec.kernels.silu_mul import silu_mul

Differing = Callable[[Tensor, Tensor], int]

# of the greatest entry: a few roundings of fp32 in a sum, two roundings of bf16 (the output and the gradient)
ACCURACY = {torch.float32: 4e-6, torch.bfloat16: 2**-7}

IDS = torch.arange(34).view(17, 2) * 5 % 16
POSITIONS = torch.arange(17) * 3


def _norm(x: Tensor, w: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w


def _rope(x: Tensor) -> Tensor:
    angle = POSITIONS.double().unsqueeze(1) * 1e4 ** (-torch.arange(0, 32, 2).double() / 32)
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True).transpose(1, 2)


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "column_linear": (
        lambda x, w: column_linear(x, w, k_block=64),
        F.linear,
        [(17, 2, 128), (192, 128)],
    ),
    "column_linear_interleaved": (
        lambda x, w: column_linear(x, w, k_block=64, interleave=2),
        F.linear,
        [(17, 2, 128), (256, 128)],
    ),
    "row_linear": (lambda x, w: row_linear(x, w, k_block=64), F.linear, [(17, 2, 256), (128, 256)]),
    "rms_norm": (lambda x, w: rms_norm_grad(x, w, 1e-6), _norm, [(17, 2, 100), (100,)]),
    "qk_norm": (lambda x, w: rms_norm_grad(x, w, 1e-6), _norm, [(17, 2, 3, 32), (32,)]),
    "residual_add": (residual_add, torch.add, [(17, 2, 63), (17, 2, 63)]),
    "bias_add": (bias_add, torch.add, [(17, 2, 63), (63,)]),
    "rope": (lambda x: rope_grad(x, POSITIONS, 1e4), _rope, [(17, 3, 32)]),
    "silu_mul": (silu_mul, lambda g, u: F.silu(g) * u, [(17, 2, 63), (17, 2, 63)]),
    "embedding": (lambda w: embedding(IDS, w), lambda w: F.embedding(IDS, w), [(16, 63)]),
    "attention": (
        lambda q, k, v: attention_varlen(q, k, v, 0.2, kv_segment=32),
        _attention,
        [(2, 63, 6, 32), (2, 63, 2, 32), (2, 63, 2, 32)],
    ),
    "token_logprobs": (
        lambda z: token_logprobs(z, IDS, vocab_leaves=8),
        lambda z: torch.log_softmax(z, -1).gather(-1, IDS.unsqueeze(-1)).squeeze(-1),
        [(17, 2, 136)],
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_gradients_agree_with_float64_and_repeat_bit_by_bit(
    differing: Differing, name: str, dtype: torch.dtype
) -> None:
    ours, plain, shapes = CASES[name]
    inputs = [fill(*s, salt=i, dtype=dtype, scale=2.0).requires_grad_() for i, s in enumerate(shapes)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    out, want = ours(*inputs), plain(*exact)
    assert out.shape == want.shape
    g = fill(*out.shape, salt=50, dtype=out.dtype)
    got = torch.autograd.grad(out, inputs, g)
    expected = torch.autograd.grad(want, exact, g.double())
    for a, b in zip((out, *got), (want, *expected), strict=True):
        assert (
            float((a.detach().double() - b.detach()).abs().max() / b.detach().abs().max()) < ACCURACY[dtype]
        )
    for a, b in zip(torch.autograd.grad(ours(*inputs), inputs, g), got, strict=True):
        assert differing(a, b) == 0
