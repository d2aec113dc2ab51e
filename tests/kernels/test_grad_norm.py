# SPDX-License-Identifier: Apache-2.0
"""exact_sq_sum: however the elements are cut and ordered, the sum of squares has the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from isoexec.kernels.canaries import fill
from isoexec.kernels.grad_norm import exact_sq_sum, naive

Differing = Callable[[Tensor, Tensor], int]


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e12])
def test_any_cut_and_order_gives_the_bits_of_the_specification(differing: Differing, scale: float) -> None:
    x = fill(100, 63, salt=1, scale=scale)
    whole = exact_sq_sum([x])
    assert float(whole) == naive.exact_sq_sum([x])
    assert math.isclose(float(whole), float(x.double().square().sum()), rel_tol=1e-9)
    assert differing(exact_sq_sum(list(x.split(17))), whole) == 0
    assert differing(exact_sq_sum(list(x.flip(0).t().split(3))), whole) == 0


def test_one_unit_in_the_last_place_is_seen(differing: Differing) -> None:
    x = fill(100, 63, salt=1)
    nudged = x.clone()
    nudged[3, 5] = torch.nextafter(nudged[3, 5], torch.tensor(9.0))
    assert differing(exact_sq_sum([x]), exact_sq_sum([nudged])) == 1


def test_nothing_zero_the_ends_of_the_range_and_broken_gradients() -> None:
    assert float(exact_sq_sum([])) == 0.0
    assert float(exact_sq_sum([torch.zeros(5), torch.zeros(0)])) == 0.0
    tiny, huge = torch.tensor([1e-45]), torch.tensor([3e38])
    assert float(exact_sq_sum([tiny])) == float(tiny.double() ** 2)
    assert float(exact_sq_sum([huge, tiny])) == float(huge.double() ** 2)
    assert math.isnan(float(exact_sq_sum([torch.tensor([1.0, math.inf])])))
    assert math.isnan(float(exact_sq_sum([torch.tensor([1.0, math.nan])])))


def test_the_integers_stay_below_the_bits_of_the_contract() -> None:
    for greatest, count in ((1.0, 1), (3.9, 1000), (1e-300, 2**40)):
        e = naive.exponent(greatest, count)
        assert math.log2(greatest) + math.log2(count) + e <= naive.BITS
        assert math.log2(greatest) + math.log2(count) + e >= naive.BITS - 4
