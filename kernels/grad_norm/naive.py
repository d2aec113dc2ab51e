# SPDX-License-Identifier: Apache-2.0
"""The sum of squares of a gradient as an integer: exact, so its bits do not depend on how ranks share the tensors.

Each square is exact in float64. A power of two, from the greatest square and the number of elements, scales the squares so that
their rounded integers sum below 2**BITS; integer sums have no order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BITS = 62


def exponent(greatest: float, count: int) -> int:
    """E with count * greatest * 2**e <= 2**BITS, for greatest > 0 and count > 0."""
    return BITS - math.frexp(greatest)[1] - (count - 1).bit_length() - 1


def exact_sq_sum(tensors: Sequence[Tensor]) -> float:
    values = [float(v) ** 2 for t in tensors for v in t.float().reshape(-1).tolist()]
    greatest = max(values, default=0.0)
    if greatest == 0.0 or not math.isfinite(greatest):
        return greatest
    e = exponent(greatest, len(values))
    return math.ldexp(float(sum(round(math.ldexp(v, e)) for v in values)), -e)
