# SPDX-License-Identifier: Apache-2.0
"""The sm90 attention's own kernel, with and without a window, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

from isoexec.kernels.domain import DomainError
from isoexec.kernels.window_attention.hopper.ops import plan

INTERPRETED = "interpreted_attention_tiles.py"


@pytest.fixture(scope="module")
def interpreted(script: Callable[..., Any]) -> dict[str, str]:
    found: dict[str, str] = script(INTERPRETED, interpreted=True)
    return found


def test_in_the_interpreter(check: str, interpreted: dict[str, str]) -> None:
    assert interpreted[check] == ""


def test_a_window_is_named_and_a_row_sees_its_own_key_at_least() -> None:
    sizes = {"requests": 1, "tokens": 4, "most_rows": 4, "most_keys": 64, "kv_segment": 64, "device": "meta"}
    step = plan(**sizes, window=8)  # type: ignore[arg-type]
    assert (step.window, step.provider) == (8, "triton")
    with pytest.raises(DomainError, match=r"a window of 0.*at least the row's own key"):
        plan(**sizes, window=0)  # type: ignore[arg-type]


def test_what_is_to_be_tuned_runs_and_has_the_bits_of_what_serves(script: Callable[..., Any]) -> None:
    found: dict[str, Any] = script("bench_attention_interpreted.py", interpreted=True)
    said = found["said"]
    assert "troubles" not in said, said["troubles"]
    assert "S32 64 columns" in said["walks"][-1]
    assert "growing, split" in said["layouts"][0]
    assert len(said["layouts"]) == 2
    assert {row["walk"]: row["other_bits"] for row in found["rows"]} == dict.fromkeys(
        ("as it is", "products twice", "products stored", "key 64x64 w4 s2"), 0
    )
