# SPDX-License-Identifier: Apache-2.0
"""Evidence bundles: one tar.gz with all that a violation needs to be looked into elsewhere, small enough for a bug report.

Members: manifest.json (what, when, versions, a digest of every member, what was left out), window.json, verdicts.json,
differences.json (fields that differ), rules.json, contract.json, processes.json (versions), attestations.json (the last of
each process), steps.json, actions.json, halt.json and pairs.npz (the raw pairs that differ, worst first). Token ids are left
out unless asked for: they are the text. The same evidence gives the same bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FORMAT", "Evidence", "keep_last", "pack", "write_bundle"]

FORMAT = 1
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
