# SPDX-License-Identifier: Apache-2.0
"""What verdicts may do to a run: enforce, warn, dryrun, or off, the emergency exit that needs no daemon.

`mode.json` in a run's directory or in the state directory says enforce, warn or dryrun; a file named `off` in either
place, empty or not, is the emergency exit: guards go on whatever lease, marker and policy say. ``touch
STATE_DIR/runs/RUN/off`` does it with nothing of IsoExec running. The weaker of run and state directory counts.
Every change is a line of `mode.log` beside the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.halting import StateDirectory

__all__ = ["Mode", "ModeError", "ModeSetting", "read_mode", "write_mode"]


class ModeError(IsoExecError):
    """A mode that cannot be written down."""


class Mode(StrEnum):
    """The most that a verdict may do. OFF also makes guards ignore lease, marker and the policy on a lost daemon.

    WARN and DRYRUN bound the daemon's rules, and let a fail_closed run go on without its daemon; a halt that a person
    ordered holds in every mode but OFF.
    """

    ENFORCE = "enforce"
    WARN = "warn"
    DRYRUN = "dryrun"
    OFF = "off"


_ORDER = tuple(Mode)


@dataclass(frozen=True, kw_only=True)
class ModeSetting:
    """The mode in force, who set it (login or uid), why, when (unix seconds), and the file that says so."""

    mode: Mode = Mode.ENFORCE
    by: str = ""
    reason: str = ""
    time: float = 0.0
    path: Path | None = None


def read_mode(state: StateDirectory, run: str) -> ModeSetting:
    """Give the weaker of what the run's and the state directory say; a `mode.json` that cannot be read is enforce."""
    found = [_of(folder) for folder in (state.run(run).path, state.path)]
    return max(found, key=lambda setting: _ORDER.index(setting.mode))


def write_mode(state: StateDirectory, run: str | None, mode: Mode, *, by: str, reason: str) -> ModeSetting:
    """Set the mode of a run, or of every run of the state directory (None); in force when this returns.

    Raises ModeError when it cannot be written. OFF needs room for a name only, not for a block.
    """
    folder = state.path if run is None else state.run(run).path
    setting = ModeSetting(mode=mode, by=by, reason=reason, time=time.time(), path=_file(folder, mode))
    line = json.dumps({"mode": mode.value, "by": by, "reason": reason, "time": setting.time}) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if mode is Mode.OFF:
            os.close(os.open(folder / "off", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            with contextlib.suppress(OSError):  # on a full disk the bare name has to do
                _replace(folder / "off", line)
        else:
            _replace(folder / "mode.json", line)
            (folder / "off").unlink(missing_ok=True)
    except OSError as error:
        raise ModeError(f"{folder}: the mode cannot be written: {error.strerror or error}") from error
    with contextlib.suppress(OSError), (folder / "mode.log").open("a", encoding="utf-8") as log:
        log.write(line)
    return setting


def _file(folder: Path, mode: Mode) -> Path:
    return folder / ("off" if mode is Mode.OFF else "mode.json")


def _of(folder: Path) -> ModeSetting:
    off = folder / "off"
    if off.exists():
        return _read(off, Mode.OFF)
    return _read(folder / "mode.json", None)


def _read(path: Path, mode: Mode | None) -> ModeSetting:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return ModeSetting(
            mode=mode or Mode(found["mode"]),
            by=str(found.get("by", "")),
            reason=str(found.get("reason", "")),
            time=float(found.get("time", 0.0)),
            path=path,
        )
    except FileNotFoundError:
        return ModeSetting(mode=mode or Mode.ENFORCE, path=path if mode else None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return ModeSetting(mode=mode or Mode.ENFORCE, reason=f"{path} cannot be read: {error}", path=path)


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
