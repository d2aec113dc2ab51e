# SPDX-License-Identifier: Apache-2.0
"""Rules are data: which signal, above which bound, for how many windows, leads to which action.

No bound is global: each belongs to a declared regime. `DEFAULT_RULES(regime)` is the ladder to start from;
a YAML file replaces it::

    rules:
      - name: mean_abs_d.halt
        signal: mean_abs_d
        bound: 0.1
        regime: bf16_dense
        patience: 3
        action: halt
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from isoexec.contracts.errors import ContractError
from isoexec.contracts.signals import SIGNALS
from isoexec.contracts.window import REGIMES

__all__ = ["DEFAULT_RULES", "LADDER", "Action", "Rule", "dump_rules", "load_rules", "read_rules"]

Action = Literal["dryrun", "warn", "halt"]
ANY = "any"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One bound on one signal. Raises ContractError when a field makes no sense.

    A value above `bound` violates. The value judged is the mean over the last `window` windows; for a
    relative signal it is the current value over the median of the last `window` windows. `action` follows
    after `patience` violated windows in a row, one degree less before (halt -> warn -> dryrun).
    `on_unknown` follows in the same way when the signal cannot be known; unknown never passes, whatever the
    action.
    """

    name: str
    signal: str
    bound: float = 0.0
    regime: str = ANY
    window: int = 1
    patience: int = 1
    action: Action = "warn"
    on_unknown: Action = "warn"

    def __post_init__(self) -> None:
        actions = get_args(Action)
        _need(bool(self.name), "name", "a rule needs a name", "name it signal.action")
        _need(self.signal in SIGNALS, "signal", f"unknown signal {self.signal!r}", _one_of(SIGNALS))
        _need(_is_number(self.bound), "bound", f"wanted a finite number from 0 up, found {self.bound!r}", "")
        _need(
            self.regime in (ANY, *REGIMES),
            "regime",
            f"unknown regime {self.regime!r}",
            _one_of((ANY, *REGIMES)),
        )
        for name in ("window", "patience"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            _need(whole, name, f"wanted a whole number of windows from 1 up, found {value!r}", "")
        for name in ("action", "on_unknown"):
            value = getattr(self, name)
            _need(value in actions, name, f"unknown action {value!r}", _one_of(actions))

    def applies_to(self, regime: str) -> bool:
        """Whether the rule judges windows of `regime`."""
        return self.regime in (ANY, regime)

    def to_dict(self) -> dict[str, Any]:
        """The map that YAML holds."""
        return asdict(self)


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    )


def _need(ok: bool, field: str, problem: str, fix: str) -> None:
    if not ok:
        raise ContractError(problem, field=field, fix=fix)


def _one_of(names: Iterable[str]) -> str:
    return "use one of " + ", ".join(names)


# per regime: (warn, page, halt) bounds of mean abs d and of k3, in nats, from public reports and own
# measurements
LADDER: dict[str, dict[str, tuple[float, float, float]]] = {
    "near_bitwise": {"mean_abs_d": (1e-5, 1e-4, 1e-3)},
    "bf16_dense": {"mean_abs_d": (0.02, 0.05, 0.1), "k3": (1e-3, 5e-3, 1.5e-2)},
    "bf16_moe": {"mean_abs_d": (0.04, 0.08, 0.15), "k3": (5e-3, 1e-2, 3e-2)},
    "fp8": {"mean_abs_d": (0.07, 0.12, 0.25), "k3": (5e-3, 1.5e-2, 5e-2)},
}
_DEGREES: tuple[tuple[str, Action, int], ...] = (
    ("warn", "warn", 1),
    ("page", "warn", 2),
    ("halt", "halt", 3),
)


def DEFAULT_RULES(regime: str) -> tuple[Rule, ...]:
    """Return the starting ladder of a regime. Raises ContractError for a regime that is not known."""
    _need(regime in REGIMES, "regime", f"unknown regime {regime!r}", _one_of(REGIMES))
    exact = regime == "bitwise"
    return (*_facts(regime, exact=exact), *(_exact() if exact else _statistics(regime)), *_health())


def _facts(regime: str, *, exact: bool) -> tuple[Rule, ...]:
    halt, warn = "halt", "warn"
    # a weight sync in flight can look stale for one window; between bitwise windows nothing may
    syncs = 1 if exact else 2
    return (
        _rule("handshake", "handshake_differences", halt),
        _rule("topology", "topology_breaks", halt),
        _rule("kernel_replaced", "region_breaks", halt),
        _rule("canary", "canary_mismatches", halt),
        _rule("environment", "environment_breaks", halt if exact else warn),
        _rule("weights_stale", "weights_stale", halt, patience=syncs),
        # an fp8 engine holds other bytes than it was sent
        _rule("weights_unequal", "weights_unequal", warn if regime == "fp8" else halt, patience=syncs),
        _rule("weights_unchanged", "weights_unchanged", warn, patience=3),
        _rule("sampling", "sampling_differences", halt, patience=syncs),
        _rule("nonfinite", "nonfinite_tokens", halt, patience=1 if exact else 3),
        _rule("exact_zero", "exact_zero_share", warn, bound=0.0 if exact else 0.001),
        _rule("positive", "positive_tokens", warn),
        _rule("id_mismatch", "id_mismatch_tokens", warn),
    )


def _exact() -> tuple[Rule, ...]:
    # integers carry no noise: one window is proof, and patience would only let a broken step through
    return (
        _rule("unequal", "unequal_tokens", "halt", regime="bitwise"),
        _rule("decode_prefill", "decode_unequal_tokens", "halt", regime="bitwise", on_unknown="dryrun"),
        # a claim of equality that nobody can check any more is not kept: one window may be late, two are not
        _rule("unobserved", "unequal_tokens", "halt", regime="bitwise", patience=2, on_unknown="halt"),
    )


def _statistics(regime: str) -> tuple[Rule, ...]:
    rules = [
        _rule(f"{signal}.{degree}", signal, action, bound=bound, regime=regime, patience=patience)
        for signal, bounds in LADDER[regime].items()
        for (degree, action, patience), bound in zip(_DEGREES, bounds, strict=True)
    ]
    rules += [
        _rule("rho.warn", "rho_z", "warn", bound=5.0, regime=regime),
        _rule("rho.page", "rho_effect", "warn", bound=0.01, regime=regime, patience=2),
        _rule("rho.halt", "rho_effect", "halt", bound=0.05, regime=regime, patience=3),
        # the plain test trusts a variance that heavy tails do not have; where this one is unknown, the plain one shouts
        _rule("rho_capped.warn", "rho_z_capped", "warn", bound=5.0, regime=regime, on_unknown="dryrun"),
    ]
    for (degree, action, patience), bound in zip(_DEGREES, (2.0, 4.0, 8.0), strict=True):
        # young runs have no baseline yet: recorded, not shouted
        rules.append(
            Rule(
                name=f"baseline.{degree}",
                signal="baseline_ratio",
                bound=bound,
                regime=regime,
                window=32,
                patience=patience,
                action=action,
                on_unknown="dryrun",
            )
        )
    # the rescore is a sample; a window without one is normal
    for (degree, action, patience), bound in zip(_DEGREES, LADDER[regime]["mean_abs_d"], strict=True):
        rules.append(
            Rule(
                name=f"decode_prefill.{degree}",
                signal="decode_mean_abs_d",
                bound=bound,
                regime=regime,
                patience=patience,
                action=action,
                on_unknown="dryrun",
            )
        )
    return tuple(rules)


def _health() -> tuple[Rule, ...]:
    return (
        _rule("silence", "silence", "warn"),
        _rule("drops", "dropped_messages", "warn"),
        _rule("unpaired", "unpaired_share", "warn", bound=0.05, patience=2),
    )


def _rule(
    name: str,
    signal: str,
    action: str,
    *,
    bound: float = 0.0,
    regime: str = ANY,
    patience: int = 1,
    on_unknown: str = "warn",
) -> Rule:
    return Rule(
        name=name,
        signal=signal,
        bound=bound,
        regime=regime,
        patience=patience,
        action=action,  # type: ignore[arg-type]  # checked by Rule itself
        on_unknown=on_unknown,  # type: ignore[arg-type]
    )


def load_rules(path: Path) -> tuple[Rule, ...]:
    """Read a rules file. Raises ContractError that names file, line and field."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ContractError(f"cannot be read: {error}", path=str(path)) from error
    return read_rules(text, path=str(path))


def read_rules(text: str, *, path: str = "") -> tuple[Rule, ...]:
    """Read rules from YAML text; `path` only names the place in errors, which are ContractErrors."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = f"not YAML: {getattr(error, 'problem', None) or error}"
        raise ContractError(problem, path=path, line=mark.line + 1 if mark else None) from error
    if not isinstance(data, Mapping) or set(data) != {"rules"} or not isinstance(data["rules"], list):
        raise ContractError("wanted one key, `rules`, that holds a list of rules", path=path, line=1)
    if not data["rules"]:
        raise ContractError(
            "the list is empty: nothing would ever be judged", path=path, line=1, field="rules"
        )
    rows = node.value[0][1].value if isinstance(node, yaml.MappingNode) else []
    lines = [item.start_mark.line + 1 for item in rows]
    rules: list[Rule] = []
    for index, (row, line) in enumerate(zip(data["rules"], lines, strict=True)):
        where = f"rules[{index}]"
        rule = _row(row, path=path, line=line, where=where)
        if any(rule.name == other.name and rule.regime == other.regime for other in rules):
            raise ContractError(
                f"a second rule {rule.name!r} for regime {rule.regime}",
                path=path,
                line=line,
                field=f"{where}.name",
                fix="give each rule its own name",
            )
        rules.append(rule)
    return tuple(rules)


def _row(row: object, *, path: str, line: int, where: str) -> Rule:
    if not isinstance(row, Mapping):
        raise ContractError(f"wanted a map, found {type(row).__name__}", path=path, line=line, field=where)
    known = [f.name for f in fields(Rule)]
    for name in row:
        if name not in known:
            raise ContractError(
                "unknown field", path=path, line=line, field=f"{where}.{name}", fix=_one_of(known)
            )
    for name in ("name", "signal"):
        if not isinstance(row.get(name), str):
            raise ContractError("wanted a string", path=path, line=line, field=f"{where}.{name}")
    values = dict(row)
    if isinstance(values.get("bound"), str):  # YAML 1.1 reads 1e-5 as a string
        with suppress(ValueError):  # Rule refuses the string and names it
            values["bound"] = float(values["bound"])
    try:
        return Rule(**values)
    except ContractError as error:
        raise ContractError(
            error.problem, path=path, line=line, field=f"{where}.{error.field}", fix=error.fix
        ) from error


def dump_rules(rules: Iterable[Rule]) -> str:
    """Write rules as the YAML that `read_rules` reads."""
    return yaml.safe_dump({"rules": [rule.to_dict() for rule in rules]}, sort_keys=False)
