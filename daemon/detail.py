# SPDX-License-Identifier: Apache-2.0
"""Puts the detailed statistics of a pair into the form that a window keeps."""

from __future__ import annotations

import math

from isoexec.contracts.detail import NUMBERS, PairDetail
from isoexec.daemon.statistics import Detail

__all__ = ["pair_detail"]

# share of a quantile -> how the catalogue calls it
_QUANTILES = {0.5: "p50", 0.9: "p90", 0.99: "p99", 0.999: "p999"}


def pair_detail(found: Detail) -> PairDetail:
    """Give what a window keeps of `found`: every number of the catalogue, every bucket."""
    numbers = {
        "sequences_unequal": float(found.sequences - found.sequences_equal),
        "sequence_worst_abs_d": max(found.worst_sequences, default=math.nan),
    }
    for share, name in _QUANTILES.items():
        numbers[f"{name}_abs_d"] = found.quantiles[share]
        numbers[f"sequence_{name}_abs_d"] = found.sequence_quantiles[share]
    numbers |= {name: float(getattr(found, name)) for name in NUMBERS.keys() - numbers.keys()}
    labelled = (bucket for rows in found.by_label.values() for bucket in rows)
    return PairDetail(
        numbers={name: numbers[name] for name in NUMBERS},
        worst_sequences=found.worst_sequences,
        buckets=(*found.by_position, *found.by_distance_to_end, *labelled),
    )
