# SPDX-License-Identifier: Apache-2.0
"""What ranks exchange in the sm90 logprobs, from logits and from hidden states, between real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")


def test_two_and_four_ranks_have_the_bits_of_one_and_faults_do_not(script: Callable[..., Any]) -> None:
    found = script("logprobs_ranks.py", imported=True)
    assert len(found) == 13
    assert {name: why for name, why in found.items() if why} == {}
