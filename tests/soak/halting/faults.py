# SPDX-License-Identifier: Apache-2.0
"""Faults of the daemon, its disk, its clock and of ranks, each real, under torchrun or bare processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from job import RUN, arguments  # type: ignore[import-not-found]  # beside this file
from stage import Row, Stage, StageError, end, until  # type: ignore[import-not-found]

from isoexec.contracts.halting import HaltMarker

__all__ = ["CASES", "run_case"]

CGROUP = Path("/sys/fs/cgroup/blkio")
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
GOES_ON_SECONDS = 6.0
"""How long a run that must go on is watched: longer than lease and confirmation together."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """`fault` happens to a running job; then, with `verdict`, the contract breaks. Without, seconds count from the fault."""

    asked: str
    fault: Callable[[Stage], None] | None = None
    verdict: bool = True
    policy: str = "fail_open"
    flags: tuple[str, ...] = ()
    restarts: int = 0
    torchrun: bool = False
    """By torchrun, which ends and starts ranks; else the ranks are bare processes, and one does not end as the other dies."""
    ends: bool = True
    fence: bool = True
    patience: float = 30.0
    disk: str = ""
    clock: bool = False
    watched: bool = True
    """Whether the run is watched for a while after the fault, and must go on."""


def _signal(number: signal.Signals) -> Callable[[Stage], None]:
    def fault(stage: Stage) -> None:
        stage.daemon.send_signal(number)
        if number is not signal.SIGSTOP:
            stage.daemon.wait(20)

    return fault


def _restart(stage: Stage) -> None:
    _signal(signal.SIGKILL)(stage)
    began = time.monotonic()
    stage.fork_daemon()
    stage.notes.append(f"a new daemon after {time.monotonic() - began:.1f} s")


def _stop_and_continue(stage: Stage) -> None:
    stage.daemon.send_signal(signal.SIGSTOP)
    time.sleep(GOES_ON_SECONDS)
    stage.daemon.send_signal(signal.SIGCONT)
    stage.notes.append(f"SIGSTOP for {GOES_ON_SECONDS:g} s")


def _no_socket(stage: Stage) -> None:
    stage.state.socket.unlink()
    began = time.monotonic()
    until(stage.state.socket.exists, "a new socket", 20)
    stage.notes.append(f"a new socket after {time.monotonic() - began:.1f} s")


def _fill(stage: Stage) -> None:
    with (stage.state.path / "ballast").open("wb", buffering=0) as out, contextlib.suppress(OSError):
        while True:
            out.write(b"x" * 4096)
    stage.notes.append(f"{shutil.disk_usage(stage.state.path).free} bytes free")


def _fill_and_kill(stage: Stage) -> None:
    _fill(stage)
    _signal(signal.SIGKILL)(stage)


def _jump(days: int) -> Callable[[Stage], None]:
    def fault(stage: Stage) -> None:
        (stage.folder / "clock").write_text(f"{days * 86400:+d}\n")

    return fault


def _dead_rank(stage: Stage) -> None:
    os.kill(stage.pid_of(1), signal.SIGKILL)


def _silent_rank(stage: Stage) -> None:
    os.kill(stage.pid_of(1), signal.SIGSTOP)


def _halt(stage: Stage) -> None:
    stage.command("halt", RUN, "--reason", "soak")


def _halt_daemonless(stage: Stage) -> None:
    _signal(signal.SIGKILL)(stage)
    time.sleep(4)
    _halt(stage)


def _off_daemonless(stage: Stage) -> None:
    _signal(signal.SIGKILL)(stage)
    (stage.state.run(RUN).path / "off").touch()


def _off(stage: Stage) -> None:
    (stage.state.run(RUN).path / "off").touch()


def _then_halt(stage: Stage) -> None:
    _off_daemonless(stage)
    stage.running(20)
    _halt(stage)
    stage.notes.append("isoexec halt while off: the marker lies there")


CASES: dict[str, Case] = {
    "verdict, 2 ranks of torchrun": Case(asked="guard at the step boundary", torchrun=True),
    "verdict, 2 bare ranks": Case(asked="guard at the step boundary"),
    "verdict, torchrun --max-restarts=2": Case(asked="guard; torchrun starts it again twice", restarts=2),
    "verdict, the checkpoint fails": Case(
        asked="guard; the disk of the checkpoint is full", flags=("full",), fence=False
    ),
    "verdict, no guard": Case(asked="SIGTERM", flags=("deaf",), fence=False, patience=2),
    "verdict, no guard, SIGTERM ignored": Case(
        asked="SIGTERM, SIGKILL", flags=("deaf", "immune"), fence=False, patience=2
    ),
    "isoexec halt": Case(asked="marker by hand", fault=_halt, verdict=False, watched=False),
    "isoexec halt, daemon dead, fail_open": Case(
        asked="marker by hand", fault=_halt_daemonless, verdict=False, watched=False
    ),
    "daemon SIGKILL, fail_closed": Case(
        asked="policy", fault=_signal(signal.SIGKILL), policy="fail_closed", verdict=False, watched=False
    ),
    "daemon SIGSTOP, fail_closed": Case(
        asked="policy", fault=_signal(signal.SIGSTOP), policy="fail_closed", verdict=False, watched=False
    ),
    "daemon SIGTERM, fail_closed": Case(
        asked="policy", fault=_signal(signal.SIGTERM), policy="fail_closed", verdict=False, watched=False
    ),
    "daemon SIGKILL, fail_open": Case(
        asked="policy: go on", fault=_signal(signal.SIGKILL), verdict=False, ends=False, fence=False
    ),
    "daemon SIGSTOP and SIGCONT, fail_open, verdict": Case(
        asked="go on; then guard", fault=_stop_and_continue
    ),
    "daemon SIGKILL and restart, fail_closed, verdict": Case(
        asked="go on; then guard", fault=_restart, policy="fail_closed"
    ),
    "socket removed, verdict": Case(asked="socket anew; then guard", fault=_no_socket),
    "disk full, verdict": Case(asked="go on; then guard", fault=_fill, disk="full"),
    "disk full, daemon SIGKILL, fail_closed": Case(
        asked="policy; the guard writes the marker",
        fault=_fill_and_kill, policy="fail_closed", verdict=False, watched=False, disk="full",
    ),
    "slow disk, verdict": Case(asked="go on; then guard", disk="slow"),
    "clock 40 days ahead, verdict": Case(asked="go on; then guard", fault=_jump(40), clock=True),
    "clock 40 days back, fail_closed, verdict": Case(
        asked="go on; then guard", fault=_jump(-40), policy="fail_closed", clock=True
    ),
    "verdict, then rank 1 SIGKILLed, torchrun --max-restarts=2": Case(
        asked="marker; torchrun starts it again", flags=("deaf",), restarts=2, fence=False
    ),
    "rank 1 dead, rank 0 hangs in its collective, verdict": Case(
        asked="guard cannot agree: SIGTERM",
        fault=_dead_rank, flags=("stuck",), fence=False, patience=3, watched=False,
    ),
    "rank 1 silent (SIGSTOP), verdict": Case(
        asked="guard cannot agree: SIGTERM", fault=_silent_rank, fence=False, patience=3, watched=False
    ),
    "mode off, daemon dead, fail_closed": Case(
        asked="emergency off: go on",
        fault=_off_daemonless, policy="fail_closed", verdict=False, ends=False, fence=False,
    ),
    "mode off, daemon dead, isoexec halt": Case(
        asked="emergency off: go on",
        fault=_then_halt, verdict=False, ends=False, fence=False, watched=False,
    ),
}  # fmt: skip


@contextlib.contextmanager
def disk(kind: str, folder: Path) -> Iterator[list[str]]:
    """Put the state directory on a disk of its own, and give what goes before the daemon's command line.

    full: a tmpfs of 4 MiB. slow: ext4 on a loop device that the blkio controller holds to 4 writes a second for the daemon.
    """
    if not kind:
        yield []
        return
    folder.mkdir()
    if kind == "full":
        _do("mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(folder))
        try:
            yield []
        finally:
            _do("umount", "-l", str(folder))
        return
    image, group = folder.with_name("disk.img"), CGROUP / f"isoexec-soak-{os.getpid()}"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    _do("mkfs.ext4", "-q", str(image))
    device = _do("losetup", "-f", "--show", str(image))
    try:
        _do("mount", device, str(folder))
        group.mkdir()
        number = Path(device).stat().st_rdev
        (group / "blkio.throttle.write_iops_device").write_text(f"{os.major(number)}:{os.minor(number)} 4")
        # by the shell: before the daemon opens anything, so that every write of it counts
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        _do("umount", "-l", str(folder))
        _do("losetup", "-d", device)
        with contextlib.suppress(OSError):
            group.rmdir()


def _do(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise StageError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout.strip()


def start_ranks(stage: Stage, case: Case) -> None:
    if not (case.torchrun or case.restarts):
        stage.fork_ranks(*case.flags)
        return
    stage.start_job(
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
        f"--max-restarts={case.restarts}", *arguments(stage.folder, case.policy, *case.flags),
    )  # fmt: skip


def run_case(name: str, folder: Path) -> Row:
    """Run one case in an empty folder. Raises StageError where its parts do not come up."""
    case = CASES[name]
    stage = Stage(folder, policy=case.policy, cooperative_seconds=case.patience)
    options = {}
    if case.clock:
        if not FAKETIME.exists():
            raise StageError(f"{FAKETIME} is not there: apt-get install libfaketime")
        (folder / "clock").write_text("+0\n")
        options["env"] = os.environ | {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(folder / "clock"),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_CACHE_DURATION": "1",
        }
    with disk(case.disk, stage.state.path) as before:
        try:
            stage.start_daemon(before, **options)
            stage.start_engine()
            start_ranks(stage, case)
            stage.running()
            pids = stage.pids()
            at = time.time()
            if case.fault is not None:
                case.fault(stage)
                at = time.time() if not case.watched else at
            if case.watched and case.fault is not None:
                goes_on(stage)
            if case.verdict:
                at = stage.verdict()
            if "then rank 1 SIGKILLed" in name:
                _dead_rank(stage)
            stopped = stage.stopped(pids, 60 if case.ends else GOES_ON_SECONDS)
            if case.restarts:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    stage.jobs[0].wait(240)
                    stage.notes.append(f"torchrun gave up, exit {stage.jobs[0].returncode}")
            marked(stage, case)
            row = stage.row(name, case.asked, at, stopped, ends=case.ends, fence=case.fence)
            if case.restarts and row.starts != 2 * (1 + case.restarts):
                row.wrong.append(f"wanted {2 * (1 + case.restarts)} starts, found {row.starts}")
            if case.ends:
                for process in stage.jobs:
                    end(process)
                stage.daemon.send_signal(signal.SIGCONT)
                stage.clear(row)
            elif "isoexec halt" in name:
                row.wrong = [text for text in row.wrong if not text.startswith("a marker")]
        finally:
            stage.close()
    return row


def goes_on(stage: Stage) -> None:
    """See that the run goes on after a fault for longer than a lease lasts. Raises StageError where it does not."""
    time.sleep(GOES_ON_SECONDS)
    stage.running(5)
    if HaltMarker.read(stage.state.run(RUN).path) is not None:
        raise StageError("halted by the fault alone")
    stage.notes.append("goes on after the fault")


def marked(stage: Stage, case: Case) -> None:
    """Wait for what a daemon that lives still journals of a stop."""
    if case.ends and stage.daemon.poll() is None and stage.daemon_runs():
        with contextlib.suppress(StageError):
            until(stage.timed, "the stages in the journal", 20, 0.1)
