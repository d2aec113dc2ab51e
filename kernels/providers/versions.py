# SPDX-License-Identifier: Apache-2.0
"""Versions of the libraries that are really loaded: asked of the library or of torch, never read from a package's name."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from pathlib import Path

import torch

from isoexec.contracts.errors import EvidenceError

__all__ = ["cublaslt_version", "loaded_library", "torch_build", "triton_version"]

_MAPS = Path("/proc/self/maps")


def torch_build() -> str:
    """Version and commit of the torch that computes, such as `torch 2.11.0+cu130 git 0123456789ab`."""
    return f"torch {torch.__version__} git {str(torch.version.git_version)[:12]}"


def triton_version() -> str:
    """Version of the compiler of our kernels."""
    import triton

    return f"triton {triton.__version__}"


def loaded_library(name: str) -> ctypes.CDLL:
    """A shared library that this process has loaded; raises `EvidenceError` where there is none, or two of a name."""
    pattern = re.compile(rf"/\S*/{re.escape(name)}\.so[.\d]*$")
    # a process on a GPU has thousands of maps, and few of a library
    lines = _MAPS.read_text().splitlines() if _MAPS.is_file() else []
    found = sorted({at[0] for line in lines if f"/{name}.so" in line and (at := pattern.search(line))})
    if len(found) == 1:
        return ctypes.CDLL(found[0])
    for major in (13, 12) if not found else ():  # a system whose map names no files
        with contextlib.suppress(OSError):
            return ctypes.CDLL(f"{name}.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    raise EvidenceError(
        field="provider.version",
        wanted=f"one {name} loaded in this process",
        found=", ".join(found) or "none",
        fix="run where torch has a CUDA build, and load the library from one place only",
    )


def cublaslt_version() -> str:
    """`cublasLt 13.0.2`, as the library that is loaded says; torch loads it with its CUDA build."""
    library = loaded_library("libcublasLt")
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    number = int(library.cublasLtGetVersion())
    return f"cublasLt {number // 10000}.{number // 100 % 100}.{number % 100}"
