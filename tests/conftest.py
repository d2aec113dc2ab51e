# SPDX-License-Identifier: Apache-2.0
"""Keep the repo root off sys.path: kernels, daemon, adapters and contracts are other people's module names."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != _ROOT]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(folder)], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"no tmpfs of our own: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def fill() -> Callable[[Path], Path]:
    """Take every free block of a disk by one file in it."""

    def take(folder: Path) -> Path:
        ballast = folder / "ballast"
        with ballast.open("wb", buffering=0) as out, contextlib.suppress(OSError):
            while True:
                out.write(b"x" * 4096)
        return ballast

    return take
