# SPDX-License-Identifier: Apache-2.0
"""The commands `isoexec halt`, `clear` and `mode`: files in the state directory, so that they work with the daemon dead."""

from __future__ import annotations

import argparse
import getpass
import os
import time
from collections.abc import Iterator
from pathlib import Path

from isoexec.contracts.asking import ask, noted_shard, others_that_halt
from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.halting import HaltMarker, StateDirectory
from isoexec.contracts.modes import Mode, ModeSetting, read_mode, write_mode

__all__ = ["clear", "halt", "mode"]


def halt(argv: list[str]) -> int:
    """Halt a run at its next step boundary, and keep it from starting again; works with the daemon dead."""
    parser = argparse.ArgumentParser(
        prog="isoexec halt",
        description="Halt a run: its guards stop it at the next step boundary, after a checkpoint, and it does not start "
        "again until it is cleared. A guard looks at the marker when its lease stops being renewed or says halt: with "
        "the daemon alive within a second, with it dead within the lease.",
    )
    parser.add_argument("run", metavar="RUN", help="name of the run")
    parser.add_argument("--reason", default="", help="why, for the marker and the journal")
    _state_option(parser)
    args, code = _parsed(parser, argv)
    if args is None:
        return code
    state = _state(args)
    folder = _folder(state, args.run)
    found = HaltMarker.read(folder)
    if found is not None:
        print(f"already halted: {found}")
        return 0
    marker = HaltMarker(
        run=args.run,
        step=-1,
        rule="operator",
        cause=f"halted by {_who()}" + (f": {args.reason}" if args.reason else ""),
        verdict="unknown",
        time=time.time(),
    )
    try:
        marker.write(folder)
    except OSError as error:
        raise IsoExecError(
            f"{folder}: the marker cannot be written: {error.strerror}; free some disk"
        ) from error
    print(f"halted {args.run}; it stops at its next step boundary")
    if read_mode(state, args.run).mode is Mode.OFF:
        print(f"but its mode is off, so nothing stops it: `isoexec mode {args.run} enforce`")
        return 1
    return 0


def clear(argv: list[str]) -> int:
    """Clear a halted run, so that it may start again; 1 where another shard of the daemon halts it too, or that is unknown."""
    parser = argparse.ArgumentParser(
        prog="isoexec clear",
        description="Clear the halt marker of a run, so that it may start again. Look at the cause first. Each shard of a "
        "daemon has markers of its own, and so has each host of the job: those of shards that are left are named.",
    )
    parser.add_argument("run", metavar="RUN", help="name of the run")
    _state_option(parser)
    args, code = _parsed(parser, argv)
    if args is None:
        return code
    state = _state(args)
    folder = _folder(state, args.run)
    marker = HaltMarker.read(folder)
    shard = noted_shard(state)
    here = f" by shard {shard}" if shard else ""
    if marker is None:
        print(f"{args.run} is not halted{here}")
    else:
        HaltMarker.clear(folder)
        print(f"cleared {args.run}, which was halted{here}: {marker}")
    left = list(_left(state, args.run)) if shard else []
    for line in left:
        print(line)
    return 1 if left else 0


def _left(state: StateDirectory, run: str) -> Iterator[str]:
    answer = ask(state, "/api/v1/runs")
    if answer is None or "shards" not in answer:
        yield (
            f"the daemon here does not answer: whether another shard halts {run} is unknown; `isoexec status {run}` on the "
            f"host of any shard that runs says it"
        )
    else:
        yield from others_that_halt(answer["shards"], run)


def mode(argv: list[str]) -> int:
    """Show or set what verdicts may do to a run: enforce, warn, dryrun, or off, the emergency exit."""
    parser = argparse.ArgumentParser(
        prog="isoexec mode",
        description="Show or set the most that a verdict may do to a run. off makes its guards ignore lease, marker and "
        "policy, with the daemon dead too; a run over several hosts needs it in the state directory of each.",
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="name of the run")
    parser.add_argument("mode", metavar="MODE", nargs="?", choices=[one.value for one in Mode])
    parser.add_argument(
        "--all", choices=[one.value for one in Mode], help="set it for every run, known or not"
    )
    parser.add_argument("--reason", default="", help="why, for the audit trail")
    _state_option(parser)
    args, code = _parsed(parser, argv)
    if args is None:
        return code
    state = _state(args)
    if args.all is not None:
        if args.run is not None:
            raise IsoExecError("wanted RUN MODE or --all MODE, found both")
        write_mode(state, None, Mode(args.all), by=_who(), reason=args.reason)
        print(f"every run of {state.path}: {args.all}")
        return 0
    if args.run is None:
        for name in state.runs():
            _tell(name, read_mode(state, name))
        return 0
    if args.mode is not None:
        # not held to the runs that are known: an exit that asks for a directory first is none
        write_mode(state, args.run, Mode(args.mode), by=_who(), reason=args.reason)
        found = read_mode(state, args.run)
        _tell(args.run, found)
        return 0 if found.mode == args.mode else 1
    _folder(state, args.run)
    _tell(args.run, read_mode(state, args.run))
    return 0


def _tell(run: str, setting: ModeSetting) -> None:
    said = [f"{run}: {setting.mode}"]
    if setting.by:
        said.append(f"set by {setting.by}")
    if setting.path is not None:
        said.append(f"by {setting.path}")
    if setting.reason:
        said.append(f"({setting.reason})")
    print(" ".join(said))


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def _state_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state-dir", type=Path, default=None, help="default: ISOEXEC_STATE_DIR")


def _state(args: argparse.Namespace) -> StateDirectory:
    return StateDirectory(args.state_dir) if args.state_dir is not None else StateDirectory.default()


def _parsed(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace | None, int]:
    try:
        return parser.parse_args(argv), 0
    except SystemExit as stop:  # argparse has printed why
        return None, stop.code if isinstance(stop.code, int) else 2


def _folder(state: StateDirectory, run: str) -> Path:
    folder = state.run(run).path
    if not folder.is_dir():
        known = ", ".join(state.runs()) or "none"
        raise IsoExecError(
            f"no run {run!r} under {state.path}; the runs there: {known}; is ISOEXEC_STATE_DIR right?"
        )
    return folder
