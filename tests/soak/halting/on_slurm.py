# SPDX-License-Identifier: Apache-2.0
"""A real Slurm of one node on loopback, with a munge key of its own: a guard, `scancel`, a hung controller, a requeue."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from job import arguments  # type: ignore[import-not-found]  # beside this file
from stage import Row, Stage, StageError, alive, end, free_port, until  # type: ignore[import-not-found]

__all__ = ["CASES", "run_case"]

GUARD = "Slurm job, guard, requeued"
CANCEL = "Slurm job, no guard, SIGTERM ignored"
HUNG = "Slurm job, no guard, SIGTERM ignored, controller hung"
CASES = {
    GUARD: "guard; then `scontrol requeue`",
    CANCEL: "SIGTERM, then scancel",
    HUNG: "SIGTERM, scancel without an answer, SIGKILL",
}
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue")
CONFIG = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=5
MessageTimeout=10
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=debug Nodes={host} Default=YES MaxTime=10 State=UP
"""


class Cluster:
    """munged, slurmctld and slurmd, ended with this script."""

    def __init__(self) -> None:
        missing = [name for name in PROGRAMS if shutil.which(name) is None]
        if missing:
            raise StageError(
                f"not found: {', '.join(missing)}; apt-get install slurmd slurmctld slurm-client munge"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="slurm-")
        folder, host = Path(self._folder.name), socket.gethostname()
        for name in ("munge", "state", "spool"):
            (folder / name).mkdir(mode=0o700)
        key = folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        self.config = folder / "slurm.conf"
        self.config.write_text(CONFIG.format(folder=folder, host=host, ports=(free_port(), free_port())))
        # the commands that the daemon runs read it too
        os.environ["SLURM_CONF"] = str(self.config)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self._log = (folder / "log").open("ab")
        self._started: list[subprocess.Popen[bytes]] = []
        atexit.register(self.close)
        munge = folder / "munge"
        self._start(
            "munged", "-F", "-f", "-S", f"{munge}/munge.sock", f"--key-file={key}", f"--pid-file={munge}/pid",
            f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        )  # fmt: skip
        until((munge / "munge.sock").exists, "munged", 60)
        self.controller = self._start("slurmctld", "-D", "-f", str(self.config))
        self._start("slurmd", "-D", "-f", str(self.config), "-N", host)
        until(lambda: "idle" in _said("sinfo", "-h", "-o", "%t"), f"an idle node; {folder / 'log'}", 120, 0.5)

    def _start(self, *argv: str) -> subprocess.Popen[bytes]:
        self._started.append(subprocess.Popen(argv, stdout=self._log, stderr=self._log))
        return self._started[-1]

    def close(self) -> None:
        for process in reversed(self._started):
            end(process)
        self._folder.cleanup()


@cache
def cluster() -> Cluster:
    return Cluster()


def _said(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, timeout=60).stdout.strip()


def _state(job: str) -> str:
    for word in _said("scontrol", "show", "job", job).split():
        if word.startswith("JobState="):
            return word.partition("=")[2]
    return ""


def run_case(name: str, folder: Path) -> Row:
    """Run one case in an empty folder. Raises StageError where its parts do not come up."""
    slurm = cluster()
    deaf = name != GUARD
    port = str(free_port())
    flags = ("deaf", "immune") if deaf else ()
    script = folder / "job.sh"
    rank = " ".join([sys.executable, *arguments(folder, "fail_open", *flags)])
    script.write_text(f"#!/bin/sh\nMASTER_ADDR=127.0.0.1 MASTER_PORT={port} exec srun -n2 {rank}\n")
    job = _said(
        "sbatch", "--parsable", "--requeue", "-n2", "--mem=1000", "--hold", "-o", f"{folder}/job.log",
        "--open-mode=append", str(script),
    )  # fmt: skip
    stage = Stage(
        folder,
        cooperative_seconds=3 if deaf else 60,
        terminate_seconds=3,
        runtimes=[{"kind": "slurm", "job": job, "timeout_seconds": 5}],
    )
    try:
        stage.start_daemon()
        stage.start_engine()
        _said("scontrol", "release", job)
        stage.running()
        pids = stage.pids()
        if name == HUNG:
            slurm.controller.send_signal(signal.SIGSTOP)
        at = stage.verdict()
        stopped = stage.stopped(pids, 90)
        time.sleep(1.0)
        slurm.controller.send_signal(signal.SIGCONT)
        over = until(
            lambda: (state := _state(job)) not in ("RUNNING", "COMPLETING", "PENDING") and state,
            "its end",
            90,
            0.5,
        )
        stage.notes.append(f"Slurm says {over}")
        if name == GUARD:
            _said("scontrol", "requeue", job)
            until(lambda: len(stage.pids()) == 4, "the start of the requeued job", 180, 0.2)
            again = until(
                lambda: (state := _state(job)) not in ("RUNNING", "COMPLETING", "PENDING") and state,
                "its end",
                180,
                0.5,
            )
            stage.notes.append(f"requeued: started again, refused, {again}")
        row = stage.row(name, CASES[name], at, stopped, ends=True, fence=not deaf)
        answers = " ".join(row.stages)
        if name == CANCEL and f"slurm {job}: asked" not in answers:
            row.wrong.append("scancel was not run")
        if name == HUNG and f"slurm {job}: failed: no answer" not in answers:
            row.wrong.append("wanted no answer")
        if any(map(alive, stage.pids())):
            row.wrong.append("a rank still lives")
        stage.clear(row)
    finally:
        slurm.controller.send_signal(signal.SIGCONT)
        _said("scancel", "--signal=KILL", "--full", job)
        _said("scancel", job)
        stage.close()
    return row
