# SPDX-License-Identifier: Apache-2.0
"""Every sm90 op and its fake kernel return the same shapes, dtypes and strides, so that a traced graph is the real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")


def test_every_op_returns_what_its_fake_says(script: Callable[..., Any]) -> None:
    found: dict[str, str] = script("interpreted_fakes.py")
    assert len(found) > 45
    assert {name: why for name, why in found.items() if why} == {}
