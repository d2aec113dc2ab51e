# SPDX-License-Identifier: Apache-2.0
"""The gradients of the sm90 attention in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

INTERPRETED = "interpreted_attention_gradients.py"


@pytest.fixture(scope="module")
def interpreted(script: Callable[..., Any]) -> dict[str, str]:
    found: dict[str, str] = script(INTERPRETED, interpreted=True)
    return found


def test_in_the_interpreter(check: str, interpreted: dict[str, str]) -> None:
    assert interpreted[check] == ""
