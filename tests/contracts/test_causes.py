# SPDX-License-Identifier: Apache-2.0
"""The classifier against simulated faults: every fault gets its own cause, and clean noise gets none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from isoexec.contracts.causes import CAUSES, classify
from isoexec.contracts.window import (
    FILLED_BELOW,
    EnvironmentBreak,
    FieldDifference,
    PairStats,
    RegionBreak,
    SamplingBreak,
    Silence,
    TopologyBreak,
    WeightBreak,
    Window,
)

Array = npt.NDArray[Any]

LENGTH = 64  # response tokens per simulated sequence


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    normalised: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalised


class Rollout:
    """Tokens sampled from a policy of mixed entropy, with the logits that sampled them."""

    def __init__(self, seed: int = 7, tokens: int = 12_800, vocabulary: int = 256) -> None:
        self.rng = np.random.default_rng(seed)
        sharpness = self.rng.uniform(0.5, 6.0, size=(tokens, 1))
        self.logits: Array = self.rng.standard_normal((tokens, vocabulary)) * sharpness
        self.tokens: Array = self.sample(log_softmax(self.logits))

    def sample(self, logprobs: Array) -> Array:
        gumbel = -np.log(-np.log(self.rng.uniform(1e-12, 1.0, size=logprobs.shape)))
        drawn: Array = (logprobs + gumbel).argmax(axis=-1)
        return drawn

    def noise(self, scale: float) -> Array:
        return self.rng.standard_normal(self.logits.shape) * scale

    def logprobs(self, logits: Array, tokens: Array | None = None) -> Array:
        chosen = self.tokens if tokens is None else tokens
        picked: Array = np.take_along_axis(log_softmax(logits), chosen[:, None], axis=-1)[:, 0]
        return picked


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    return Rollout()


def stats(
    engine: Array, trainer: Array, pair: tuple[str, str] = ("engine_decode", "trainer_score")
) -> PairStats:
    """Statistics of the definition in PairStats, straight from two float arrays of whole sequences."""
    q, p = engine.astype(np.float32), trainer.astype(np.float32)
    good = np.isfinite(q) & np.isfinite(p)
    d = p[good].astype(np.float64) - q[good]
    rho = np.exp(np.clip(d, -50, 50))
    spread = rho.std() / math.sqrt(d.size)
    nonzero = d[d != 0]
    by_position = np.abs(p.astype(np.float64) - q).reshape(-1, LENGTH)
    variance = d.var()
    return PairStats(
        pair=pair,
        tokens=q.size,
        bitwise_equal=int((q.view(np.uint32) == p.view(np.uint32)).sum()),
        nonfinite=int((~good).sum()),
        exact_zero=int((((q == 0) & (p < FILLED_BELOW)) | ((p == 0) & (q < FILLED_BELOW))).sum()),
        positive=int(((q > 0) | (p > 0)).sum()),
        mean_d=float(d.mean()),
        mean_abs_d=float(np.abs(d).mean()),
        max_abs_d=float(np.abs(d).max()),
        p99_abs_d=float(np.quantile(np.abs(d), 0.99)),
        std_d=float(d.std()),
        kurtosis=float(((d - d.mean()) ** 4).mean() / variance**2) if variance else math.nan,
        r_ratio=float(-2 * d.mean() / (d**2).mean()) if variance else math.nan,
        share_negative=float((nonzero < 0).mean()) if nonzero.size else math.nan,
        k1=float(-d.mean()),
        k3=float((rho - 1 - d).mean()),
        rho_mean=float(rho.mean()),
        rho_z=float((rho.mean() - 1) / spread) if spread else 0.0,
        first_token_mean_abs_d=float(np.nanmean(by_position[:, 0])),
        last_token_mean_abs_d=float(np.nanmean(by_position[:, -1])),
        position_growth=float(
            np.nanmean(by_position[:, LENGTH // 2 :]) / max(np.nanmean(by_position[:, : LENGTH // 2]), 1e-30)
        ),
        correlation=float(np.corrcoef(q[good], p[good])[0, 1]),
        grid_share=float((nonzero * 32 % 1 == 0).mean()) if nonzero.size else math.nan,
    )


def window(*pairs: PairStats, regime: str = "bf16_dense", **facts: Any) -> Window:
    values: dict[str, Any] = {"monitor_only": False, "step": 3, "weight_version": 2} | facts
    return Window(run="r", regime=regime, pairs=pairs, **values)


def ids(w: Window) -> list[str]:
    return [cause.id for cause in classify(w)]


def bf16_like(r: Rollout) -> tuple[Array, Array]:
    return r.logprobs(r.logits), r.logprobs(r.logits + r.noise(0.012))


def large_noise(r: Rollout) -> tuple[Array, Array]:
    return r.logprobs(r.logits), r.logprobs(r.logits + r.noise(0.3))


def scaled_logits(r: Rollout) -> tuple[Array, Array]:
    return r.logprobs(r.logits), r.logprobs(r.logits * 1.1)


def raw_against(temperature: float) -> Callable[[Rollout], tuple[Array, Array]]:
    def fault(r: Rollout) -> tuple[Array, Array]:
        sampled = r.sample(log_softmax(r.logits / temperature))
        return r.logprobs(r.logits, sampled), r.logprobs(r.logits / temperature, sampled)

    return fault


def top_p(r: Rollout) -> tuple[Array, Array]:
    probabilities = np.exp(log_softmax(r.logits))
    order = np.argsort(-probabilities, axis=-1)
    ranked = np.take_along_axis(probabilities, order, axis=-1)
    outside = np.empty(ranked.shape, dtype=bool)
    np.put_along_axis(outside, order, ranked.cumsum(axis=-1) - ranked > 0.9, axis=-1)
    cut = np.where(outside, -np.inf, r.logits)
    sampled = r.sample(log_softmax(cut))
    return r.logprobs(cut, sampled), r.logprobs(r.logits, sampled)


def shifted(r: Rollout) -> tuple[Array, Array]:
    q = r.logprobs(r.logits)
    return q, np.roll(q, 1)


def retokenised(r: Rollout) -> tuple[Array, Array]:
    p_tokens = r.tokens.copy()
    hit = r.rng.uniform(size=p_tokens.size) < 0.01
    p_tokens[hit] = r.rng.integers(0, r.logits.shape[1], size=int(hit.sum()))
    return r.logprobs(r.logits), r.logprobs(r.logits + r.noise(0.012), p_tokens)


def moe_flips(r: Rollout) -> tuple[Array, Array]:
    hit = r.rng.uniform(size=(r.tokens.size, 1)) < 0.05
    return r.logprobs(r.logits), r.logprobs(r.logits + np.where(hit, r.noise(0.8), r.noise(0.012)))


def filled_zeros(r: Rollout) -> tuple[Array, Array]:
    q, p = bf16_like(r)
    return np.where(r.rng.uniform(size=q.size) < 0.02, 0.0, q), p


def quantised(r: Rollout) -> tuple[Array, Array]:
    q = r.logprobs(r.logits)
    d = np.round((r.logprobs(r.logits + r.noise(0.08)) - q) * 8) / 8
    # both sides on one power-of-two scale, so that float32 keeps the grid
    q = np.round(q * 2**12) / 2**12
    return q, np.where(q + d < 0, q + d, q)


def last_token(r: Rollout) -> tuple[Array, Array]:
    q, p = bf16_like(r)
    p = p.reshape(-1, LENGTH).copy()
    p[:, -1] -= 2.0
    return q, p.ravel()


def first_token(r: Rollout) -> tuple[Array, Array]:
    first = (np.arange(r.tokens.size) % LENGTH == 0)[:, None]
    return r.logprobs(r.logits), r.logprobs(r.logits + np.where(first, r.noise(0.6), r.noise(0.012)))


def growing(r: Rollout) -> tuple[Array, Array]:
    position = (np.arange(r.tokens.size) % LENGTH / LENGTH)[:, None]
    return r.logprobs(r.logits), r.logprobs(r.logits + r.noise(0.3) * position**2)


FAULTS: dict[str, tuple[Callable[[Rollout], tuple[Array, Array]], str]] = {
    "large noise": (large_noise, "other_policy"),
    "logit scale 1.1": (scaled_logits, "logit_scale"),
    "raw against T=0.6": (raw_against(0.6), "raw_against_processed"),
    "raw against T=1.2": (raw_against(1.2), "raw_against_processed"),
    "top-p 0.9 renormalised": (top_p, "support_renormalised"),
    "shift by one": (shifted, "shift_or_wrong_tokens"),
    "1 % re-tokenised": (retokenised, "retokenised"),
    "MoE flips": (moe_flips, "moe_routing"),
    "filled zeros": (filled_zeros, "filled_logprobs"),
    "d quantised to 0.125": (quantised, "quantised_logits"),
    "last token": (last_token, "sequence_end"),
    "first token": (first_token, "sequence_start"),
    "grows with length": (growing, "grows_with_length"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_gets_its_own_cause_first(name: str, rollout: Rollout) -> None:
    fault, expected = FAULTS[name]
    found = classify(window(stats(*fault(rollout))))
    assert [c.id for c in found][:1] == [expected], found


def test_no_two_faults_of_different_kind_share_a_cause() -> None:
    kinds = [cause for name, (_, cause) in FAULTS.items() if name != "raw against T=1.2"]
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize("scale", [0.0, 1e-4, 0.006, 0.012])
def test_clean_noise_gets_no_cause(scale: float, rollout: Rollout) -> None:
    pair = stats(rollout.logprobs(rollout.logits), rollout.logprobs(rollout.logits + rollout.noise(scale)))
    assert ids(window(pair)) == []


@pytest.mark.parametrize("seed", range(5))
def test_clean_noise_gets_no_cause_for_other_draws_and_small_windows(seed: int) -> None:
    small = Rollout(seed=seed, tokens=640)
    assert ids(window(stats(*bf16_like(small)))) == []


def test_moe_noise_is_clean_in_its_own_regime_and_not_in_the_dense_one(rollout: Rollout) -> None:
    pair = stats(rollout.logprobs(rollout.logits), rollout.logprobs(rollout.logits + rollout.noise(0.04)))
    assert ids(window(pair, regime="bf16_moe")) == []
    assert ids(window(pair, regime="bf16_dense")) == ["numeric_noise"]


def test_the_same_small_noise_is_a_cause_where_bitwise_was_promised(rollout: Rollout) -> None:
    assert ids(window(stats(*bf16_like(rollout)), regime="bitwise")) == ["numeric_noise"]
    same = rollout.logprobs(rollout.logits)
    assert ids(window(stats(same, same.copy()), regime="bitwise")) == []


def test_an_engine_that_disagrees_with_its_own_prefill_is_named_and_the_trainer_cleared(
    rollout: Rollout,
) -> None:
    prefill, trainer = bf16_like(rollout)
    decode = rollout.logprobs(rollout.logits + rollout.noise(0.3))
    found = classify(
        window(
            stats(decode, trainer),
            stats(prefill, trainer, ("engine_prefill", "trainer_score")),
            stats(decode, prefill, ("engine_decode", "engine_prefill")),
        )
    )
    assert found[0].id == "engine_decode_prefill"
    assert found[0].evidence["trainer_cleared"] is True


def test_an_engine_that_agrees_with_itself_points_away_from_the_engine(rollout: Rollout) -> None:
    decode, trainer = large_noise(rollout)
    prefill = rollout.logprobs(rollout.logits + rollout.noise(0.001))
    found = classify(
        window(stats(decode, trainer), stats(decode, prefill, ("engine_decode", "engine_prefill")))
    )
    assert found[0].id == "other_policy"
    assert "agrees with itself" in found[0].evidence["witness"]


def test_the_missing_witness_is_said(rollout: Rollout) -> None:
    (cause,) = classify(window(stats(*large_noise(rollout))))
    assert "no prefill rescore" in cause.evidence["witness"]


def test_two_trainer_forwards_that_differ_blame_the_trainer(rollout: Rollout) -> None:
    engine, score = bf16_like(rollout)
    forward = rollout.logprobs(rollout.logits + rollout.noise(0.3))
    found = ids(window(stats(engine, score), stats(engine, forward, ("engine_decode", "trainer_fwd"))))
    assert found[0] == "trainer_variance"


FACTS: dict[str, dict[str, Any]] = {
    "contract_differs": {"handshake": (FieldDifference(path="composition.rope", engine="1", trainer="2"),)},
    "topology": {
        "topology_breaks": (
            TopologyBreak(role="engine", source="h:1:0", axis="TP", found=3, admitted="{1, 2, 4}"),
        )
    },
    "kernel_replaced": {
        "region_breaks": (
            RegionBreak(
                role="engine",
                source="h:1:0",
                region="norm",
                wanted="rms_norm.tree/1",
                found="?",
                kind="object",
            ),
        )
    },
    "canary": {
        "region_breaks": (
            RegionBreak(role="engine", source="h:1:0", region="norm", wanted="a", found="b", kind="canary"),
        )
    },
    "weights_stale": {"weights": (WeightBreak(name="w", kind="stale", engine_version=1, trainer_version=2),)},
    "weights_unequal": {
        "weights": (WeightBreak(name="w", kind="zero", engine_version=2, trainer_version=2),)
    },
    "sampling": {"sampling": (SamplingBreak(field="temperature", engine=0.6, trainer=1.0),)},
    "environment": {
        "environment_breaks": (
            EnvironmentBreak(role="engine", source="h:1:0", name="torch", wanted="2.13.0", found="2.12.1"),
        )
    },
}


@pytest.mark.parametrize("expected", FACTS)
def test_an_installed_fact_outranks_every_statistic(expected: str, rollout: Rollout) -> None:
    found = ids(window(stats(*large_noise(rollout)), **FACTS[expected]))
    assert found == [expected, "other_policy"]


def test_facts_of_the_contract_are_no_cause_in_a_run_without_one() -> None:
    facts = FACTS["topology"] | FACTS["kernel_replaced"] | FACTS["weights_stale"]
    assert ids(window(monitor_only=True, **facts)) == ["weights_stale"]


def test_counts_come_before_averages(rollout: Rollout) -> None:
    q, p = large_noise(rollout)
    p = p.copy()
    p[5], p[6] = np.nan, 0.25
    found = ids(window(stats(q, p)))
    assert found[:2] == ["nonfinite", "positive_logprobs"]


def test_silence_drops_and_lost_partners_are_named_last(rollout: Rollout) -> None:
    pair = dataclasses.replace(stats(*bf16_like(rollout)), unpaired={"engine": 4000})
    w = window(pair, dropped=2, silence=(Silence(role="trainer", what="weights", age_seconds=70.0),))
    assert ids(w) == ["unpaired", "drops", "silence"]
    assert classify(w)[-1].evidence["roles"] == ["trainer has sent no weights for 70 s"]


def test_a_window_without_a_finite_token_claims_no_statistical_cause() -> None:
    assert ids(window(PairStats(pair=("engine_decode", "trainer_score"), tokens=4, nonfinite=4))) == [
        "nonfinite"
    ]


def test_every_cause_says_where_the_runbook_treats_it() -> None:
    for cause in classify(window(**FACTS["topology"])):
        assert cause.anchor == f"dashboards/runbook.md#{cause.id}"
        assert cause.text == CAUSES[cause.id]
