# SPDX-License-Identifier: Apache-2.0
"""`isoexec kernels`: the functions this installation computes, with the digests of their sources."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from isoexec.kernels.registry import ARCHS, FUNCTIONS, source_digest

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """List the kernels and the digests of their sources."""
    parser = argparse.ArgumentParser(prog="isoexec kernels", description=run.__doc__)
    parser.add_argument(
        "--pin",
        action="store_true",
        help="print arguments for `isoexec contract pin FILE` instead of a table",
    )
    parser.add_argument("--arch", choices=ARCHS, help="of one arch only; --pin means cpu unless told")
    args = parser.parse_args(argv)
    wanted = args.arch or ("cpu" if args.pin else None)
    for name in sorted(FUNCTIONS):
        for kernel in FUNCTIONS[name].kernels:
            if wanted not in (None, kernel.arch):
                continue
            digest = source_digest(name, kernel.arch)
            line = f"{name:24} {kernel.arch:6} {kernel.module:40} {digest}"
            print(f"--source {name}={digest}" if args.pin else line)
    return 0
