# SPDX-License-Identifier: Apache-2.0
"""The processes beside the job: the IsoExec daemon, and a real Prometheus where one is installed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.halting import StateDirectory

__all__ = ["Daemon", "Prometheus", "ServiceError", "get_json"]


# a demo does not wait two minutes to call a side silent
_SETTINGS = "window_seconds: 20\n"  # longer than a slow machine trains a step


class ServiceError(IsoExecError):
    """A service did not start, or does not answer."""


def get_json(url: str, timeout: float = 5.0) -> Any:
    """GET a JSON document.  Raises ServiceError when there is none."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:  # noqa: S310 - our own loopback services
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise ServiceError(f"{url}: {error}") from error


def _wait(
    what: str, ready: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float = 20.0
) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServiceError(f"{what} ended with code {process.returncode}; see its log")
        if ready():
            return
        time.sleep(0.05)
    raise ServiceError(f"{what} did not answer within {seconds:.0f} s; see its log")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


class Daemon:
    """``isoexec daemon`` over a state directory, serving HTTP on a free loopback port."""

    def __init__(self, state_dir: Path, log: Path) -> None:
        self.state = StateDirectory(state_dir).make()
        self._log = log
        self._settings = state_dir / "settings.yaml"
        self._settings.write_text(_SETTINGS)
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.target = f"127.0.0.1:{port}"
        self.process = self._launch()

    def _launch(self) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-P", "-m", "isoexec.contracts.main", "daemon",
            "--state-dir", str(self.state.path), "--http", self.target, "--config", str(self._settings),
        ]  # fmt: skip
        with self._log.open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        _wait("the daemon", self.healthy, process)
        return process

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/healthz", timeout=1.0) as answer:  # noqa: S310 - loopback
                return bool(answer.status == 200)
        except OSError:
            return False

    def restart(self) -> None:
        """Start it again over the same state directory; refused while it runs."""
        if self.process.poll() is None:
            raise ServiceError("the daemon still runs: nothing to restart")
        self.process = self._launch()

    def kill(self) -> None:
        """SIGKILL: no goodbye, no flush."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5.0) as answer:  # noqa: S310 - loopback
            return bytes(answer.read()).decode()

    def run(self, name: str) -> Any:
        """What the daemon says of a run (``/api/v1/runs/<name>``)."""
        return get_json(f"{self.url}/api/v1/runs/{urllib.parse.quote(name)}")

    def close(self) -> None:
        _stop(self.process)


class Prometheus:
    """A real Prometheus that scrapes one daemon each second and evaluates the shipped rules."""

    def __init__(self, folder: Path, target: str) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        folder.mkdir(parents=True, exist_ok=True)
        configure = [
            sys.executable, "-P", "-m", "isoexec.contracts.main", "dashboards", "config",
            "--target", target, "--out", str(folder), "--interval", "1",
        ]  # fmt: skip
        made = subprocess.run(configure, capture_output=True, text=True, check=False)
        if made.returncode:
            raise ServiceError(f"isoexec dashboards config: {made.stderr.strip() or made.stdout.strip()}")
        command = [
            "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
        ]  # fmt: skip
        with (folder / "prometheus.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        _wait("Prometheus", self._ready, self.process)

    @staticmethod
    def installed() -> bool:
        return shutil.which("prometheus") is not None

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1.0) as answer:  # noqa: S310 - loopback
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector of a PromQL expression."""
        answer = get_json(f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def firing(self) -> list[dict[str, str]]:
        """The label sets of the alerts that fire now, without the always-firing heartbeat."""
        alerts = [r["metric"] for r in self.query('ALERTS{alertstate="firing"}')]
        return [a for a in alerts if a.get("alertname") != "IsoexecHeartbeat"]

    def wait_alert(self, name: str, seconds: float = 20.0) -> str:
        """The state of an alert: ``firing`` once it fires within the time, else what it is then (``pending``, ``inactive``)."""
        deadline = time.monotonic() + seconds
        state = "inactive"
        while time.monotonic() < deadline:
            states = {r["metric"]["alertstate"] for r in self.query(f'ALERTS{{alertname="{name}"}}')}
            if "firing" in states:
                return "firing"
            state = "pending" if states else "inactive"
            time.sleep(0.3)
        return state

    def close(self) -> None:
        _stop(self.process)
