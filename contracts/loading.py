# SPDX-License-Identifier: Apache-2.0
"""Reads a strict subset of YAML into plain values and remembers where each one stood.

Refused, each with file, line, field and fix: anchors, aliases, tags, merge keys, duplicate keys, raw floats,
the words YAML 1.1 reads as booleans or dates, more than one document, files over 256 kB, nesting over 64. JSON is
part of the subset.

libyaml parses where PyYAML was built with it, twenty times as fast as PyYAML's own parser. The two are one: text in
which they are known to differ is never given to libyaml, and whatever is refused is refused by PyYAML's parser, in its
words and with its marks.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from isoexec.contracts.errors import ContractError

__all__ = ["MAX_BYTES", "MAX_DEPTH", "Document", "Keys", "Place", "Span", "parse", "read", "read_bytes"]

MAX_BYTES = 256 * 1024
MAX_DEPTH = 64

Keys = tuple[str | int, ...]

_INT = re.compile(r"-?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_NUMBER_LIKE = re.compile(r"[-+]?0[xob]?[0-9a-fA-F_]+|\+[0-9]+|[0-9][0-9_]*_[0-9_]*")
# where libyaml admits what PyYAML refuses or reads it otherwise: tabs, `?`, directives, line breaks YAML 1.2 gave up, and
# comments that touch a block scalar's indicators
_PARSERS_DIFFER = re.compile("[\t?%\r\x85\u2028\u2029\ufeff]|[|>][-+0-9]*#")
_SURROGATE = re.compile("[\ud800-\udfff]")
_FAST: Any = getattr(yaml, "CSafeLoader", None)


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
    return parse(read_bytes(path), path=str(path))


def read_bytes(path: str | Path) -> bytes:
    """A file's bytes, one more than `parse` takes at most; raises ContractError when it cannot be read."""
    try:
        with Path(path).open("rb") as handle:
            return handle.read(MAX_BYTES + 1)
    except OSError as error:
        raise ContractError(
            f"cannot be read: {error.strerror}", path=str(path), fix="give the path of a contract file"
        ) from error


def parse(data: bytes | str, *, path: str = "") -> Document:
    """Parse YAML bytes or text; `path` is only used in messages."""
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if len(raw) > MAX_BYTES:
        raise ContractError(
            f"larger than {MAX_BYTES} bytes", path=path, fix="give a contract: it has a few kilobytes"
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ContractError("not UTF-8", path=path, line=line, fix="save the file as UTF-8") from error
    builder = _fast(text, path) or _exact(text, path)
    if not builder.documents:
        raise ContractError("is empty", path=path, fix="start from a shipped contract")
    return Document(path=path, text=text, value=builder.value, spans=builder.spans)


def _fast(text: str, path: str) -> _Builder | None:
    """Build by libyaml; None where it is not there, may differ, or finds anything to refuse."""
    if _FAST is None or _PARSERS_DIFFER.search(text):
        return None
    builder = _Builder(path, text)
    try:
        for event in yaml.parse(text, Loader=_FAST):
            builder.take(event)
    except (yaml.YAMLError, ContractError):
        return None
    return builder


def _exact(text: str, path: str) -> _Builder:
    """Build by PyYAML's own parser; raises ContractError for what it or the subset refuses."""
    builder = _Builder(path, text)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = mark.line + 1 if mark is not None else None
        problem = f"not YAML: {error.problem or error.context}"
        raise ContractError(problem, path=path, line=at, fix="mend the syntax") from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        problem = f"not YAML: character #x{error.character:04x} is not text"
        raise ContractError(problem, path=path, line=line, fix="remove it") from error
    except yaml.YAMLError as error:
        problem = "not YAML: " + " ".join(str(error).split())
        raise ContractError(problem, path=path, fix="remove what is not text") from error
    return builder


@dataclass(kw_only=True)
class _Open:
    """A collection still being filled; `key` is the mapping key waiting for its value."""

    value: dict[str, object] | list[object]
    keys: Keys
    key: str | None = None


class _Builder:
    """Makes plain values from parser events; recursion-free, so depth is refused before it can hurt."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        self.value: object = None
        self.spans: dict[Keys, Span] = {}
        self.documents = 0
        self._open: list[_Open] = []

    def take(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.NodeEvent):
            self._node(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._open.pop()
        elif isinstance(event, yaml.DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                raise self._error(event, (), "more than one document", "keep one contract a file")

    def _error(self, event: yaml.Event, keys: Keys, problem: str, fix: str) -> ContractError:
        place = Place(path=self.path, keys=keys)
        line = self._span(event).line
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
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event, keys)
            self.spans[keys] = self._span(event)
            self._place(top, value)
            return
        self.spans[keys] = self._span(event)
        if len(self._open) >= MAX_DEPTH:
            raise self._error(event, keys, f"nested deeper than {MAX_DEPTH}", "flatten it")
        made: dict[str, object] | list[object] = {} if isinstance(event, yaml.MappingStartEvent) else []
        self._place(top, made)
        self._open.append(_Open(value=made, keys=keys))

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

    def _span(self, event: yaml.Event) -> Span:
        first, last = event.start_mark, event.end_mark
        if first is None or last is None:  # the stream's own events have none
            return Span(line=1, start=0, end=0)
        if first.index != last.index:
            return Span(line=first.line + 1, start=first.index, end=last.index)
        at = self._before_blanks(first.index)
        line = first.line + 1 - self.text.count("\n", at, first.index)
        return Span(line=line, start=at, end=at)

    def _before_blanks(self, at: int) -> int:
        # the parsers differ on which side of blanks and comments an empty value stands
        text = self.text
        while True:
            while at and text[at - 1] in " \n":
                at -= 1
            line = text.rfind("\n", 0, at) + 1
            comment = line if text.startswith("#", line) else text.find(" #", line, at)
            if not line <= comment < at:
                return at
            at = comment

    def _scalar(self, event: yaml.ScalarEvent, keys: Keys) -> object:
        text: str = event.value
        if not text.isascii():
            text = unicodedata.normalize("NFC", self._paired(event, keys, text))
        if not event.implicit[0]:  # quoted or block: always text
            return text
        value, problem, fix = _plain(text)
        if problem:
            raise self._error(event, keys, problem, fix)
        return value

    def _paired(self, event: yaml.ScalarEvent, keys: Keys, text: str) -> str:
        # JSON escapes a character beyond U+FFFF as a pair of surrogates, which PyYAML leaves as two
        if not _SURROGATE.search(text):
            return text
        try:
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError as error:
            problem = f"{text[:60]!r} is not valid Unicode"
            raise self._error(event, keys, problem, "write whole characters") from error


@lru_cache(maxsize=4096)
def _plain(text: str) -> tuple[str | int | bool | None, str, str]:
    """Read an unquoted scalar: its value, or a problem and its fix."""
    if text in {"", "null", "~"}:
        return None, "", ""
    if text in {"true", "false"}:
        return text == "true", "", ""
    if _INT.fullmatch(text):
        if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
            return None, f"{text[:24]} does not fit 64 bits", "write it as a string"
        return int(text), "", ""
    if _FLOAT.fullmatch(text) and not _NUMBER_LIKE.fullmatch(text):
        return None, f"raw float {text}", f'quote it ("{text}") or give the bit pattern as text'
    tag: str = _RESOLVER.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    if tag == "tag:yaml.org,2002:merge":
        return None, "merge key '<<'", "write the fields out; a contract has none"
    if tag != "tag:yaml.org,2002:str" or _NUMBER_LIKE.fullmatch(text):
        return (
            None,
            f"{text!r} means different things to different YAML readers",
            "quote it, or use true, false, null or a plain decimal integer",
        )
    return text, "", ""


_RESOLVER = yaml.resolver.Resolver()
