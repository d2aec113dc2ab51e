# SPDX-License-Identifier: Apache-2.0
"""Says how two contracts differ, field by field and by meaning: model first, then policy, then deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from isoexec.contracts.canonical import encode, normal
from isoexec.contracts.identities import IDENTITIES, identities_of, identity_of_field
from isoexec.contracts.schema import Contract

__all__ = [
    "ABSENT",
    "Difference",
    "counted",
    "diff",
    "diff_dicts",
    "disagreements",
    "one_line",
    "render",
]

ABSENT = "(absent)"
"""Stands for a side that does not have the field; survives JSON and msgpack."""

# what names an entry among its like, so that a change shows as the field that changed
_NAMED_BY: dict[str, tuple[str, ...]] = {
    "cases": ("name",),
    "composition": ("region", "cases"),
    "providers": ("function", "name", "kind"),
    "state": ("state",),
    "tolerances": ("cases", "metric"),
    "versions": ("name",),
}
_SHOWN = 240  # characters of a value in a line; `to_dict` has all
_MEANING = {
    "semantic": "semantic: another model",
    "numerical_policy": "numerical_policy: bits or claims may differ",
    "deployment": "deployment: proven not to change bits",
}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One field: dotted `path`, its value on each side (or ABSENT), and the `identity` it belongs to."""

    path: str
    a: object
    b: object
    identity: str

    def to_dict(self) -> dict[str, object]:
        """Return the difference as plain JSON values."""
        return {"path": self.path, "a": self.a, "b": self.b, "identity": self.identity}

    def line(self, a: str = "a", b: str = "b") -> str:
        """Return one line, the sides called `a` and `b`; sets show what only one side has."""
        if _scalars(self.a) and _scalars(self.b):
            left = [item for item in self.a if item not in self.b]
            right = [item for item in self.b if item not in self.a]
            parts = [f"only in {a}: {_words(left)}"] if left else []
            parts += [f"only in {b}: {_words(right)}"] if right else []
            if parts:
                return f"{self.path}: " + "; ".join(parts)
        return f"{self.path}: {a} has {_words(self.a)}, {b} has {_words(self.b)}"

    def __str__(self) -> str:
        return self.line()


def diff(a: Contract, b: Contract) -> list[Difference]:
    """Return the differences of two contracts, ordered by identity and path; empty when all digests agree."""
    return diff_dicts(a.to_dict(), b.to_dict())


def diff_dicts(a: Mapping[str, object], b: Mapping[str, object]) -> list[Difference]:
    """Return the differences of two canonical dicts, as a handshake compares them.

    Raises ContractError when a side holds what has no canonical form, such as a float.
    """
    a, b = _plain(a), _plain(b)
    found: list[Difference] = []
    for field in sorted({*a, *b}):
        for path, left, right in _walk(field, field, a.get(field, ABSENT), b.get(field, ABSENT)):
            found.append(Difference(path=path, a=left, b=right, identity=identity_of_field(field)))
    return sorted(found, key=lambda one: (IDENTITIES.index(one.identity), one.path))


def disagreements(a: Mapping[str, object] | None, b: Mapping[str, object] | None) -> list[Difference]:
    """Return the fields that keep two processes apart: model and policy; a deployment may differ.

    A side is a canonical dict, or None for a process without a contract, which differs in the one field `contract`.
    Raises ContractError as `diff_dicts` does.
    """
    if a is None or b is None:
        if a is b:
            return []
        return [Difference(path="contract", a=_title(a), b=_title(b), identity="numerical_policy")]
    return [one for one in diff_dicts(a, b) if one.identity != "deployment"]


def one_line(differences: Sequence[Difference], a: str = "a", b: str = "b", *, limit: int = 8) -> str:
    """Return the differences as one line for a message, `limit` of them written out."""
    shown = "; ".join(one.line(a, b) for one in differences[:limit])
    more = f"; and {len(differences) - limit} more" if len(differences) > limit else ""
    return f"{counted(differences)}: {shown}{more}"


def render(differences: Sequence[Difference], a: str = "a", b: str = "b") -> str:
    """Return the differences as text, under one heading an identity; the sides are called `a` and `b`."""
    if not differences:
        return "no difference"
    lines = []
    for identity in IDENTITIES:
        here = [one for one in differences if one.identity == identity]
        if here:
            lines.append(f"{_MEANING[identity]} ({counted(here)})")
            lines += [f"  {one.line(a, b)}" for one in here]
    return "\n".join(lines)


def counted(differences: Sequence[Difference]) -> str:
    """Return how many fields differ, in words."""
    return f"{len(differences)} field{'s differ' if len(differences) != 1 else ' differs'}"


def _title(contract: Mapping[str, object] | None) -> str:
    if contract is None:
        return ABSENT
    return f"{contract.get('name')}, numerical_policy {identities_of(contract).numerical_policy}"


def _plain(side: Mapping[str, object]) -> dict[str, object]:
    plain = normal(side)
    return plain if isinstance(plain, dict) else {}


def _walk(path: str, field: str, a: object, b: object) -> list[tuple[str, object, object]]:
    if _same(a, b):
        return []
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        out = []
        for key in sorted({*a, *b}, key=str):
            out += _walk(f"{path}.{key}", str(key), a.get(key, ABSENT), b.get(key, ABSENT))
        return out
    names = _NAMED_BY.get(field)
    if names is not None and _records(a) and _records(b):
        return _entries(path, names, a, b)
    return [(path, a, b)]


def _entries(
    path: str, names: tuple[str, ...], a: Sequence[Mapping[str, object]], b: Sequence[Mapping[str, object]]
) -> list[tuple[str, object, object]]:
    # the fewest names that tell the entries of each side apart; a change in the rest is then a field's change
    for count in range(1, len(names) + 1):
        left, right = (_labelled(side, names[:count]) for side in (a, b))
        if len(left) == len(a) and len(right) == len(b):
            break
    else:
        return [(path, list(a), list(b))]
    out = []
    for label in sorted({*left, *right}):
        out += _walk(f"{path}[{label}]", "", left.get(label, ABSENT), right.get(label, ABSENT))
    return out


def _labelled(
    entries: Sequence[Mapping[str, object]], names: tuple[str, ...]
) -> dict[str, Mapping[str, object]]:
    return {"|".join(_label(entry.get(name)) for name in names): entry for entry in entries}


def _label(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


def _same(a: object, b: object) -> bool:
    # types tell true from 1, which Python's == does not
    if type(a) is not type(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


def _records(value: object) -> TypeGuard[list[Mapping[str, object]]]:
    return isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)


def _scalars(value: object) -> TypeGuard[list[str | int]]:
    return isinstance(value, list) and all(isinstance(entry, (str, int)) for entry in value)


def _words(value: object) -> str:
    text = value if isinstance(value, str) else encode(value).decode()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
