# SPDX-License-Identifier: Apache-2.0
"""What a diagnosis is made from: raw token pairs of one pair of cases, and what is known of their sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

__all__ = ["Point", "RawPairs", "Settings"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class RawPairs:
    """Logprobs of n tokens in s sequences, one sequence after the other, in nats.

    first and second: float32 [n], rollout and trainer (or the two cases of any pair). lengths: int64 [s], tokens
    of each, at least 1. What is None was not observed: starts [s], position of the first token, prompt included;
    digests [s], an integer that is equal for equal sequences; engine [s], an index from 0 (into engine_names,
    where those are given); pack_index [s], place in the trainer's pack, 0 first, -1 not known; padded [s], left-padded by the
    trainer; prefix_hit [s]; drafted [n], token proposed by a draft. Raises ValueError naming the field whose
    shape is wrong.
    """

    first: Floats
    second: Floats
    lengths: Ints
    starts: Ints | None = None
    digests: Ints | None = None
    engine: Ints | None = None
    pack_index: Ints | None = None
    padded: Flags | None = None
    prefix_hit: Flags | None = None
    drafted: Flags | None = None
    engine_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n, s = self.first.shape[0], self.lengths.shape[0]
        if (self.lengths < 1).any() or int(self.lengths.sum()) != n:
            raise ValueError(
                f"lengths: wanted numbers from 1 up that add to {n}, found {int(self.lengths.sum())}"
            )
        for item in (one for one in fields(self) if one.name != "engine_names"):
            value = getattr(self, item.name)
            wanted = n if item.name in ("first", "second", "drafted") else s
            if value is not None and value.shape != (wanted,):
                raise ValueError(f"{item.name}: wanted shape ({wanted},), found {value.shape}")
        for name in ("first", "second"):
            if getattr(self, name).dtype != np.float32:
                raise ValueError(f"{name}: wanted float32, found {getattr(self, name).dtype}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the sides said of their sampling; None: not said."""

    temperature: float | None = None


@dataclass(frozen=True, kw_only=True)
class Point:
    """An earlier window of the run. moved: whether weights changed before it; None where nobody looked."""

    step: int
    mean_abs_d: float
    moved: bool | None = None


History = Sequence[Point]
