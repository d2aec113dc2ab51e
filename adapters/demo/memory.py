# SPDX-License-Identifier: Apache-2.0
"""How much memory a process of the job has taken at most."""

from __future__ import annotations

import resource

import torch

__all__ = ["peak_bytes", "reset_peak"]


def peak_bytes(device: torch.device) -> int:
    """Bytes torch has reserved on a GPU at most since `reset_peak`; on a CPU the largest resident set of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def reset_peak(device: torch.device) -> None:
    """Begin to look for the peak anew; nothing on a CPU, which keeps the process's own."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
