# SPDX-License-Identifier: Apache-2.0
"""rms_norm.tree: one row, one result, and a scale gradient that padding does not change."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from isoexec.kernels.canaries import fill
from isoexec.kernels.domain import DomainError
from isoexec.kernels.rms_norm import add_rms_norm, naive, residual_add, rms_norm, rms_norm_grad
from isoexec.kernels.sums import halving_tree, pair_tree

Differing = Callable[[Tensor, Tensor], int]

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 3, 17, 32, 63, 100, 128]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_norm_has_the_bits_of_the_specification_alone_and_in_company(
    differing: Differing, width: int, dtype: torch.dtype
) -> None:
    x, w = fill(63, width, salt=1, dtype=dtype, scale=3.0), fill(width, salt=2, dtype=dtype)
    whole = rms_norm(x, w, 1e-6)
    assert differing(whole, naive.rms_norm(x, w, 1e-6)) == 0
    assert differing(torch.cat([rms_norm(x[i : i + 1], w, 1e-6) for i in range(63)]), whole) == 0
    order = torch.arange(63) * 5 % 63
    assert differing(rms_norm(x[order], w, 1e-6), whole[order]) == 0
    assert differing(rms_norm(x.view(7, 9, width), w, 1e-6).view(63, width), whole) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_reads_the_residual_after_rounding(differing: Differing, dtype: torch.dtype) -> None:
    x, residual = fill(17, 128, salt=1, dtype=dtype), fill(17, 128, salt=2, dtype=dtype)
    w = fill(128, salt=3, dtype=dtype)
    y, h = add_rms_norm(x, residual, w, 1e-6)
    assert differing(h, naive.residual_add(x, residual)) == 0
    assert differing(h, residual_add(x, residual)) == 0
    assert differing(y, naive.rms_norm(h, w, 1e-6)) == 0
    if dtype is torch.bfloat16:
        unrounded = x.float() + residual.float()
        assert differing(y, naive.rms_norm(unrounded, w, 1e-6).to(dtype)) > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(17, 3, 128), (9, 2, 4, 32)])
def test_gradients_have_the_bits_of_the_specification(
    differing: Differing, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, w = (
        fill(*shape, salt=4, dtype=dtype).requires_grad_(),
        fill(shape[-1], salt=5, dtype=dtype).requires_grad_(),
    )
    g = fill(*shape, salt=6, dtype=dtype)
    dx, dw = torch.autograd.grad(rms_norm_grad(x, w, 1e-6), (x, w), g)
    four = x if len(shape) == 4 else x.unsqueeze(2)
    assert differing(dx, naive.dx(g, x, w, 1e-6)) == 0
    assert differing(dw, naive.dgamma(g.view(four.shape), four, 1e-6).to(dtype)) == 0


def test_padding_the_sequence_changes_no_bit_of_the_scale_gradient(differing: Differing) -> None:
    x, w = fill(17, 3, 128, salt=4), fill(128, salt=5).requires_grad_()
    g = fill(17, 3, 128, salt=6)
    padded = [torch.cat([t, p]) for t, p in ((x, fill(8, 3, 128, salt=7)), (g, torch.zeros(8, 3, 128)))]
    (plain,) = torch.autograd.grad(rms_norm_grad(x, w, 1e-6), w, g)
    (long,) = torch.autograd.grad(rms_norm_grad(padded[0], w, 1e-6), w, padded[1])
    assert differing(plain, long) == 0


def test_a_tree_is_not_a_running_sum_and_sees_one_unit_in_the_last_place(differing: Differing) -> None:
    x = fill(64, 100, salt=8)
    running = torch.zeros(64)
    for column in x.unbind(1):
        running = running + column
    assert differing(halving_tree(x), running) > 10
    assert differing(pair_tree(x.unbind(1)[:64]), halving_tree(x[:, :64])) > 10
    w = fill(100, salt=9)
    nudged = x.clone()
    nudged[3, 50] = torch.nextafter(nudged[3, 50], torch.tensor(9.0))
    a, b = rms_norm(x, w, 1e-6), rms_norm(nudged, w, 1e-6)
    assert differing(a, b) > 0
    assert differing(a[4:], b[4:]) == 0


def test_a_weight_of_another_width_and_an_unknown_shard_are_refused() -> None:
    with pytest.raises(DomainError, match="weight"):
        rms_norm(torch.zeros(2, 8), torch.zeros(9), 1e-6)
    with pytest.raises(DomainError, match="rows"):
        rms_norm_grad(torch.zeros(2, 1, 8), torch.zeros(8), 1e-6, shard="rows")  # type: ignore[arg-type]
    with pytest.raises(DomainError, match="heads"):
        rms_norm_grad(torch.zeros(2, 1, 8), torch.zeros(8), 1e-6, shard="heads")


def test_the_root_is_correctly_rounded_where_the_library_s_fp32_root_is_not() -> None:
    x = torch.cat([torch.arange(1, 20001) / 977, torch.logspace(-6, 6, 20000)])
    roots = [float(Fraction(math.isqrt(int(Fraction(v) * 4**60)), 2**60)) for v in x.tolist()]
    exact = torch.tensor(roots, dtype=torch.float64).float()
    assert torch.equal(naive.reciprocal_root(x), (1.0 / exact.double()).float())
