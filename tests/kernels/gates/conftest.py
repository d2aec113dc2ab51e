# SPDX-License-Identifier: Apache-2.0
"""What the ranks of these tests run, in a module that they can import too."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from isoexec.kernels.gates import ranks


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    ranks.close()  # ranks take the path of the moment they start
    yield importlib.import_module("rank_workers")
    ranks.close()
