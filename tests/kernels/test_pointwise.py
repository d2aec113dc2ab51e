# SPDX-License-Identifier: Apache-2.0
"""rope, silu_mul and embedding: bits do not depend on an element's place, in a vector's body or tail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from isoexec.kernels.canaries import fill
from isoexec.kernels.domain import DomainError
from isoexec.kernels.embedding import embedding, vocab_parallel_embedding
from isoexec.kernels.embedding import naive as embedding_naive
from isoexec.kernels.rope import naive as rope_naive
from isoexec.kernels.rope import rope, rope_grad
from isoexec.kernels.silu_mul import naive as silu_naive
from isoexec.kernels.silu_mul import silu_mul

Differing = Callable[[Tensor, Tensor], int]

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 3, 17, 63, 100]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", SIZES)
def test_rope_has_the_bits_of_the_specification_at_any_place(
    differing: Differing, tokens: int, dtype: torch.dtype
) -> None:
    x = fill(tokens, 3, 32, salt=1, dtype=dtype)
    positions = torch.arange(tokens) * 811 % 8192
    whole = rope(x, positions, 1e6)
    assert differing(whole, rope_naive.rope(x, positions, 1e6)) == 0
    alone = torch.cat([rope(x[i : i + 1], positions[i : i + 1], 1e6) for i in range(tokens)])
    assert differing(alone, whole) == 0
    assert differing(rope(x[:, 1:2], positions, 1e6), whole[:, 1:2]) == 0
    strided = torch.cat([x, x], 1)[:, 3:]
    assert differing(rope(strided, positions, 1e6), whole) == 0


def test_ropes_gradient_is_the_opposite_rotation(differing: Differing) -> None:
    x, positions = fill(17, 2, 32, salt=1).requires_grad_(), torch.arange(17)
    g = fill(17, 2, 32, salt=2)
    (dx,) = torch.autograd.grad(rope_grad(x, positions, 1e4), x, g)
    assert differing(dx, rope_naive.rope_backward(g, positions, 1e4)) == 0
    assert differing(rope(x, positions + 1, 1e4), rope(x, positions, 1e4)) > 100


@pytest.mark.parametrize("position", [8192, -1])
def test_rope_refuses_a_position_outside_its_table(position: int) -> None:
    with pytest.raises(DomainError, match="8191"):
        rope(torch.zeros(2, 1, 32), torch.tensor([0, position]), 1e6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", SIZES)
def test_silu_mul_has_the_same_bits_in_every_slice(
    differing: Differing, width: int, dtype: torch.dtype
) -> None:
    gate, up = fill(7, width, salt=3, dtype=dtype, scale=9.0), fill(7, width, salt=4, dtype=dtype)
    whole = silu_mul(gate, up)
    assert differing(whole, silu_naive.silu_mul(gate, up)) == 0
    for start in range(0, width, max(1, width // 7)):
        assert differing(silu_mul(gate[:, start:], up[:, start:]), whole[:, start:]) == 0
    assert differing(silu_mul(gate[3:4], up[3:4]), whole[3:4]) == 0
    both = torch.cat([gate, up], 1)
    assert differing(silu_mul(both[:, :width], both[:, width:]), whole) == 0


def test_silu_mul_keeps_the_ends_of_the_range_finite() -> None:
    gate = torch.tensor([-200.0, -90.0, 0.0, 90.0, 200.0], requires_grad=True)
    out = silu_mul(gate, torch.ones(5))
    out.sum().backward()
    assert gate.grad is not None
    assert bool(torch.isfinite(out).all())
    assert bool(torch.isfinite(gate.grad).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_muls_gradient_has_the_same_bits_in_every_slice(
    differing: Differing, dtype: torch.dtype
) -> None:
    gate = fill(7, 100, salt=3, dtype=dtype, scale=9.0).requires_grad_()
    up = fill(7, 100, salt=4, dtype=dtype).requires_grad_()
    g = fill(7, 100, salt=5, dtype=dtype)
    whole = torch.autograd.grad(silu_mul(gate, up), (gate, up), g)
    for start in (1, 37, 93):
        part = torch.autograd.grad(silu_mul(gate[:, start:], up[:, start:]), (gate, up), g[:, start:])
        for a, b in zip(part, whole, strict=True):
            assert differing(a[:, start:], b[:, start:]) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_looked_up_minus_zero_is_plus_zero_as_a_sum_over_shards_makes_it(
    differing: Differing, dtype: torch.dtype
) -> None:
    w = fill(64, 17, salt=6, dtype=dtype)
    w[:, 0] = -0.0
    ids = torch.arange(63).view(7, 9) * 5 % 64
    out = embedding(ids, w)
    assert differing(out, embedding_naive.embedding(ids, w)) == 0
    assert not bool(out[..., 0].signbit().any())
    assert differing(vocab_parallel_embedding(ids, w, vocab_start=0, group=None), out) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embeddings_gradient_adds_in_token_order(differing: Differing, dtype: torch.dtype) -> None:
    w = fill(16, 32, salt=6, dtype=dtype).requires_grad_()
    ids, g = torch.arange(100) * 7 % 5, fill(100, 32, salt=7, dtype=dtype)
    (dw,) = torch.autograd.grad(embedding(ids, w), w, g)
    assert differing(dw, embedding_naive.embedding_backward(g, ids, 16).to(dtype)) == 0
    if dtype is torch.float32:
        back = embedding_naive.embedding_backward(g.flip(0), ids.flip(0), 16)
        assert differing(back, embedding_naive.embedding_backward(g, ids, 16)) > 0


def test_an_id_outside_the_table_is_refused() -> None:
    with pytest.raises(DomainError, match="ids 0 to 3"):
        embedding(torch.tensor([1, 4]), torch.zeros(4, 8))
