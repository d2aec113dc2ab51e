# SPDX-License-Identifier: Apache-2.0
"""The lease and the marker: what a reader may believe, and what a crash leaves behind."""

from __future__ import annotations

import struct
import threading
import time
from pathlib import Path

import pytest

from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.halting import (
    HaltMarker,
    LeaseError,
    LeasePage,
    LeaseState,
    Policy,
    StateDirectory,
    default_state_dir,
)

MARKER = HaltMarker(
    run="r",
    step=7,
    rule="bitwise",
    cause="stale_weights",
    verdict="violation",
    evidence={"tokens": 3},
    time=1.0,
)


def test_a_fresh_page_is_unknown_not_fine(tmp_path: Path) -> None:
    page = LeasePage.create(tmp_path / "lease")
    assert page.read().state is LeaseState.UNKNOWN
    assert not page.read().alive
    assert not page.fine()


def test_what_is_written_is_read_by_another_mapping(tmp_path: Path) -> None:
    writer = LeasePage.create(tmp_path / "lease")
    writer.write(LeaseState.HALT, policy=Policy.FAIL_CLOSED, step=12, rule="bitwise", cause="ä" * 400)
    with LeasePage.open(tmp_path / "lease") as reader:
        lease = reader.read()
        assert (lease.state, lease.policy, lease.step, lease.rule) == (
            LeaseState.HALT,
            Policy.FAIL_CLOSED,
            12,
            "bitwise",
        )
        assert lease.cause == "ä" * 256
        assert lease.alive
        assert not reader.fine()
        writer.write(LeaseState.WARN)
        assert reader.fine()
        with pytest.raises(LeaseError, match="only the daemon"):
            reader.write(LeaseState.OK)


def test_a_lease_that_is_not_renewed_runs_out(tmp_path: Path) -> None:
    page = LeasePage.create(tmp_path / "lease")
    page.write(LeaseState.OK, ttl_seconds=0.05)
    assert page.fine()
    deadline = page.read().deadline_ns
    while time.monotonic_ns() <= deadline:
        time.sleep(0.01)
    assert not page.fine()
    assert not page.read().alive
    assert page.read().state is LeaseState.OK


def test_a_page_torn_by_a_dead_writer_is_unknown_and_recovers(tmp_path: Path) -> None:
    path = tmp_path / "lease"
    page = LeasePage.create(path)
    page.write(LeaseState.OK)
    raw = bytearray(path.read_bytes())
    struct.pack_into("<Q", raw, 0, struct.unpack_from("<Q", raw)[0] + 1)
    with path.open("r+b") as out:
        out.write(raw)
    assert page.read().state is LeaseState.UNKNOWN
    assert not page.fine()
    again = LeasePage.create(path)
    again.write(LeaseState.OK)
    assert page.fine()


def test_a_foreign_page_and_a_missing_one_are_not_believed(tmp_path: Path) -> None:
    with pytest.raises(LeaseError, match="is the daemon running"):
        LeasePage.open(tmp_path / "lease")
    (tmp_path / "lease").write_bytes(b"\0" * 8 + b"NOTALEASE" * 400)
    with pytest.raises(LeaseError):
        LeasePage.open(tmp_path / "lease")
    (tmp_path / "lease").write_bytes((b"\0" * 8 + b"NOTALEASE").ljust(4096, b"\1"))
    assert LeasePage.open(tmp_path / "lease").read().state is LeaseState.UNKNOWN


def test_readers_never_see_half_a_write(tmp_path: Path) -> None:
    writer = LeasePage.create(tmp_path / "lease")
    reader = LeasePage.open(tmp_path / "lease")
    writer.write(LeaseState.OK, step=0, rule="0", cause="0")
    enough = threading.Event()

    def write() -> None:
        step = 0
        while not enough.is_set():
            step += 1
            writer.write(LeaseState.OK, step=step, rule=str(step), cause=str(step))

    thread = threading.Thread(target=write)
    thread.start()
    steps: set[int] = set()
    late = time.monotonic() + 60
    try:
        while len(steps) < 20 and time.monotonic() < late:
            lease = reader.read()
            if lease.state is not LeaseState.UNKNOWN:
                assert lease.rule == lease.cause == str(lease.step)
                steps.add(lease.step)
    finally:
        enough.set()
        thread.join()
    assert len(steps) == 20


def test_a_marker_survives_and_the_first_one_counts(tmp_path: Path) -> None:
    run = StateDirectory(tmp_path).run("r").path
    assert HaltMarker.read(run) is None
    MARKER.write(run)
    HaltMarker(run="r", step=8, rule="other", cause="", verdict="unknown").write(run)
    assert HaltMarker.read(run) == MARKER
    assert "isoexec clear r" in str(MARKER)


def test_of_two_writers_at_once_the_first_one_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = HaltMarker(run="r", step=8, rule="other", cause="", verdict="unknown")
    put = HaltMarker._put

    def meanwhile(self: HaltMarker, draft: Path) -> None:
        put(self, draft)
        put(MARKER, tmp_path / "halt.json")

    monkeypatch.setattr(HaltMarker, "_put", meanwhile)
    late.write(tmp_path)
    assert HaltMarker.read(tmp_path) == MARKER
    assert [path.name for path in tmp_path.iterdir()] == ["halt.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run": "r"}'])
def test_a_marker_that_cannot_be_read_still_halts(tmp_path: Path, content: str) -> None:
    (tmp_path / "halt.json").write_text(content)
    marker = HaltMarker.read(tmp_path)
    assert marker is not None
    assert marker.rule == "marker_unreadable"
    assert marker.verdict == "unknown"


def test_clearing_lifts_the_halt_and_keeps_what_was_lifted(tmp_path: Path) -> None:
    MARKER.write(tmp_path)
    assert HaltMarker.clear(tmp_path) == MARKER
    assert HaltMarker.read(tmp_path) is None
    assert len(list(tmp_path.glob("halt-cleared-*.json"))) == 1
    assert HaltMarker.clear(tmp_path) is None


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a b", "x" * 65, "a\n"])
def test_a_run_name_cannot_leave_the_state_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(IsoExecError, match="run name"):
        StateDirectory(tmp_path).run(name)


def test_the_state_directory_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ISOEXEC_STATE_DIR", str(tmp_path / "s"))
    assert default_state_dir() == tmp_path / "s"
    monkeypatch.delenv("ISOEXEC_STATE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_state_dir() == tmp_path / ".local/state/isoexec"
    state = StateDirectory.default().make()
    state.run("b").path.mkdir(parents=True)
    assert state.runs() == ["b"]
