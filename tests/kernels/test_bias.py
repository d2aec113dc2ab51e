# SPDX-License-Identifier: Apache-2.0
"""The bias of a linear: two roundings, and a gradient with the same bits for any shard of features and any padding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from isoexec.kernels.bias import bias_add, naive
from isoexec.kernels.canaries import fill
from isoexec.kernels.domain import DomainError

Differing = Callable[[Tensor, Tensor], int]

DTYPES = [torch.float32, torch.bfloat16]


def _bias_gradient(g: Tensor, dtype: torch.dtype) -> Tensor:
    x = torch.zeros(g.shape, dtype=dtype)
    bias = torch.zeros(g.shape[-1], dtype=dtype, requires_grad=True)
    (found,) = torch.autograd.grad(bias_add(x, bias), bias, g.to(dtype))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 63, 100, 512])
def test_bias_add_has_the_bits_of_the_specification_in_any_company(
    differing: Differing, width: int, dtype: torch.dtype
) -> None:
    x, bias = fill(300, width, salt=1, dtype=dtype, scale=4.0), fill(width, salt=2, dtype=dtype)
    whole = bias_add(x, bias)
    assert differing(whole, naive.bias_add(x, bias)) == 0
    assert differing(torch.cat([bias_add(row.unsqueeze(0), bias) for row in x]), whole) == 0
    assert differing(bias_add(x.view(100, 3, width), bias).view(x.shape), whole) == 0
    strided = torch.cat([x, x], 1)[:, width:]
    assert differing(bias_add(strided, bias), whole) == 0
    half = width // 2
    if half:
        parts = [bias_add(x[:, a], bias[a]) for a in (slice(0, half), slice(half, width))]
        assert differing(torch.cat(parts, 1), whole) == 0


def test_the_sum_is_rounded_where_a_fused_bias_would_not_be(differing: Differing) -> None:
    x, w = fill(64, 64, salt=1), fill(100, 64, salt=2)
    bias = fill(100, salt=3, dtype=torch.bfloat16)
    product = x @ w.t()
    twice = bias_add(product.bfloat16(), bias)
    once = (product + bias.float()).bfloat16()
    assert differing(twice, once) > 100


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 17, 64, 65, 200])
def test_the_gradient_has_the_bits_of_the_specification_for_any_shard_and_padding(
    differing: Differing, tokens: int, dtype: torch.dtype
) -> None:
    g = fill(tokens, 2, 96, salt=1, dtype=dtype)
    whole = _bias_gradient(g, dtype)
    assert differing(whole, naive.bias_grad(g).to(dtype)) == 0
    shards = torch.cat([_bias_gradient(part.contiguous(), dtype) for part in g.chunk(3, -1)])
    assert differing(shards, whole) == 0
    for more in (1, 40, 64, 130):
        padded = torch.cat([g, torch.zeros(more, *g.shape[1:], dtype=dtype)])
        assert differing(_bias_gradient(padded, dtype), whole) == 0


def test_the_gradient_of_another_token_order_has_other_bits(differing: Differing) -> None:
    g = fill(200, 96, salt=1)
    assert differing(_bias_gradient(g.flip(0), torch.float32), _bias_gradient(g, torch.float32)) > 10
    assert differing(g.sum(0), _bias_gradient(g, torch.float32)) > 10


def test_the_input_s_gradient_is_handed_on_untouched(differing: Differing) -> None:
    x, g = fill(5, 2, 32, salt=1).requires_grad_(), fill(5, 2, 32, salt=2)
    (dx,) = torch.autograd.grad(bias_add(x, fill(32, salt=3)), x, g)
    assert differing(dx, g) == 0


@pytest.mark.parametrize(
    "bias", [torch.zeros(31), torch.zeros(32, dtype=torch.bfloat16), torch.zeros(32, dtype=torch.float16)]
)
def test_a_bias_that_does_not_fit_is_refused(bias: Tensor) -> None:
    with pytest.raises(DomainError, match=r"bias_add|float16"):
        bias_add(torch.zeros(4, 32), bias)
