# SPDX-License-Identifier: Apache-2.0
"""A real daemon on a file system of its own that is really full: it goes on, says so, halts all the same, and catches up."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isoexec.contracts.halting import HaltMarker, LeasePage, LeaseState
from isoexec.contracts.modes import Mode, write_mode
from isoexec.daemon import evidence
from isoexec.daemon.bundle import run as bundle
from isoexec.daemon.evidence import Evidence, pack

BITS = np.array([-1.0, -2.25, -0.5], np.float32)
SEQUENCES = [([1, 2, 3, 4, 5], 2, BITS), ([9, 8, 7, 6], 1, BITS)]


def one_step(engine: Any, trainer: Any, step: int, trained: Any = SEQUENCES) -> None:
    for side in (trainer, engine):
        side.weights(step, {"w": (1 + step, 2)})
    engine.logprobs("engine_decode", step, SEQUENCES)
    trainer.logprobs("trainer_score", step, trained)
    trainer.step(step)


def broken_step(engine: Any, trainer: Any, step: int) -> None:
    one_step(engine, trainer, step, [(*SEQUENCES[0][:2], BITS - 1), SEQUENCES[1]])


def test_a_full_disk_degrades_halts_and_catches_up(
    disk: Path,
    fill: Callable[[Path], Path],
    start: Callable[..., Any],
    peer: Callable[..., Any],
    wait_until: Callable[..., Any],
    contract_hello: dict[str, Any],
) -> None:
    daemon = start(disk / "state")
    engine, trainer = (peer(daemon, role, **contract_hello) for role in ("engine", "trainer"))
    other = peer(daemon, "engine", run="watched"), peer(daemon, "trainer", run="watched")
    one_step(engine, trainer, 1)
    one_step(*other, 1)
    daemon.windows()
    daemon.windows("watched")
    ballast = fill(disk)
    step = 1
    # what room the log still has is used up first
    while not daemon.metric("isoexec_journal_degraded"):
        step += 1
        assert step < 200
        one_step(*other, step)
        lease = LeasePage.open(daemon.state.run("watched").lease)
        wait_until(lambda: lease.read().step == step, "the verdict")  # noqa: B023
    kept = daemon.json("/api/v1/runs/watched/windows?limit=1000")["windows"]
    assert len(kept) < step
    assert daemon.metric("isoexec_journal_rows_waiting")
    one_step(*other, step := step + 1)
    lease = LeasePage.open(daemon.state.run("watched").lease)
    wait_until(lambda: lease.read().step == step, "the verdict")
    assert lease.read().state is LeaseState.WARN
    assert "journal cannot be written" in lease.read().cause
    # the other run breaks: it is halted, and the marker is on the full disk
    broken_step(engine, trainer, 2)
    page = LeasePage.open(daemon.state.run("r").lease)
    wait_until(lambda: page.read().state is LeaseState.HALT, "the halt")
    marker = HaltMarker.read(daemon.state.run("r").path)
    assert marker is not None
    assert (marker.step, marker.verdict) == (2, "violation")
    # a run that no lease can stop is not taken
    late = peer(daemon, "trainer", run="late").welcome
    assert late.accepted or "no room" in late.message
    ballast.unlink()
    wait_until(lambda: daemon.metric("isoexec_journal_degraded") == 0, "the disk to be used again")
    assert daemon.metric("isoexec_journal_rows_lost_total") == 0
    steps = [w["step"] for w in daemon.windows("watched", count=step)]
    assert steps == list(range(1, step + 1))
    assert "halt" in {row["action"] for row in daemon.json("/api/v1/runs/r")["actions"]}
    text = (daemon.state_dir / "daemon.log").read_text()
    assert "journal degraded" in text or "journal written again" in text


def read(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        found = {}
        for item in tar:
            content = tar.extractfile(item)
            assert content is not None
            found[item.name.removeprefix("isoexec-evidence/")] = content.read()
    return found


def test_a_halt_leaves_a_bundle_and_any_window_can_have_one(
    start: Callable[..., Any],
    peer: Callable[..., Any],
    wait_until: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    contract_hello: dict[str, Any],
) -> None:
    daemon = start()
    engine, trainer = (peer(daemon, role, **contract_hello) for role in ("engine", "trainer"))
    one_step(engine, trainer, 1)
    daemon.windows()
    broken_step(engine, trainer, 2)
    folder = daemon.state.run("r").path / "evidence"
    (path,) = wait_until(lambda: list(folder.glob("step-*2-*.tar.gz")), "the bundle")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size < 200_000
    members = read(path)
    manifest = json.loads(members["manifest.json"])
    assert manifest["step"] == 2
    assert manifest["members"].keys() == members.keys() - {"manifest.json"}
    assert "unequal" in {one["rule"] for one in manifest["violations"]}
    assert {"window.json", "verdicts.json", "differences.json", "contract.json", "attestations.json"} <= set(
        members
    )
    assert json.loads(members["halt.json"])["step"] == 2
    with np.load(io.BytesIO(members["pairs.npz"])) as pairs:
        name = "engine_decode:trainer_score"
        assert np.abs(pairs[f"{name}/second"] - pairs[f"{name}/first"]).tolist() == [1.0, 1.0, 1.0]
        assert f"{name}/tokens" not in pairs
    daemon.kill()
    out = tmp_path / "b.tar.gz"
    said = ["r", "--state-dir", str(daemon.state_dir), "--out", str(out)]
    assert bundle([*said, "--token-ids"]) == 0
    assert str(out) in capsys.readouterr().out
    with np.load(io.BytesIO(read(out)["pairs.npz"])) as pairs:
        assert sorted(pairs[f"{name}/tokens"].tolist()) == [3, 4, 5]
    first = out.read_bytes()
    assert bundle([*said, "--token-ids"]) == 0
    assert out.read_bytes() == first
    assert bundle([*said, "--step", "1"]) == 0
    assert json.loads(read(out)["manifest.json"])["violations"] == []
    assert bundle([*said, "--step", "9"]) == 1
    assert "no window of step 9" in capsys.readouterr().err


def test_a_bundle_keeps_to_its_size_and_says_what_it_left_out() -> None:
    dice = np.random.default_rng(3)
    rows = 60_000
    first = dice.normal(size=rows).astype(np.float32)
    arrays = {
        "a:b/first": first,
        "a:b/second": first + dice.normal(size=rows).astype(np.float32),
        "a:b/tokens": np.arange(rows),
        "a:b/position": np.arange(rows),
        "a:b/digest": dice.integers(0, 255, (rows, 16), np.uint8),
    }
    one = Evidence(
        run="r", key=1, time=1.0, version="0", window={"step": 1}, verdicts=[], arrays=arrays,
        rest={"steps.json": dice.integers(0, 1 << 30, 20_000).tolist(), "halt.json": {"a": 1}},
    )  # fmt: skip
    whole = pack(one, token_ids=False, most_bytes=1 << 30)
    for most in (len(whole) - 1, 300_000, 20_000):
        packed = pack(one, token_ids=False, most_bytes=most)
        assert len(packed) <= most
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            content = tar.extractfile("isoexec-evidence/manifest.json")
            assert content is not None
            left_out = json.loads(content.read())["left_out"]
        assert any(text.startswith(("a:b: ", "pairs: ")) for text in left_out)
    assert evidence.FORMAT == 1
    # the worst pairs are those that stay
    with np.load(io.BytesIO(evidence._pairs(arrays, 10, token_ids=False)[0])) as pairs:
        size = np.abs(arrays["a:b/second"].astype(np.float64) - first)
        assert pairs["a:b/position"].tolist() == np.argsort(-size, kind="stable")[:10].tolist()


@pytest.mark.parametrize(("mode", "state"), [(Mode.WARN, LeaseState.WARN), (Mode.DRYRUN, LeaseState.OK)])
def test_a_weaker_mode_withholds_the_halt_and_the_journal_keeps_the_verdict(
    start: Callable[..., Any],
    peer: Callable[..., Any],
    wait_until: Callable[..., Any],
    mode: Mode,
    state: LeaseState,
    contract_hello: dict[str, Any],
) -> None:
    daemon = start()
    engine, trainer = (peer(daemon, role, **contract_hello) for role in ("engine", "trainer"))
    write_mode(daemon.state, "r", mode, by="me", reason="known")
    broken_step(engine, trainer, 1)
    lease = LeasePage.open(daemon.state.run("r").lease)
    wait_until(lambda: lease.read().step == 1, "the verdict")
    assert lease.read().state in (state, LeaseState.WARN)
    assert HaltMarker.read(daemon.state.run("r").path) is None
    daemon.windows()
    assert "halt" in {v["action"] for v in daemon.json("/api/v1/runs/r/verdicts")["verdicts"]}
    actions = {row["action"]: row for row in daemon.json("/api/v1/runs/r")["actions"]}
    assert actions["halt_withheld"]["mode"] == mode
    assert (actions["mode"]["by"], actions["mode"]["reason"]) == ("me", "known")
    assert daemon.metric("isoexec_halting", run="r", halting=mode) == 1
    assert daemon.metric("isoexec_halted", run="r") == 0
