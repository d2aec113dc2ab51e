# SPDX-License-Identifier: Apache-2.0
"""The sentence a user needs for each cause: what was seen, in numbers, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isoexec.contracts.causes import CAUSES

__all__ = ["sentence"]

_PLACE = "there {mean_abs_d_there:.3g} nats, elsewhere {mean_abs_d_elsewhere:.3g}"
_SAID: dict[str, str] = {
    "filled_logprobs": "{filled} {side} logprobs of {tokens} are exactly {filled_with:g}: they were never computed; mask "
    "these tokens instead of filling them",
    "nonfinite": "{nonfinite} {side} logprobs of {tokens} are NaN or infinite; compute the log-softmax in fp32 and look "
    "for masked logits at sampled tokens",
    "positive_logprobs": "{positive} {side} logprobs are above 0, up to {largest:.3g}: its log-softmax rounds between "
    "its parts; compute it in fp32, fused",
    "engine_varies": "the same sequences, rolled out again, differ by {rollout_differs_by:.3g} nats while the trainer "
    "repeats itself to {trainer_differs_by:.3g}: the engine is not batch-invariant; install the contract's kernels there",
    "trainer_variance": "two trainer forwards of the same tokens differ by {trainer_differs_by:.3g} nats, the rollout's by "
    "{rollout_differs_by:.3g}: look for dropout left on, and for kernels that depend on the micro-batch",
    "one_engine": "only engine {engine} is off, " + _PLACE + ": sync its weights again, or take it out and check its host",
    "pack_boundary": "only sequences that are not first in their pack are off, " + _PLACE + ": check cu_seqlens and the "
    "state that crosses the boundary",
    "padding": "only left-padded rows are off, " + _PLACE + ": check the position ids and the mask of the padding path",
    "prefix_cache": "only requests with a prefix-cache hit are off, " + _PLACE + ": reset the prefix cache at every weight "
    "sync, then compare the hit path's reduction order",
    "sequence_end": "only the last token of each sequence is off, " + _PLACE + ": labels roll at a boundary, or EOS is "
    "scored on one side only",
    "sequence_start": "only the first response token is off, " + _PLACE + ": compare BOS, the prompt's ids and the edge of "
    "the last prefill chunk",
    "position_break": "clean up to {counted_from} {position}, off from there on, " + _PLACE + ": look for a window, chunk, "
    "block or re-tokenised turn that ends there",
    "few_sequences": "{sequences} sequences ({share:.2%}) are off by {mean_abs_d_there:.3g} nats, the median one by "
    "{median_elsewhere:.3g}: the engine's decode state of these requests; replay them alone",
    "moe_routing": "{share_of_tokens:.2%} of the tokens carry {tail_carries:.0%} of the mismatch, with both signs: experts are "
    "chosen differently; compute router and bias in fp32 on both sides, or replay the routes",
    "retokenised": "{share_of_tokens:.2%} of the tokens are far too unlikely for the trainer: it was given other ids; pass the "
    "sampled ids on instead of encoding the text again",
    "support_renormalised": "d has one sign and E[rho] is {rho_mean:.4g}: one side normalises over fewer tokens (top-p, "
    "top-k, min-p, padded vocabulary); score with the same mask on both sides",
    "ageing_state": "mean abs d rose over {windows} windows though no weight moved: a cache or calibration outlives the "
    "weight sync; reset it at each one",
}  # fmt: skip


def sentence(cause: str, evidence: Mapping[str, Any]) -> str:
    """Say a cause with its numbers; the plain text of `CAUSES` where it has no sentence of its own."""
    if cause == "raw_against_processed":
        return _temperature(evidence)
    if cause == "quantised_logits":
        if "grid" in evidence:
            return (
                f"d lies on a grid of {evidence['grid']:g} nats: logits or logprobs went through fp8 or bf16; keep the head "
                "in fp32"
            )
        return (
            f"the {evidence['side']} logprobs hold bf16 values: take the log-softmax in fp32 and send float32"
        )
    if cause == "logit_scale":
        way = "sharper" if evidence["odds_slope"] > 1 else "flatter"
        return (
            f"the trainer's distribution is the rollout's made {way}: a temperature, cap or multiplier is applied on one "
            "side only"
        )
    if cause == "shift_or_wrong_tokens":
        if evidence["shift"]:
            way = "later" if evidence["shift"] > 0 else "earlier"
            return f"the trainer's logprobs are the rollout's one position {way}: shift the labels by one"
        return f"the two sides' logprobs have correlation {evidence['correlation']:.2f}: they belong to other tokens or inputs"
    if cause == "speculative_decoding":
        where = (
            f"the last positions before {evidence['near_limit']}"
            if "near_limit" in evidence
            else "drafted tokens"
        )
        return (
            f"only {where} are off, {_PLACE.format(**evidence)}: take logprobs from the verifying forward; turn drafts off "
            "once to be sure"
        )
    if cause == "other_policy" and "times_before" in evidence:
        return (
            f"mean abs d jumped to {evidence['times_before']:.3g} times the median of the windows before, and both sides are "
            "self-consistent: stale weights, a sync that did not happen; sync again and compare weight digests"
        )
    if cause == "unclear":
        names = " or ".join(evidence.get("between", ())) or "no cause"
        return f"unclear: the numbers fit {names}; more tokens, a prefill rescore, weight digests or an earlier window would tell"
    return _SAID[cause].format(**evidence) if cause in _SAID else CAUSES[cause]


def _temperature(evidence: Mapping[str, Any]) -> str:
    said = evidence.get("temperature")
    side = "below" if evidence["odds_slope"] > 1 else "above"
    value = f"T={said:g}" if said not in (None, 1.0) else f"a temperature {side} 1"
    return f"rollout logprobs are raw, the trainer divides by {value}; set logprobs_mode=processed_logprobs"
