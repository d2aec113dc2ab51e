# SPDX-License-Identifier: Apache-2.0
"""The parts of a contract, as frozen dataclasses whose attribute names are the names in the file.

`Contract` itself, which ties them together, is in `isoexec.contracts.schema`.
"""

# ruff: noqa: RUF009  (wire() makes a dataclass field, not a shared default)
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from isoexec.contracts.kinds import Amount, Digest, Int, ListOf, MapOf, Record, Scalar, Text, wire

__all__ = [
    "ANY_TEXT",
    "AXES",
    "CASES",
    "FUNCTION",
    "GRADS",
    "ROLES",
    "ROUTES",
    "STATES",
    "AxisClaim",
    "Binding",
    "Case",
    "Claims",
    "Constraint",
    "Discharge",
    "Environment",
    "EvidencePolicy",
    "Model",
    "Provider",
    "StateClaim",
    "Tolerance",
    "Value",
    "VersionClaim",
]

AXES = ("TP", "EP", "ETP", "SP", "CP", "PP", "DP")
ROLES = ("engine", "trainer")
GRADS = ("no_grad", "grad", "recompute")
CASES: Mapping[str, str] = {
    "engine_prefill": "engine",
    "engine_decode": "engine",
    "trainer_fwd": "trainer",
    "trainer_recompute": "trainer",
    "trainer_score": "trainer",
}
"""Every way a logprob comes to be, and the runtime that computes it; a path that is none of them is refused."""
STATES = ("stateless", "paged_kv", "recurrent")
ROUTES = ("reference_preserving", "composition_defining", "protected", "canonical")

Value = int | str | bool
ANY_TEXT = Text(pattern=r"[^\x00-\x1f]{1,200}", what="text of at most 200 characters")
FUNCTION = Text(pattern=r"[a-z][a-z0-9_.]*/[1-9][0-9]*", what="a function such as linear.chain/1")


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """What a number or name may be: `fixed`, `one_of`, or an integer that is a `multiple_of` within bounds.

    An empty constraint admits every value, but the fact must be known. A bare scalar in a file is `fixed`.
    """

    fixed: Value | None = wire(Scalar(), "the only admitted value", default=None)
    one_of: tuple[Value, ...] = wire(ListOf(Scalar()), "the admitted values", default=())
    multiple_of: int | None = wire(Int(), "the value is a multiple of this", default=None)
    minimum: int | None = wire(Int(0), "smallest admitted value", default=None)
    maximum: int | None = wire(Int(0), "largest admitted value", default=None)

    def problem(self) -> tuple[str, str] | None:
        ranged = (self.multiple_of, self.minimum, self.maximum) != (None, None, None)
        if (self.fixed is not None) + bool(self.one_of) + ranged > 1:
            return "mixes fixed, one_of and a range", "keep one of them"
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            return f"minimum {self.minimum} is above maximum {self.maximum}", "swap them"
        return None

    def admits(self, value: Value) -> bool:
        if self.fixed is not None:
            return type(value) is type(self.fixed) and value == self.fixed
        if self.one_of:
            return any(type(value) is type(one) and value == one for one in self.one_of)
        if self == Constraint():
            return True
        if isinstance(value, (bool, str)):
            return False
        low, high = self.minimum, self.maximum
        return (
            value % (self.multiple_of or 1) == 0
            and (low is None or value >= low)
            and (high is None or value <= high)
        )

    @property
    def divisor(self) -> int:
        """The largest integer known to divide every admitted value; 1 where nothing is known."""
        values = [self.fixed] if self.fixed is not None else list(self.one_of)
        if values:
            return (
                math.gcd(*(v if isinstance(v, int) and not isinstance(v, bool) else 1 for v in values)) or 1
            )
        return self.multiple_of or 1

    @property
    def largest(self) -> int | None:
        """The largest admitted integer, or None where there is no bound."""
        numbers = [v for v in (self.fixed, *self.one_of) if isinstance(v, int) and not isinstance(v, bool)]
        return max(numbers) if numbers else self.maximum

    def __str__(self) -> str:
        if self.fixed is not None:
            return str(self.fixed)
        if self.one_of:
            return "one of " + ", ".join(map(str, self.one_of))
        parts = []
        if self.multiple_of is not None:
            parts.append(f"a multiple of {self.multiple_of}")
        if self.minimum is not None:
            parts.append(f"at least {self.minimum}")
        if self.maximum is not None:
            parts.append(f"at most {self.maximum}")
        return ", ".join(parts) or "any value"


_CONSTRAINT = Record(Constraint, short="fixed")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The logical model: which architectures, which operators, and the shape facts the kernels depend on."""

    family: str = wire(Text(), "model family, such as qwen3-dense")
    architectures: tuple[str, ...] = wire(ListOf(Text(), least=1), "architecture names of the model's config")
    ops: tuple[str, ...] = wire(ListOf(Text(), least=1), "logical operators every case computes")
    step_ops: tuple[str, ...] = wire(
        ListOf(Text()),
        "operators of a training step outside the forward, owned in every grad case",
        default=(),
    )
    facts: Mapping[str, Constraint] = wire(MapOf(_CONSTRAINT), "admitted shape facts by name")

    def refusals(self, facts: Mapping[str, Value]) -> list[str]:
        """Return why a model with these facts is not served, one line a fact; empty when it is.

        The widths q_width (heads x head_dim), kv_width and qkv_width are derived when they are not given.
        """
        known = {**derived_widths(facts), **facts}
        out = []
        for name, constraint in sorted(self.facts.items()):
            if name not in known:
                out.append(f"{name} is unknown, the contract wants {constraint}")
            elif not constraint.admits(known[name]):
                out.append(f"{name} is {known[name]}, the contract wants {constraint}")
        return out


def derived_widths(facts: Mapping[str, Value]) -> dict[str, Value]:
    """Return q_width, kv_width and qkv_width, in elements, as far as the facts they come of are known."""
    heads, kv_heads, dim = (facts.get(name) for name in ("heads", "kv_heads", "head_dim"))
    out: dict[str, Value] = {}
    if isinstance(heads, int) and isinstance(dim, int):
        out["q_width"] = heads * dim
    if isinstance(kv_heads, int) and isinstance(dim, int):
        out["kv_width"] = kv_heads * dim
    if "q_width" in out and "kv_width" in out:
        out["qkv_width"] = int(out["q_width"]) + 2 * int(out["kv_width"])
    return out


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way a logprob comes to be."""

    name: str = wire(Text(choices=tuple(CASES)), "name of the case")
    role: str = wire(Text(choices=ROLES), "the runtime that computes it")
    grad: str = wire(Text(choices=GRADS), "gradient mode of the forward")
    state: str = wire(Text(choices=STATES), "what the forward reads and writes besides its inputs")
    domain: Mapping[str, Constraint] = wire(
        MapOf(_CONSTRAINT), "admitted shapes: length in tokens, rows in a batch, ...", default={}
    )

    def problem(self) -> tuple[str, str] | None:
        if CASES[self.name] != self.role:
            return f"{self.name} with role {self.role}", f"say role: {CASES[self.name]}"
        if (self.name == "trainer_recompute") != (self.grad == "recompute"):
            return (
                f"{self.name} with grad {self.grad}",
                "trainer_recompute, and it alone, has grad: recompute",
            )
        return None


@dataclass(frozen=True, kw_only=True)
class Discharge:
    """Why a statement holds: `evidence` (a recorded gate), or `none`, and then it is unproven."""

    kind: str = wire(Text(choices=("evidence", "none")), "what discharges the statement")
    evidence: str | None = wire(Digest(), "digest of the evidence record, with kind evidence", default=None)

    def problem(self) -> tuple[str, str] | None:
        if self.kind == "evidence" and self.evidence is None:
            return "kind evidence without a record", "name the record's digest, or say kind: none"
        if self.kind != "evidence" and self.evidence is not None:
            return f"kind {self.kind} with an evidence digest", "say kind: evidence, or drop the digest"
        return None


@dataclass(frozen=True, kw_only=True)
class Binding:
    """One composition entry: in these cases this region owns these operators and computes this function."""

    region: str = wire(Text(), "name of the region")
    cases: tuple[str, ...] = wire(ListOf(Text(), least=1), "cases the entry holds for")
    ops: tuple[str, ...] = wire(ListOf(Text(), least=1), "logical operators the region owns in them")
    function: str = wire(FUNCTION, "id and version of the exact rounding schedule")
    constants: Mapping[str, Value] = wire(
        MapOf(Scalar()), "constants of the function that reach a bit", default={}
    )
    route: str = wire(Text(choices=ROUTES), "how the binding relates to the canonical bits")
    discharge: Discharge = wire(Record(Discharge), "why the binding gives the same bits in all its cases")


@dataclass(frozen=True, kw_only=True)
class Provider:
    """Something admitted to compute a function."""

    name: str = wire(Text(), "name of the provider, such as its module")
    function: str = wire(FUNCTION, "the function it computes")
    kind: str = wire(Text(choices=("kernel", "library")), "own kernel, or a library's")
    source: str | None = wire(Digest(), "digest of a kernel's source; zeros until it is pinned", default=None)
    artifact: str | None = wire(Digest(), "digest of the compiled artifact, when there is one", default=None)
    version: str | None = wire(ANY_TEXT, "version and build of a library", default=None)
    settings: Mapping[str, Value] = wire(MapOf(Scalar()), "settings its bits depend on", default={})
    roles: tuple[str, ...] = wire(ListOf(Text(choices=ROLES), least=1), "runtimes it serves")
    arch: str | None = wire(Text(), "arch it is for, when not the contract's", default=None)
    discharge: Discharge = wire(Record(Discharge), "why its bits are the function's")

    def problem(self) -> tuple[str, str] | None:
        if self.kind == "kernel" and self.source is None:
            return "a kernel without a source digest", "add source: sha256:... (isoexec contract pin)"
        if self.kind == "library" and self.version is None:
            return "a library without a version", "add its version and build"
        return None


@dataclass(frozen=True, kw_only=True)
class AxisClaim:
    """What is claimed of one axis: a `pinned` degree, or bits `invariant` over a domain of degrees."""

    pinned: int | None = wire(Int(), "the only admitted degree", default=None)
    invariant: tuple[int, ...] = wire(ListOf(Int()), "degrees that all give the same bits", default=())

    def problem(self) -> tuple[str, str] | None:
        if (self.pinned is None) == (not self.invariant):
            return "needs either pinned or invariant", "write {pinned: 1} or {invariant: [1, 2]}"
        return None

    @property
    def domain(self) -> tuple[int, ...]:
        """The admitted degrees, ascending."""
        return (self.pinned,) if self.pinned is not None else tuple(sorted(self.invariant))

    def admits(self, degree: int) -> bool:
        return degree in self.domain

    def __str__(self) -> str:
        if self.pinned is not None:
            return f"pinned {self.pinned}"
        return "invariant over {" + ", ".join(map(str, self.domain)) + "}"


@dataclass(frozen=True, kw_only=True)
class StateClaim:
    """What makes a kept state stale; state kept across one of these events is a violation."""

    state: str = wire(Text(), "kv_cache, prefix_cache, recurrent_state, cast_cache, ...")
    invalidated_by: tuple[str, ...] = wire(ListOf(Text(), least=1), "events after which it must not be read")


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """A mismatch admitted between two cases, and the regions it is blamed on."""

    cases: tuple[str, ...] = wire(ListOf(Text(), least=2), "the two cases")
    metric: str = wire(Text(choices=("max_abs_d", "mean_abs_d", "p99_abs_d")), "statistic of |d|, in nats")
    bound: str = wire(Amount(), "largest admitted value, a quoted decimal in nats")
    regions: tuple[str, ...] = wire(ListOf(Text()), "regions that differ between the cases")
    reason: str = wire(ANY_TEXT, "why the regions differ")

    def problem(self) -> tuple[str, str] | None:
        if len(self.cases) != 2:
            return f"names {len(self.cases)} cases", "name the two cases it lies between"
        return None


@dataclass(frozen=True, kw_only=True)
class VersionClaim:
    """A component whose version may change bits: both sides run the same one, from `admitted` when given."""

    name: str = wire(Text(), "name of the component")
    admitted: tuple[str, ...] = wire(ListOf(ANY_TEXT), "admitted versions; any, when absent", default=())


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The machine and process state the bits depend on."""

    arch: str = wire(Text(), "arch of the machine")
    variables: Mapping[str, str] = wire(MapOf(ANY_TEXT), "environment variables and their values", default={})
    versions: tuple[VersionClaim, ...] = wire(
        ListOf(Record(VersionClaim), key=("name",)), "versions that may change bits", default=()
    )
    switches: Mapping[str, Value] = wire(
        MapOf(Scalar()), "process switches that may change bits, and the value each must have", default={}
    )

    def refusals(self, found: Mapping[str, object]) -> list[str]:
        """Return why an environment {name: value} is not admitted; a name it lacks is refused as unknown."""
        wanted: dict[str, tuple[str, ...]] = {name: (value,) for name, value in self.variables.items()}
        wanted |= {claim.name: claim.admitted for claim in self.versions}
        wanted |= {name: (str(value),) for name, value in self.switches.items()}
        wanted["arch"] = (self.arch,)
        out = []
        for name, values in sorted(wanted.items()):
            value = found.get(name)
            words = " or ".join(values) or "any value"
            if value is None:
                out.append(f"{name} is unknown, the contract wants {words}")
            elif values and str(value) not in values:
                out.append(f"{name} is {value}, the contract wants {words}")
        return out


@dataclass(frozen=True, kw_only=True)
class EvidencePolicy:
    """Which evidence is believed, beyond a record's own expiry."""

    max_age_days: int | None = wire(
        Int(), "days after which a record is too old; its own expiry alone, when absent", default=None
    )
    signers: tuple[str, ...] = wire(
        ListOf(Text(pattern=r"[0-9a-f]{64}", what="an Ed25519 public key, 64 hex digits")),
        "keys of which one must have signed each record; none is asked for, when absent",
        default=(),
    )
    certify: str = wire(
        Text(choices=("refuse", "install")),
        "where this machine's build has no evidence: refuse, or run the provider's quick gate while installing",
        default="refuse",
    )


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What the run promises beyond its composition."""

    topology: Mapping[str, Mapping[str, AxisClaim]] = wire(
        MapOf(MapOf(Record(AxisClaim), keys=AXES), keys=ROLES), "per role, per axis"
    )
    state: tuple[StateClaim, ...] = wire(
        ListOf(Record(StateClaim), key=("state",)), "what invalidates kept state", default=()
    )
    bitwise: tuple[tuple[str, ...], ...] = wire(
        ListOf(ListOf(Text(), least=2)), "groups of cases whose logprobs are equal bit for bit", default=()
    )
    tolerances: tuple[Tolerance, ...] = wire(
        ListOf(Record(Tolerance), key=("cases", "metric")), "mismatch admitted elsewhere", default=()
    )
    dtypes: tuple[str, ...] = wire(
        ListOf(Text(choices=("bfloat16", "float16", "float32")), least=1), "parameter dtypes admitted"
    )
    environment: Environment = wire(Record(Environment), "what the bits depend on outside the process")
    evidence: EvidencePolicy = wire(
        Record(EvidencePolicy), "which evidence is believed", default=EvidencePolicy()
    )
