# SPDX-License-Identifier: Apache-2.0
"""How a test runs this folder's scripts, each in a process of its own: Triton is either compiled or interpreted in one."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def _script(name: str, *arguments: str, interpreted: bool = False, imported: bool = False) -> Any:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # the scripts share modules, and a safe path leaves their own folder out
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    module = name.removesuffix(".py")
    started = ["-c", f"import {module}; {module}.main()"] if imported else [str(HERE / name), *arguments]
    run = subprocess.run(
        [sys.executable, *started], capture_output=True, text=True, env=environment, timeout=580, cwd=HERE
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.fixture(scope="session")
def script() -> Callable[..., Any]:
    """Run a script of this folder by its name, and give what it prints as JSON.

    `interpreted` where the script leaves that to its caller; `imported` where ranks have to find its functions by name.
    """
    return _script


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for a `check` runs for each of those in its module's `INTERPRETED`."""
    if "check" in metafunc.fixturenames:
        body = ast.parse((HERE / metafunc.module.INTERPRETED).read_text()).body
        names = [
            one.name
            for one in body
            if isinstance(one, ast.FunctionDef)
            and any(getattr(mark, "id", "") == "check" for mark in one.decorator_list)
        ]
        assert names
        metafunc.parametrize("check", names)
