# SPDX-License-Identifier: Apache-2.0
"""A kernel is compiled once for a model: no number of tokens or sequences has Triton compile it again in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")


def test_no_kernel_is_compiled_again_for_other_tokens(script: Callable[..., Any]) -> None:
    found: dict[str, int] = script("launched.py")
    assert len(found) >= 20
    assert {name: variants for name, variants in found.items() if variants > 1} == {}


def test_a_kernel_that_is_told_its_rows_is_seen_to_be(script: Callable[..., Any]) -> None:
    found: dict[str, int] = script("launched.py", "--forget", "rope_kernel")
    assert {name for name, variants in found.items() if variants > 1} == {"rope_kernel"}
