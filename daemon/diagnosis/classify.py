# SPDX-License-Identifier: Apache-2.0
"""Ranks the likely causes of a mismatch from raw pairs, the surest first; `unclear` where none fits.

Order: counts (filled, non-finite, positive), then what repeats show, then who and where (engine, pack, padding,
prefix hits, drafts, ends, a break, single sequences), then what is normalised (shift, temperature, support), then the
shape of d. A place is named only where the rest is clean, by a rank test, which heavy tails do not move.
`d = second - first` in nats. Pure, NumPy only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from isoexec.contracts.rules import LADDER
from isoexec.daemon.diagnosis.pairs import History, RawPairs, Settings
from isoexec.daemon.diagnosis.sentences import sentence

__all__ = ["Finding", "diagnose"]

Doubles = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_Z = (
    8.0  # of a rank test; one in 10^15 under normality, so that a thousand windows of many groups stay silent
)
_FEW = 400  # finite tokens below which nothing but counts is said
_BITWISE_FLOOR = 1e-7  # nats; logprobs near 1 differ by this much in the last place


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One likely cause: stable id, the sentence a user needs, and the numbers that it rests on."""

    id: str
    text: str
    evidence: dict[str, Any] = field(default_factory=dict)


class _Look:
    """The finite tokens of a window and what every test needs of them."""

    def __init__(self, pairs: RawPairs, regime: str) -> None:
        self.pairs, self.regime = pairs, regime
        good = np.isfinite(pairs.first) & np.isfinite(pairs.second)
        self.good = good
        self.x = pairs.first[good].astype(np.float64)
        self.y = pairs.second[good].astype(np.float64)
        self.d = self.y - self.x
        self.a = np.abs(self.d)
        self.n = int(self.d.size)
        sequence = np.repeat(np.arange(pairs.lengths.size), pairs.lengths)
        place = np.arange(good.size) - np.repeat(np.cumsum(pairs.lengths) - pairs.lengths, pairs.lengths)
        self.sequence, self.place = sequence[good], place[good]
        self.length = pairs.lengths[self.sequence]
        self.position = self.place + (pairs.starts[self.sequence] if pairs.starts is not None else 0)
        self.limit, self.k3_limit = _bounds(regime)
        self.mean = float(self.a.mean()) if self.n else math.nan
        self._ranks: Doubles | None = None

    @property
    def ranks(self) -> Doubles:
        """Ranks of abs d in (0, 1); ties broken by order, which d of real logits leaves rare."""
        if self._ranks is None:
            ranks = np.empty(self.n)
            shuffle = np.random.default_rng(0).permutation(self.n)
            ranks[shuffle[np.argsort(self.a[shuffle], kind="stable")]] = (np.arange(self.n) + 0.5) / self.n
            self._ranks = ranks
        return self._ranks

    def stands_out(self, group: Flags, factor: float = 4.0) -> dict[str, float] | None:
        """Evidence that abs d of a group is above the regime while the rest is clean, or None."""
        m = int(np.count_nonzero(group))
        if m < 20 or self.n - m < 20:
            return None
        inside, outside = float(self.a[group].mean()), float(self.a[~group].mean())
        # few tokens far off in the rest are not what a place explains: the rest must be clean
        if inside <= self.limit or inside < factor * outside or outside > max(self.limit, inside / 20):
            return None
        spread = math.sqrt((1 / m + 1 / (self.n - m)) / 12)
        z = float(self.ranks[group].mean() - self.ranks[~group].mean()) / spread
        if z < _Z:
            high = self.a > max(4 * self.limit, 20 * float(np.median(self.a)))
            p, q, r = float(high[group].mean()), float(high[~group].mean()), float(high.mean())
            z = (p - q) / math.sqrt(max(r * (1 - r), 1e-12) * (1 / m + 1 / (self.n - m)))
        if z < _Z:
            return None
        return {"mean_abs_d_there": inside, "mean_abs_d_elsewhere": outside, "tokens_there": m, "z": z}


def _bounds(regime: str) -> tuple[float, float]:
    row = LADDER.get(regime, {})
    return row.get("mean_abs_d", (_BITWISE_FLOOR,))[0], row.get("k3", (math.inf,))[0]


def diagnose(
    pairs: RawPairs, regime: str, *, settings: Settings | None = None, history: History = ()
) -> tuple[Finding, ...]:
    """Return the likely causes of one window, the surest first; empty for a clean one.

    regime: one of `contracts.window.REGIMES`. history: earlier windows, oldest first. Linear in tokens but for
    one sort.
    """
    look = _Look(pairs, regime)
    found = list(_counts(look))
    if look.n >= _FEW or (regime == "bitwise" and look.n):
        found += _first_of(look, settings or Settings(), history)
    return tuple(found)


def _finding(cause: str, **evidence: Any) -> Finding:
    plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in evidence.items()}
    return Finding(id=cause, text=sentence(cause, plain), evidence=plain)


def _counts(look: _Look) -> Iterator[Finding]:
    x, y = look.pairs.first, look.pairs.second
    tokens = int(x.size)
    for side, mine, other in (("rollout", x, y), ("trainer", y, x)):
        # a near-certain token, or the only one that top-p keeps, is 0.0 too, but never where the other side is
        # below log(1/2); other tokens' logprobs put such zeros on both sides alike, and a fault that moves
        # near-certain tokens far moves those just below 0.0 as often
        zero, near = mine == 0, (mine < 0) & (mine > -1e-3)
        deep = other < -0.7
        filled, mirrored = (
            int(np.count_nonzero(zero & deep)),
            int(np.count_nonzero((other == 0) & (mine < -0.7))),
        )
        rate = int(np.count_nonzero(near & deep)) / max(int(np.count_nonzero(near)), 1)
        moved = rate * int(np.count_nonzero(zero))
        if filled > max(1e-4 * tokens, 2, 4 * mirrored, 3 * moved):
            yield _finding("filled_logprobs", side=side, filled_with=0.0, filled=filled, tokens=tokens)
        low = mine[np.isfinite(mine) & (mine < -60)]
        if low.size > 2:
            values, counts = np.unique(low, return_counts=True)
            most = int(counts.argmax())
            # a real logprob so low is seldom whole and never most of them
            if counts[most] > max(2, 0.5 * low.size) and values[most] == np.rint(values[most]):
                yield _finding(
                    "filled_logprobs",
                    side=side,
                    filled_with=values[most],
                    filled=int(counts[most]),
                    tokens=tokens,
                )
        if bad := int(np.count_nonzero(~np.isfinite(mine))):
            yield _finding("nonfinite", side=side, nonfinite=bad, tokens=tokens)
        if above := int(np.count_nonzero(np.isfinite(mine) & (mine > 0))):
            yield _finding(
                "positive_logprobs", side=side, positive=above, largest=mine[mine > 0].max(), tokens=tokens
            )


def _first_of(look: _Look, settings: Settings, history: History) -> list[Finding]:
    for test in (_repeats, _grid, _shift, _groups, _places, _few_sequences, _retokenised):
        if found := test(look):
            return found
    if found := _normalised(look, settings):
        return found
    if not _off(look):
        return []
    return _shape(look, history)


def _off(look: _Look) -> bool:
    if look.regime == "bitwise":
        return bool((look.pairs.first.view(np.int32) != look.pairs.second.view(np.int32)).any())
    return look.mean > look.limit or _k3(look) > look.k3_limit


def _k3(look: _Look) -> float:
    # one token at +12 nats would carry the mean of a million: the tail is cut where k3 is 6 nats
    d = np.clip(look.d, -20.0, 2.0)
    return float((np.expm1(d) - d).mean())


def _repeats(look: _Look) -> list[Finding]:
    """Sequences that came more than once: the side that differs from itself is the side that is off."""
    digests = look.pairs.digests
    if digests is None or not _off(look):
        return []
    lengths = look.pairs.lengths
    ends = np.cumsum(lengths)
    order = np.argsort(digests, kind="stable")
    same = (digests[order][1:] == digests[order][:-1]) & (lengths[order][1:] == lengths[order][:-1])
    left, right = order[:-1][same][:2000], order[1:][same][:2000]
    if left.size < 4:
        return []
    a = np.concatenate([np.arange(ends[i] - lengths[i], ends[i]) for i in left])
    b = np.concatenate([np.arange(ends[i] - lengths[i], ends[i]) for i in right])
    with np.errstate(invalid="ignore"):
        engine = float(np.nanmean(np.abs(look.pairs.first[a] - look.pairs.first[b])))
        trainer = float(np.nanmean(np.abs(look.pairs.second[a] - look.pairs.second[b])))
    if max(engine, trainer) < 0.5 * look.mean or max(engine, trainer) < 4 * min(engine, trainer):
        return []
    evidence = {"repeats": int(left.size), "rollout_differs_by": engine, "trainer_differs_by": trainer}
    return [_finding("engine_varies" if engine > trainer else "trainer_variance", **evidence)]


def _grid(look: _Look) -> list[Finding]:
    moved = look.d[look.d != 0]
    if moved.size >= 100 and look.a.max() >= 1 / 32:
        for power in (3, 4, 5, 6):
            scaled = moved * 2.0**power
            share = float((scaled == np.rint(scaled)).mean())
            if share > 0.9:
                return [_finding("quantised_logits", grid=2.0**-power, share=share, mean_abs_d=look.mean)]
    if look.regime != "fp8":
        # a bf16 logprob has 16 zero bits at its end; by chance one float32 in 65,536 has
        short = [
            float(((v.view(np.uint32) & 0xFFFF) == 0).mean()) for v in (look.pairs.first, look.pairs.second)
        ]
        if max(short) > 0.99 and min(short) < 0.5 and _off(look):
            side = "rollout" if short[0] > short[1] else "trainer"
            return [_finding("quantised_logits", side=side, share=max(short), mean_abs_d=look.mean)]
    return []


def _shift(look: _Look) -> list[Finding]:
    if look.mean < max(0.3, 5 * look.limit):
        return []
    here = _correlation(look.x, look.y)
    inner = look.sequence[1:] == look.sequence[:-1]
    later, earlier = (
        _correlation(look.x[:-1][inner], look.y[1:][inner]),
        _correlation(look.x[1:][inner], look.y[:-1][inner]),
    )
    if max(later, earlier) > max(0.6, here + 0.3):
        return [_finding("shift_or_wrong_tokens", shift=1 if later > earlier else -1, correlation=here,
                         correlation_shifted=max(later, earlier), mean_abs_d=look.mean)]  # fmt: skip
    # unlike at nearly every token and in nearly every sequence: a few sequences are another cause
    if here < 0.3 and float((look.a > 0.05).mean()) > 0.5:
        return [_finding("shift_or_wrong_tokens", shift=0, correlation=here, mean_abs_d=look.mean)]
    return []


def _correlation(a: Doubles, b: Doubles) -> float:
    if a.size < 10 or a.std() == 0 or b.std() == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def _groups(look: _Look) -> list[Finding]:
    """Who: what is known of the sequences beside their logprobs."""
    pairs, at = look.pairs, look.sequence
    if pairs.engine is not None and np.unique(pairs.engine).size > 1:
        engines = pairs.engine[at]
        count = np.bincount(engines)
        means = np.bincount(engines, weights=look.a) / np.maximum(count, 1)
        worst = int(means.argmax())
        if seen := look.stands_out(engines == worst):
            return [
                _finding(
                    "one_engine", engine=pairs.engine_names[worst] if pairs.engine_names else worst, **seen
                )
            ]
    named: list[tuple[str, Flags | None]] = [
        ("pack_boundary", None if pairs.pack_index is None else pairs.pack_index[at] > 0),
        ("padding", None if pairs.padded is None else pairs.padded[at]),
        ("prefix_cache", None if pairs.prefix_hit is None else pairs.prefix_hit[at]),
        ("speculative_decoding", None if pairs.drafted is None else pairs.drafted[look.good]),
    ]
    for cause, group in named:
        if group is not None and (seen := look.stands_out(group)):
            return [_finding(cause, **seen)]
    return []


def _places(look: _Look) -> list[Finding]:
    """Where in a sequence: its ends, the length limit, a position from which on it is off."""
    top = int(look.position.max())
    near = (look.position > top - 8) & (look.length > 8)
    last, first = look.place == look.length - 1, look.place == 0
    for cause, group in (("sequence_end", last), ("sequence_start", first)):
        seen = look.stands_out(group)
        if seen and cause == "sequence_end" and look.stands_out(near & ~last):
            break
        if seen:
            return [_finding(cause, **seen)]
    return _break(look, top, near)


def _break(look: _Look, top: int, near: Flags) -> list[Finding]:
    """One step in the profile of abs d over absolute positions, against a line and a power of the position."""
    for name, where in (("position", look.position), ("response", look.place)):
        if name == "response" and look.pairs.starts is None:
            continue
        edges = np.unique(np.quantile(where, np.linspace(0, 1, 65)).astype(np.int64))
        if edges.size < 8:
            continue
        bins = np.clip(np.searchsorted(edges, where, side="right") - 1, 0, edges.size - 1)
        count = np.bincount(bins, minlength=edges.size).astype(float)
        kept = count >= 20
        if np.count_nonzero(kept) < 8:
            continue
        sums = np.bincount(bins, weights=look.ranks, minlength=edges.size)
        profile, weight, at = sums[kept] / count[kept], count[kept], edges[kept].astype(float)
        step, cut, jump = _best_step(profile, weight, at)
        slopes = min(
            _line(profile, weight, at), _line(profile, weight, np.log1p(at)), _line(profile, weight, at**2)
        )
        whole = float((weight * (profile - np.average(profile, weights=weight)) ** 2).sum())
        edge = int(at[cut])
        late = where >= edge
        seen = look.stands_out(late)
        if seen and step < 0.5 * slopes and step < 0.3 * whole and jump > 0.35:
            if name == "position" and edge > top - 12:
                return [_finding("speculative_decoding", near_limit=top + 1, **seen)]
            return [_finding("position_break", counted_from=name, position=edge, **seen)]
        if slopes < 0.35 * whole and whole * 12 > 100 and _off_late(look, where):
            half = np.median(where)
            return [_finding("grows_with_length", counted_from=name, late_mean_abs_d=look.a[where > half].mean(),
                             early_mean_abs_d=look.a[where <= half].mean())]  # fmt: skip
    if seen := look.stands_out(near):
        return [_finding("speculative_decoding", near_limit=top + 1, **seen)]
    return []


def _off_late(look: _Look, where: npt.NDArray[np.int64]) -> bool:
    low, high = np.quantile(where, (0.25, 0.75))
    late, early = look.a[where >= high], look.a[where <= low]
    if not late.size or not early.size or late.mean() <= look.limit or late.mean() < 2.5 * early.mean():
        return False
    # few tokens far off do not move the median: they are no growth
    return bool(np.median(late) > 1.8 * np.median(early))


def _best_step(profile: Doubles, weight: Doubles, at: Doubles) -> tuple[float, int, float]:
    """Fit a level and, from a cut on, a line: (squares left, cut, jump at the cut over the whole rise)."""
    best = (math.inf, 1, 0.0)
    for cut in range(2, profile.size - 1):
        level = float(np.average(profile[:cut], weights=weight[:cut]))
        left = float((weight[:cut] * (profile[:cut] - level) ** 2).sum())
        w, x, y = weight[cut:], at[cut:] - at[cut], profile[cut:]
        mx, my = float(np.average(x, weights=w)), float(np.average(y, weights=w))
        slope = float((w * (x - mx) * (y - my)).sum() / max(float((w * (x - mx) ** 2).sum()), 1e-300))
        right = float((w * (y - my - slope * (x - mx)) ** 2).sum())
        if left + right < best[0]:
            rise = max(float(y.max()) - level, 1e-12)
            best = (left + right, cut, (my - slope * mx - level) / rise)
    return best


def _line(profile: Doubles, weight: Doubles, at: Doubles) -> float:
    x, y = at - np.average(at, weights=weight), profile - np.average(profile, weights=weight)
    slope = (weight * x * y).sum() / max((weight * x * x).sum(), 1e-300)
    return float((weight * (y - slope * x) ** 2).sum())


def _few_sequences(look: _Look) -> list[Finding]:
    """Few whole sequences far off, the rest clean."""
    count = np.bincount(look.sequence, minlength=look.pairs.lengths.size)
    mean = np.bincount(look.sequence, weights=look.a, minlength=count.size) / np.maximum(count, 1)
    middle = float(np.median(mean[count > 0]))
    high = look.a > max(10 * look.limit, 10 * middle)
    share = np.bincount(look.sequence, weights=high, minlength=count.size) / np.maximum(count, 1)
    bad = (share > 0.3) & (count >= 8)
    part = float(bad.mean())
    if int(bad.sum()) < 2 or part > 0.25 or float(mean[bad].mean()) < max(10 * middle, 5 * look.limit):
        return []
    # tokens scattered over all sequences make some sequences bad by chance: then the others have their part too
    if float(high[bad[look.sequence]].sum()) < 0.7 * float(high.sum()):
        return []
    return [_finding("few_sequences", sequences=int(bad.sum()), share=part, mean_abs_d_there=mean[bad].mean(),
                     median_elsewhere=middle)]  # fmt: skip


def _retokenised(look: _Look) -> list[Finding]:
    """Few tokens, all over, nats too unlikely for the trainer; they move E[rho] too, so they come before it."""
    size = float(np.median(look.a))
    tail = look.a > max(20 * size, 10 * look.limit, 0.3)
    part = float(tail.mean())
    carried = float(look.a[tail].sum() / max(look.a.sum(), 1e-300))
    if np.count_nonzero(tail) < 10 or part > 0.15 or carried < 0.3 or look.mean < 0.5 * look.limit:
        return []
    negative, far = float((look.d[tail] < 0).mean()), float(look.a[tail].mean())
    if negative < 0.85 or far < 1.0:
        return []
    return [_finding("retokenised", share_of_tokens=part, tail_carries=carried, share_negative_of_tail=negative,
                     mean_abs_d=look.mean)]  # fmt: skip


def _normalised(look: _Look, settings: Settings) -> list[Finding]:
    """E[rho] = 1 holds for any two policies that normalise over the same support; here it does not."""
    d = look.d
    rho = np.exp(np.clip(d, -30.0, 3.0))  # cut above: the mean can but fall, so a mean above 1 is proven
    mean = float(rho.mean())
    z = (mean - 1) / max(float(rho.std()) / math.sqrt(look.n), 1e-12)
    # below 1 a rare heavy token may be missing: E[d] must be far from -E[d^2] / 2 too, on winsorised d
    cut = np.clip(d, -1.0, 1.0)
    second = float((cut * cut).mean())
    ratio = -2 * float(cut.mean()) / second if second > 0 else math.nan
    above = mean > 1 + 1e-3 and z > _Z
    below = mean < 1 - 1e-3 and z < -_Z and ratio > 1.8
    if not (above or below) or look.mean < 0.1 * look.limit:
        return []
    evidence = {
        "rho_mean": mean,
        "rho_z": z,
        "mean_d": float(d.mean()),
        "mean_abs_d": look.mean,
        "r_ratio": ratio,
    }
    size = max(float(np.quantile(look.a, 0.5)), 1e-6)
    clear = d[look.a > size]
    negative = float((clear < 0).mean())
    evidence["share_negative"] = negative
    if negative > 0.985 or negative < 0.015:
        return [_finding("support_renormalised", **evidence)]
    slope, fit = _odds(look)
    lopsided = negative > 0.93 or negative < 0.07
    sloped = fit > 0.6 and abs(slope - 1) > 0.02
    declared = evidence["mean_d"] > 0 and settings.temperature not in (None, 1.0)
    if above and (sloped or (declared and not lopsided)):
        said: dict[str, Any] = {"temperature": settings.temperature, "odds_slope": slope, "fit": fit}
        return [_finding("raw_against_processed", **said, **evidence)]
    if lopsided:
        return [_finding("support_renormalised", **evidence)]
    if _off(look):
        return [_finding("support_or_scale", **evidence)]
    return []


def _odds(look: _Look) -> tuple[float, float]:
    """Slope of the trainer's log odds over the rollout's at likely tokens, and the share of the change it explains.

    A factor on the logits of one side, 1 / T for a temperature, multiplies the log odds of a token that has one rival. With
    several the slope leans further from 1 than the factor does: it tells the side and the sign, not T.
    """
    chosen = (look.x > math.log(0.6)) & (look.x < -1e-4) & (look.y < -1e-6)
    if np.count_nonzero(chosen) < 50:
        return 1.0, 0.0
    x = look.x[chosen] - np.log(-np.expm1(look.x[chosen]))
    change = look.y[chosen] - np.log(-np.expm1(look.y[chosen])) - x
    slope = float((x * change).sum() / (x * x).sum())
    whole = float((change * change).sum())
    left = float(((change - slope * x) ** 2).sum())
    return 1 + slope, 1 - left / whole if whole > 0 else 0.0


def _shape(look: _Look, history: History) -> list[Finding]:
    """Both sides normalise alike and every place is as bad as any other: what is left is the shape of d."""
    a, d = look.a, look.d
    variance = float(d.var())
    kurtosis = float(((d - d.mean()) ** 4).mean()) / variance**2 if variance > 0 else math.nan
    square = float((d * d).mean())
    ratio = -2 * float(d.mean()) / square if square > 0 else math.nan
    evidence: dict[str, Any] = {
        "mean_abs_d": look.mean,
        "kurtosis": kurtosis,
        "r_ratio": ratio,
        "tokens": look.n,
    }
    size = float(np.median(a))
    tail = a > max(10 * size, 2 * look.limit, 1e-6)
    carried = float(a[tail].sum() / max(a.sum(), 1e-300))
    if kurtosis > 25 and carried > 0.3 and np.count_nonzero(tail) >= 10:
        negative = float((d[tail] < 0).mean())
        evidence |= {
            "share_of_tokens": float(tail.mean()),
            "share_negative_of_tail": negative,
            "tail_carries": carried,
        }
        if negative < 0.75:
            return [_finding("moe_routing", **evidence)]
        return [_finding("unclear", between=["moe_routing", "retokenised"], **evidence)]
    slope, fit = _odds(look)
    if fit > 0.7 and abs(slope - 1) > 0.01 and look.mean > 0.005:
        # a scaled policy keeps E[rho] = 1; the same slope with E[rho] above 1 is raw against processed, if it lasts
        rho = np.exp(np.clip(d, -30.0, 3.0))
        z = float(rho.mean() - 1) / max(float(rho.std()) / math.sqrt(look.n), 1e-12)
        if z > 3:
            names = ["raw_against_processed", "logit_scale"]
            return [_finding("unclear", between=names, odds_slope=slope, rho_z=z, **evidence)]
        return [_finding("logit_scale", odds_slope=slope, fit=fit, **evidence)]
    return _over_steps(look, history, evidence)


def _over_steps(look: _Look, history: History, evidence: dict[str, Any]) -> list[Finding]:
    values = np.asarray([point.mean_abs_d for point in history] + [look.mean])
    if values.size >= 6 and np.isfinite(values).all():
        before = float(np.median(values[:-1]))
        order = values.argsort().argsort()
        rising = float(np.corrcoef(order, np.arange(values.size))[0, 1])
        evidence |= {"windows": int(values.size), "median_before": before}
        if rising > 0.9 and values[-1] > 2 * values[0]:
            jumps = np.diff(values)
            if jumps.max() < 0.6 * (values[-1] - values[0]):
                still = [point.moved for point in history]
                if all(moved is False for moved in still):
                    return [_finding("ageing_state", rising=rising, **evidence)]
                return [
                    _finding("unclear", between=["ageing_state", "other_policy"], rising=rising, **evidence)
                ]
        if look.mean > 3 * before and before <= look.limit:
            return [_finding("other_policy", times_before=look.mean / max(before, 1e-12), **evidence)]
        if look.mean < 1.5 * before and look.mean <= 0.05:
            return [_finding("numeric_noise", **evidence)]
    quiet = look.regime in ("bitwise", "near_bitwise")
    if look.mean <= 0.02 and quiet and evidence["kurtosis"] < 30:
        return [_finding("numeric_noise", **evidence)]
    if look.mean > max(0.08, 1.5 * look.limit) and 0.4 <= evidence["r_ratio"] <= 1.6:
        return [_finding("other_policy", **evidence)]
    return [_finding("unclear", between=["numeric_noise", "other_policy"], **evidence)]
