# SPDX-License-Identifier: Apache-2.0
"""What ranks exchange in the sm90 row ops, between real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")


def test_two_ranks_have_the_bits_of_one(script: Callable[..., Any]) -> None:
    found = script("rows_ranks.py", imported=True)
    assert len(found) == 19
    assert {name: why for name, why in found.items() if why} == {}
