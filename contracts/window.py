# SPDX-License-Identifier: Apache-2.0
"""A window holds everything that was seen of a run over one step: what rules judge and journals keep.

A window states facts and statistics; the one opinion in it is the diagnosis that was made from raw pairs while they
were there, kept so that a replay says the same. What was not seen is listed in `silence`, or has the
value NaN; both become the verdict `unknown`. The daemon writes windows; `rules`, `verdict` and `causes`
read them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args

from isoexec.contracts.detail import Bucket, PairDetail
from isoexec.contracts.errors import IsoExecError

__all__ = [
    "FILLED_BELOW",
    "HISTOGRAM_EDGES",
    "PAIRS",
    "REGIMES",
    "ROLES",
    "SILENT",
    "UNPAIRED_REASONS",
    "Diagnosis",
    "EnvironmentBreak",
    "FieldDifference",
    "PairStats",
    "RegionBreak",
    "SamplingBreak",
    "Silence",
    "TopologyBreak",
    "Unpaired",
    "WeightBreak",
    "Window",
    "WindowError",
]

REGIMES = ("bitwise", "near_bitwise", "bf16_dense", "bf16_moe", "fp8")
ROLES = ("engine", "trainer", "driver")

# what a role can be silent about; a claim that rests on a silent subject is unknown
SilentSubject = Literal["hello", "attestation", "logprobs", "weights", "step", "probe"]
SILENT: tuple[str, ...] = get_args(SilentSubject)

RegionBreakKind = Literal["object", "canary", "source", "missing", "unequal_sides"]
WeightBreakKind = Literal["stale", "missing", "zero", "unequal", "unchanged", "unknown"]

# why tokens never met a partner, each with one sentence for a person
UNPAIRED_REASONS: dict[str, str] = {
    "only_rollout": "only the rollout was seen: the trainer reported nothing like it, or fewer of it",
    "only_trainer": "only the trainer was seen: the engine reported nothing like it, or fewer of it",
    "version": "the weight version differs between the sides",
    "length": "the length differs: one side reported a shorter or longer sequence, or another part of it",
    "ids": "token ids differ: tokenised anew, or under another prompt",
    "late": "the partner came after this side had been let go of",
    "evicted": "it, or its partner, was let go of early, for want of room",
    "unknown": "it is not known why: too much was left over to be compared, or too few tokens to tell",
}

# (subtrahend, minuend): d = logprob of the second case - logprob of the first
PAIRS: tuple[tuple[str, str], ...] = (
    ("engine_decode", "trainer_fwd"),
    ("engine_decode", "trainer_recompute"),
    ("engine_decode", "trainer_score"),
    ("engine_prefill", "trainer_fwd"),
    ("engine_prefill", "trainer_recompute"),
    ("engine_prefill", "trainer_score"),
    ("engine_decode", "engine_prefill"),
)

# upper edges of abs d in nats, half decades; a value belongs to the first edge it does not exceed
HISTOGRAM_EDGES: tuple[float, ...] = (
    1e-9, 3e-9, 1e-8, 3e-8, 1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4,
    3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0,
)  # fmt: skip

FILLED_BELOW = -1e-3
"""Nats below which a logprob can no longer be a rounded 0.0 of the other side."""


class WindowError(IsoExecError):
    """A stored window cannot be read back: a field is unknown, missing or of another type."""


@dataclass(frozen=True, kw_only=True)
class PairStats:
    """Statistics of d over the tokens of one case pair in one window.

    `d` is `logprob(pair[1]) - logprob(pair[0])` in nats: trainer - engine, or prefill - decode for the
    engine pair `("engine_decode", "engine_prefill")`. Counts are tokens. Every mean is over the
    `tokens - nonfinite` tokens with two finite logprobs and is NaN when there are none.
    """

    pair: tuple[str, str]
    tokens: int = 0  # paired tokens, non-finite ones included
    bitwise_equal: int = 0  # same 32 bits, compared as integers
    nonfinite: int = 0  # NaN or infinite on either side
    exact_zero: int = 0  # exactly 0.0 on one side, below FILLED_BELOW on the other
    positive: int = 0  # above 0 on either side
    id_mismatch: int = 0  # paired by position, but the token ids differ
    unpaired: Mapping[str, int] = field(default_factory=dict)  # tokens that found no partner in time, by role
    mean_d: float = math.nan
    mean_abs_d: float = math.nan
    max_abs_d: float = math.nan
    p99_abs_d: float = math.nan
    std_d: float = math.nan
    kurtosis: float = math.nan  # fourth central moment / variance^2; 3 for a normal distribution
    r_ratio: float = math.nan  # -2 E[d] / E[d^2]
    share_negative: float = math.nan  # share of d < 0 among the tokens with d != 0
    k1: float = math.nan  # E[-d]
    k3: float = math.nan  # E[exp(d) - 1 - d]
    rho_mean: float = math.nan  # E[exp(d)]
    rho_z: float = math.nan  # (rho_mean - 1) / standard error; 0 when every d is 0
    first_token_mean_abs_d: float = math.nan  # first response token of each sequence
    last_token_mean_abs_d: float = math.nan  # last response token of each sequence
    position_growth: float = math.nan  # mean abs d of the later half of the positions / of the earlier half
    correlation: float = math.nan  # between the two sides' logprobs
    grid_share: float = math.nan  # share of the d != 0 that are exact multiples of 1/32
    histogram: tuple[int, ...] = ()  # of abs d: one count per HISTOGRAM_EDGES, then one for what is above
    detail: PairDetail | None = None  # None: nobody computed it, as in journals of old

    @property
    def label(self) -> str:
        """The metric label of the pair, `engine_decode:trainer_score`."""
        return ":".join(self.pair)

    @property
    def rho_evidence(self) -> float:
        """Standard errors by which E[rho] is off 1: `rho_z_capped`, or `rho_z` where that test was not made."""
        capped = self.detail.number("rho_z_capped") if self.detail is not None else math.nan
        return self.rho_z if math.isnan(capped) else capped

    @property
    def is_engine_pair(self) -> bool:
        """Whether both sides are the engine's own: the third witness."""
        return all(case.startswith("engine_") for case in self.pair)

    @property
    def finite(self) -> int:
        """Tokens with two finite logprobs."""
        return self.tokens - self.nonfinite


@dataclass(frozen=True, kw_only=True)
class FieldDifference:
    """One field of the contract that engine and trainer declare differently. None: that side lacks it."""

    path: str
    engine: Any
    trainer: Any


@dataclass(frozen=True, kw_only=True)
class TopologyBreak:
    """A parallel degree outside what the contract admits, as one process reported it."""

    role: str
    source: str
    axis: str
    found: int | None  # None: the axis was not reported
    admitted: str  # `2` for a pinned degree, `{1, 2, 4}` for an invariant domain


@dataclass(frozen=True, kw_only=True)
class RegionBreak:
    """A region that does not run what the contract binds.

    kind: `object` another callable sits there; `canary` it computes other bits; `source` its file has
    another digest; `missing` nothing of ours is installed; `unequal_sides` engine and trainer name
    different functions.
    """

    role: str
    source: str
    region: str
    wanted: str
    found: str
    kind: RegionBreakKind


@dataclass(frozen=True, kw_only=True)
class WeightBreak:
    """A tensor that is not the same on both sides, or cannot be known.

    kind: `stale` the engine still has an earlier version; `missing` on one side; `zero` all bytes zero on
    one side; `unequal` same version, other bytes; `unchanged` no byte moved over a sync; `unknown`
    unreadable.
    """

    name: str
    kind: WeightBreakKind
    engine_version: int | None
    trainer_version: int | None


@dataclass(frozen=True, kw_only=True)
class Silence:
    """A role that did not say what it should have. `age_seconds` since the last time, None for never."""

    role: str
    what: SilentSubject
    age_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class SamplingBreak:
    """A sampling setting that engine and trainer apply differently: temperature, logprobs_mode, top_p."""

    field: str
    engine: Any
    trainer: Any


@dataclass(frozen=True, kw_only=True)
class EnvironmentBreak:
    """A version, build or flag that can change bits and is outside what the contract admits."""

    role: str
    source: str
    name: str
    wanted: str
    found: str


@dataclass(frozen=True, kw_only=True)
class Unpaired:
    """Tokens of one side that never met anything of the other one, for one of `UNPAIRED_REASONS`; each token counts once."""

    role: str
    reason: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A likely cause that raw pairs showed, the surest first in a window: id of CAUSES, sentence, numbers."""

    pair: tuple[str, str]
    cause: str
    text: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Window:
    """Everything seen of one run over one step; the only input of rules, verdicts and causes."""

    run: str
    regime: str
    monitor_only: bool
    step: int
    weight_version: int
    pairs: tuple[PairStats, ...] = ()
    handshake: tuple[FieldDifference, ...] = ()
    topology_breaks: tuple[TopologyBreak, ...] = ()
    region_breaks: tuple[RegionBreak, ...] = ()
    weights: tuple[WeightBreak, ...] = ()
    silence: tuple[Silence, ...] = ()
    dropped: int = 0  # messages lost between probe and daemon
    sampling: tuple[SamplingBreak, ...] = ()
    environment_breaks: tuple[EnvironmentBreak, ...] = ()
    diagnosis: tuple[Diagnosis, ...] = ()  # from raw pairs; empty where none were kept or nothing stood out
    unpaired: tuple[Unpaired, ...] = ()  # by side and reason
    between_steps: bool = False  # made the moment a fact broke: it states those facts and nothing else

    @property
    def trainer_pairs(self) -> tuple[PairStats, ...]:
        """The pairs of engine against trainer that hold a token."""
        return tuple(p for p in self.pairs if not p.is_engine_pair and p.tokens > 0)

    @property
    def engine_pairs(self) -> tuple[PairStats, ...]:
        """The pairs of the engine against itself that hold a token."""
        return tuple(p for p in self.pairs if p.is_engine_pair and p.tokens > 0)

    def silent(self, *subjects: str) -> tuple[Silence, ...]:
        """The silences about any of `subjects`."""
        return tuple(s for s in self.silence if s.what in subjects)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; NaN and infinities become the strings `nan`, `inf`, `-inf`."""
        plain: dict[str, Any] = _plain(self)
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Window:
        """Read `to_dict` back. Raises WindowError on unknown, missing or misshapen fields."""
        parts: dict[str, type] = {
            "pairs": PairStats,
            "handshake": FieldDifference,
            "topology_breaks": TopologyBreak,
            "region_breaks": RegionBreak,
            "weights": WeightBreak,
            "silence": Silence,
            "sampling": SamplingBreak,
            "environment_breaks": EnvironmentBreak,
            "diagnosis": Diagnosis,
            "unpaired": Unpaired,
        }
        if not isinstance(data, Mapping):
            raise WindowError(f"a window must be a map, found {type(data).__name__}")
        values = dict(data)
        for name, part in parts.items():
            rows = values.get(name, ())
            if not isinstance(rows, list | tuple):
                raise WindowError(f"window field {name} must be a list, found {type(rows).__name__}")
            values[name] = tuple(_build(part, row) for row in rows)
        window: Window = _build(cls, values)
        return window


_FLOATS: dict[type, frozenset[str]] = {
    kind: frozenset(f.name for f in fields(kind) if f.type == "float") for kind in (PairStats, Bucket)
}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _build(kind: type, row: Any) -> Any:
    if not isinstance(row, Mapping):
        raise WindowError(f"{kind.__name__} must be a map, found {type(row).__name__}")
    known = {f.name for f in fields(kind)}
    if unknown := sorted(set(row) - known):
        raise WindowError(f"{kind.__name__} has no field {unknown[0]!r}; it has {', '.join(sorted(known))}")
    values = dict(row)
    try:
        for name in _FLOATS.get(kind, frozenset()) & values.keys():
            values[name] = float(values[name])
        if kind is PairStats:
            for name in ("pair", "histogram"):
                if name in values:
                    values[name] = tuple(values[name])
            if values.get("detail") is not None:
                values["detail"] = _build(PairDetail, values["detail"])
        if kind is PairDetail:
            numbers = dict(values.get("numbers", {}))
            values["numbers"] = {str(name): float(value) for name, value in numbers.items()}
            values["worst_sequences"] = tuple(float(one) for one in values.get("worst_sequences", ()))
            values["buckets"] = tuple(_build(Bucket, one) for one in values.get("buckets", ()))
        if kind is Diagnosis:
            values["pair"] = tuple(values["pair"])
        return kind(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise WindowError(f"{kind.__name__} cannot be read: {error}") from error
