# SPDX-License-Identifier: Apache-2.0
"""The command `isoexec bundle`: an evidence bundle of any window, from the journal and the kept samples."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.halting import StateDirectory, default_state_dir
from isoexec.daemon.evidence import Evidence, other_members, pack, write_bundle
from isoexec.daemon.journal import Journal, JournalError
from isoexec.daemon.version import package_version

__all__ = ["run"]


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
        version=package_version(),
        window=row["window"],
        verdicts=row["verdicts"],
        arrays=arrays,
        rest=other_members(state, chosen.run, row["time"], row["session"]),
    )
    packed = pack(evidence, token_ids=chosen.token_ids, most_bytes=int(chosen.most_mb * 1e6))
    out = chosen.out or Path(f"{chosen.run}-step-{row['window']['step']}.tar.gz")
    return write_bundle(out, packed)
