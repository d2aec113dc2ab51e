# SPDX-License-Identifier: Apache-2.0
"""The parts of a merged weight's shard: how many rows each has, which is how the chain over ranks goes round (`naive.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isoexec.kernels.domain import require
from isoexec.kernels.linear.hopper.naive import STEP

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["parts_of", "require_parts"]


def parts_of(laps: int | Sequence[int], rows: int) -> list[int]:
    """The rows of each part of a shard of `rows`: those that are given, or as many equal ones as `laps`."""
    return [rows // laps] * laps if isinstance(laps, int) else list(laps)


def require_parts(op: str, parts: Sequence[int], rows: int) -> None:
    """Raise `DomainError` unless the parts are all of `rows` and each is whole steps of the chain, on every rank alike."""
    require(
        bool(parts) and sum(parts) == rows and all(part > 0 and part % STEP == 0 for part in parts),
        op,
        f"a shard of {rows} rows in parts of {list(parts)}",
        f"parts of whole {STEP}s that make up the shard",
    )
