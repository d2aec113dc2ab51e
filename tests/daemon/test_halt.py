# SPDX-License-Identifier: Apache-2.0
"""Halting for real: the order of marker and lease, a hung main loop, and real processes that do not heed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from isoexec.contracts.halting import HaltMarker, LeasePage, LeaseState, Policy, StateDirectory
from isoexec.daemon import halt
from isoexec.daemon.config import Escalation
from isoexec.daemon.halt import LeaseKeeper, ProcessHandle, StageReport, escalate

MARKER = HaltMarker(run="r", step=3, rule="unequal", cause="weights_stale", verdict="violation")


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[LeaseKeeper]:
    one = LeaseKeeper(StateDirectory(tmp_path).make(), ttl_seconds=0.6)
    one.start()
    yield one
    one.close()


def test_a_lease_is_renewed_until_the_keeper_ends(keeper: LeaseKeeper, tmp_path: Path) -> None:
    keeper.set("r", LeaseState.OK, Policy.FAIL_CLOSED)
    page = LeasePage.open(StateDirectory(tmp_path).run("r").lease)
    first = page.read().deadline_ns
    deadline = time.monotonic() + 5
    while page.read().deadline_ns == first and time.monotonic() < deadline:
        time.sleep(0.01)
    assert page.read().deadline_ns > first
    assert page.fine()
    keeper.close()
    time.sleep(0.7)  # longer than the lease
    assert not page.fine()


def test_a_main_loop_that_hangs_loses_the_lease(
    keeper: LeaseKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halt, "LOOP_STALL_SECONDS", 0.1)
    keeper.set("r", LeaseState.OK, Policy.FAIL_OPEN)
    page = LeasePage.open(StateDirectory(tmp_path).run("r").lease)
    deadline = time.monotonic() + 5
    while page.fine() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not page.fine()
    keeper.beat()
    while not page.fine() and time.monotonic() < deadline:
        keeper.beat()
        time.sleep(0.01)
    assert page.fine()


def test_a_lease_left_just_now_is_taken_up_for_a_moment_and_a_marker_makes_it_halt(
    keeper: LeaseKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateDirectory(tmp_path)
    for run in ("going", "marked", "old", "rebooted"):
        keeper.set(run, LeaseState.WARN, Policy.FAIL_CLOSED, step=7)
    keeper.close()  # as a daemon that is killed leaves it
    HaltMarker.write(MARKER, state.run("marked").path)
    for run, seconds in (("old", -60.0), ("rebooted", 1e6)):
        with LeasePage.create(state.run(run).lease) as page:
            page.write(LeaseState.OK, ttl_seconds=seconds)
    monkeypatch.setattr(halt, "RESUME_SECONDS", 2.0)
    after = LeaseKeeper(state, ttl_seconds=0.2)
    assert after.resume() == ["going", "marked"]
    after.start()
    going, marked = (LeasePage.open(state.run(run).lease) for run in ("going", "marked"))
    assert (going.read().state, going.read().policy, going.read().step) == (
        LeaseState.WARN,
        Policy.FAIL_CLOSED,
        7,
    )
    assert going.fine()
    assert (marked.read().state, marked.read().rule) == (LeaseState.HALT, "unequal")
    deadline = time.monotonic() + 20
    while going.fine() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not going.fine()  # nobody of the run came back
    after.close()


def test_the_marker_lies_there_before_the_lease_says_halt(
    keeper: LeaseKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = StateDirectory(tmp_path).run("r")
    keeper.set("r", LeaseState.OK, Policy.FAIL_OPEN)
    seen: list[LeaseState] = []
    write = HaltMarker.write

    def watched(self: HaltMarker, directory: Path) -> Path:
        path = write(self, directory)
        seen.append(LeasePage.open(run.lease).read().state)
        return path

    monkeypatch.setattr(HaltMarker, "write", watched)
    keeper.halt(MARKER, Policy.FAIL_OPEN)
    assert seen == [LeaseState.OK]
    lease = LeasePage.open(run.lease).read()
    assert (lease.state, lease.step, lease.rule, lease.cause) == (
        LeaseState.HALT,
        3,
        "unequal",
        "weights_stale",
    )


def test_a_marker_that_cannot_be_written_is_no_halt(
    keeper: LeaseKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper.set("r", LeaseState.OK, Policy.FAIL_OPEN)

    def full(self: HaltMarker, directory: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(HaltMarker, "write", full)
    with pytest.raises(OSError, match="space"):
        keeper.halt(MARKER, Policy.FAIL_OPEN)
    assert LeasePage.open(StateDirectory(tmp_path).run("r").lease).read().state is LeaseState.OK


@pytest.fixture
def child() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def begin(code: str) -> subprocess.Popen[str]:
        one = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(one)
        assert one.stdout is not None
        assert one.stdout.readline() == "up\n"
        return one

    yield begin
    for one in started:
        one.kill()
        one.wait()
        assert one.stdout is not None
        one.stdout.close()


HEEDS = "import time\nprint('up', flush=True)\ntime.sleep(60)"
IGNORES = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)"
ENDS = "print('up', flush=True)"


def see_through(
    handles: list[ProcessHandle], settings: Escalation, **options: Any
) -> tuple[list[str], list[StageReport]]:
    reports: list[StageReport] = []
    asyncio.run(escalate(handles, settings, reports.append, **options))
    return [report.stage for report in reports], reports


@pytest.mark.parametrize(
    ("code", "stages", "status"),
    [
        (ENDS, ["stopped"], 0),
        (HEEDS, ["terminate", "stopped"], -signal.SIGTERM),
        (IGNORES, ["terminate", "kill", "stopped"], -signal.SIGKILL),
    ],
)
def test_escalation_goes_as_far_as_it_must_and_times_each_stage(
    child: Callable[[str], Any], code: str, stages: list[str], status: int
) -> None:
    process = child(code)
    handle = ProcessHandle.open(process.pid)
    assert handle is not None
    settings = Escalation(enabled=True, cooperative_seconds=0.5, terminate_seconds=0.3)
    found, reports = see_through([handle], settings)
    assert found == stages
    assert process.wait(10) == status
    assert all(report.pids == [process.pid] for report in reports if report.stage != "stopped")
    assert [report.before for report in reports] == ["cooperative", *stages[:-1]]
    if len(stages) == 3:
        waits = [report.before_seconds for report in reports[:2]]
        assert waits[0] >= 0.5
        assert waits[1] >= 0.3
        assert reports[-1].seconds >= 0.8
    handle.close()


def test_a_stopped_process_is_woken_to_heed_its_sigterm(child: Callable[[str], Any]) -> None:
    process = child(HEEDS)
    process.send_signal(signal.SIGSTOP)
    handle = ProcessHandle.open(process.pid)
    assert handle is not None
    settings = Escalation(enabled=True, cooperative_seconds=0.0, terminate_seconds=20.0)
    assert see_through([handle], settings)[0] == ["terminate", "stopped"]
    assert process.wait(10) == -signal.SIGTERM
    handle.close()


def test_without_escalation_the_stop_is_timed_and_nothing_is_sent(child: Callable[[str], Any]) -> None:
    process = child(HEEDS)
    handle = ProcessHandle.open(process.pid)
    assert handle is not None
    found, reports = see_through([handle], Escalation(cooperative_seconds=0.3))
    assert found == ["not_stopped"]
    assert reports[0].pids == [process.pid]
    assert process.poll() is None
    handle.close()


def test_a_halt_that_is_lifted_is_called_off(child: Callable[[str], Any]) -> None:
    process = child(IGNORES)
    handle = ProcessHandle.open(process.pid)
    assert handle is not None
    lifted_at = time.monotonic() + 0.5
    found, _ = see_through(
        [handle],
        Escalation(enabled=True, cooperative_seconds=0.2, terminate_seconds=30),
        stands=lambda: time.monotonic() < lifted_at,
    )
    assert found == ["terminate", "called_off"]
    assert process.poll() is None
    handle.close()


def test_no_process_of_this_host_is_unseen_not_stopped() -> None:
    assert see_through([], Escalation(enabled=True, cooperative_seconds=0.0))[0] == ["unseen"]


def test_a_second_handle_outlives_the_first(child: Callable[[str], Any]) -> None:
    process = child(HEEDS)
    one = ProcessHandle.open(process.pid)
    assert one is not None
    two = one.again()
    one.close()
    assert two.alive()
    two.send(signal.SIGTERM)
    assert process.wait(10) == -signal.SIGTERM
    assert not two.alive()
    two.close()


def test_a_process_that_is_gone_or_is_the_daemon_gives_no_handle() -> None:
    assert ProcessHandle.open(os.getpid()) is None
    assert ProcessHandle.open(0) is None
    assert ProcessHandle.open(2**22 + 5) is None
