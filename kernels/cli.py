# SPDX-License-Identifier: Apache-2.0
"""`isoexec kernels`: the functions this installation computes, with the digests of their sources."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from isoexec.kernels.registry import FUNCTIONS, source_digest

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """List the kernels and the digests of their sources."""
    parser = argparse.ArgumentParser(prog="isoexec kernels", description=run.__doc__)
    parser.add_argument(
        "--pin",
        action="store_true",
        help="print arguments for `isoexec contract pin FILE` instead of a table",
    )
    args = parser.parse_args(argv)
    for name in sorted(FUNCTIONS):
        digest = source_digest(name)
        print(f"--source {name}={digest}" if args.pin else f"{name:24} {FUNCTIONS[name].module:32} {digest}")
    return 0
