# SPDX-License-Identifier: Apache-2.0
"""A halt stops every rank at the same step after a checkpoint, and outlives a restart until it is cleared."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from isoexec.contracts.errors import HaltedError
from isoexec.contracts.halting import HaltMarker, LeaseError, LeasePage, LeaseState, Policy, StateDirectory
from isoexec.contracts.modes import Mode, write_mode
from isoexec.probes.client import ProbeSettings
from isoexec.probes.guard import Guard


@pytest.fixture
def page(tmp_path: Path) -> LeasePage:
    directory = StateDirectory(tmp_path).make().run("r")
    directory.path.mkdir(parents=True)
    page = LeasePage.create(directory.lease)
    page.write(LeaseState.OK)
    return page


def settings(path: Path, policy: str = "fail_open") -> ProbeSettings:
    return ProbeSettings(run="r", state_dir=path, policy=policy)


def test_an_ok_and_a_warning_lease_let_the_step_go(tmp_path: Path, page: LeasePage) -> None:
    guard = Guard(settings(tmp_path, "fail_closed"))
    guard.check(0)
    page.write(LeaseState.WARN, rule="x", cause="y")
    guard.check(1)


def test_a_halt_checkpoints_first_and_carries_rule_and_cause(tmp_path: Path, page: LeasePage) -> None:
    guard = Guard(settings(tmp_path))
    page.write(LeaseState.HALT, step=3, rule="topology", cause="trainer TP is 1")
    saved: list[int] = []
    with pytest.raises(HaltedError, match="trainer TP is 1"):
        guard.check(4, checkpoint=lambda: saved.append(4))
    assert saved == [4]


def test_a_checkpoint_that_cannot_be_written_halts_all_the_same(tmp_path: Path, page: LeasePage) -> None:
    guard = Guard(settings(tmp_path))
    page.write(LeaseState.HALT, step=3, rule="topology", cause="trainer TP is 1")

    def full() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(HaltedError, match="trainer TP is 1") as raised:
        guard.check(4, checkpoint=full)
    assert "No space left" in str(raised.value.__cause__)


def test_a_full_disk_keeps_no_rank_from_its_checkpoint_and_its_halt(
    disk: Path, fill: Callable[[Path], Path]
) -> None:
    state = StateDirectory(disk / "state").make()
    state.run("r").path.mkdir(parents=True)
    page = LeasePage.create(state.run("r").lease)
    page.write(LeaseState.OK, ttl_seconds=0.0)
    fill(disk)
    saved: list[int] = []
    with pytest.raises(HaltedError, match="stopped renewing"):
        Guard(settings(state.path, "fail_closed")).check(1, checkpoint=lambda: saved.append(1))
    assert saved == [1]


def test_the_marker_blocks_a_restart_until_it_is_cleared(tmp_path: Path, page: LeasePage) -> None:
    guard = Guard(settings(tmp_path))
    page.write(LeaseState.HALT, step=3, rule="topology", cause="broken")
    with pytest.raises(HaltedError):
        guard.check(4)
    page.write(LeaseState.OK)  # a restarted daemon that has forgotten everything
    with pytest.raises(HaltedError, match="broken"):
        Guard(settings(tmp_path))
    assert HaltMarker.clear(StateDirectory(tmp_path).run("r").path) is not None
    Guard(settings(tmp_path)).check(5)


@pytest.mark.parametrize("policy", ["fail_open", "fail_closed"])
def test_a_lost_lease_follows_the_declared_policy(tmp_path: Path, page: LeasePage, policy: str) -> None:
    guard = Guard(settings(tmp_path, policy))
    page.write(LeaseState.OK, ttl_seconds=0.01, policy=Policy.FAIL_CLOSED)
    time.sleep(0.05)
    if policy == "fail_open":
        guard.check(1)
        return
    with pytest.raises(HaltedError, match="stopped renewing"):
        guard.check(1)
    marker = HaltMarker.read(StateDirectory(tmp_path).run("r").path)
    assert marker is not None
    assert (marker.rule, marker.verdict, marker.step) == ("lease_lost", "unknown", 1)


def test_a_run_nobody_watches_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(LeaseError, match="said hello"):
        Guard(settings(tmp_path))


def _rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    # a state directory each, as on two hosts: only rank 0's lease will ever say halt
    own = Path(folder) / f"state{rank}"
    lease = StateDirectory(own).make().run("r").lease
    lease.parent.mkdir(parents=True)
    page = LeasePage.create(lease)
    page.write(LeaseState.OK, ttl_seconds=60)
    guard = Guard(settings(own))
    guard.check(0, group=dist.group.WORLD)
    if rank == 0:
        page.write(LeaseState.HALT, step=0, rule="kernel_replaced", cause="norm is native")
    try:
        guard.check(1, group=dist.group.WORLD)
        outcome = "went on"
    except HaltedError as error:
        outcome = str(error)
    (Path(folder) / f"rank{rank}").write_text(outcome)
    dist.destroy_process_group()


def test_all_ranks_stop_at_the_same_step_though_one_alone_was_told(tmp_path: Path) -> None:
    start_processes(_rank, (str(tmp_path),), nprocs=2, start_method="fork")
    told, followed = [(tmp_path / f"rank{r}").read_text() for r in (0, 1)]
    assert "norm is native" in told
    assert "another rank" in followed


def test_mode_off_lets_a_halted_and_a_daemonless_run_go_on(tmp_path: Path, page: LeasePage) -> None:
    state = StateDirectory(tmp_path)
    guard = Guard(settings(tmp_path, "fail_closed"))
    write_mode(state, "r", Mode.OFF, by="me", reason="wrong alarm")
    page.write(LeaseState.HALT, step=3, rule="topology", cause="broken")
    HaltMarker(run="r", step=3, rule="topology", cause="broken", verdict="violation").write(
        state.run("r").path
    )
    guard.check(4)
    page.write(LeaseState.OK, ttl_seconds=0.0)
    guard.check(5)
    Guard(settings(tmp_path)).check(5)
    write_mode(state, "r", Mode.ENFORCE, by="me", reason="")
    with pytest.raises(HaltedError, match="broken"):
        guard.check(6)


@pytest.mark.parametrize("mode", [Mode.WARN, Mode.DRYRUN])
def test_a_weaker_mode_lets_a_fail_closed_run_go_on_but_holds_what_a_person_halted(
    tmp_path: Path, page: LeasePage, mode: Mode
) -> None:
    state = StateDirectory(tmp_path)
    guard = Guard(settings(tmp_path, "fail_closed"))
    write_mode(state, "r", mode, by="me", reason="")
    page.write(LeaseState.OK, ttl_seconds=0.0)
    guard.check(1)
    HaltMarker(run="r", step=-1, rule="operator", cause="stop", verdict="unknown").write(state.run("r").path)
    with pytest.raises(HaltedError, match="operator"):
        guard.check(2)


def test_a_marker_halts_with_the_daemon_dead_though_the_policy_is_fail_open(
    tmp_path: Path, page: LeasePage
) -> None:
    guard = Guard(settings(tmp_path))
    page.write(LeaseState.OK, ttl_seconds=0.0)
    guard.check(1)
    HaltMarker(run="r", step=-1, rule="operator", cause="stop", verdict="unknown").write(
        StateDirectory(tmp_path).run("r").path
    )
    with pytest.raises(HaltedError, match="operator"):
        guard.check(2)
