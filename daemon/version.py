# SPDX-License-Identifier: Apache-2.0
"""The version of this package, for what the daemon writes down."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["package_version"]


def package_version() -> str:
    try:
        return version("isoexec")
    except PackageNotFoundError:
        return "unknown"
