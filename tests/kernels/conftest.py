# SPDX-License-Identifier: Apache-2.0
"""Fresh memory is poisoned with NaN, and equal means equal as integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

INTEGER = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}


def _differing(a: Tensor, b: Tensor) -> int:
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    view = INTEGER[a.dtype]
    return int((a.detach().contiguous().view(view) != b.detach().contiguous().view(view)).sum())


@pytest.fixture(scope="session")
def differing() -> Callable[[Tensor, Tensor], int]:
    """How many elements of two tensors differ in any bit."""
    return _differing


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fresh(*args: Any, **kwargs: Any) -> Tensor:
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() and out.device.type == "cpu" else out

        return fresh

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))
