# SPDX-License-Identifier: Apache-2.0
"""Statistics of d over paired tokens: see docs/statistics.md for what each is."""

from isoexec.daemon.statistics.accumulator import PairAccumulator, prepare
from isoexec.daemon.statistics.histogram import BitHistogram
from isoexec.daemon.statistics.places import FROM_END, POSITIONS
from isoexec.daemon.statistics.result import QUANTILES, Detail

__all__ = ["FROM_END", "POSITIONS", "QUANTILES", "BitHistogram", "Detail", "PairAccumulator", "prepare"]
