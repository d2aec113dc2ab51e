# SPDX-License-Identifier: Apache-2.0
"""Evidence bundles: one tar.gz with all that a violation needs to be looked into elsewhere, small enough for a bug report.

Members: manifest.json (what, when, versions, a digest of every member, what was left out), window.json, verdicts.json,
differences.json (fields that differ), rules.json, contract.json, processes.json (versions), attestations.json (the last of
each process), steps.json, actions.json, halt.json and pairs.npz (the raw pairs that differ, worst first). Token ids are left
out unless asked for: they are the text. The same evidence gives the same bytes. The daemon makes one of every halt and of
each new kind of violation.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import hashlib
import io
import json
import re
import sqlite3
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from isoexec.contracts.halting import HaltMarker, StateDirectory
from isoexec.contracts.verdict import Verdict
from isoexec.contracts.window import Window
from isoexec.daemon.config import Config
from isoexec.daemon.journal import Journal, JournalError
from isoexec.daemon.metrics import Metrics
from isoexec.daemon.store import write_samples
from isoexec.daemon.version import package_version

__all__ = [
    "FORMAT",
    "TOO_MANY",
    "Evidence",
    "EvidenceKeeper",
    "keep_last",
    "other_members",
    "pack",
    "write_bundle",
]

_log = structlog.get_logger("isoexec.daemon")

FORMAT = 1
_WAITING = 16
"""Windows whose samples wait to be written, at most."""
TOO_MANY = f"{_WAITING} windows wait to be written"
_ROWS = (16384, 4096, 1024, 256, 0)
_OPTIONAL = ("steps.json", "actions.json", "attestations.json", "contract.json", "processes.json")
"""What is left out, in this order, when a bundle is too large without any pairs."""
_NAME = re.compile(r"step-\d{10}-\d+\.tar\.gz")
_DIFFERENCES = (
    "handshake", "topology_breaks", "region_breaks", "weights", "environment_breaks", "sampling", "silence",
)  # fmt: skip

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What goes into a bundle. `window` and `verdicts` as the journal has them, `arrays` as `SampleBuffer.arrays`."""

    run: str
    key: int
    time: float
    version: str
    window: Mapping[str, Any]
    verdicts: Sequence[Mapping[str, Any]]
    arrays: Arrays = field(default_factory=dict)
    rest: Mapping[str, Any] = field(default_factory=dict)
    """Other members by file name, as JSON data."""


def pack(evidence: Evidence, *, token_ids: bool, most_bytes: int) -> bytes:
    """Give the bundle, `most_bytes` at most, as tar.gz; what had to be left out is named in its manifest.

    A bundle that is too large with its window and verdicts alone is given as it is.
    """
    left_out: list[str] = [] if token_ids else ["token ids: not asked for"]
    texts = {
        "window.json": _json(evidence.window),
        "verdicts.json": _json(evidence.verdicts),
        "differences.json": _json({name: evidence.window.get(name) for name in _DIFFERENCES}),
        **{name: _json(value) for name, value in evidence.rest.items()},
    }
    packed = b""
    for rows in _ROWS:
        pairs, cut = _pairs(evidence.arrays, rows, token_ids=token_ids)
        members = {**texts, **({"pairs.npz": pairs} if pairs else {})}
        packed = _tar(evidence, members, [*left_out, *cut], token_ids=token_ids)
        if len(packed) <= most_bytes:
            return packed
    cut = ["pairs: too large"]
    for name in _OPTIONAL:
        if texts.pop(name, None) is not None:
            cut.append(f"{name}: too large")
            packed = _tar(evidence, texts, [*left_out, *cut], token_ids=token_ids)
            if len(packed) <= most_bytes:
                break
    return packed


def _tar(evidence: Evidence, members: Mapping[str, bytes], left_out: list[str], *, token_ids: bool) -> bytes:
    violations = [one for one in evidence.verdicts if one.get("outcome") == "violation"]
    manifest = {
        "format": FORMAT,
        "isoexec": evidence.version,
        "run": evidence.run,
        "window": evidence.key,
        "time": evidence.time,
        "step": evidence.window.get("step"),
        "weight_version": evidence.window.get("weight_version"),
        "regime": evidence.window.get("regime"),
        "violations": [{name: one.get(name) for name in ("rule", "cause", "message")} for one in violations],
        "token_ids": token_ids,
        "left_out": left_out,
        "members": {
            name: {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
            for name, raw in sorted(members.items())
        },
    }
    out = io.BytesIO()
    # a time of its own in neither layer, so that the same evidence is the same file
    with (
        gzip.GzipFile(fileobj=out, mode="wb", mtime=0) as squeezed,
        tarfile.open(fileobj=squeezed, mode="w") as tar,
    ):
        for name, raw in [("manifest.json", _json(manifest)), *sorted(members.items())]:
            item = tarfile.TarInfo(f"isoexec-evidence/{name}")
            item.size, item.mtime, item.mode = len(raw), int(evidence.time), 0o600
            tar.addfile(item, io.BytesIO(raw))
    return out.getvalue()


def _pairs(arrays: Arrays, rows: int, *, token_ids: bool) -> tuple[bytes, list[str]]:
    """Give the npz of up to `rows` raw pairs of each pair of cases: those whose bits differ, largest abs d first."""
    found: dict[str, npt.NDArray[Any]] = {}
    cut: list[str] = []
    for name in sorted({key.rpartition("/")[0] for key in arrays}):
        first, second = arrays[f"{name}/first"], arrays[f"{name}/second"]
        differ = np.flatnonzero(first.view(np.int32) != second.view(np.int32))
        with np.errstate(all="ignore"):
            size = np.abs(second[differ].astype(np.float64) - first[differ])
        worst = differ[np.argsort(-np.nan_to_num(size, nan=np.inf, posinf=np.inf), kind="stable")]
        # a window in which every kept pair has the same bits is shown by its first pairs
        chosen = (worst if len(worst) else np.arange(min(len(first), 256)))[:rows]
        if len(chosen) < len(differ):
            cut.append(f"{name}: {len(differ) - len(chosen)} of {len(differ)} kept pairs that differ")
        if rows == 0:
            continue
        for part in ("first", "second", "position", "digest", *(("tokens",) if token_ids else ())):
            found[f"{name}/{part}"] = arrays[f"{name}/{part}"][chosen]
        found[f"{name}/kept_and_differing"] = np.array([len(first), len(differ)])
    if not found:
        return b"", cut
    out = io.BytesIO()
    # mypy: the stub takes **kwds for arrays and names allow_pickle among them
    np.savez_compressed(out, **found)  # type: ignore[arg-type]
    return out.getvalue(), cut


def write_bundle(path: Path, packed: bytes) -> Path:
    """Write a bundle, whole or not at all, readable by its owner only. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}")
    try:
        draft.write_bytes(packed)
        draft.chmod(0o600)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return path


def keep_last(directory: Path, keep: int) -> None:
    """Remove all but the last `keep` bundles of a directory."""
    files = [item for item in directory.iterdir() if _NAME.fullmatch(item.name)]
    files.sort(key=lambda item: item.stat().st_mtime_ns)
    for old in files[: max(len(files) - keep, 0)]:
        old.unlink(missing_ok=True)


def _json(value: Any) -> bytes:
    return (json.dumps(value, sort_keys=True, indent=1, default=str) + "\n").encode()


class EvidenceKeeper:
    """Writes samples and bundles beside the daemon's loop, and remembers which kinds of violation have one."""

    def __init__(self, config: Config, state: StateDirectory, metrics: Metrics) -> None:
        self._config = config
        self._state = state
        self._metrics = metrics
        self._seen: dict[str, tuple[int, set[tuple[str, str]]]] = {}
        self._turn = asyncio.Lock()
        self._waiting = 0

    def wanted(self, run: str, session: int, verdicts: Sequence[Verdict]) -> bool:
        """Whether verdicts are of a halt, or show a rule or cause that this session has no bundle of."""
        broken = {(one.rule, one.cause or "") for one in verdicts if one.outcome == "violation"}
        if not broken or self._config.evidence_bundles == 0:
            return False
        known, seen = self._seen.get(run, (session, set()))
        if known != session:
            seen = set()
        fresh = broken - seen
        self._seen[run] = (session, seen | broken)
        return bool(fresh) or any(one.action == "halt" for one in verdicts)

    async def keep(
        self,
        window: Window,
        verdicts: Sequence[Verdict],
        key: int,
        arrays: Arrays,
        versions: Mapping[str, Mapping[str, str]],
        *,
        bundled: bool,
        time: float,
    ) -> None:
        """Write the samples of a window, and its bundle where `bundled`; what the disk refuses is counted.

        One window at a time. Where many wait, since the disk is slow or many came at once, samples are given up, counted as
        well; bundles are not.
        """
        if self._waiting >= _WAITING and not bundled:
            self._metrics.add("evidence_errors", 1.0)
            _log.error("evidence cannot be written", run=window.run, step=window.step, error=TOO_MANY)
            return
        folder = self._state.run(window.run).path
        failures: list[str] = []

        def write() -> None:
            try:
                write_samples(folder / "samples", window.step, key, arrays, keep=self._config.sample_windows)
            except OSError as error:
                failures.append(f"samples: {error}")
            if not bundled:
                return
            try:
                evidence = Evidence(
                    run=window.run,
                    key=key,
                    time=time,
                    version=package_version(),
                    window=window.to_dict(),
                    verdicts=[verdict.to_dict() for verdict in verdicts],
                    arrays=arrays,
                    rest={"versions.json": versions, **other_members(self._state, window.run, time)},
                )
                packed = pack(evidence, token_ids=False, most_bytes=self._config.evidence_bytes)
                path = folder / "evidence" / f"step-{max(window.step, 0):010d}-{key}.tar.gz"
                write_bundle(path, packed)
                keep_last(path.parent, self._config.evidence_bundles)
                _log.warning("evidence", run=window.run, step=window.step, path=str(path), size=len(packed))
            except (OSError, ValueError, TypeError, sqlite3.Error) as error:
                failures.append(f"bundle: {error}")

        self._waiting += 1
        try:
            async with self._turn:
                await asyncio.to_thread(write)
        finally:
            self._waiting -= 1
        for failure in failures:
            self._metrics.add("evidence_errors", 1.0)
            _log.error("evidence cannot be written", run=window.run, step=window.step, error=failure)


def other_members(
    state: StateDirectory, run: str, before: float, session: int | None = None
) -> dict[str, Any]:
    """Give the other members of a bundle, as they stood at a time; without a journal there are few."""
    found: dict[str, Any] = {}
    marker = HaltMarker.read(state.run(run).path)
    if marker is not None:
        found["halt.json"] = dataclasses.asdict(marker)
    try:
        journal = Journal.open(state.journal)
    except JournalError as error:
        return found | {"journal.json": {"unreadable": str(error)}}
    with closing(journal):
        row = next(
            (row for row in journal.runs(run) if session in (None, row["session"])),
            None,
        )
        if row is not None:
            found["contract.json"] = {name: row.get(name) for name in ("contract", "identities")}
            found["rules.json"] = row.get("rules")
            found["processes.json"] = journal.processes(row["session"])
        found["attestations.json"] = journal.last_attestations(run, before=before + 1.0)
        found["steps.json"] = journal.steps(run, limit=100)
        found["actions.json"] = journal.actions(run, limit=100)
    return found
