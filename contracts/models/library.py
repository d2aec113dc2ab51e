# SPDX-License-Identifier: Apache-2.0
"""Writes the shipped contracts from the families they are of: `python -m isoexec.contracts.models.library [--check]`.

What a gate and `isoexec contract pin` wrote into a file (source digests, discharges) is kept, as long as the entry it belongs
to computes the same function with the same constants. A new or changed entry is unproven, and its source unpinned.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from isoexec.contracts.canonical import encode
from isoexec.contracts.digests import ZERO
from isoexec.contracts.errors import ContractError
from isoexec.contracts.evidence import put_file
from isoexec.contracts.loading import parse
from isoexec.contracts.models.families import FAMILIES, Family
from isoexec.contracts.models.regions import LENGTH, PROVIDERS, Admitted, Part
from isoexec.contracts.parts import AXES, Value
from isoexec.contracts.schema import library

__all__ = ["Pins", "check", "pins_of", "render", "write"]

_CASES = (
    ("engine_prefill", "engine", "no_grad"),
    ("engine_decode", "engine", "no_grad"),
    ("trainer_fwd", "trainer", "grad"),
    ("trainer_recompute", "trainer", "recompute"),
    ("trainer_score", "trainer", "no_grad"),
)
_EVERY_CASE = tuple(name for name, _, _ in _CASES)
_STEP_OPS = ("grad_norm",)
_ENGINE_ONLY_STATE = {
    "paged_kv": ("kv_cache", "prefix_cache"),
    "recurrent": ("kv_cache", "prefix_cache", "recurrent_state", "conv_state"),
}
_UNPROVEN = "{kind: none}"
_SETTINGS: dict[str, tuple[str, ...]] = {
    "cpu": (
        "  dtypes: [bfloat16, float32]",
        "  environment:",
        "    arch: cpu",
        '    variables: {OMP_NUM_THREADS: "1"}',
        "    # a CPU of another vector width gives other bits, and another evidence: one in every process, and in the records",
        "    versions:",
        "      - name: torch",
        "      - name: cpu_capability",
        "      - name: float32_products",
        "    # read by effect where a getter lies; the names are explained in kernels/switches.py",
        "    switches:",
        "      flush_denormal: false",
        "      rounding: to_nearest",
        "      float32_product_is_exact: true",
        "      float32_matmul_precision: highest",
        "      mkldnn.enabled: true",
        "      mkldnn.matmul.fp32_precision: ieee",
        "      num_threads: 1",
        "      autocast.cpu: false",
        "  # on a CPU or a torch that no shipped record is of, the quick gates run while the contract is installed",
        "  evidence: {certify: install}",
    ),
    "sm90": (
        "  dtypes: [bfloat16]",
        "  environment:",
        "    arch: sm90",
        "    versions:",
        "      - name: torch",
        "      - name: triton",
        "      - name: cublaslt",
        "    # the names are explained in kernels/switches.py; cuBLASLt may not split K, nor sum in bfloat16",
        "    switches:",
        "      cuda.blas: Cublaslt",
        "      cuda.matmul.bf16_reduced_precision: false",
        "      cuda.matmul.bf16_split_k: false",
        "      float32_matmul_precision: highest",
        "      autocast.cuda: false",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Pins:
    """What was pinned in a file: sources by (provider, function), discharges of providers and of bindings."""

    sources: Mapping[tuple[str, str], str] = field(default_factory=dict)
    providers: Mapping[tuple[str, str], str] = field(default_factory=dict)
    bindings: Mapping[tuple[str, str, bytes], str] = field(default_factory=dict)


def pins_of(text: str) -> Pins:
    """Return what is pinned in a contract's text; raises ContractError for what is no YAML of a contract's kind."""
    value = parse(text).value
    sources: dict[tuple[str, str], str] = {}
    providers: dict[tuple[str, str], str] = {}
    bindings: dict[tuple[str, str, bytes], str] = {}
    for entry in _entries(value, "providers"):
        key = (str(entry.get("name")), str(entry.get("function")))
        sources[key] = str(entry.get("source"))
        providers[key] = _discharge(entry.get("discharge"))
    for entry in _entries(value, "composition"):
        name = encode([entry.get("constants") or {}, sorted(_names(entry.get("ops")))])
        bindings[str(entry.get("region")), str(entry.get("function")), name] = _discharge(
            entry.get("discharge")
        )
    return Pins(sources=sources, providers=providers, bindings=bindings)


def _entries(value: object, part: str) -> list[Mapping[str, object]]:
    found = value.get(part) if isinstance(value, Mapping) else None
    return [entry for entry in found if isinstance(entry, Mapping)] if isinstance(found, list) else []


def _names(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else []


def _discharge(value: object) -> str:
    if not isinstance(value, Mapping):
        return _UNPROVEN
    return "{" + ", ".join(f"{name}: {value[name]}" for name in ("kind", "evidence") if name in value) + "}"


def render(family: Family, pins: Pins | None = None) -> str:
    """Return the contract file of a family, with what `pins` holds of it."""
    held = pins or Pins()
    parts = [
        *_head(family),
        *_model(family),
        *_cases(family),
        *_composition(family, held),
        *_providers(family, held),
        *_claims(family),
        "",
        "deployment:",
        f"  kv_page_size: {family.page}",
    ]
    return "\n".join(parts) + "\n"


def _head(family: Family) -> list[str]:
    return [
        "# SPDX-License-Identifier: Apache-2.0",
        *(f"# {line}" for line in family.about),
        "# Every field is explained in contracts/spec/contract-v1.md. Generated by `python -m isoexec.contracts.models.library`",
        "# from contracts/models/families.py; digests are pinned in place and kept.",
        "schema_version: 1",
        f"name: {family.name}",
        f"arch: {family.arch}",
        "",
    ]


def _model(family: Family) -> list[str]:
    facts = [f"    {name}: {_constraint(value)}" for name, value in family.facts.items()]
    return [
        "model:",
        f"  family: {family.family}",
        f"  architectures: {_list(family.architectures)}",
        "  ops:",
        *(f"    - {op}" for op in family.ops),
        f"  step_ops: {_list(_STEP_OPS)}",
        "  # in elements; q_width is heads x head_dim, kv_width kv_heads x head_dim, qkv_width is q_width + 2 kv_width",
        "  facts:",
        *facts,
        "",
    ]


def _cases(family: Family) -> list[str]:
    out = ["cases:"]
    for name, role, grad in _CASES:
        out += [
            f"  - name: {name}",
            f"    role: {role}",
            f"    grad: {grad}",
            f"    state: {family.state if role == 'engine' else 'stateless'}",
            f"    domain: {{length: {{minimum: 1, maximum: {LENGTH}}}}}",
        ]
    return [*out, ""]


def _composition(family: Family, pins: Pins) -> list[str]:
    out = ["composition:"]
    for part in family.parts:
        name = encode([dict(part.constants), sorted(part.ops)])
        discharge = pins.bindings.get((part.region, part.function, name), _UNPROVEN)
        out += [
            f"  - region: {part.region}",
            f"    cases: {_list(part.cases or _EVERY_CASE)}",
            f"    ops: {_list(part.ops)}",
            f"    function: {part.function}",
            *([f"    constants: {_map(part.constants)}"] if part.constants else []),
            f"    route: {part.route}",
            f"    discharge: {discharge}",
        ]
    return [*out, ""]


def _providers(family: Family, pins: Pins) -> list[str]:
    out = ["# Source digests are written by `isoexec contract pin`; zeros mean that no source is pinned yet."]
    out.append("providers:")
    for function, parts in _by_function(family).items():
        provider = PROVIDERS[family.arch].get(function)
        if provider is None:
            continue
        key = (provider.name, function)
        # a provider is believed for the constants its function is bound with; one more set, and it is not
        known = all(
            (part.region, function, encode([dict(part.constants), sorted(part.ops)])) in pins.bindings
            for part in parts
        )
        out += [
            f"  - name: {provider.name}",
            f"    function: {function}",
            *_what(provider, pins.sources.get(key, ZERO)),
            f"    roles: {_list(_roles(parts))}",
            f"    discharge: {pins.providers.get(key, _UNPROVEN) if known else _UNPROVEN}",
        ]
    return [*out, ""]


def _what(provider: Admitted, source: str) -> list[str]:
    if not provider.version:
        return ["    kind: kernel", f"    source: {source}"]
    settings = [f"    settings: {_map(provider.settings)}"] if provider.settings else []
    return ["    kind: library", f"    version: {provider.version}", *settings]


def _by_function(family: Family) -> dict[str, list[Part]]:
    out: dict[str, list[Part]] = {}
    for part in family.parts:
        out.setdefault(part.function, []).append(part)
    return out


def _roles(parts: Iterable[Part]) -> tuple[str, ...]:
    cases = {case for part in parts for case in (part.cases or _EVERY_CASE)}
    return tuple(dict.fromkeys(role for name, role, _ in _CASES if name in cases))


def _claims(family: Family) -> list[str]:
    out = ["claims:", "  topology:"]
    for role, degrees in (("engine", family.engine), ("trainer", family.trainer)):
        out.append(f"    {role}:")
        for axis in AXES:
            claimed = degrees.get(axis, (1,))
            one = len(claimed) == 1
            words = f"pinned: {claimed[0]}" if one else f"invariant: {_list(claimed)}"
            out.append(f"      {axis}: {{{words}}}")
    out.append("  state:")
    for state in _ENGINE_ONLY_STATE[family.state]:
        out += [f"    - state: {state}", "      invalidated_by: [weight_sync]"]
    out += ["    - state: cast_cache", "      invalidated_by: [optimizer_step, weight_sync]"]
    out += ["  bitwise:", f"    - {_list(_EVERY_CASE)}"]
    return [*out, *_SETTINGS[family.arch]]


def _scalar(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _list(values: Sequence[object]) -> str:
    return "[" + ", ".join(_scalar(value) for value in values) + "]"


def _map(values: Mapping[str, Value]) -> str:
    return "{" + ", ".join(f"{name}: {_scalar(value)}" for name, value in values.items()) + "}"


def _constraint(value: object) -> str:
    if not isinstance(value, Mapping):
        return _scalar(value)
    parts = [f"{name}: {_list(v) if isinstance(v, tuple) else _scalar(v)}" for name, v in value.items()]
    return "{" + ", ".join(parts) + "}"


def _wanted(folder: Path) -> dict[str, str]:
    out = {}
    for family in FAMILIES:
        path = folder / f"{family.name}.yaml"
        held = pins_of(path.read_text(encoding="utf-8")) if path.exists() else None
        out[path.name] = render(family, held)
    return out


def check(folder: Path) -> list[str]:
    """Return what is not as the families say it, one line a file; empty for a folder that is up to date."""
    wanted = _wanted(folder)
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.yaml")}
    lines = [f"{name} is missing" for name in wanted if name not in found]
    lines += [f"{name} is out of date" for name in wanted if name in found and found[name] != wanted[name]]
    return lines + [f"{name} is of no family" for name in sorted(set(found) - set(wanted))]


def write(folder: Path) -> list[str]:
    """Write what is not up to date, so that no reader sees half of a file; return the names written."""
    changed = []
    for name, text in _wanted(folder).items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            put_file(folder, name, text.encode("utf-8"))
            changed.append(name)
    return changed


def _main(argv: Sequence[str]) -> int:
    if argv not in ([], ["--check"]):
        print("usage: python -m isoexec.contracts.models.library [--check]", file=sys.stderr)
        return 2
    try:
        lines = check(library()) if argv else write(library())
    except ContractError as error:
        print(f"isoexec: {error}", file=sys.stderr)
        return 1
    for line in lines:
        print(line)
    return 1 if argv and lines else 0


if __name__ == "__main__":
    raise SystemExit(_main(sys.argv[1:]))
