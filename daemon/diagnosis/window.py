# SPDX-License-Identifier: Apache-2.0
"""Diagnoses the raw pairs kept of a step: the worst pair of engine and trainer, as a window states it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import structlog

from isoexec.contracts.window import Diagnosis, PairStats
from isoexec.daemon.diagnosis.classify import diagnose
from isoexec.daemon.diagnosis.pairs import History, Point, RawPairs, Settings
from isoexec.daemon.pairing import Batch
from isoexec.daemon.window import StepState

__all__ = ["diagnose_step", "raw_pairs"]

_log = structlog.get_logger("isoexec.daemon")


def raw_pairs(batches: Sequence[Batch]) -> RawPairs:
    """Lay batches of one pair of cases out one after the other. Raises ValueError where there is none."""
    if not batches:
        raise ValueError("batches: wanted at least one")
    # the first case of every pair is the engine's
    sources = [source for batch in batches for source in batch.first_sources]
    names = sorted(set(sources))
    index = {name: place for place, name in enumerate(names)}
    digests = np.frombuffer(b"".join(digest[:8] for batch in batches for digest in batch.digests), "<i8")
    return RawPairs(
        first=np.concatenate([batch.first for batch in batches]),
        second=np.concatenate([batch.second for batch in batches]),
        lengths=np.concatenate([batch.lengths for batch in batches]),
        starts=np.concatenate([batch.positions for batch in batches]),
        digests=digests.astype(np.int64),
        engine=np.asarray([index[source] for source in sources], np.int64),
        engine_names=tuple(names),
        pack_index=_known(batches, "pack_index"),
        padded=_positive(_known(batches, "padding")),
        prefix_hit=_positive(_known(batches, "prefix_hit")),
    )


def _known(batches: Sequence[Batch], name: str) -> npt.NDArray[np.int64] | None:
    """Give an attribute of each sequence, -1 where it is not known; None where it is of none."""
    if not any(name in batch.attributes for batch in batches):
        return None
    columns = [batch.attributes.get(name, np.full(batch.lengths.size, -1)) for batch in batches]
    return np.concatenate(columns).astype(np.int64)


def _positive(column: npt.NDArray[np.int64] | None) -> npt.NDArray[np.bool_] | None:
    return None if column is None else column > 0


def diagnose_step(
    state: StepState | None, pairs: Sequence[PairStats], regime: str, history: History
) -> tuple[tuple[Diagnosis, ...], Point | None]:
    """Give what the raw pairs of a closed step show, and the step's point in the history of its run.

    Looks at the engine's decode against the worst trainer case, since E[rho] = 1 is a statement about what was
    sampled. A diagnosis that fails is logged and leaves the statistics to speak.
    """
    seen = [one for one in pairs if not one.is_engine_pair and one.finite > 0]
    seen = [one for one in seen if one.pair[0] == "engine_decode"] or seen
    if state is None or not seen:
        return (), None
    worst = max(seen, key=lambda one: one.mean_abs_d)
    point = Point(step=state.step, mean_abs_d=worst.mean_abs_d) if math.isfinite(worst.mean_abs_d) else None
    batches = state.samples.batches(worst.pair)
    if worst.bitwise_equal == worst.tokens or not batches:
        return (), point
    said = {engine for batch in batches for name, engine, _ in batch.sampling if name == "temperature"}
    said |= {trainer for batch in batches for name, _, trainer in batch.sampling if name == "temperature"}
    declared = {float(one) for one in said} - {1.0}
    settings = Settings(temperature=declared.pop() if len(declared) == 1 else None)
    try:
        found = diagnose(raw_pairs(batches), regime, settings=settings, history=history)
    except (ValueError, ArithmeticError) as error:
        _log.warning("no diagnosis", step=state.step, error=str(error))
        return (), point
    rows = (Diagnosis(pair=worst.pair, cause=one.id, text=one.text, evidence=one.evidence) for one in found)
    return tuple(rows), point
