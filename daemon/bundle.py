# SPDX-License-Identifier: Apache-2.0
"""Makes evidence bundles: by itself of every halt and of each new kind of violation, and by `isoexec bundle` of any window."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.halting import HaltMarker, StateDirectory, default_state_dir
from isoexec.contracts.verdict import Verdict
from isoexec.contracts.window import Window
from isoexec.daemon.config import Config
from isoexec.daemon.evidence import Arrays, Evidence, keep_last, pack, write_bundle
from isoexec.daemon.journal import Journal, JournalError
from isoexec.daemon.metrics import Metrics
from isoexec.daemon.store import write_samples

__all__ = ["EvidenceKeeper", "run"]

_log = structlog.get_logger("isoexec.daemon")


class EvidenceKeeper:
    """Writes samples and bundles beside the daemon's loop, and remembers which kinds of violation have one."""

    def __init__(self, config: Config, state: StateDirectory, metrics: Metrics) -> None:
        self._config = config
        self._state = state
        self._metrics = metrics
        self._seen: dict[str, tuple[int, set[tuple[str, str]]]] = {}

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
        """Write the samples of a window, and its bundle where `bundled`; what the disk refuses is counted."""
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
                    version=_version(),
                    window=window.to_dict(),
                    verdicts=[verdict.to_dict() for verdict in verdicts],
                    arrays=arrays,
                    rest={"versions.json": versions, **_rest(self._state, window.run, time)},
                )
                packed = pack(evidence, token_ids=False, most_bytes=self._config.evidence_bytes)
                path = folder / "evidence" / f"step-{max(window.step, 0):010d}-{key}.tar.gz"
                write_bundle(path, packed)
                keep_last(path.parent, self._config.evidence_bundles)
                _log.warning("evidence", run=window.run, step=window.step, path=str(path), size=len(packed))
            except (OSError, ValueError, TypeError, sqlite3.Error) as error:
                failures.append(f"bundle: {error}")

        await asyncio.to_thread(write)
        for failure in failures:
            self._metrics.add("evidence_errors", 1.0)
            _log.error("evidence cannot be written", run=window.run, step=window.step, error=failure)


def _version() -> str:
    try:
        return version("isoexec")
    except PackageNotFoundError:
        return "unknown"


def _rest(state: StateDirectory, run: str, before: float, session: int | None = None) -> dict[str, Any]:
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


def run(argv: Sequence[str] | None = None) -> int:
    """Make an evidence bundle of a window, from the journal and the kept samples; 1 when there is none to make."""
    parser = argparse.ArgumentParser(
        prog="isoexec bundle",
        description="Make one tar.gz of a window: pairs, attestations, differences, contract and versions. Works with the "
        "daemon dead. Token ids are text and stay out unless asked for.",
    )
    parser.add_argument("run", help="name of the run")
    parser.add_argument("--step", type=int, default=None, help="default: the last window with a violation")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="default: RUN-step-N.tar.gz")
    parser.add_argument("--token-ids", action="store_true", help="put the token ids in: they are the text")
    parser.add_argument("--most-mb", type=float, default=4.0, help="largest size, in MB; default 4")
    parser.add_argument("--state-dir", type=Path, default=None, help="default: ISOEXEC_STATE_DIR")
    chosen = parser.parse_args(argv)
    state = StateDirectory(chosen.state_dir or default_state_dir())
    try:
        path = _make(state, chosen)
    except (IsoExecError, OSError) as error:
        print(f"isoexec bundle: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


def _make(state: StateDirectory, chosen: argparse.Namespace) -> Path:
    folder = state.run(chosen.run).path
    with closing(Journal.open(state.journal)) as journal:
        row = journal.window(chosen.run, step=chosen.step)
    if row is None:
        what = "with a violation" if chosen.step is None else f"of step {chosen.step}"
        raise JournalError(f"{state.journal}: run {chosen.run!r} has no window {what}")
    arrays: dict[str, Any] = {}
    for path in (folder / "samples").glob(f"step-*-{row['id']}.npz"):
        with np.load(path, allow_pickle=False) as kept:
            arrays = {name: kept[name] for name in kept.files}
    evidence = Evidence(
        run=chosen.run,
        key=row["id"],
        time=row["time"],
        version=_version(),
        window=row["window"],
        verdicts=row["verdicts"],
        arrays=arrays,
        rest=_rest(state, chosen.run, row["time"], row["session"]),
    )
    packed = pack(evidence, token_ids=chosen.token_ids, most_bytes=int(chosen.most_mb * 1e6))
    out = chosen.out or Path(f"{chosen.run}-step-{row['window']['step']}.tar.gz")
    return write_bundle(out, packed)
