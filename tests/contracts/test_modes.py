# SPDX-License-Identifier: Apache-2.0
"""Modes and the commands that halt, clear and let go: files only, and on a disk that is full."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from isoexec.contracts.halting import HaltMarker, LeaseError, LeasePage, StateDirectory
from isoexec.contracts.main import main
from isoexec.contracts.modes import Mode, ModeError, read_mode, write_mode

MARKER = HaltMarker(
    run="r", step=7, rule="unequal", cause="c", verdict="violation", evidence={"a": "b" * 500}
)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateDirectory:
    monkeypatch.setenv("ISOEXEC_STATE_DIR", str(tmp_path))
    state = StateDirectory(tmp_path)
    state.run("r").path.mkdir(parents=True)
    return state


@pytest.mark.parametrize("mode", list(Mode))
def test_a_mode_is_read_back_and_audited(state: StateDirectory, mode: Mode) -> None:
    write_mode(state, "r", Mode.OFF, by="me", reason="before")
    write_mode(state, "r", mode, by="me", reason="why")
    found = read_mode(state, "r")
    assert (found.mode, found.by, found.reason) == (mode, "me", "why")
    lines = (state.run("r").path / "mode.log").read_text().splitlines()
    assert [json.loads(line)["mode"] for line in lines] == ["off", mode]


def test_the_weaker_of_run_and_state_directory_counts(state: StateDirectory) -> None:
    assert read_mode(state, "r").mode is Mode.ENFORCE
    write_mode(state, None, Mode.WARN, by="", reason="")
    assert read_mode(state, "r").mode is Mode.WARN
    write_mode(state, "r", Mode.ENFORCE, by="", reason="")
    assert read_mode(state, "r").mode is Mode.WARN
    write_mode(state, "r", Mode.DRYRUN, by="", reason="")
    assert read_mode(state, "r").mode is Mode.DRYRUN


def test_a_bare_file_named_off_is_the_exit(state: StateDirectory) -> None:
    (state.path / "off").touch()
    assert read_mode(state, "never-seen").mode is Mode.OFF


@pytest.mark.parametrize(
    "content", ["", "{", '{"mode": "nonsense"}', "[]", '{"mode": "off", "time": "x"}', "\0\xff"]
)
def test_a_mode_that_cannot_be_read_is_enforce_and_says_so(state: StateDirectory, content: str) -> None:
    path = state.run("r").path / "mode.json"
    path.write_text(content)
    found = read_mode(state, "r")
    assert found.mode is Mode.ENFORCE
    assert "cannot be read" in found.reason


def test_a_full_disk_still_takes_off_a_marker_and_refuses_the_rest(
    disk: Path, fill: Callable[[Path], Path]
) -> None:
    state = StateDirectory(disk)
    for run in ("r", "bare"):
        state.run(run).path.mkdir(parents=True)
    HaltMarker.reserve(state.run("r").path)
    fill(disk)
    with pytest.raises(ModeError, match="No space left"):
        write_mode(state, "r", Mode.WARN, by="", reason="")
    write_mode(state, "r", Mode.OFF, by="me", reason="full")
    assert read_mode(state, "r").mode is Mode.OFF
    # what was not reserved is refused, and leaves no half of a marker
    with pytest.raises(OSError, match="No space left"):
        MARKER.write(state.run("bare").path)
    assert HaltMarker.read(state.run("bare").path) is None
    with pytest.raises(LeaseError, match="no room"):
        LeasePage.create(state.run("bare").lease)
    MARKER.write(state.run("r").path)
    assert HaltMarker.read(state.run("r").path) == MARKER


def test_halt_and_clear_by_hand(state: StateDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["halt", "r", "--reason", "loss is NaN"]) == 0
    marker = HaltMarker.read(state.run("r").path)
    assert marker is not None
    assert (marker.rule, marker.step, marker.verdict) == ("operator", -1, "unknown")
    assert "loss is NaN" in marker.cause
    assert main(["halt", "r"]) == 0
    assert "already halted" in capsys.readouterr().out
    assert HaltMarker.read(state.run("r").path) == marker
    assert main(["clear", "r"]) == 0
    assert HaltMarker.read(state.run("r").path) is None
    assert main(["mode", "r", "off"]) == 0
    assert main(["halt", "r"]) == 1
    assert "nothing stops it" in capsys.readouterr().out


def test_the_mode_command_shows_and_sets(state: StateDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mode", "r"]) == 0
    assert capsys.readouterr().out == "r: enforce\n"
    assert main(["mode", "r", "warn", "--reason", "new kernel"]) == 0
    assert "r: warn set by" in capsys.readouterr().out
    # an exit works for a run that has no directory here
    assert main(["mode", "new", "off"]) == 0
    assert main(["mode"]) == 0
    told = capsys.readouterr().out
    assert "new: off" in told.splitlines()[-2]
    assert "(new kernel)" in told
    assert main(["mode", "--all", "off"]) == 0
    assert read_mode(state, "r").mode is Mode.OFF
    # setting one run does not lift what holds for all, and the exit code says so
    assert main(["mode", "r", "enforce"]) == 1
    assert main(["mode", "--all", "enforce"]) == 0
    assert read_mode(state, "r").mode is Mode.ENFORCE


@pytest.mark.parametrize(
    "argv",
    [["halt", "nobody"], ["mode", "nobody"], ["mode", "../x", "off"], ["mode", "r", "warn", "--all", "off"]],
)
def test_what_cannot_be_meant_is_refused(state: StateDirectory, argv: list[str]) -> None:
    assert main(argv) == 1
    assert not (state.path.parent / "x").exists()


@pytest.mark.parametrize("argv", [["halt"], ["mode", "r", "loud"]])
def test_wrong_usage_is_2(state: StateDirectory, argv: list[str]) -> None:
    assert main(argv) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_named(state: StateDirectory) -> None:
    state.run("r").path.chmod(0o500)
    with pytest.raises(ModeError, match="Permission"):
        write_mode(state, "r", Mode.OFF, by="", reason="")
