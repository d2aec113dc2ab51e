# SPDX-License-Identifier: Apache-2.0
"""What is summed over the tokens of a window. Any two sums can be added, and give those over both."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from isoexec.contracts.window import HISTOGRAM_EDGES
from isoexec.daemon.statistics.histogram import BitHistogram

__all__ = ["CLIP", "PEAKS", "RHO_CAP", "SUMS", "State", "Sums"]

CLIP = (float(np.log(0.8)), float(np.log(1.2)))
"""d outside of which a ratio clipped to [0.8, 1.2] is clipped."""
RHO_CAP = 2.0
"""d in nats at which exp(d) is cut off for the test of E[exp(d)] = 1."""

_EDGES = np.asarray(HISTOGRAM_EDGES, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Sums:
    """Counts and sums; all but the first eleven over finite tokens only."""

    tokens: float = 0.0
    unequal: float = 0.0
    nonfinite: float = 0.0
    filled: float = 0.0
    positive: float = 0.0
    id_mismatch: float = 0.0
    negative: float = 0.0
    clipped: float = 0.0
    far_below: float = 0.0  # d < -RHO_CAP
    moved: float = 0.0  # d other than 0
    on_grid: float = 0.0  # of these
    lag_pairs: float = 0.0
    finite: float = 0.0
    x: float = 0.0  # logprob of the first side
    xx: float = 0.0
    xd: float = 0.0
    d1: float = 0.0
    d2: float = 0.0
    d3: float = 0.0
    d4: float = 0.0
    abs1: float = 0.0
    excess1: float = 0.0  # exp(d) - 1
    excess2: float = 0.0  # its square
    k3: float = 0.0  # exp(d) - 1 - d
    exp_abs: float = 0.0  # exp(abs d) - 1
    capped1: float = 0.0  # min(exp(d), exp(RHO_CAP)) - 1
    capped2: float = 0.0
    beyond: float = 0.0  # what the cap takes away
    lag_product: float = 0.0
    lag_first: float = 0.0
    lag_second: float = 0.0
    place: float = 0.0
    place_square: float = 0.0
    place_abs: float = 0.0
    probability1: float = 0.0  # abs(exp(y) - exp(x))
    probability2: float = 0.0
    largest: float = 0.0  # abs d
    largest_probability: float = 0.0


SUMS = tuple(item.name for item in fields(Sums))
PEAKS = [SUMS.index(name) for name in ("largest", "largest_probability")]
"""Places of what is not added up: the larger is kept."""


@dataclass(slots=True)
class State:
    """What one accumulator holds: the sums, as numbers in the order of `SUMS`, and the histogram of abs d."""

    total: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(SUMS)))
    histogram: BitHistogram = field(default_factory=lambda: BitHistogram(_EDGES))

    @property
    def sums(self) -> Sums:
        return Sums(*self.total.tolist())

    def merge(self, other: State) -> None:
        peaks = np.maximum(self.total[PEAKS], other.total[PEAKS])
        self.total += other.total
        self.total[PEAKS] = peaks
        self.histogram.merge(other.histogram)
