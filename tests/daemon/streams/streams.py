# SPDX-License-Identifier: Apache-2.0
"""Labelled streams of token pairs, one kind per line of the signature key, from the logits in `logits.npz`.

Tokens are sampled from the real distributions of a tiny model; a fault moves the real logits by what that fault did to the
model (`bf16`, `flips`, `router`, `fp8`, `rope`, `window`, `stale`), or does to the sampled logprobs what a bug does. Every stream
also carries plain numeric noise of its regime. `strength` scales the fault; what is weaker than the weakest listed is
inside the regime and is no fault. The same arguments give the same stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isoexec.daemon.diagnosis.pairs import Point, RawPairs, Settings

__all__ = ["CLEAN", "KINDS", "Stream", "clean", "stream"]

Doubles = npt.NDArray[np.float64]
LENGTH, VOCABULARY = 64, 256

CLEAN = {"near_bitwise": 1e-5, "bf16_dense": 0.02, "bf16_moe": 0.04, "fp8": 0.07}
"""Mean abs d in nats that each regime allows; the bitwise one allows none."""


_K3 = {"bf16_dense": 1e-3, "bf16_moe": 5e-3, "fp8": 5e-3}


def _k3(d: Doubles) -> float:
    return float((np.expm1(d) - d).mean())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """Raw pairs under a regime, and the cause that is planted; "" in a clean one."""

    kind: str
    cause: str
    regime: str
    strength: float
    pairs: RawPairs
    settings: Settings = dataclasses.field(default_factory=Settings)
    history: tuple[Point, ...] = ()


@cache
def _kept() -> dict[str, Doubles]:
    with np.load(Path(__file__).with_name("logits.npz")) as found:
        return {name: found[name].astype(np.float64) for name in found.files}


@cache
def _move(name: str) -> Doubles:
    """What a variant adds to the logits [rows * 64, 256]."""
    kept = _kept()
    hidden = kept["hidden"]
    moved: Doubles = (kept[name] * kept[f"{name}_scale"]) @ kept["head"].T
    if name == "stale":
        moved = moved + (hidden + kept[name] * kept[f"{name}_scale"]) @ kept["stale_head"].T
    return moved.reshape(-1, VOCABULARY)


@cache
def _logits() -> Doubles:
    found: Doubles = (_kept()["hidden"] @ _kept()["head"].T).reshape(-1, VOCABULARY)
    return found


def _log_softmax(logits: Doubles) -> Doubles:
    shifted = logits - logits.max(-1, keepdims=True)
    found: Doubles = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


@cache
def _base() -> Doubles:
    return _log_softmax(_logits())


@cache
def _cumulated() -> Doubles:
    return _cumulate(_base())


def _cumulate(table: Doubles) -> Doubles:
    """Rows of cumulated probabilities, row i between i and i + 1: one sorted list to search in."""
    cdf = np.exp(table).cumsum(-1)
    found: Doubles = (cdf / cdf[:, -1:] + np.arange(cdf.shape[0])[:, None]).ravel()
    return found


@lru_cache(maxsize=48)
def _noise_of(shape: str, target: float) -> tuple[Doubles, Doubles]:
    """d of every token for a variant's move with either sign, scaled until its mean abs over samples is `target`."""
    size, move, base = 1.0, _move(shape), _base()
    weight = np.exp(base)
    for _ in range(6):
        up, down = (_log_softmax(_logits() + sign * size * move) - base for sign in (1, -1))
        mean = float((weight * (np.abs(up) + np.abs(down)) / 2).sum(-1).mean())
        size *= target / max(mean, 1e-30)
    return up, down


class _Draw:
    """Sequences of contexts, tokens sampled from a table of logprobs [contexts, 256], and their noise."""

    def __init__(self, seed: int, tokens: int, regime: str, sampler: Doubles | None = None) -> None:
        self.rng = np.random.default_rng(seed)
        rows = _logits().shape[0] // LENGTH
        count = max(tokens // 36, 2)
        # contexts start..end of a row: half of the sequences run into the length limit
        starts = self.rng.integers(4, 20, count)
        ends = np.where(self.rng.uniform(size=count) < 0.5, LENGTH, self.rng.integers(36, LENGTH + 1, count))
        self.row = self.rng.integers(0, rows, count)
        self.starts, self.lengths = starts.astype(np.int64), (ends - starts).astype(np.int64)
        self._lay()
        self.base = _base()
        self.sampler = self.base if sampler is None else sampler
        self.regime = regime
        flat = _cumulated() if sampler is None else _cumulate(sampler)
        picked = np.searchsorted(flat, self.context + self.rng.uniform(size=self.context.size), side="right")
        self.token = np.minimum(picked - self.context * VOCABULARY, VOCABULARY - 1)

    def _lay(self) -> None:
        at = np.repeat(np.arange(self.row.size), self.lengths)
        self.place = np.arange(at.size) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        self.position = self.place + self.starts[at]
        self.context = self.row[at] * LENGTH + self.position
        self.sequence = at

    def repeat(self, times: int) -> None:
        """Keep the first of every `times` sequences, that many times, with the tokens it sampled."""
        ends = np.cumsum(self.lengths)
        first = np.arange(0, self.row.size, times)
        token = np.concatenate(
            [self.token[ends[i] - self.lengths[i] : ends[i]] for i in first for _ in range(times)]
        )
        chosen = np.repeat(first, times)
        self.row, self.starts, self.lengths = self.row[chosen], self.starts[chosen], self.lengths[chosen]
        self._lay()
        self.token = token

    def pick(self, table: Doubles) -> Doubles:
        found: Doubles = table[self.context, self.token]
        return found

    def noise(self, target: float, shape: str = "bf16") -> Doubles:
        """d of numeric noise of mean abs `target`: the real move of a variant, of either sign, token by token."""
        if target <= 0:
            return np.zeros(self.context.size)
        up, down = _noise_of(shape, float(f"{target:.2g}"))
        sign = self.rng.uniform(size=self.context.size) < 0.5
        found: Doubles = np.where(sign, self.pick(up), self.pick(down))
        return found

    def natural(self, share: float = 0.4) -> Doubles:
        """Noise of the regime, at a share of what it allows."""
        shape = {"bf16_moe": "flips", "fp8": "fp8"}.get(self.regime, "bf16")
        return self.noise(share * CLEAN.get(self.regime, 0.0), shape)

    def moved(self, name: str, strength: float) -> Doubles:
        """d of a variant of the model, its move times `strength`."""
        return self.pick(_log_softmax(_logits() + strength * _move(name))) - self.pick(self.base)

    def pairs(self, first: Doubles, second: Doubles, **known: Any) -> RawPairs:
        values: dict[str, Any] = {"starts": self.starts, "lengths": self.lengths} | known
        return RawPairs(first=first.astype(np.float32), second=second.astype(np.float32), **values)


def clean(regime: str, seed: int, tokens: int) -> Stream:
    """A window inside its regime: noise of 5 % to 80 % of what it allows, and every place that could be blamed named."""
    draw = _Draw(seed, tokens, regime)
    q = draw.pick(draw.base)
    d = draw.natural(float(draw.rng.integers(1, 17) / 20))
    # inside the regime by k3 too: heavy tails of routing reach that bound first
    while _k3(d) > 0.7 * _K3.get(regime, np.inf):
        d *= 0.8
    p = q + d
    s = draw.lengths.size
    known = {
        "engine": draw.rng.integers(0, 8, s),
        "pack_index": draw.rng.integers(0, 4, s),
        "padded": draw.rng.uniform(size=s) < 0.5,
        "prefix_hit": draw.rng.uniform(size=s) < 0.3,
        "drafted": draw.rng.uniform(size=q.size) < 0.4,
        "digests": np.arange(s, dtype=np.int64),
    }
    before = float(np.abs(p - q).mean()) * draw.rng.uniform(0.8, 1.2, 12)
    past = tuple(Point(step=i, mean_abs_d=float(value), moved=True) for i, value in enumerate(before))
    p = np.where(p > 0, q, p)
    return Stream(
        kind="clean", cause="", regime=regime, strength=0, pairs=draw.pairs(q, p, **known), history=past
    )


Kind = Callable[[int, int, float, str], Stream]
KINDS: dict[str, tuple[str, tuple[float, ...], Callable[..., Any]]] = {}


def _kind(name: str, cause: str, *strengths: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def keep(make: Callable[..., Any]) -> Callable[..., Any]:
        KINDS[name] = (cause, strengths, make)
        return make

    return keep


def stream(kind: str, seed: int, tokens: int, strength: float, regime: str = "bf16_dense") -> Stream:
    """Make one labelled stream of about `tokens` tokens."""
    cause, _, make = KINDS[kind]
    sampler = None
    if kind.startswith("raw against"):
        sampler = _log_softmax(_logits() / strength)
    elif kind in _CUTS:
        sampler = _log_softmax(_CUTS[kind](_logits(), strength))
    draw = _Draw(seed, tokens, regime, sampler)
    found = make(draw, strength)
    first, second, *rest = found
    known: dict[str, Any] = dict(rest[0]) if rest else {}
    more = {name: known.pop(name) for name in ("settings", "history") if name in known}
    if not known.pop("above", False):
        # two moves of one token can add to more than 0, which no policy says: such a token keeps its logprob
        first, second = np.where(first > 0, second, first), np.where(second > 0, first, second)
    return Stream(
        kind=kind,
        cause=cause,
        regime=regime,
        strength=strength,
        pairs=draw.pairs(first, second, **known),
        **more,
    )


def _top_p(logits: Doubles, keep: float) -> Doubles:
    order = np.argsort(-logits, axis=-1)
    ranked = np.take_along_axis(np.exp(_log_softmax(logits)), order, -1)
    outside = np.empty(logits.shape, bool)
    np.put_along_axis(outside, order, ranked.cumsum(-1) - ranked > keep, -1)
    return np.where(outside, -1e30, logits)


def _top_k(logits: Doubles, k: float) -> Doubles:
    return np.where(logits < np.sort(logits, -1)[:, -int(k), None], -1e30, logits)


def _min_p(logits: Doubles, share: float) -> Doubles:
    return np.where(logits < logits.max(-1, keepdims=True) + np.log(share), -1e30, logits)


_CUTS: dict[str, Callable[[Doubles, float], Doubles]] = {"top-p": _top_p, "top-k": _top_k, "min-p": _min_p}


def _cut(draw: _Draw, strength: float) -> Any:
    return draw.pick(draw.sampler), draw.pick(draw.base) + draw.natural()


_kind("top-p", "support_renormalised", 0.8, 0.9, 0.95)(_cut)
_kind("top-k", "support_renormalised", 5, 10, 20)(_cut)
_kind("min-p", "support_renormalised", 0.02, 0.05, 0.1)(_cut)


@_kind("padded vocabulary", "support_renormalised", 0.1, 0.3, 1.0)
def _padded_vocabulary(draw: _Draw, strength: float) -> Any:
    # columns of logit 0 beside the real ones, on the rollout's side
    extra = strength * 256 * np.exp(-np.log(np.exp(_logits()).sum(-1)))
    return draw.pick(draw.base) - np.log1p(extra)[draw.context], draw.pick(draw.base) + draw.natural()


def _raw(draw: _Draw, strength: float) -> Any:
    return draw.pick(draw.base), draw.pick(draw.sampler) + draw.natural()


_kind("raw against processed", "raw_against_processed", 0.6, 0.8, 1.2, 1.4)(_raw)


@_kind("raw against processed, T declared", "raw_against_processed", 0.6, 0.9, 1.1, 1.2)
def _raw_declared(draw: _Draw, strength: float) -> Any:
    return (*_raw(draw, strength), {"settings": Settings(temperature=strength)})


def _some(draw: _Draw, share: float) -> npt.NDArray[np.bool_]:
    return draw.rng.uniform(size=draw.context.size) < share


def _filled(value: float) -> Callable[..., Any]:
    def make(draw: _Draw, strength: float) -> Any:
        q = draw.pick(draw.base)
        return np.where(_some(draw, strength), value, q), q + draw.natural(), {"above": value > 0}

    return make


_kind("filled with 0.0", "filled_logprobs", 0.005, 0.02, 0.1)(_filled(0.0))
_kind("filled with -1e4", "filled_logprobs", 0.005, 0.02, 0.1)(_filled(-1e4))
_kind("NaN", "nonfinite", 0.005, 0.02, 0.1)(_filled(np.nan))
_kind("-inf", "nonfinite", 0.005, 0.02, 0.1)(_filled(-np.inf))


def _short(values: Doubles) -> Doubles:
    bits = values.astype(np.float32).view(np.uint32)
    found: Doubles = ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    return found


@_kind("unfused bf16 log-softmax", "positive_logprobs", 1, 2)
def _above(draw: _Draw, strength: float) -> Any:
    logits = _logits() * strength
    whole = logits.max(-1) + np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1))
    table = _log_softmax(logits)
    return draw.pick(table), draw.pick(logits - _short(whole)[:, None]), {"above": True}


@_kind("shift by one", "shift_or_wrong_tokens", 1)
def _shifted(draw: _Draw, strength: float) -> Any:
    q = draw.pick(draw.base)
    return q, np.roll(q, 1) + draw.natural()


@_kind("wrong tokens", "shift_or_wrong_tokens", 1)
def _wrong(draw: _Draw, strength: float) -> Any:
    q = draw.pick(draw.base)
    return q, draw.rng.permutation(q) + draw.natural()


def _where(draw: _Draw, q: Doubles, group: Any, strength: float, name: str = "stale") -> Doubles:
    return np.where(group, q + draw.noise(strength, name), q + draw.natural())


@_kind("last token", "sequence_end", 0.3, 1.0, 3.0)
def _last(draw: _Draw, strength: float) -> Any:
    q = draw.pick(draw.base)
    return q, _where(draw, q, draw.place == draw.lengths[draw.sequence] - 1, strength)


@_kind("first token", "sequence_start", 0.3, 1.0, 3.0)
def _first(draw: _Draw, strength: float) -> Any:
    q = draw.pick(draw.base)
    return q, _where(draw, q, draw.place == 0, strength)


def _group(field: str) -> Callable[..., Any]:
    def make(draw: _Draw, strength: float) -> Any:
        q = draw.pick(draw.base)
        values: Any = draw.rng.integers(0, 4, draw.lengths.size)
        hit = values > 0 if field == "pack_index" else values == 3
        return (
            q,
            _where(draw, q, hit[draw.sequence], strength),
            {field: values if field in ("pack_index", "engine") else hit},
        )

    return make


_kind("not first in pack", "pack_boundary", 0.1, 0.3, 1.0)(_group("pack_index"))
_kind("left-padded rows", "padding", 0.1, 0.3, 1.0)(_group("padded"))
_kind("prefix hits", "prefix_cache", 0.1, 0.3, 1.0)(_group("prefix_hit"))
_kind("one engine", "one_engine", 0.1, 0.3, 1.0)(_group("engine"))


@_kind("sliding window", "position_break", 1.0, 2.0, 4.0)
def _window(draw: _Draw, strength: float) -> Any:
    q = draw.pick(draw.base)
    return q, q + draw.natural() + draw.moved("window", strength)


@_kind("chunk edge", "position_break", 0.2, 0.5, 1.0)
def _chunk(draw: _Draw, strength: float) -> Any:
    q = draw.pick(draw.base)
    return q, _where(draw, q, draw.position >= 24, strength)


@_kind("length", "grows_with_length", 1.0, 2.0, 4.0)
def _grows(draw: _Draw, strength: float) -> Any:
    q = draw.pick(draw.base)
    # the move of stretched positions, which a state carries on: every token adds its own
    return q, q + draw.natural() + strength * draw.noise(0.2, "rope") * (draw.position / LENGTH) ** 1.5


def _past(draw: _Draw, values: Any, moved: bool) -> tuple[Point, ...]:
    return tuple(Point(step=i, mean_abs_d=float(v), moved=moved) for i, v in enumerate(values))


@_kind("stale weights, jump", "other_policy", 0.05, 0.1, 0.3)
def _stale_jump(draw: _Draw, strength: float) -> Any:
    q = draw.pick(draw.base)
    before = 0.008 * draw.rng.uniform(0.8, 1.2, 10)
    return q, q + draw.natural() + draw.noise(strength, "stale"), {"history": _past(draw, before, True)}


@_kind("stale weights, no history", "other_policy", 0.15, 0.3, 0.6)
def _stale(draw: _Draw, strength: float) -> Any:
    q = draw.pick(draw.base)
    return q, q + draw.natural() + draw.noise(strength, "stale")


@_kind("ageing state", "ageing_state", 0.05, 0.1, 0.3)
def _ageing(draw: _Draw, strength: float) -> Any:
    q = draw.pick(draw.base)
    before = 0.01 + (strength - 0.01) * np.arange(10) / 10
    return q, q + draw.noise(strength, "stale"), {"history": _past(draw, before, False)}


@_kind("few sequences", "few_sequences", 0.002, 0.01, 0.05)
def _few(draw: _Draw, strength: float) -> Any:
    q = draw.pick(draw.base)
    bad = draw.rng.uniform(size=draw.lengths.size) < strength
    bad[:2] = True
    return q, _where(draw, q, bad[draw.sequence], 2.0)


@_kind("near the length limit", "speculative_decoding", 0.2, 0.5, 1.0)
def _near(draw: _Draw, strength: float) -> Any:
    q = draw.pick(draw.base)
    return q, _where(draw, q, draw.position >= LENGTH - 6, strength)


@_kind("drafted tokens", "speculative_decoding", 0.1, 0.3, 1.0)
def _drafted(draw: _Draw, strength: float) -> Any:
    q = draw.pick(draw.base)
    hit = _some(draw, 0.4)
    return q, _where(draw, q, hit, strength), {"drafted": hit}


@_kind("expert flips", "moe_routing", 0.02, 0.05, 0.1)
def _flips(draw: _Draw, strength: float) -> Any:
    q, hit = draw.pick(draw.base), np.flatnonzero(_some(draw, strength))
    # what a flipped expert really did to the logits of one context, at as many tokens as are to flip
    move = _move("router")
    flipped = move[np.flatnonzero(np.abs(move).max(-1) > 0.5)]
    logits = _logits()[draw.context[hit]] + 1.5 * flipped[draw.rng.integers(0, flipped.shape[0], hit.size)]
    d = draw.natural()
    d[hit] = _log_softmax(logits)[np.arange(hit.size), draw.token[hit]] - q[hit]
    return q, q + d


@_kind("re-tokenised tokens", "retokenised", 0.01, 0.02, 0.05)
def _tokens(draw: _Draw, strength: float) -> Any:
    q, hit = draw.pick(draw.base), _some(draw, strength)
    other = draw.base[draw.context, draw.rng.integers(0, VOCABULARY, q.size)]
    return q, np.where(hit, other, q + draw.natural())


@_kind("grid of 1/8", "quantised_logits", 0.05, 0.1)
def _eighths(draw: _Draw, strength: float) -> Any:
    q = np.round(draw.pick(draw.base) * 4096) / 4096
    d = np.round((draw.noise(strength)) * 8) / 8
    return q, np.where(q + d < 0, q + d, q)


@_kind("bf16 logprobs", "quantised_logits", 1)
def _bf16(draw: _Draw, strength: float) -> Any:
    q = draw.pick(draw.base)
    return q + draw.noise(0.03), _short(q)


@_kind("trainer differs from itself", "trainer_variance", 0.1, 0.3)
def _trainer(draw: _Draw, strength: float) -> Any:
    draw.repeat(2)
    q = draw.pick(draw.base)
    return q, q + draw.noise(strength), {"digests": np.arange(draw.row.size) // 2}


@_kind("rollout differs from itself", "engine_varies", 0.1, 0.3)
def _engine(draw: _Draw, strength: float) -> Any:
    draw.repeat(2)
    q = draw.pick(draw.base)
    return q + draw.noise(strength), q, {"digests": np.arange(draw.row.size) // 2}


@_kind("logit scale", "logit_scale", 1.05, 1.1, 1.2)
def _scale(draw: _Draw, strength: float) -> Any:
    return draw.pick(draw.base), draw.pick(_log_softmax(_logits() * strength)) + draw.natural(0.2)


@_kind("noise above the regime", "numeric_noise", 0.022, 0.03, 0.04)
def _noise(draw: _Draw, strength: float) -> Any:
    q = draw.pick(draw.base)
    return (
        q,
        q + draw.noise(strength),
        {"history": _past(draw, strength * draw.rng.uniform(0.8, 1.2, 10), True)},
    )
