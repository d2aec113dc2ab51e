# SPDX-License-Identifier: Apache-2.0
"""Field kinds: one object per field reads it strictly, writes it canonically and describes it as JSON Schema.

A contract part is a frozen dataclass whose fields are made by `wire(kind, doc)`. Reading refuses unknown
fields and wrong types with the place of the value; writing omits fields at their default and puts sets in
order, so layout and entry order never reach a digest.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from isoexec.contracts.canonical import encode, normal
from isoexec.contracts.digests import is_digest
from isoexec.contracts.errors import ContractError
from isoexec.contracts.loading import Place

__all__ = [
    "Amount",
    "Digest",
    "Int",
    "Kind",
    "ListOf",
    "MapOf",
    "Record",
    "Scalar",
    "Text",
    "read_record",
    "schema_of",
    "wire",
    "wire_fields",
    "write_record",
]

NAME = r"[A-Za-z][A-Za-z0-9_.\-]*"


class Kind:
    """What a field may hold; `read` refuses everything else by place."""

    def read(self, value: object, place: Place) -> Any:
        raise place.error(f"{type(self).__name__} cannot read {value!r}", "use a subclass")

    def write(self, value: Any) -> object:
        return value

    def describe(self, defs: dict[str, object]) -> dict[str, object]:
        """Return the JSON Schema of the field, adding the records it needs to `defs`."""
        del defs
        return {}


def _wrong(place: Place, wanted: str, value: object) -> Exception:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "a boolean", int: "an integer"}
    found = "null" if value is None else names.get(type(value), type(value).__name__)
    if isinstance(value, float):
        return place.error(f"raw float {value!r}", f'write {wanted}; decimals are quoted ("1e-6")')
    shown = f" {value!r}" if isinstance(value, (str, int)) and len(repr(value)) < 60 else ""
    return place.error(f"expected {wanted}, found {found}{shown}", f"write {wanted}")


def _text(value: str, place: Place) -> str:
    try:
        return str(normal(value))
    except ContractError as error:
        raise place.error(error.problem, "write whole characters") from error


@dataclasses.dataclass(frozen=True)
class Text(Kind):
    """Text of a pattern or from `choices`."""

    pattern: str = NAME
    choices: tuple[str, ...] = ()
    what: str = "a name"

    def read(self, value: object, place: Place) -> str:
        if self.choices:
            if not isinstance(value, str) or value not in self.choices:
                raise _wrong(place, "one of " + ", ".join(self.choices), value)
            return value
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value):
            raise _wrong(place, self.what, value)
        return _text(value, place)

    def describe(self, defs: dict[str, object]) -> dict[str, object]:
        del defs
        if self.choices:
            return {"enum": list(self.choices)}
        return {"type": "string", "pattern": f"^(?:{self.pattern})$"}


@dataclasses.dataclass(frozen=True)
class Int(Kind):
    """An integer of 64 bits, at least `minimum`."""

    minimum: int = 1

    def read(self, value: object, place: Place) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not self.minimum <= value < 2**63:
            raise _wrong(place, f"an integer of at least {self.minimum}", value)
        return value

    def describe(self, defs: dict[str, object]) -> dict[str, object]:
        del defs
        return {"type": "integer", "minimum": self.minimum, "maximum": 2**63 - 1}


@dataclasses.dataclass(frozen=True)
class Scalar(Kind):
    """An integer of 64 bits, text or a boolean."""

    def read(self, value: object, place: Place) -> str | int | bool:
        if isinstance(value, str):
            return _text(value, place)
        if not isinstance(value, int) or not -(2**63) <= value < 2**63:
            raise _wrong(place, "an integer, text or a boolean", value)
        return value

    def describe(self, defs: dict[str, object]) -> dict[str, object]:
        del defs
        return {"type": ["integer", "string", "boolean"]}


@dataclasses.dataclass(frozen=True)
class Digest(Kind):
    """`sha256:<64 lower-case hex digits>`."""

    def read(self, value: object, place: Place) -> str:
        if not isinstance(value, str) or not is_digest(value):
            raise _wrong(place, "sha256: and 64 lower-case hex digits", value)
        return value

    def describe(self, defs: dict[str, object]) -> dict[str, object]:
        del defs
        return {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"}


@dataclasses.dataclass(frozen=True)
class Amount(Kind):
    """A non-negative decimal in text; "0.0010" and "1e-3" are the same amount and have the same digest."""

    pattern: str = r"[0-9]{1,40}(?:\.[0-9]{1,40})?(?:[eE][-+]?[0-9]{1,3})?"

    def read(self, value: object, place: Place) -> str:
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value):
            raise _wrong(place, 'a quoted decimal such as "1e-3"', value)
        written = self.write(value)
        if not re.fullmatch(self.pattern, written):
            raise place.error(
                f"decimal {value!r} has too many digits to be written plainly", 'write one such as "1e-3"'
            )
        return written

    def write(self, value: Any) -> str:
        from decimal import Decimal  # loaded where a contract has a decimal, which few have

        _, digits, exponent = Decimal(str(value)).as_tuple()
        shift = exponent if isinstance(exponent, int) else 0
        kept = list(digits)
        while len(kept) > 1 and kept[-1] == 0:
            kept.pop()
            shift += 1
        return "0" if kept == [0] else str(Decimal((0, tuple(kept), shift))).lower()

    def describe(self, defs: dict[str, object]) -> dict[str, object]:
        del defs
        return {"type": "string", "pattern": f"^{self.pattern}$"}


@dataclasses.dataclass(frozen=True)
class ListOf(Kind):
    """A set written as a list: no entry twice, order without meaning; `key` fields name a record."""

    item: Kind
    least: int = 0
    key: tuple[str, ...] = ()

    def read(self, value: object, place: Place) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise _wrong(place, "a list", value)
        if len(value) < self.least:
            raise place.error(f"has {len(value)} entries", f"give at least {self.least}")
        out, seen = [], set[bytes]()
        for index, entry in enumerate(value):
            read = self.item.read(entry, place.at(index))
            written = self._label(read) if self.key else self.item.write(read)
            name = encode(written)
            if name in seen:
                label = ", ".join(map(str, written)) if self.key and isinstance(written, list) else written
                raise place.at(index).error(f"{label!r} is listed twice", "keep one of them")
            seen.add(name)
            out.append(read)
        return tuple(out)

    def _label(self, record: Any) -> list[object]:
        kinds = {name: (attribute, kind) for name, attribute, kind, *_ in wire_fields(type(record))}
        return [kind.write(getattr(record, at)) for at, kind in (kinds[name] for name in self.key)]

    def write(self, value: Any) -> list[object]:
        return sorted((self.item.write(entry) for entry in value), key=encode)

    def describe(self, defs: dict[str, object]) -> dict[str, object]:
        unique: dict[str, object] = {} if self.key else {"uniqueItems": True}
        return {"type": "array", "items": self.item.describe(defs), "minItems": self.least, **unique}


@dataclasses.dataclass(frozen=True)
class MapOf(Kind):
    """A mapping from names (of `keys`, when given) to values of one kind."""

    item: Kind
    keys: tuple[str, ...] = ()

    def read(self, value: object, place: Place) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _wrong(place, "a mapping", value)
        out = {}
        for name, entry in value.items():
            if not isinstance(name, str) or not re.fullmatch(NAME, name):
                raise place.error(f"key {name!r} is not a name", "use letters, digits, '_', '.' and '-'")
            if self.keys and name not in self.keys:
                raise place.at(name).error("unknown field", "use " + ", ".join(self.keys))
            out[name] = self.item.read(entry, place.at(name))
        return out

    def write(self, value: Any) -> dict[str, object]:
        return {name: self.item.write(value[name]) for name in sorted(value)}

    def describe(self, defs: dict[str, object]) -> dict[str, object]:
        item = self.item.describe(defs)
        if self.keys:
            properties = dict.fromkeys(self.keys, item)
            return {"type": "object", "properties": properties, "additionalProperties": False}
        return {"type": "object", "propertyNames": {"pattern": f"^{NAME}$"}, "additionalProperties": item}


@dataclasses.dataclass(frozen=True)
class Record(Kind):
    """A dataclass of this module's making; `short` names the field a bare scalar stands for."""

    cls: type
    short: str = ""

    def read(self, value: object, place: Place) -> Any:
        if self.short and value is None:
            raise place.error("has no value", f"write one ({self.short}), or {{}} where any is admitted")
        if self.short and not isinstance(value, (Mapping, list)):
            value = {self.short: value}
        return read_record(self.cls, value, place)

    def write(self, value: Any) -> dict[str, object]:
        return write_record(value)

    def describe(self, defs: dict[str, object]) -> dict[str, object]:
        name = self.cls.__name__
        if name not in defs:
            defs[name] = {}  # holds the place while a record that mentions it is described
            defs[name] = schema_of(self.cls, defs)
        ref: dict[str, object] = {"$ref": f"#/$defs/{name}"}
        return {"anyOf": [ref, {"type": ["integer", "string", "boolean"]}]} if self.short else ref


def wire(kind: Kind, doc: str, *, default: Any = dataclasses.MISSING, name: str = "") -> Any:
    """Make a dataclass field of a kind; `name` is the name in the file where the attribute's differs."""
    meta = {"kind": kind, "doc": doc, "name": name}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=meta)
    if isinstance(default, dict):
        return dataclasses.field(metadata=meta, default_factory=dict)
    return dataclasses.field(metadata=meta, default=default)


Fields = tuple[tuple[str, str, Kind, str, Any], ...]
_FIELDS: dict[type, Fields] = {}


def wire_fields(cls: type) -> Fields:
    """Return (wire name, attribute, kind, doc, default or MISSING) of each field of a record, in order."""
    known = _FIELDS.get(cls)
    if known is not None:
        return known
    out = []
    for f in dataclasses.fields(cls):
        default: Any = f.default
        if f.default_factory is not dataclasses.MISSING:
            default = f.default_factory()
        out.append((f.metadata["name"] or f.name, f.name, f.metadata["kind"], f.metadata["doc"], default))
    return _FIELDS.setdefault(cls, tuple(out))


def read_record(cls: type, value: object, place: Place) -> Any:
    """Build `cls` from a mapping; raises ContractError for a missing, unknown or ill-typed field."""
    if not isinstance(value, Mapping):
        raise _wrong(place, "a mapping", value)
    fields = wire_fields(cls)
    known = [name for name, *_ in fields]
    for name in value:
        if name not in known:
            raise place.at(str(name)).error("unknown field", "use " + ", ".join(known))
    got = {}
    for name, attribute, kind, _, default in fields:
        entry = value.get(name)
        if entry is None:
            # null and absent are one thing: the default, where there is one
            if default is dataclasses.MISSING:
                raise place.at(name).error("is missing", f"add {name}")
            continue
        got[attribute] = kind.read(entry, place.at(name))
    made = cls(**got)
    problem = made.problem() if hasattr(made, "problem") else None
    if problem is not None:
        raise place.error(*problem)
    return made


def write_record(record: Any) -> dict[str, object]:
    """Return the canonical dict of a record: sets in order, fields at their default left out."""
    out: dict[str, object] = {}
    for name, attribute, kind, _, default in wire_fields(type(record)):
        value = getattr(record, attribute)
        if value is None or (default is not dataclasses.MISSING and value == default):
            continue
        out[name] = kind.write(value)
    return out


def schema_of(cls: type, defs: dict[str, object]) -> dict[str, object]:
    """Return the JSON Schema of a record, adding the records it mentions to `defs`."""
    properties: dict[str, object] = {}
    required: list[str] = []
    for name, _, kind, doc, default in wire_fields(cls):
        shape = kind.describe(defs)
        if default is dataclasses.MISSING:
            required.append(name)
        else:
            shape = {"anyOf": [shape, {"type": "null"}]}
        properties[name] = {"description": doc, **shape}
    lines: Sequence[str] = (cls.__doc__ or "").strip().splitlines()
    return {
        "type": "object",
        "description": lines[0] if lines else "",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
