# SPDX-License-Identifier: Apache-2.0
"""Name the likely causes of what a window shows, the surest first.

Installed facts (contract, topology, kernels, weights, sampling) outrank statistics. The third witness comes
next: the engine's own prefill rescore says which side is off. Statistics of d then separate semantic
faults, where E[rho] leaves 1, from sparse faults, from positions, from a self-consistent other policy, and
from plain numerics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from isoexec.contracts.rules import LADDER
from isoexec.contracts.signals import SIGNALS, describe_silence
from isoexec.contracts.window import UNPAIRED_REASONS, PairStats, Window

__all__ = ["CAUSES", "Cause", "classify"]

# id -> one sentence for a person; every id has a heading of that name in the runbook
CAUSES: dict[str, str] = {
    "contract_differs": "engine and trainer hold different contracts",
    "topology": "a parallel degree lies outside the claim",
    "kernel_replaced": "a region does not run the function that the contract binds",
    "canary": "an installed function computes other bits than its reference",
    "weights_stale": "the engine still samples from an earlier version of the weights",
    "weights_unequal": "weights are missing, zero or different on one side",
    "sampling": "engine and trainer apply different sampling settings",
    "environment": "a version or flag that can change bits is outside what the contract admits",
    "weights_unchanged": "a weight sync moved no byte of some tensors",
    "nonfinite": "logprobs are NaN or infinite",
    "filled_logprobs": "missing logprobs were filled with 0.0",
    "positive_logprobs": "logprobs above 0: a log-softmax rounded between its parts",
    "token_ids": "the two sides scored different token ids",
    "engine_decode_prefill": "the engine's decode disagrees with its own prefill: an engine fault",
    "trainer_variance": "two forwards of the trainer on the same weights differ",
    "shift_or_wrong_tokens": "logprobs are shifted by one or belong to other tokens",
    "raw_against_processed": "one side's logprobs are raw, the other's are scaled by the temperature",
    "support_renormalised": "one side normalises over fewer tokens: top-p, top-k, a padded vocabulary",
    "retokenised": "a small share of the tokens was re-tokenised or replaced",
    "support_or_scale": "the two sides do not normalise over the same support",
    "moe_routing": "few tokens are far off and the rest is clean: routing flips",
    "quantised_logits": "d lies on a grid: logits or logprobs went through a low precision",
    "sequence_end": "only the last token of each sequence is off: label roll or EOS handling",
    "sequence_start": "only the first response token is off: prompt state, BOS or a chunk edge",
    "one_engine": "one engine alone is off: a missed sync, a recovered engine, or its hardware",
    "pack_boundary": "only sequences that are not first in their pack are off: boundaries or state of the pack",
    "padding": "only left-padded rows are off: position ids or mask of the padding path",
    "prefix_cache": "only requests with a prefix-cache hit are off: stale KV, or the hit path's reduction order",
    "speculative_decoding": "only drafted tokens, or those near the length limit, are off: speculative decoding",
    "position_break": "clean up to one position and off after it: a window, a chunk, a block or a re-tokenised turn",
    "few_sequences": "few sequences are far off and the rest is clean: decode state of the engine",
    "engine_varies": "the same sequences rolled out again differ: the engine is not batch-invariant",
    "ageing_state": "the mismatch grows over steps while no weight moves: a cache or calibration is kept too long",
    "grows_with_length": "the mismatch grows with the position: attention state, recurrent state or RoPE",
    "logit_scale": "one side's logits are scaled: an unapplied factor, cap or fp32 head",
    "other_policy": "both sides are self-consistent but are different policies: stale weights look like this",
    "numeric_noise": "plain numerics: other kernels, another batch shape or another layout",
    "unclear": "the mismatch is above the regime and fits no signature, or more than one",
    "unpaired": "many tokens found no partner: re-tokenised sequences, or one side samples others",
    "drops": "messages were lost between probe and daemon",
    "silence": "a side did not report",
}

_RUNBOOK = "dashboards/runbook.md"


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A likely cause: stable id, one sentence, the numbers it rests on, and where the runbook treats it."""

    id: str
    text: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def anchor(self) -> str:
        """`dashboards/runbook.md#<id>`."""
        return f"{_RUNBOOK}#{self.id}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the journal and the API."""
        return {"id": self.id, "text": self.text, "evidence": dict(self.evidence), "runbook": self.anchor}


def _cause(cause_id: str, **evidence: Any) -> Cause:
    shown = {k: v for k, v in evidence.items() if not (isinstance(v, float) and math.isnan(v))}
    return Cause(id=cause_id, text=CAUSES[cause_id], evidence=shown)


def classify(window: Window) -> tuple[Cause, ...]:
    """Return the likely causes, the surest first; empty when nothing stands out. Pure."""
    # what raw pairs showed says more than the statistics of a window can
    statistics = _diagnosed(window) or tuple(_statistics(window))
    found = [*_facts(window), *_counts(window), *_witness(window), *statistics, *_health(window)]
    unique: dict[str, Cause] = {}
    said = {one.cause: one.text for one in reversed(window.diagnosis)}
    for cause in found:
        unique.setdefault(cause.id, replace(cause, text=said.get(cause.id, cause.text)))
    return tuple(unique.values())


_FACT_SIGNALS = (
    "handshake_differences",
    "topology_breaks",
    "region_breaks",
    "canary_mismatches",
    "weights_stale",
    "weights_unequal",
    "sampling_differences",
    "environment_breaks",
    "weights_unchanged",
)


def _facts(window: Window) -> Iterator[Cause]:
    for name in _FACT_SIGNALS:
        signal = SIGNALS[name]
        if window.monitor_only and signal.scope == "contract":
            continue
        reading = signal.read(window)
        if reading.value:
            yield _cause(signal.cause, **reading.evidence)


def _counts(window: Window) -> Iterator[Cause]:
    for pair in (*window.trainer_pairs, *window.engine_pairs):
        share = pair.exact_zero / pair.tokens
        # saturated tokens and a top-p set of one token are exactly 0.0 too: a filled one is nats away
        if share > 1e-3 and pair.max_abs_d > 1:
            yield _cause("filled_logprobs", pair=pair.label, exact_zero=pair.exact_zero, tokens=pair.tokens)
        if pair.nonfinite:
            yield _cause("nonfinite", pair=pair.label, nonfinite=pair.nonfinite, tokens=pair.tokens)
        if pair.positive:
            yield _cause("positive_logprobs", pair=pair.label, positive=pair.positive, tokens=pair.tokens)
        if pair.id_mismatch:
            yield _cause("token_ids", pair=pair.label, id_mismatch=pair.id_mismatch, tokens=pair.tokens)


def _limit(window: Window) -> float:
    """Mean abs d from which on a pair is off; in the bitwise regime any."""
    return LADDER.get(window.regime, {}).get("mean_abs_d", (0.0,))[0]


def _off(pair: PairStats, window: Window) -> bool:
    """Whether a pair shows more than its regime explains."""
    if pair.finite <= 0:
        return False
    if window.regime == "bitwise":
        return pair.bitwise_equal < pair.tokens
    k3_limit = LADDER.get(window.regime, {}).get("k3", (math.inf,))[0]
    return pair.mean_abs_d > _limit(window) or pair.k3 > k3_limit or _rho_off(pair)


def _rho_off(pair: PairStats) -> bool:
    return abs(pair.rho_evidence) > 5 and abs(pair.rho_mean - 1) > 5e-3


def _witness(window: Window) -> Iterator[Cause]:
    """Use the engine's own prefill as the third logprob."""
    for pair in window.engine_pairs:
        if _off(pair, window):
            prefill = [p for p in window.trainer_pairs if p.pair[0] == "engine_prefill"]
            cleared = bool(prefill) and not any(_off(p, window) for p in prefill)
            yield _cause(
                "engine_decode_prefill",
                pair=pair.label,
                mean_abs_d=pair.mean_abs_d,
                unequal=pair.tokens - pair.bitwise_equal,
                tokens=pair.tokens,
                trainer_cleared=cleared,
            )
    decoded = [p for p in window.trainer_pairs if p.pair[0] == "engine_decode" and p.finite > 0]
    if len(decoded) > 1:
        worst = max(decoded, key=lambda p: p.mean_abs_d)
        best = min(decoded, key=lambda p: p.mean_abs_d)
        if _off(worst, window) and not _off(best, window) and worst.mean_abs_d > 4 * best.mean_abs_d:
            yield _cause(
                "trainer_variance",
                off=worst.label,
                off_mean_abs_d=worst.mean_abs_d,
                clean=best.label,
                clean_mean_abs_d=best.mean_abs_d,
            )


def _diagnosed(window: Window) -> tuple[Cause, ...]:
    return tuple(
        Cause(id=one.cause, text=one.text, evidence={"pair": ":".join(one.pair), **one.evidence})
        for one in window.diagnosis
        if one.cause in CAUSES
    )


def _statistics(window: Window) -> Iterator[Cause]:
    usable = [p for p in window.trainer_pairs if p.finite > 0]
    # the engine samples by its decode, so E[rho] = 1 is a statement about that pair
    sampled = [p for p in usable if p.pair[0] == "engine_decode"] or usable
    if not sampled:
        return
    pair = max(sampled, key=lambda p: p.mean_abs_d)
    name = _signature(pair, window)
    if name:
        yield _cause(
            name,
            pair=pair.label,
            tokens=pair.tokens,
            mean_abs_d=pair.mean_abs_d,
            mean_d=pair.mean_d,
            max_abs_d=pair.max_abs_d,
            k3=pair.k3,
            rho_mean=pair.rho_mean,
            rho_z=pair.rho_z,
            r_ratio=pair.r_ratio,
            kurtosis=pair.kurtosis,
            share_negative=pair.share_negative,
            **_side(window, pair),
        )


def _side(window: Window, pair: PairStats) -> dict[str, str]:
    engine: Sequence[PairStats] = window.engine_pairs
    if not engine:
        return {"witness": "no prefill rescore in this window"}
    if any(_off(p, window) for p in engine):
        return {"witness": "the engine's decode disagrees with its own prefill"}
    return {"witness": f"the engine agrees with itself, so {pair.pair[1]} or what it was given differs"}


def _signature(pair: PairStats, window: Window) -> str:
    """Return the id of the statistical signature of one pair, or "" for a clean one."""
    unequal = pair.tokens - pair.bitwise_equal
    if pair.grid_share > 0.9 and unequal >= 100 and pair.max_abs_d >= 1 / 32:
        return "quantised_logits"
    if name := _edge(pair, window) or _semantic(pair):
        return name
    if not _off(pair, window):
        return ""
    if pair.position_growth > 3:
        return "grows_with_length"
    if pair.kurtosis > 30:
        return "moe_routing"
    if pair.mean_abs_d <= max(_limit(window), 0.05) and pair.kurtosis < 20:
        # small, dense and self-consistent; only regimes that promise less noise come here
        return "numeric_noise"
    if abs(_sign_excess(pair)) > 0.06:
        return "logit_scale"
    if 0.6 <= pair.r_ratio <= 1.4:
        return "other_policy"
    return "unclear"


def _semantic(pair: PairStats) -> str:
    """Faults that change what is normalised or scored: no amount of numeric noise looks like them."""
    unlike = pair.correlation < 0.3 if not math.isnan(pair.correlation) else abs(pair.r_ratio) < 0.1
    if pair.mean_abs_d > 1 and unlike:
        return "shift_or_wrong_tokens"
    # few tokens far off and too likely under the sampler; checked before the mean of rho, which they move
    # only a little
    if pair.kurtosis > 50 and pair.r_ratio < 0.4 and pair.mean_d < 0:
        return "retokenised"
    if not _rho_off(pair):
        return ""
    effect = pair.rho_mean - 1
    if pair.share_negative > 0.95 or pair.share_negative < 0.05:
        return "support_renormalised"
    if effect > 0 and pair.mean_d > 0:
        return "raw_against_processed"
    if effect > 0 and pair.kurtosis > 30:
        return ""  # a heavy right tail is a sample that missed its rare tokens, not another support
    return "support_or_scale"


def _edge(pair: PairStats, window: Window) -> str:
    """Faults at one end of the sequences; averages over all tokens hide them, or make them look semantic."""
    floor = max(_limit(window), 1e-6)
    for value, name in (
        (pair.last_token_mean_abs_d, "sequence_end"),
        (pair.first_token_mean_abs_d, "sequence_start"),
    ):
        if value > 10 * pair.mean_abs_d and value > 5 * floor:
            return name
    return ""


def _sign_excess(pair: PairStats) -> float:
    """How far the share of negative d is from that of a normal distribution of the same mean and width."""
    if not pair.std_d > 0:
        return 0.0
    expected = 0.5 * math.erfc(pair.mean_d / pair.std_d / math.sqrt(2))
    return pair.share_negative - expected


def _health(window: Window) -> Iterator[Cause]:
    reading = SIGNALS["unpaired_share"].read(window)
    if reading.value is not None and reading.value > 0.05:
        found = _cause("unpaired", share=reading.value, **reading.evidence)
        yield replace(found, text=_most_unpaired(window) or found.text)
    if window.dropped:
        yield _cause("drops", dropped=window.dropped)
    if window.silence:
        yield _cause("silence", roles=[describe_silence(s) for s in window.silence])


def _most_unpaired(window: Window) -> str:
    """Name the commonest reason of the side that lost most; empty where a window states none."""
    lost: dict[str, int] = {}
    for one in window.unpaired:
        lost[one.role] = lost.get(one.role, 0) + one.tokens
    if not lost:
        return ""
    role = max(sorted(lost), key=lambda name: lost[name])
    most = max((one for one in window.unpaired if one.role == role), key=lambda one: one.tokens)
    return (
        f"many tokens found no partner; of {lost[role]} tokens of the {role}, {most.tokens} because "
        f"{UNPAIRED_REASONS.get(most.reason, most.reason)}"
    )
