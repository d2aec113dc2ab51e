# SPDX-License-Identifier: Apache-2.0
"""The sm90 kernels in Triton's interpreter against their specifications, one process for all checks of `interpreted.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

INTERPRETED = "interpreted.py"


@pytest.fixture(scope="module")
def results(script: Callable[..., Any]) -> dict[str, str]:
    found: dict[str, str] = script(INTERPRETED)
    return found


def test_in_the_interpreter(check: str, results: dict[str, str]) -> None:
    assert results[check] == ""
