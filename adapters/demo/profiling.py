# SPDX-License-Identifier: Apache-2.0
"""Where a call's time goes in a process of the demo: torch's profiler for device and operators, cProfile for Python."""

from __future__ import annotations

import cProfile
import io
import os
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "profiled", "worker_python"]

KINDS = ("torch", "python")
_ROWS = 45


def profiled(kind: str, to: Path, call: Callable[[], Any]) -> Any:
    """Run ``call`` and write tables of it to the file ``to``; its result, whatever it took."""
    began = time.perf_counter()
    if kind == "python":
        profile = cProfile.Profile()
        result = profile.runcall(call)
        to.write_text(f"{time.perf_counter() - began:.3f} s\n{_python_tables(profile)}")
        return result
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as found:
        result = call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    averages = found.key_averages()
    # an operator's row repeats the time of the kernels it launched
    kernels = [e for e in averages if not str(e.device_type).endswith("CPU")]
    busy = sum(e.self_device_time_total for e in kernels) / 1e6
    tables = [
        averages.table(sort_by=f"self_{what}_time_total", row_limit=_ROWS, max_name_column_width=70)
        for what in ("device", "cpu")
    ]
    to.write_text(f"{seconds:.3f} s, device busy {busy:.3f} s\n" + "\n".join(tables))
    return result


def worker_python(worker: Any, driver: int, to: str | None) -> None:
    """Begin to profile the thread that serves an engine's worker, or with the file ``to`` end it and write the tables there.

    A worker in the process of its ``driver`` is in that one's own profile.
    """
    if os.getpid() == driver:
        return
    if to is None:
        worker.demo_profile = cProfile.Profile()
        worker.demo_profile.enable()
        return
    profile: cProfile.Profile = worker.__dict__.pop("demo_profile")
    profile.disable()
    Path(f"{to}-{worker.rank}.txt").write_text(_python_tables(profile))


def _python_tables(profile: cProfile.Profile) -> str:
    text = io.StringIO()
    for order in ("tottime", "cumtime"):
        pstats.Stats(profile, stream=text).sort_stats(order).print_stats(_ROWS)
    return text.getvalue()
