# SPDX-License-Identifier: Apache-2.0
"""Evidence: what a gate compared, kept as a record whose file name is the SHA-256 of its bytes.

A record says that on one arch, in one environment, one provider of one function passed checks: over which domain, how many
elements were compared as integers, and that the controls planted beside each check failed as they must.
"""

# ruff: noqa: RUF009  (wire() makes a dataclass field, not a shared default)
from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from importlib.resources import files
from pathlib import Path

from isoexec.contracts.canonical import encode
from isoexec.contracts.digests import digest_bytes, is_digest
from isoexec.contracts.errors import ContractError, EvidenceError
from isoexec.contracts.kinds import Digest, Int, ListOf, MapOf, Record, Scalar, Text, read_record, wire
from isoexec.contracts.kinds import write_record as _write
from isoexec.contracts.loading import Place
from isoexec.contracts.parts import ANY_TEXT, FUNCTION, Value

__all__ = [
    "FAMILIES",
    "PROFILES",
    "Check",
    "Control",
    "EvidenceRecord",
    "Store",
    "Subject",
    "default_store",
    "moment",
    "put_file",
    "shipped",
    "stamp",
]

FAMILIES: Mapping[str, str] = {
    "conformance": "the provider's bits are those of the function's reference",
    "case_parity": "prefill, decode and every trainer forward give the same bits",
    "batch_invariance": "a row has the same bits alone and in any company, at any place",
    "partition_invariance": "any admitted degree of an axis gives the bits of degree 1, in real process groups",
    "resume_exactness": "chunked, cached and interrupted computation gives the bits of one pass",
    "degenerate_shapes": "empty, single and odd shapes, and non-finite values, are exact or refused",
    "rerun_determinism": "the same call gives the same bits again, at full size",
    "backward": "gradients are connected, right, and the same bits again",
}
"""Families of checks, each with what it proves."""
PROFILES = ("quick", "full")
MAX_BYTES = 4_000_000
_TIME = Text(
    pattern=r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z",
    what="a time such as 2026-01-31T12:00:00Z",
)


@dataclass(frozen=True, kw_only=True)
class Control:
    """A fault planted beside a check: `differing` of `elements` showed it, and 0 means that the check is blind."""

    name: str = wire(Text(), "what was planted")
    elements: int = wire(Int(0), "elements compared as integers")
    differing: int = wire(Int(0), "elements that differed, as they must")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One family under one set of the function's constants, over a domain of named values."""

    family: str = wire(Text(choices=tuple(FAMILIES)), "what the check proves")
    constants: Mapping[str, Value] = wire(
        MapOf(Scalar()), "the function's constants it ran under", default={}
    )
    domain: Mapping[str, tuple[Value, ...]] = wire(
        MapOf(ListOf(Scalar(), least=1)),
        "values covered: dtype, case, rows, an axis' degrees, ...",
        default={},
    )
    elements: int = wire(Int(0), "elements compared as integers")
    differing: int = wire(Int(0), "elements that differed")
    controls: tuple[Control, ...] = wire(ListOf(Record(Control), key=("name",)), "planted faults", default=())

    def failures(self) -> list[str]:
        """Return why the check proves nothing; empty when it holds."""
        out = []
        if self.elements == 0:
            out.append("no element was compared")
        if self.differing:
            out.append(f"{self.differing} of {self.elements} elements differ")
        if not self.controls:
            out.append("no control was planted")
        out += [
            f"control {one.name} passed: {one.elements} elements, none differs"
            for one in self.controls
            if not one.differing
        ]
        return out


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The provider that was run: an own kernel by its source, a library by its version and settings."""

    name: str = wire(Text(), "name of the provider")
    kind: str = wire(Text(choices=("kernel", "library")), "own kernel, or a library's")
    source: str | None = wire(Digest(), "digest of a kernel's source", default=None)
    version: str | None = wire(ANY_TEXT, "version and build of a library", default=None)
    settings: Mapping[str, Value] = wire(MapOf(Scalar()), "settings its bits depend on", default={})

    def problem(self) -> tuple[str, str] | None:
        if self.kind == "kernel" and self.source is None:
            return "a kernel without a source digest", "record the digest of the source that ran"
        if self.kind == "library" and self.version is None:
            return "a library without a version", "record the version and build that ran"
        return None


@dataclass(frozen=True, kw_only=True)
class EvidenceRecord:
    """One run of a function's gate on one provider."""

    schema_version: int = wire(Int(), "version of this format, 1")
    function: str = wire(FUNCTION, "the function")
    provider: Subject = wire(Record(Subject), "what computed it")
    arch: str = wire(Text(), "arch it ran on")
    environment: Mapping[str, str] = wire(MapOf(ANY_TEXT), "versions, build and switches it ran under")
    profile: str = wire(Text(choices=PROFILES), "quick covers less than full")
    gate: str = wire(Digest(), "digest of the gate's own source")
    made: str = wire(_TIME, "when it ran, UTC")
    expires: str = wire(_TIME, "when it stops being evidence, UTC")
    checks: tuple[Check, ...] = wire(
        ListOf(Record(Check), least=1, key=("family", "constants")), "what was compared"
    )

    def problem(self) -> tuple[str, str] | None:
        if self.schema_version != 1:
            return f"schema_version {self.schema_version} is not known", "write schema_version 1"
        for name in ("made", "expires"):
            try:
                moment(getattr(self, name))
            except ValueError:
                return f"{name} {getattr(self, name)} is no date", "write a time such as 2026-01-31T12:00:00Z"
        if moment(self.expires) <= moment(self.made):
            return "expires before it was made", "let it expire later"
        if "torch" not in self.environment:
            return "environment does not say which torch ran", "record torch's version"
        return None

    @classmethod
    def from_bytes(cls, data: bytes, path: str = "") -> EvidenceRecord:
        """Make a record of its canonical bytes; raises ContractError where they are not that."""
        place = Place(path=path)
        try:
            value = json.loads(
                data, object_pairs_hook=_unique, parse_float=_no_float, parse_constant=_no_float
            )
        except (ValueError, RecursionError) as error:
            raise place.error(
                f"not a record: {error}", "restore the file: records are never edited"
            ) from error
        made: EvidenceRecord = read_record(cls, value, place)
        if made.to_bytes() != data:
            raise place.error(
                "not the canonical bytes of its record", "restore the file: records are never edited"
            )
        return made

    def to_dict(self) -> dict[str, object]:
        """Return the canonical dict."""
        return _write(self)

    def to_bytes(self) -> bytes:
        """Return the canonical bytes, the content of the record's file."""
        return encode(self.to_dict())

    @cached_property
    def digest(self) -> str:
        """Digest of the canonical bytes, the record's name."""
        return digest_bytes(self.to_bytes())

    def check(self, family: str, constants: Mapping[str, Value]) -> Check | None:
        """Return the check of a family under exactly these constants, or None."""
        wanted = encode(dict(constants))
        for one in self.checks:
            if one.family == family and encode(dict(one.constants)) == wanted:
                return one
        return None

    @property
    def elements(self) -> int:
        """Elements compared as integers, over all checks, controls not counted."""
        return sum(one.elements for one in self.checks)


def moment(text: str) -> float:
    """Return the Unix time of a record's time."""
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()


def stamp(seconds: float) -> str:
    """Return a Unix time as a record writes it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Store:
    """Records in one or more folders, each file named by the hex of its digest; new ones go to the first."""

    def __init__(self, paths: Sequence[Path]) -> None:
        if not paths:
            raise EvidenceError(
                field="store",
                wanted="a folder",
                found="none",
                fix="name one, in ISOEXEC_EVIDENCE or by --store",
            )
        self.paths = tuple(paths)

    def path(self, digest: str) -> Path | None:
        """Return where a record lies, or None."""
        name = digest.removeprefix("sha256:") + ".json"
        return next((folder / name for folder in self.paths if (folder / name).is_file()), None)

    def read(self, digest: str) -> EvidenceRecord:
        """Return a record; raises EvidenceError for one that is missing, unreadable, edited or ill-formed."""
        return _record(*self._bytes(digest))

    def _bytes(self, digest: str) -> tuple[bytes, str]:
        """Return a record's bytes, which have this digest, and where they lie."""
        path = self.path(digest) if is_digest(digest) else None
        where = ", ".join(map(str, self.paths))
        if path is None:
            raise EvidenceError(
                field="evidence", wanted=f"the record {digest}", found=f"none in {where}",
                fix="run the gate (isoexec gate run), or put the folder that holds it into ISOEXEC_EVIDENCE",
            )  # fmt: skip
        try:
            with path.open("rb") as handle:
                data = handle.read(MAX_BYTES + 1)
        except OSError as error:
            raise EvidenceError(
                field="evidence",
                wanted=f"the record {digest}",
                found=f"{path}, unreadable: {error.strerror}",
                fix="make it readable",
            ) from error
        found = digest_bytes(data)
        if found != digest:
            raise EvidenceError(
                field="evidence", wanted=f"the record {digest}", found=f"{path}, whose bytes are {found}",
                fix="restore the file, or run the gate again: records are never edited",
            )  # fmt: skip
        return data, str(path)

    def write(self, record: EvidenceRecord) -> str:
        """Keep a record in the first folder and return its digest."""
        put_file(self.paths[0], record.digest.removeprefix("sha256:") + ".json", record.to_bytes())
        return record.digest

    def digests(self) -> list[str]:
        """Return the digests of all files named like a record, sorted; what they hold is not looked at."""
        names = {path.stem for folder in self.paths if folder.is_dir() for path in folder.glob("*.json")}
        return sorted(f"sha256:{name}" for name in names if is_digest(f"sha256:{name}"))

    def records(self) -> Iterator[EvidenceRecord]:
        """Yield every record; raises EvidenceError at the first that cannot be read."""
        for digest in self.digests():
            yield self.read(digest)

    def find(self, *, function: str, provider: str, arch: str) -> list[EvidenceRecord]:
        """Return the readable records of a provider of a function on an arch, newest first."""
        found = []
        said = b'"function":' + encode(function)
        for digest in self.digests():
            try:
                data, path = self._bytes(digest)
                if said not in data:
                    continue  # to read what other functions' records say takes longer than all else
                one = _record(data, path)
            except EvidenceError:
                continue  # what cannot be read is no evidence; `isoexec gate verify` names it
            if (one.function, one.provider.name, one.arch) == (function, provider, arch):
                found.append(one)
        return sorted(found, key=lambda one: (moment(one.made), one.digest), reverse=True)


@lru_cache(maxsize=256)
def _record(data: bytes, path: str) -> EvidenceRecord:
    """The record of these bytes; the same bytes are the same record, so that a process reads each once."""
    try:
        return EvidenceRecord.from_bytes(data, path)
    except ContractError as error:
        raise EvidenceError(
            field=f"evidence.{error.field}" if error.field else "evidence",
            wanted="a record of this format", found=str(error), fix="run the gate again with this release",
        ) from error  # fmt: skip


def shipped() -> Path:
    """Return the folder of the records that come with the package."""
    return Path(str(files("isoexec.contracts"))) / "evidence"


def default_store() -> Store:
    """Return the user's folders (ISOEXEC_EVIDENCE, else one in the state directory), then the shipped one."""
    from isoexec.contracts.halting import StateDirectory

    said = [Path(one) for one in os.environ.get("ISOEXEC_EVIDENCE", "").split(os.pathsep) if one]
    return Store([*(said or [StateDirectory.default().path / "evidence"]), shipped()])


def put_file(folder: Path, name: str, data: bytes, *, mode: int = 0o644) -> None:
    """Write a file so that no reader ever sees half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
    try:
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(data)
        Path(temporary).chmod(mode)
        Path(temporary).replace(folder / name)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("the same key twice")
    return made


def _no_float(text: str) -> object:
    raise ValueError(f"a raw float {text}")
