# SPDX-License-Identifier: Apache-2.0
"""Reads a strict subset of YAML into plain values and remembers where each one stood.

Refused, each with file, line, field and fix: anchors, aliases, tags, merge keys, duplicate keys, raw floats,
the words YAML 1.1 reads as booleans or dates, more than one document, files over 1 MB, nesting over 64.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from isoexec.contracts.errors import ContractError

__all__ = ["MAX_BYTES", "MAX_DEPTH", "Document", "Keys", "Place", "Span", "parse", "read"]

MAX_BYTES = 1_000_000
MAX_DEPTH = 64

Keys = tuple[str | int, ...]

_INT = re.compile(r"-?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_NUMBER_LIKE = re.compile(r"[-+]?0[xob]?[0-9a-fA-F_]+|\+[0-9]+|[0-9][0-9_]*_[0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Span:
    """Where a value stood: 1-based `line`, and the character range [start, end) of a scalar."""

    line: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Place:
    """A value's address while it is read: file, keys from the root, and the spans known for the file."""

    path: str = ""
    spans: Mapping[Keys, Span] = field(default_factory=dict)
    keys: Keys = ()

    def at(self, key: str | int) -> Place:
        return Place(path=self.path, spans=self.spans, keys=(*self.keys, key))

    @property
    def dotted(self) -> str:
        text = ""
        for key in self.keys:
            text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
        return text

    @property
    def line(self) -> int | None:
        """The line of this value, else of the nearest value around it."""
        for depth in range(len(self.keys), -1, -1):
            span = self.spans.get(self.keys[:depth])
            if span is not None:
                return span.line
        return None

    def error(self, problem: str, fix: str) -> ContractError:
        return ContractError(problem, path=self.path, line=self.line, field=self.dotted, fix=fix)


@dataclass(frozen=True, kw_only=True)
class Document:
    """A parsed file: its `text`, its `value` as plain dicts, lists and scalars, and a span per address."""

    path: str
    text: str
    value: object
    spans: Mapping[Keys, Span]

    @property
    def place(self) -> Place:
        return Place(path=self.path, spans=self.spans)


def read(path: str | Path) -> Document:
    """Read a file; raises ContractError when it cannot be read or is not in the subset."""
    try:
        with Path(path).open("rb") as handle:
            data = handle.read(MAX_BYTES + 1)
    except OSError as error:
        raise ContractError(
            f"cannot be read: {error.strerror}", path=str(path), fix="give the path of a contract file"
        ) from error
    return parse(data, path=str(path))


def parse(data: bytes | str, *, path: str = "") -> Document:
    """Parse YAML bytes or text; `path` is only used in messages."""
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if len(raw) > MAX_BYTES:
        raise ContractError(f"larger than {MAX_BYTES} bytes", path=path, fix="a contract is a few kilobytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ContractError("not UTF-8", path=path, line=line, fix="save the file as UTF-8") from error
    builder = _Builder(path)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = mark.line + 1 if mark is not None else None
        problem = f"not YAML: {error.problem or error.context}"
        raise ContractError(problem, path=path, line=at, fix="mend the syntax") from error
    except yaml.YAMLError as error:
        problem = "not YAML: " + " ".join(str(error).split())
        raise ContractError(problem, path=path, fix="remove what is not text") from error
    if not builder.documents:
        raise ContractError("is empty", path=path, fix="start from a shipped contract")
    return Document(path=path, text=text, value=builder.value, spans=builder.spans)


@dataclass(kw_only=True)
class _Open:
    """A collection still being filled; `key` is the mapping key waiting for its value."""

    value: dict[str, object] | list[object]
    keys: Keys
    key: str | None = None


class _Builder:
    """Makes plain values from parser events; recursion-free, so depth is refused before it can hurt."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.value: object = None
        self.spans: dict[Keys, Span] = {}
        self.documents = 0
        self._open: list[_Open] = []

    def take(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                raise self._error(event, (), "more than one document", "keep one contract a file")
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            self._open.pop()
        elif isinstance(event, yaml.NodeEvent):
            self._node(event)

    def _error(self, event: yaml.Event, keys: Keys, problem: str, fix: str) -> ContractError:
        place = Place(path=self.path, keys=keys)
        line = _span(event).line
        return ContractError(problem, path=self.path, line=line, field=place.dotted, fix=fix)

    def _node(self, event: yaml.NodeEvent) -> None:
        top = self._open[-1] if self._open else None
        is_key = top is not None and isinstance(top.value, dict) and top.key is None
        keys = self._address(top)
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise self._error(
                event, keys, f"anchor or alias {event.anchor!r}", "write the value out; a contract has none"
            )
        if getattr(event, "tag", None) is not None:
            raise self._error(event, keys, "explicit YAML tag", "remove the tag")
        if is_key:
            self._key(event, top)
            return
        self.spans[keys] = _span(event)
        if isinstance(event, yaml.ScalarEvent):
            self._place(top, self._scalar(event, keys))
            return
        if len(self._open) >= MAX_DEPTH:
            raise self._error(event, keys, f"nested deeper than {MAX_DEPTH}", "flatten it")
        value: dict[str, object] | list[object] = {} if isinstance(event, yaml.MappingStartEvent) else []
        self._place(top, value)
        self._open.append(_Open(value=value, keys=keys))

    def _address(self, top: _Open | None) -> Keys:
        if top is None:
            return ()
        if isinstance(top.value, list):
            return (*top.keys, len(top.value))
        return (*top.keys, top.key) if top.key is not None else top.keys

    def _key(self, event: yaml.NodeEvent, top: _Open | None) -> None:
        if top is None or not isinstance(event, yaml.ScalarEvent):
            raise self._error(event, top.keys if top else (), "a key that is not text", "use a plain name")
        key = self._scalar(event, top.keys)
        if not isinstance(key, str):
            raise self._error(event, top.keys, f"key {event.value!r} is not text", "quote it")
        if key in top.value:
            raise self._error(event, (*top.keys, key), f"duplicate key {key!r}", "keep one of them")
        top.key = key

    def _place(self, top: _Open | None, value: object) -> None:
        if top is None:
            self.value = value
        elif isinstance(top.value, list):
            top.value.append(value)
        elif top.key is not None:
            top.value[top.key] = value
            top.key = None

    def _scalar(self, event: yaml.ScalarEvent, keys: Keys) -> object:
        text = unicodedata.normalize("NFC", event.value)
        if not event.implicit[0]:  # quoted or block: always text
            return text
        if text in {"", "null", "~"}:
            return None
        if text in {"true", "false"}:
            return text == "true"
        if _INT.fullmatch(text):
            return self._integer(event, keys, text)
        if _FLOAT.fullmatch(text) and not _NUMBER_LIKE.fullmatch(text):
            raise self._error(
                event, keys, f"raw float {text}", f'quote it ("{text}") or give the bit pattern as text'
            )
        tag: str = _RESOLVER.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        if tag != "tag:yaml.org,2002:str" or _NUMBER_LIKE.fullmatch(text):
            raise self._error(
                event, keys, f"{text!r} means different things to different YAML readers", "quote it, or use "
                "true, false, null or a plain decimal integer",
            )  # fmt: skip
        return text

    def _integer(self, event: yaml.ScalarEvent, keys: Keys, text: str) -> int:
        if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
            raise self._error(event, keys, f"{text[:24]} does not fit 64 bits", "write it as a string")
        return int(text)


def _span(event: yaml.Event) -> Span:
    start, end = event.start_mark, event.end_mark
    if start is None or end is None:  # the stream's own events have none
        return Span(line=1, start=0, end=0)
    return Span(line=start.line + 1, start=start.index, end=end.index)


_RESOLVER = yaml.resolver.Resolver()
