# SPDX-License-Identifier: Apache-2.0
"""Freed memory is kept: a second step's frames touch no fresh page."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource, sys
from isoexec.daemon.memory import keep_freed

if not keep_freed():
    sys.exit(3)

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [bytearray(1 << 19) for _ in range(32)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

step()
print(step())
"""


def test_what_a_step_took_goes_to_the_next() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", CODE], capture_output=True, text=True, timeout=60)
    if done.returncode == 3:
        pytest.skip("this C library has no mallopt")
    # 4,096 pages of 4 KiB; mapped anew, each is a fault
    assert int(done.stdout) < 400, done.stderr
