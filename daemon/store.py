# SPDX-License-Identifier: Apache-2.0
"""Keeps the raw pairs of the last windows of a run, bounded, so that a verdict can be looked into afterwards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isoexec.daemon.pairing import Batch

__all__ = ["SampleBuffer", "write_samples"]

_NAME = re.compile(r"step-(\d{10})-\d+\.npz")


class SampleBuffer:
    """The first `limit` raw pairs of each pair of cases in one window."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[tuple[str, str], list[Batch]] = {}
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, batch: Batch) -> None:
        held = self._counts.get(batch.pair, 0)
        if held < self._limit:
            self._held.setdefault(batch.pair, []).append(batch)
            self._counts[batch.pair] = held + batch.first.size

    def batches(self, pair: tuple[str, str]) -> list[Batch]:
        """Give what is held of a pair of cases, in order of arrival, whole batches."""
        return list(self._held.get(pair, ()))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Give, per pair `a:b`, `<pair>/first|second|tokens|position|digest`; bits as float32, one row a token."""
        found: dict[str, npt.NDArray[Any]] = {}
        for pair, batches in self._held.items():
            name = ":".join(pair)
            lengths = np.concatenate([batch.lengths for batch in batches])
            starts = np.concatenate([batch.positions for batch in batches])
            offset = np.cumsum(lengths) - lengths
            digests = np.frombuffer(b"".join(d for batch in batches for d in batch.digests), np.uint8)
            parts: Mapping[str, npt.NDArray[Any]] = {
                "first": np.concatenate([batch.first for batch in batches]),
                "second": np.concatenate([batch.second for batch in batches]),
                "tokens": np.concatenate([batch.first_ids for batch in batches]),
                "position": np.arange(int(lengths.sum())) + np.repeat(starts - offset, lengths),
                "digest": np.repeat(digests.reshape(-1, 16), lengths, axis=0),
            }
            found.update({f"{name}/{key}": value[: self._limit] for key, value in parts.items()})
        return found


def write_samples(
    directory: Path, step: int, key: int, arrays: Mapping[str, npt.NDArray[Any]], *, keep: int
) -> Path | None:
    """Write one window's arrays under its step and journal key, and remove all but the last `keep` files.

    Raises OSError when the disk refuses it; half a file is not left.
    """
    if keep == 0 or not arrays:
        return None
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / f"step-{max(step, 0):010d}-{key}.npz"
    draft = directory / f".{path.name}"
    try:
        with draft.open("wb") as out:
            # mypy: the stub takes **kwds for arrays and names allow_pickle among them
            np.savez(out, **arrays)  # type: ignore[arg-type]
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    files = [item for item in directory.iterdir() if _NAME.fullmatch(item.name)]
    files.sort(key=lambda item: item.stat().st_mtime_ns)
    for old in files[:-keep]:
        old.unlink(missing_ok=True)
    return path
