# SPDX-License-Identifier: Apache-2.0
"""Stops a real torchrun job of two ranks (gloo) in every way, and measures how long it takes and how many steps still run.

    .venv/bin/python tests/soak/halts.py [CASE ...]

Each case is one line of JSON: seconds from the verdict (or the fault) until no rank lives, and until the last rank had its
checkpoint written at the fence; steps that each rank began after it; the step at which each rank stopped and that of its
checkpoint, read back; and what the journal says of the stages.
Exit code 1 when a case does not end as it must.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isoexec.contracts import wire
from isoexec.contracts.halting import HaltMarker, LeasePage, LeaseState, StateDirectory
from isoexec.contracts.main import main as isoexec
from isoexec.contracts.schema import Contract, library
from isoexec.daemon.journal import Journal

STEP_SECONDS = 0.05
CONTRACT = "qwen3-dense-cpu"


@dataclass(frozen=True, kw_only=True)
class Case:
    """deaf: no guard is asked. immune: SIGTERM is ignored. fault: what happens. ends: whether the job must stop."""

    fault: str = "verdict"
    policy: str = "fail_open"
    deaf: bool = False
    immune: bool = False
    restarts: int = 0
    ends: bool = True


CASES = {
    "cooperative": Case(),
    "torchrun restarts twice": Case(restarts=2),
    "no guard: SIGTERM": Case(deaf=True),
    "no guard, SIGTERM ignored: SIGKILL": Case(deaf=True, immune=True),
    "daemon killed, fail_closed": Case(fault="daemon killed", policy="fail_closed"),
    "daemon stopped, fail_closed": Case(fault="daemon stopped", policy="fail_closed"),
    "daemon killed, fail_open": Case(fault="daemon killed", ends=False),
    "isoexec halt": Case(fault="halt"),
    "isoexec halt, daemon dead, fail_open": Case(fault="halt, daemon dead"),
    "daemon killed, fail_closed, mode off": Case(fault="off, daemon dead", policy="fail_closed", ends=False),
}


def rank_main(folder: Path, policy: str, *, deaf: bool, immune: bool) -> None:
    """What one rank does: a step is a sleep and an all_reduce; each is noted as it begins."""
    import torch
    import torch.distributed as dist

    from isoexec.contracts.errors import HaltedError
    from isoexec.probes.client import Client, ProbeSettings
    from isoexec.probes.guard import Guard

    if immune:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank = int(os.environ["RANK"])
    settings = ProbeSettings(
        run="r",
        state_dir=folder / "state",
        regime="bitwise",
        policy=policy,
        contract=Contract.load(library(CONTRACT)),
    )
    (folder / f"start{rank}-{os.getpid()}").touch()
    dist.init_process_group("gloo")
    client = Client(settings, "trainer", rank=rank, world=2)
    client.connect()
    guard = Guard(settings)
    weights = torch.zeros(1000)
    notes = (folder / f"steps{rank}").open("a", buffering=1)

    def checkpoint(step: int) -> None:
        draft = folder / f"checkpoint{rank}.tmp"
        torch.save({"step": step, "weights": weights}, draft)
        draft.rename(folder / f"checkpoint{rank}")

    step = -1
    while True:
        step += 1
        if not deaf:
            try:
                guard.check(step, group=dist.group.WORLD, checkpoint=lambda: checkpoint(step))  # noqa: B023
            except HaltedError:
                (folder / f"halted{rank}").write_text(f"{step} {time.time()}")
                raise
        notes.write(f"{step} {time.time()}\n")
        time.sleep(STEP_SECONDS)
        dist.all_reduce(weights)


def engine_main(folder: Path, policy: str) -> None:
    """An engine of the run in a process of its own: breaks the contract when told to, ends when the lease says halt."""
    path = Path(__file__).parents[1] / "daemon" / "conftest.py"
    spec = importlib.util.spec_from_file_location("isoexec_daemon_peers", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    contract = Contract.load(library(CONTRACT))
    identities = contract.identities.to_dict()
    state = StateDirectory(folder / "state")
    engine = module.Peer(
        state.path,
        "engine",
        monitor_only=False,
        policy=policy,
        contract=contract.to_dict(),
        identities=identities,
    )
    (folder / "engine").touch()
    sent = False
    with LeasePage.open(state.run("r").lease) as page:
        while page.read().state is not LeaseState.HALT:
            if not sent and (folder / "strike").exists():
                degrees = {"TP": 2, "SP": 1, "PP": 1, "CP": 2, "EP": 1, "ETP": 1, "DP": 1}
                sent = True
                engine.send(
                    wire.Attestation, reason="sync", step=1, weight_version=1, topology=degrees,
                    environment={"arch": "cpu"}, identities=identities,
                )  # fmt: skip
            time.sleep(0.002)


def daemon_of(folder: Path, case: Case) -> subprocess.Popen[str]:
    settings = folder / "settings.yaml"
    patience = 3 if case.deaf else 20
    settings.write_text(
        f"escalation: {{enabled: true, cooperative_seconds: {patience}, terminate_seconds: 2, kill_seconds: 5}}\n"
    )
    code = "import sys; from isoexec.daemon.cli import run; sys.exit(run())"
    argv = ["--state-dir", str(folder / "state"), "--http", "127.0.0.1:0", "--config", str(settings)]
    with (folder / "daemon.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, *argv], stdout=subprocess.PIPE, stderr=log, text=True
        )
    if process.stdout is None or not process.stdout.readline():
        raise RuntimeError((folder / "daemon.log").read_text())
    return process


def steps_of(folder: Path, rank: int) -> list[tuple[int, float]]:
    path = folder / f"steps{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(line.split()[0]), float(line.split()[1])) for line in lines if len(line.split()) == 2]


def strike(case: Case, folder: Path, daemon: subprocess.Popen[str]) -> float:
    """Do the fault and give its unix time: of a verdict, as its lease shows it."""
    state = StateDirectory(folder / "state")
    if case.fault == "verdict":
        (folder / "strike").touch()
        with LeasePage.open(state.run("r").lease) as page:
            while page.read().state is not LeaseState.HALT:
                time.sleep(0.001)
        return time.time()
    if case.fault == "daemon stopped":
        daemon.send_signal(signal.SIGSTOP)
    elif case.fault != "halt":
        daemon.kill()
    if "daemon dead" in case.fault:
        time.sleep(4 if case.fault.startswith("halt") else 0)
    now = time.time()
    where = ["--state-dir", str(state.path)]
    with contextlib.redirect_stdout(sys.stderr):
        if case.fault.startswith("halt"):
            isoexec(["halt", "r", *where])
        elif case.fault.startswith("off"):
            isoexec(["mode", "r", "off", *where])
    return now


def run_case(name: str, case: Case, folder: Path) -> dict[str, Any]:
    import torch

    daemon = daemon_of(folder, case)
    me = [sys.executable, __file__, "--rank-of", str(folder), "--policy", case.policy]
    engine = subprocess.Popen([*me, "--engine"])
    options = [f"--{flag}" for flag in ("deaf", "immune") if getattr(case, flag)]
    job = subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
            f"--max-restarts={case.restarts}", __file__, "--rank-of", str(folder), "--policy", case.policy, *options,
        ],
        stdout=subprocess.DEVNULL, stderr=(folder / "job.log").open("wb"), env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 90
        while not (folder / "engine").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        while min(len(steps_of(folder, rank)) for rank in (0, 1)) < 20:
            if time.monotonic() > deadline or job.poll() is not None:
                raise RuntimeError((folder / "job.log").read_text()[-2000:])
            time.sleep(0.05)
        ranks = [int(path.name.rpartition("-")[2]) for path in folder.glob("start*-*")]
        at = strike(case, folder, daemon)
        stopped: float | None = None
        deadline = time.monotonic() + (30 if case.ends else 6)
        while time.monotonic() < deadline and stopped is None:
            if not any(Path(f"/proc/{pid}/stat").exists() and _runs(pid) for pid in ranks):
                stopped = time.time()
            time.sleep(0.005)
        if case.restarts:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(180)
        time.sleep(0.5)
    finally:
        job.terminate()
        try:
            job.wait(20)
        except subprocess.TimeoutExpired:
            job.kill()
        daemon.send_signal(signal.SIGCONT)
        daemon.terminate()
        daemon.wait(15)
        engine.kill()
        engine.wait()
    after = [sum(when > at for _, when in steps_of(folder, rank)) for rank in (0, 1)]
    notes = [path.read_text().split() for path in sorted(folder.glob("halted?"))]
    halted, fenced = [int(step) for step, _ in notes], max((float(when) for _, when in notes), default=None)
    saved = [
        torch.load(folder / f"checkpoint{rank}")["step"]
        for rank in (0, 1)
        if (folder / f"checkpoint{rank}").exists()
    ]
    journal = Journal.open(folder / "state" / "journal.sqlite")
    actions = [row["action"] for row in reversed(journal.actions("r"))]
    journal.close()
    marker = HaltMarker.read(folder / "state" / "runs" / "r")
    cooperative = case.ends and not case.deaf
    good = (stopped is not None) == case.ends
    good &= not cooperative or (len(halted) == 2 and halted == saved and len(set(halted)) == 1)
    good &= (marker is not None) == case.ends and (not case.restarts or len(list(folder.glob("steps*"))) == 2)
    return {
        "case": name,
        "seconds_to_stop": round(stopped - at, 3) if stopped is not None else None,
        "seconds_to_fence": round(fenced - at, 3) if fenced is not None else None,
        "steps_begun_after": after,
        "halted_at": halted,
        "checkpoints": saved,
        "starts": len(list(folder.glob("start*-*"))),
        "rule": marker.rule if marker else None,
        "journal": actions,
        "as_it_must": bool(good),
    }


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Stop a torchrun job in every way.")
    parser.add_argument("case", nargs="*", help=f"default: all of {', '.join(CASES)}")
    for hidden in ("--rank-of", "--policy"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--deaf", "--immune", "--engine"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.engine:
        engine_main(Path(chosen.rank_of), chosen.policy)
        return 0
    if chosen.rank_of:
        rank_main(Path(chosen.rank_of), chosen.policy, deaf=chosen.deaf, immune=chosen.immune)
        return 0
    good = True
    for name in chosen.case or CASES:
        with tempfile.TemporaryDirectory(prefix="isoexec-halts-") as folder:
            found = run_case(name, CASES[name], Path(folder))
        good &= found["as_it_must"]
        print(json.dumps(found), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
