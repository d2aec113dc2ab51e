# SPDX-License-Identifier: Apache-2.0
"""One job beside one daemon, a fault or a verdict, and what is measured of its stop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import start_daemon  # type: ignore[import-not-found]  # beside this folder
from job import RUN, engine_main, loaded, rank_main, settings_of  # type: ignore[import-not-found]  # beside this file

from isoexec.contracts.errors import HaltedError, HandshakeError
from isoexec.contracts.halting import HaltMarker, LeasePage, LeaseState, StateDirectory
from isoexec.contracts.main import main as isoexec
from isoexec.daemon.cli import run as run_daemon
from isoexec.daemon.http import HttpServer  # noqa: F401 - loaded here, so that a fork has it
from isoexec.daemon.journal import Journal
from isoexec.daemon.service import Service  # noqa: F401
from isoexec.probes.client import Client
from isoexec.probes.guard import Guard

__all__ = ["Row", "Stage", "StageError", "alive", "descendants", "end", "free_port", "until"]


ENDS = ("stopped", "survived", "not_stopped", "called_off", "unseen")
"""What a stage of the journal may be that no other follows."""


class StageError(RuntimeError):
    """A part of the stage that did not come up, or something that did not happen in time."""


@dataclass(kw_only=True)
class Row:
    """One line of the table. Seconds are from the verdict (or the fault, where no verdict follows)."""

    case: str
    asked: str
    happened: str
    seconds_to_stop: float | None = None
    seconds_to_fence: float | None = None
    steps_after_verdict: list[int] = field(default_factory=list)
    steps_after_fence: int | None = None
    halted_at: list[int] = field(default_factory=list)
    checkpoint: str = ""
    starts: int = 0
    rule: str | None = None
    stages: list[str] = field(default_factory=list)
    cleared: str = ""
    wrong: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def until(condition: Callable[[], Any], what: str, seconds: float = 300.0, pause: float = 0.02) -> Any:
    """Wait for what another process does. Raises StageError naming it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise StageError(f"{what}: not within {seconds:g} s")
        time.sleep(pause)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def alive(pid: int) -> bool:
    """Whether a process runs, or is stopped; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """Give the processes below a process."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


class Forked:
    """A child that runs a function of this process, which has everything imported; the part of Popen that is used here."""

    def __init__(self, work: Callable[[], None], log: Path, env: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.environ.update(env)
            work()
        except BaseException:  # noqa: BLE001 - nothing of the parent may run in the child
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork", timeout)
            time.sleep(0.01)
        return self.returncode or 0

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


Process = subprocess.Popen[Any] | Forked


def end(process: Process | None, patience: float = 15.0) -> None:
    """End a process that this script started, and what is below it."""
    if process is None:
        return
    below = descendants(process.pid)
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    for pid in (process.pid, *below):
        if alive(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


class Stage:
    """A state directory, its daemon, an engine of the run, and the ranks of a trainer, whoever started them."""

    def __init__(
        self,
        folder: Path,
        *,
        policy: str = "fail_open",
        world: int = 2,
        cooperative_seconds: float = 30.0,
        terminate_seconds: float = 5.0,
        runtime_seconds: float = 15.0,
        runtimes: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.folder, self.policy, self.world = folder, policy, world
        self.state = StateDirectory(folder / "state")
        self.settings = {
            "escalation": {
                "enabled": True,
                "cooperative_seconds": cooperative_seconds,
                "terminate_seconds": terminate_seconds,
                "runtime_seconds": runtime_seconds,
                "kill_seconds": 10,
                "runtimes": list(runtimes),
            },
            "settle_seconds": 0.5,
        }
        self.daemon: Process | None = None
        self.address = ""
        self.engine: Process | None = None
        self.jobs: list[Process] = []
        self.notes: list[str] = []
        self._streams: list[Any] = []

    # the parts

    def start_daemon(self, before: Sequence[str] = (), **options: Any) -> None:
        log = self.folder / "daemon.log"
        started, self.address = start_daemon(
            self.state.path, self.settings, log=log, before=before, **options
        )
        self.daemon = started
        self._streams.append(started.stdout)

    def fork_daemon(self) -> None:
        """Start a daemon that has all its modules loaded: how long Python takes to import them is no part of it."""
        log = self.folder / "daemon.log"
        argv = ["--state-dir", str(self.state.path), "--http", "127.0.0.1:0", "--log", "json", "--config",
                str(log.with_suffix(".yaml"))]  # fmt: skip
        self.state.daemon.unlink(missing_ok=True)
        self.daemon = Forked(lambda: sys.exit(run_daemon(argv)), log, {})
        until(self.state.daemon.exists, "a daemon", 60, 0.005)
        self.address = json.loads(self.state.daemon.read_text())["http"]

    def start_engine(self) -> None:
        folder, policy = self.folder, self.policy
        self.engine = Forked(lambda: engine_main(folder, policy), folder / "engine.log", {})
        until((self.folder / "engine").exists, "the engine")

    def start_job(self, *argv: str, **options: Any) -> subprocess.Popen[Any]:
        with (self.folder / "job.log").open("ab") as log:
            options.setdefault("env", os.environ | {"OMP_NUM_THREADS": "1"})
            job = subprocess.Popen(argv, stdout=log, stderr=log, **options)
        self.jobs.append(job)
        return job

    def fork_ranks(self, *flags: str) -> None:
        """Start every rank as a bare process, with no agent that ends one as the other dies."""
        folder, policy = self.folder, self.policy
        port = str(free_port())
        for rank in range(self.world):
            place = {"RANK": str(rank), "WORLD_SIZE": str(self.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                     "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
            work = partial(rank_main, folder, policy, **dict.fromkeys(flags, True))
            self.jobs.append(Forked(work, folder / "job.log", place))

    def close(self) -> None:
        for process in (*self.jobs, self.engine, self.daemon):
            end(process)
        for pid in self.pids():
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        for stream in self._streams:
            stream.close()

    # what is seen

    def steps(self, rank: int) -> list[tuple[int, float]]:
        path = self.folder / f"steps{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(line.split()[0]), float(line.split()[1])) for line in lines if len(line.split()) == 2]

    def pids(self) -> list[int]:
        """Every process that began as a rank."""
        return [int(path.name.rpartition("-")[2]) for path in self.folder.glob("start*-*")]

    def pid_of(self, rank: int) -> int:
        """The process that began last as this rank."""
        found = sorted(self.folder.glob(f"start{rank}-*"), key=lambda path: path.stat().st_mtime_ns)
        return int(found[-1].name.rpartition("-")[2])

    def running(self, more: int = 20) -> None:
        """Wait until every rank has begun so many more steps. Raises StageError with the end of the job's log."""
        wanted = [len(self.steps(rank)) + more for rank in range(self.world)]

        def there() -> bool:
            if self.jobs and all(job.poll() is not None for job in self.jobs):
                raise StageError("the job ended")
            return all(len(self.steps(rank)) >= wanted[rank] for rank in range(self.world))

        try:
            until(there, f"{more} steps", 600)
        except StageError as error:
            log = self.folder / "job.log"
            raise StageError(f"{error}: {log.read_text()[-1500:] if log.exists() else 'no log'}") from error

    def lease(self) -> LeasePage:
        return LeasePage.open(self.state.run(RUN).lease)

    def verdict(self) -> float:
        """Break the contract, and give the unix time at which the lease says halt."""
        began = time.monotonic()
        (self.folder / "strike").touch()
        with self.lease() as page:
            until(lambda: page.read().state is LeaseState.HALT, "the verdict", 120, 0.001)
        self.notes.append(f"verdict {time.monotonic() - began:.2f} s after the break")
        return time.time()

    def command(self, *argv: str) -> int:
        """Run a command of isoexec on this state directory."""
        with contextlib.redirect_stdout(sys.stderr):
            return int(isoexec([*argv, "--state-dir", str(self.state.path)]))

    def stopped(self, pids: Sequence[int], seconds: float) -> float | None:
        """Give the unix time at which no rank lives, or None where one still does after so many seconds."""
        with contextlib.suppress(StageError):
            until(lambda: not any(map(alive, pids)), "the stop", seconds, 0.002)
            return time.time()
        return None

    # what is written down

    def row(self, case: str, asked: str, at: float, stopped: float | None, *, ends: bool, fence: bool) -> Row:
        """Judge and write down; ends: the job had to stop. fence: at one step, with its checkpoint."""
        notes = [path.read_text().split() for path in sorted(self.folder.glob("halted?"))]
        halted = [int(step) for step, _ in notes]
        fenced = max((float(when) for _, when in notes), default=None)
        after = [sum(when > at for _, when in self.steps(rank)) for rank in range(self.world)]
        row = Row(case=case, asked=asked, happened="; ".join(self.notes), steps_after_verdict=after)
        row.halted_at = halted
        row.starts = len(self.pids())
        row.seconds_to_stop = round(stopped - at, 2) if stopped is not None else None
        row.seconds_to_fence = round(fenced - at, 2) if fenced is not None else None
        if halted:
            row.steps_after_fence = sum(
                step >= max(halted) for rank in range(self.world) for step, _ in self.steps(rank)
            )
        self._checkpoints(row, fence=fence)
        self._journal(row)
        self._judge(row, ends=ends, fence=fence)
        return row

    def _checkpoints(self, row: Row, *, fence: bool) -> None:
        found = [self.folder / f"checkpoint{rank}" for rank in range(self.world)]
        saved, wrong = zip(
            *(loaded(path, self.world) if path.exists() else (-1, f"no {path.name}") for path in found),
            strict=True,
        )
        row.wrong += [text for text in wrong if text]
        steps = ", ".join(map(str, sorted(set(saved))))
        row.checkpoint = f"step {steps}, " + ("intact" if not any(wrong) else "NOT intact")
        if fence and list(saved) != row.halted_at:
            row.wrong.append(f"checkpoints of steps {saved}, halted at {row.halted_at}")

    def daemon_runs(self) -> bool:
        """Whether the daemon is neither dead nor stopped."""
        with contextlib.suppress(OSError):
            urllib.request.urlopen(self.address + "/healthz", timeout=10).close()  # noqa: S310
            return True
        return False

    def timed(self) -> list[dict[str, Any]]:
        """Give the stages of the halt that the journal has, in order; none before the last one ended."""
        with contextlib.closing(Journal.open(self.state.journal)) as journal:
            found = [one for one in reversed(journal.actions(RUN)) if "before_seconds" in one]
        return found if found and found[-1]["stage"] in ENDS else []

    def _journal(self, row: Row) -> None:
        timed = self.timed()
        row.stages = [f"{one['before']} {one['before_seconds']:.1f} s" for one in timed]
        row.stages += [one["stage"] for one in timed[-1:]]
        for one in timed:
            row.stages += [f"{name}: {text[:120]}" for name, text in one.get("answers", {}).items()]
        counted = self._counted()
        for stage in {one["before"] for one in timed} if counted is not None else ():
            if counted is not None and not counted.get(stage):
                row.wrong.append(f"stage {stage} is in the journal, its counter says {counted.get(stage)}")

    def _counted(self) -> dict[str, float] | None:
        """Give the counts of stages by the daemon's metrics; None where it does not answer."""
        found: dict[str, float] = {}
        try:
            with urllib.request.urlopen(self.address + "/metrics", timeout=5) as answer:  # noqa: S310
                lines = answer.read().decode().splitlines()
        except OSError:
            return None
        for line in lines:
            if line.startswith("isoexec_halt_stages_total{"):
                found[line.partition('stage="')[2].partition('"')[0]] = float(line.rpartition(" ")[2])
        return found

    def _judge(self, row: Row, *, ends: bool, fence: bool) -> None:
        marker = HaltMarker.read(self.state.run(RUN).path)
        row.rule = marker.rule if marker else None
        if (row.seconds_to_stop is not None) != ends:
            row.wrong.append("it had to stop" if ends else "it stopped")
        if (marker is not None) != ends:
            row.wrong.append("no marker" if ends else f"a marker: {marker}")
        if fence and (len(row.halted_at) != self.world or len(set(row.halted_at)) != 1):
            row.wrong.append(f"not one step: {row.halted_at}")
        if row.steps_after_fence:
            row.wrong.append(f"{row.steps_after_fence} steps after the fence")

    def clear(self, row: Row) -> None:
        """See that the halted run does not start, clear it, and see that it starts; with a new daemon where there is none."""
        if self.daemon is None or self.daemon.poll() is not None:
            self.start_daemon()
        settings = settings_of(self.folder, self.policy)
        refused = 0
        try:
            Client(settings, "trainer", rank=0, world=1).connect(timeout=30)
        except HandshakeError:
            refused += 1
        try:
            Guard(settings)
        except HaltedError:
            refused += 1
        if refused != 2:
            row.wrong.append("a halted run was let in")
        if self.command("clear", RUN) != 0:
            row.wrong.append("isoexec clear failed")
        client = Client(settings, "trainer", rank=0, world=1)
        try:
            client.connect(timeout=30)
            guard = Guard(settings)
            for step in range(3):
                guard.check(step)
            row.cleared = "refused before, starts after"
        except (HandshakeError, HaltedError, OSError) as error:
            row.cleared = f"does not start: {error}"
            row.wrong.append("a cleared run does not start")
        finally:
            client.close()
