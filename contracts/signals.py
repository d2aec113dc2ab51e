# SPDX-License-Identifier: Apache-2.0
"""A signal turns a window into one number that a rule can bound: above the bound is a violation.

A reading without a number, or with something missing, is never a pass. The evidence of a reading is what a
person needs to see without opening the journal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from isoexec.contracts.detail import BREAKDOWNS, FEW_TOKENS, NUMBERS, Number
from isoexec.contracts.window import PairStats, Silence, Window

__all__ = ["SIGNALS", "Reading", "Signal"]

_SHOWN = 8  # facts listed in the evidence of one reading; the count is always whole

Scope = Literal["contract", "mismatch", "health"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One value of a signal. `value` None: nothing to read. `missing` names what a pass would have needed."""

    value: float | None
    missing: tuple[str, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Signal:
    """A named number of a window.

    scope: `contract` signals mean nothing in a run without a contract; `mismatch` signals compare the two
    sides; `health` signals watch the watching. `relative`: the rule divides the value by the run's own
    trailing median. `cause` is the cause of a violation where the signal itself is that fact, else "".
    """

    name: str
    scope: Scope
    text: str
    read: Callable[[Window], Reading]
    unit: str = ""
    relative: bool = False
    cause: str = ""

    @property
    def is_fact(self) -> bool:
        """Whether one attestation or weight report breaks it for good, whatever else the step brings."""
        return self.name in _FACTS


_FACTS = frozenset(
    {
        "handshake_differences",
        "topology_breaks",
        "region_breaks",
        "canary_mismatches",
        "environment_breaks",
        "weights_stale",
        "weights_unequal",
    }
)


def _silences(window: Window, subjects: Sequence[str]) -> tuple[str, ...]:
    return tuple(describe_silence(s) for s in window.silent(*subjects))


def describe_silence(silence: Silence) -> str:
    """`engine has sent no attestation` or `... for 12 s`."""
    since = "" if silence.age_seconds is None else f" for {silence.age_seconds:.0f} s"
    return f"{silence.role} has sent no {silence.what}{since}"


def _facts(rows: Sequence[Any], window: Window, *subjects: str) -> Reading:
    """Count facts; with none found, a silence about `subjects` leaves the claim unproven."""
    evidence = {"count": len(rows), "first": [asdict(row) for row in rows[:_SHOWN]]} if rows else {}
    return Reading(value=float(len(rows)), missing=_silences(window, subjects), evidence=evidence)


def _regions(window: Window, *, canary: bool) -> Reading:
    rows = [b for b in window.region_breaks if (b.kind == "canary") is canary]
    return _facts(rows, window, "hello", "attestation")


def _weights(window: Window, *kinds: str) -> Reading:
    rows = [b for b in window.weights if b.kind in kinds]
    unreadable = [b.name for b in window.weights if b.kind == "unknown"]
    reading = _facts(rows, window, "weights")
    if unreadable:
        reason = f"{len(unreadable)} tensors could not be read, {unreadable[0]} first"
        return Reading(value=reading.value, missing=(*reading.missing, reason), evidence=reading.evidence)
    return reading


def _worst(
    pairs: Sequence[PairStats], window: Window, value: Callable[[PairStats], float], what: str
) -> Reading:
    """Read the largest finite-side value over the pairs; a NaN is a value that could not be had."""
    missing = list(_silences(window, ("logprobs",)))
    known: list[tuple[float, PairStats]] = []
    for pair in pairs:
        number = value(pair)
        if math.isnan(number):
            missing.append(f"{pair.label} has no {what}")
        else:
            known.append((number, pair))
    if not known:
        return Reading(value=None, missing=tuple(missing) or (f"no paired token to take {what} from",))
    number, pair = max(known, key=lambda item: item[0])
    return Reading(value=number, missing=tuple(missing), evidence=_summary(pair))


def _summary(pair: PairStats) -> dict[str, Any]:
    numbers = {
        name: getattr(pair, name)
        for name in ("mean_abs_d", "p99_abs_d", "max_abs_d", "mean_d", "k3", "rho_mean", "rho_z")
        if not math.isnan(getattr(pair, name))
    }
    return {"pair": pair.label, "tokens": pair.tokens, "bitwise_equal": pair.bitwise_equal, **numbers}


def _trainer(value: Callable[[PairStats], float], what: str) -> Callable[[Window], Reading]:
    return lambda window: _worst(window.trainer_pairs, window, value, what)


def _engine(value: Callable[[PairStats], float], what: str) -> Callable[[Window], Reading]:
    return lambda window: _worst(window.engine_pairs, window, value, what)


def _any_pair(value: Callable[[PairStats], float], what: str) -> Callable[[Window], Reading]:
    return lambda window: _worst([*window.trainer_pairs, *window.engine_pairs], window, value, what)


def _unequal(pair: PairStats) -> float:
    return float(pair.tokens - pair.bitwise_equal)


def _rho_effect(pair: PairStats) -> float:
    """Distance of E[rho] from 1 where the test is sure of it, above 10 standard errors; 0 elsewhere."""
    if math.isnan(pair.rho_mean) or math.isnan(pair.rho_evidence):
        return math.nan
    return abs(pair.rho_mean - 1.0) if abs(pair.rho_evidence) > 10 else 0.0


def _detailed(name: str, number: Number) -> Callable[[Window], Reading]:
    def value(pair: PairStats) -> float:
        return math.nan if pair.detail is None else number.judged(pair.detail.number(name))

    return _trainer(value, name)


def _worst_bucket(window: Window, by: str) -> Reading:
    """Read the largest mean abs d of a bucket over the pairs of engine against trainer."""
    missing = list(_silences(window, ("logprobs",)))
    known = []
    for pair in window.trainer_pairs:
        detail = pair.detail
        if detail is None or (bucket := detail.worst(by)) is None:
            missing.append(f"{pair.label} has no bucket of {by} with {FEW_TOKENS} tokens")
        else:
            known.append((bucket.mean_abs_d, pair, bucket, detail.elsewhere(bucket)))
    if not known:
        return Reading(value=None, missing=tuple(missing) or ("no paired token to break down",))
    number, pair, bucket, elsewhere = max(known, key=lambda item: item[0])
    evidence = _summary(pair) | {"by": by, "label": bucket.label, "tokens_there": bucket.tokens}
    if not math.isnan(elsewhere):
        evidence["mean_abs_d_elsewhere"] = elsewhere
    return Reading(value=number, missing=tuple(missing), evidence=evidence)


def _broken_down(by: str) -> Callable[[Window], Reading]:
    return lambda window: _worst_bucket(window, by)


def _detail_signals() -> tuple[Signal, ...]:
    numbers = [
        Signal(
            name=number.signal,
            scope="mismatch",
            text=f"{number.text}, worst pair",
            unit=number.unit,
            read=_detailed(name, number),
        )
        for name, number in NUMBERS.items()
    ]
    buckets = [
        Signal(
            name=f"worst_{by}_abs_d",
            scope="mismatch",
            text=f"mean abs d of the worst bucket by {by} ({text})",
            unit="nats",
            read=_broken_down(by),
        )
        for by, text in BREAKDOWNS.items()
    ]
    return (*numbers, *buckets)


def _silence(window: Window) -> Reading:
    texts = tuple(describe_silence(s) for s in window.silence)
    evidence = {"silence": [asdict(s) for s in window.silence[:_SHOWN]]} if texts else {}
    return Reading(value=0.0, missing=texts, evidence=evidence)


def _unpaired(window: Window) -> Reading:
    # a side reports its unpaired tokens once, however many pairs it could have been in
    unpaired: dict[str, int] = {}
    for pair in window.pairs:
        for role, count in pair.unpaired.items():
            unpaired[role] = max(unpaired.get(role, 0), count)
    paired = max((pair.tokens for pair in window.trainer_pairs), default=0)
    lost = max(unpaired.values(), default=0)
    missing = _silences(window, ("logprobs",))
    if paired + lost == 0:
        return Reading(value=None, missing=missing or ("no token was seen",))
    evidence: dict[str, Any] = {"unpaired": unpaired, "paired": paired} if lost else {}
    if lost and window.unpaired:
        evidence["why"] = {f"{one.role} {one.reason}": one.tokens for one in window.unpaired}
    return Reading(value=lost / (paired + lost), missing=missing, evidence=evidence)


def _signals() -> tuple[Signal, ...]:
    return (
        Signal(
            name="handshake_differences",
            scope="contract",
            text="contract fields that engine and trainer declare differently",
            read=lambda w: _facts(w.handshake, w, "hello"),
            cause="contract_differs",
        ),
        Signal(
            name="topology_breaks",
            scope="contract",
            text="parallel degrees outside the claim",
            read=lambda w: _facts(w.topology_breaks, w, "hello", "attestation"),
            cause="topology",
        ),
        Signal(
            name="region_breaks",
            scope="contract",
            text="regions that run something else than the contract binds",
            read=lambda w: _regions(w, canary=False),
            cause="kernel_replaced",
        ),
        Signal(
            name="canary_mismatches",
            scope="contract",
            text="regions whose canary gives other bits",
            read=lambda w: _regions(w, canary=True),
            cause="canary",
        ),
        Signal(
            name="environment_breaks",
            scope="contract",
            text="versions or flags outside what the contract admits",
            read=lambda w: _facts(w.environment_breaks, w, "hello", "attestation"),
            cause="environment",
        ),
        Signal(
            name="weights_stale",
            scope="mismatch",
            text="tensors of an earlier version in the engine",
            read=lambda w: _weights(w, "stale"),
            cause="weights_stale",
        ),
        Signal(
            name="weights_unequal",
            scope="mismatch",
            text="tensors missing, zero or of other bytes on one side",
            read=lambda w: _weights(w, "missing", "zero", "unequal"),
            cause="weights_unequal",
        ),
        Signal(
            name="weights_unchanged",
            scope="mismatch",
            text="tensors in which no byte moved over a sync",
            read=lambda w: _weights(w, "unchanged"),
            cause="weights_unchanged",
        ),
        Signal(
            name="sampling_differences",
            scope="mismatch",
            text="sampling settings that the sides apply differently",
            read=lambda w: _facts(w.sampling, w),
            cause="sampling",
        ),
        Signal(
            name="unequal_tokens",
            scope="mismatch",
            text="paired tokens whose two logprobs differ in a bit",
            read=_trainer(_unequal, "tokens"),
        ),
        Signal(
            name="mean_abs_d",
            scope="mismatch",
            text="mean abs d, worst pair",
            unit="nats",
            read=_trainer(lambda p: p.mean_abs_d, "mean abs d"),
        ),
        Signal(
            name="baseline_ratio",
            scope="mismatch",
            text="mean abs d over the run's own trailing median",
            relative=True,
            read=_trainer(lambda p: p.mean_abs_d, "mean abs d"),
        ),
        Signal(
            name="k3",
            scope="mismatch",
            text="k3, worst pair",
            unit="nats",
            read=_trainer(lambda p: p.k3, "k3"),
        ),
        Signal(
            name="rho_z",
            scope="mismatch",
            text="standard errors by which E[rho] is off 1",
            read=_trainer(lambda p: abs(p.rho_z), "rho z"),
        ),
        Signal(
            name="rho_effect",
            scope="mismatch",
            text="distance of E[rho] from 1 where z is above 10",
            read=_trainer(_rho_effect, "rho"),
        ),
        Signal(
            name="nonfinite_tokens",
            scope="mismatch",
            text="tokens with NaN or infinity",
            read=_any_pair(lambda p: float(p.nonfinite), "tokens"),
            cause="nonfinite",
        ),
        Signal(
            name="exact_zero_share",
            scope="mismatch",
            text="share of tokens with exactly 0.0 on one side and a clearly lower value on the other",
            unit="ratio",
            read=_any_pair(lambda p: p.exact_zero / p.tokens, "tokens"),
            cause="filled_logprobs",
        ),
        Signal(
            name="positive_tokens",
            scope="mismatch",
            text="tokens with a logprob above 0",
            read=_any_pair(lambda p: float(p.positive), "tokens"),
            cause="positive_logprobs",
        ),
        Signal(
            name="id_mismatch_tokens",
            scope="mismatch",
            text="tokens paired by position whose ids differ",
            read=_any_pair(lambda p: float(p.id_mismatch), "tokens"),
            cause="token_ids",
        ),
        Signal(
            name="decode_unequal_tokens",
            scope="mismatch",
            text="engine decode against its own prefill: tokens that differ in a bit",
            read=_engine(_unequal, "tokens"),
            cause="engine_decode_prefill",
        ),
        Signal(
            name="decode_mean_abs_d",
            scope="mismatch",
            text="engine decode against its own prefill: mean abs d",
            unit="nats",
            read=_engine(lambda p: p.mean_abs_d, "mean abs d"),
            cause="engine_decode_prefill",
        ),
        Signal(
            name="unpaired_share",
            scope="health",
            text="share of tokens that found no partner in time",
            unit="ratio",
            read=_unpaired,
            cause="unpaired",
        ),
        Signal(
            name="dropped_messages",
            scope="health",
            text="messages lost between probe and daemon",
            read=lambda w: Reading(
                value=float(w.dropped), evidence={"dropped": w.dropped} if w.dropped else {}
            ),
            cause="drops",
        ),
        Signal(
            name="silence",
            scope="health",
            text="roles that did not say what they should have",
            read=_silence,
            cause="silence",
        ),
    )


SIGNALS: dict[str, Signal] = {signal.name: signal for signal in (*_signals(), *_detail_signals())}
