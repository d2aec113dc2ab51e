# SPDX-License-Identifier: Apache-2.0
"""A real Ray head on loopback with a token of its own: actors and submitted jobs that are halted.

RAY_PYTHON names a Python that has `ray[default]` and finds torch and this package's dependencies; default: this one. Its HOME
is private: Ray writes a token there that every later `ray start` of that user would ask for.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

from job import arguments  # type: ignore[import-not-found]  # beside this file
from stage import Row, Stage, StageError, end, free_port, until  # type: ignore[import-not-found]

__all__ = ["CASES", "run_case"]

GUARD, ACTORS_GUARD = "Ray job, guard", "Ray actors, guard"
ACTORS_KILL = "Ray actors, no guard, SIGTERM ignored, max_restarts=-1"
STOP, NO_TOKEN = "Ray job, no guard, SIGTERM ignored", "Ray job, no guard, SIGTERM ignored, no token"
CASES = {
    ACTORS_GUARD: "guard in two actors; the driver ends",
    ACTORS_KILL: "SIGTERM, SIGKILL; Ray starts the actors again",
    GUARD: "guard in a submitted job",
    STOP: "SIGTERM, then the job API's stop",
    NO_TOKEN: "SIGTERM, the job API refuses, SIGKILL",
}
PYTHON = os.environ.get("RAY_PYTHON", sys.executable)


class Cluster:
    """A head node and its job API."""

    def __init__(self) -> None:
        if subprocess.run([PYTHON, "-c", "import ray"], capture_output=True).returncode:
            raise StageError(f"{PYTHON} has no ray: pip install 'ray[default]' and set RAY_PYTHON")
        self._folder = tempfile.TemporaryDirectory(prefix="ray-")
        folder = Path(self._folder.name)
        (folder / "home").mkdir()
        self.token = folder / "token"
        self.token.write_text(secrets.token_hex(32))
        self.token.chmod(0o600)
        self.port, dashboard = (free_port() for _ in range(2))
        self.address = f"http://127.0.0.1:{dashboard}"
        self.env = os.environ | {
            "HOME": str(folder / "home"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token.read_text(),
            "RAY_USAGE_STATS_ENABLED": "0",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        self.env.pop(
            "PYTHONSAFEPATH", None
        )  # Ray starts its workers as scripts that import what lies beside them
        with (folder / "log").open("wb") as log:
            self.head = subprocess.Popen(
                [str(Path(PYTHON).with_name("ray")), "start", "--head", "--block", "--num-cpus=4",
                 "--node-ip-address=127.0.0.1", f"--port={self.port}", "--min-worker-port=20000",
                 "--max-worker-port=20100", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
                 "--object-store-memory=104857600", f"--temp-dir={folder / 'rt'}", "--disable-usage-stats"],
                stdout=log, stderr=log, env=self.env,
            )  # fmt: skip
        atexit.register(self.close)
        until(self._up, f"Ray's job API; {folder / 'log'}", 300, 0.5)

    def _up(self) -> bool:
        if self.head.poll() is not None:
            raise StageError((Path(self._folder.name) / "log").read_text()[-1500:])
        if "Ray runtime started" not in (Path(self._folder.name) / "log").read_text():
            return False  # the job API answers before there is a node
        with contextlib.suppress(OSError):
            self.ask("/api/jobs/")
            return True
        return False

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask the job API. Raises OSError."""
        headers = {"authorization": f"Bearer {self.token.read_text()}", "content-type": "application/json"}
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.address + path, data=data, headers=headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return json.loads(answer.read())

    def close(self) -> None:
        end(self.head, 30)
        self._folder.cleanup()


@cache
def cluster() -> Cluster:
    return Cluster()


def run_case(name: str, folder: Path) -> Row:
    """Run one case in an empty folder. Raises StageError where its parts do not come up."""
    ray = cluster()
    deaf = name not in (GUARD, ACTORS_GUARD)
    job = f"soak-{secrets.token_hex(4)}"
    runtime = {"kind": "ray", "job": job, "address": ray.address, "token": str(ray.token)}
    if name == NO_TOKEN:
        del runtime["token"]
    actors = name in (ACTORS_GUARD, ACTORS_KILL)
    stage = Stage(
        folder,
        cooperative_seconds=3 if deaf else 60,
        terminate_seconds=3,
        runtimes=[] if actors else [runtime],
    )
    flags = ("deaf", "immune") if deaf else ()
    try:
        stage.start_daemon()
        stage.start_engine()
        if actors:
            argv = [
                PYTHON,
                str(Path(__file__).with_name("ray_driver.py")),
                str(free_port()),
                str(folder),
                *flags,
            ]
        else:
            argv = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
            argv += arguments(folder, "fail_open", *flags)
        ray.ask("/api/jobs/", {"entrypoint": shlex.join(argv), "submission_id": job})
        stage.running()
        pids = stage.pids()
        at = stage.verdict()
        stopped = stage.stopped(pids, 90)
        over = until(lambda: _ended(ray, job), "the end of the Ray job", 120, 0.2)
        stage.notes.append(f"Ray says {over}")
        if actors:
            stage.notes.append(f"the driver saw {(folder / 'driver').read_text()}")
        until(stage.timed, "the stages in the journal", 60, 0.1)
        row = stage.row(name, CASES[name], at, stopped, ends=True, fence=not deaf)
        if name == ACTORS_KILL and row.starts <= stage.world:
            row.wrong.append("Ray did not start the actors again: nothing was shown")
        answers = " ".join(row.stages)
        if name == STOP and "asked: 200" not in answers:
            row.wrong.append("the job API was not asked")
        if name == NO_TOKEN and "refused: 401" not in answers:
            row.wrong.append("wanted a refusal")
        # an actor whose method has ended lives until Ray has taken the job down
        if stage.stopped(stage.pids(), 60) is None:
            row.wrong.append("a rank still lives")
        stage.clear(row)
    finally:
        stage.close()
    return row


def _ended(ray: Cluster, job: str) -> str:
    status = str(ray.ask(f"/api/jobs/{job}")["status"])
    return "" if status in ("PENDING", "RUNNING") else status
