# SPDX-License-Identifier: Apache-2.0
"""What is asked of a runtime, over real HTTP and real commands; the schedulers themselves are stand-ins that note it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from isoexec.daemon.config import Config, ConfigError, Escalation
from isoexec.daemon.halt import ProcessHandle, StageReport, escalate
from isoexec.daemon.runtimes import Runtime


class Server(HTTPServer):
    asked: list[tuple[str, str]]
    tokens: list[str | None]
    status = 200
    delay = 0.0


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers["content-length"]))
        server.asked.append((self.path, body.decode()))
        server.tokens.append(self.headers.get("authorization"))
        time.sleep(server.delay)
        self.send_response(server.status)
        self.end_headers()
        self.wfile.write(b'{"stopped": true}')

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server(("127.0.0.1", 0), Handler)
    one.asked, one.tokens = [], []
    thread = threading.Thread(target=one.serve_forever, daemon=True)
    thread.start()
    yield one
    one.shutdown()
    thread.join()
    one.server_close()


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`scancel` and `kubectl` that note how they were called; a job named `bad` is refused, `hung` never answers."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, said in (("scancel", "done"), ("kubectl", "true")):
        path = folder / name
        path.write_text(
            f'#!/bin/sh\nprintf "%s\\n" {name} "$@" >> {tmp_path}/asked\n'
            'case "$*" in *bad*) echo "no such job" >&2; exit 1;; *hung*) exec sleep 60;; *old*) exit 0;; esac\n'
            f"echo {said}\n"
        )
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return tmp_path / "asked"


def stop(**settings: Any) -> str:
    return asyncio.run(Runtime.of(settings, "here").stop())


def test_slurm_and_kubernetes_are_asked_by_their_commands(commands: Path) -> None:
    assert stop(kind="slurm", job=4242) == "asked: done"
    assert commands.read_text().split("\n")[:2] == ["scancel", "4242"]
    assert stop(kind="kubernetes", job="train", namespace="rl") == "asked: job train has spec.suspend true"
    assert '{"spec":{"suspend":true}}' in commands.read_text().split("\n")
    # an API without the field takes the patch, drops it and says that all is well
    assert stop(kind="kubernetes", job="old", namespace="rl").startswith("refused: wanted spec.suspend true")
    assert stop(kind="slurm", job="bad") == "refused: exit 1: no such job"
    began = time.monotonic()
    assert stop(kind="slurm", job="hung", timeout_seconds=0.5) == "failed: no answer within 0.5 s"
    assert time.monotonic() - began < 5


def test_a_command_that_is_not_installed_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert stop(kind="slurm", job="1").startswith("failed: ")


def test_a_token_is_read_when_it_is_used(server: Server, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    token.chmod(0o600)
    address = f"http://127.0.0.1:{server.server_port}"
    runtime = Runtime.of({"kind": "ray", "job": "j", "address": address, "token": str(token)}, "here")
    assert asyncio.run(runtime.stop()).startswith("asked: 200")
    token.write_text("fedcba9876543210")
    assert asyncio.run(runtime.stop()).startswith("asked: 200")
    assert server.tokens == ["Bearer 0123456789abcdef", "Bearer fedcba9876543210"]
    token.unlink()
    assert asyncio.run(runtime.stop()).startswith(f"failed: {token}: the token cannot be read")
    assert "fedcba9876543210" not in repr(runtime)


def test_ray_and_vllm_are_asked_over_http(server: Server) -> None:
    address = f"http://127.0.0.1:{server.server_port}"
    assert stop(kind="ray", job="raysubmit_1", address=address) == 'asked: 200 {"stopped": true}'
    assert stop(kind="vllm", address=address + "/").startswith("asked: 200")
    assert server.asked == [("/api/jobs/raysubmit_1/stop", "{}"), ("/pause", "{}")]
    assert server.tokens == [None, None]
    server.status = 404
    assert stop(kind="ray", job="gone", address=address).startswith("refused: 404")
    server.delay = 1.0
    assert stop(kind="vllm", address=address, timeout_seconds=0.2).startswith("failed: ")
    assert stop(kind="vllm", address="http://127.0.0.1:9").startswith("failed: ")


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"kind": "pbs"}, "kind: wanted one of slurm, ray"),
        ({"kind": "slurm"}, "slurm needs job"),
        ({"kind": "slurm", "job": "--all"}, "job: wanted letters"),
        ({"kind": "slurm", "job": "1;rm"}, "job: wanted letters"),
        ({"kind": "kubernetes", "job": "a", "namespace": "../b"}, "namespace"),
        ({"kind": "ray", "job": "a", "address": "file:///etc"}, "address: wanted http"),
        ({"kind": "vllm", "address": "http://h", "timeout_seconds": 0}, "timeout_seconds"),
        ({"kind": "vllm", "address": "http://h", "url": "x"}, "unknown setting 'url'"),
        ({"kind": "vllm", "address": "http://h", "token": "/nonexistent"}, "token: /nonexistent"),
        ({"kind": "slurm", "job": "1", "token": "/nonexistent"}, "token: slurm"),
        ("slurm", "wanted a map"),
    ],
)
def test_a_runtime_that_cannot_be_asked_is_refused_by_name(tmp_path: Path, entry: Any, says: str) -> None:
    with pytest.raises(Exception, match=says) as raised:
        Config.load(None, state_dir=tmp_path, escalation={"runtimes": [entry]})
    assert "runtimes[0]" in str(raised.value)


def test_seconds_of_the_escalation_are_checked(tmp_path: Path) -> None:
    for wrong in ({"kill_seconds": -1}, {"enabled": "yes"}, {"runtime_seconds": True}, {"runtimes": "slurm"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Config.load(None, state_dir=tmp_path, escalation=wrong)


def test_a_runtime_is_asked_between_term_and_kill_and_only_for_its_runs(server: Server) -> None:
    address = f"http://127.0.0.1:{server.server_port}"
    runtime = Runtime.of({"kind": "vllm", "address": address, "run": "night-*"}, "here")
    assert runtime.serves("night-1")
    assert not runtime.serves("day")
    code = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)"
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        handle = ProcessHandle.open(process.pid)
        assert handle is not None
        reports: list[StageReport] = []
        settings = Escalation(
            enabled=True, cooperative_seconds=0.1, terminate_seconds=0.1, runtime_seconds=0.3
        )
        asyncio.run(escalate([handle], settings, reports.append, runtimes=[runtime]))
        handle.close()
        assert [one.stage for one in reports] == ["terminate", "runtime", "kill", "stopped"]
        assert reports[1].answers == {f"vllm {address}": 'asked: 200 {"stopped": true}'}
        assert reports[2].before_seconds >= 0.3
        # a runtime that answers late keeps its own stage waiting, not the one before
        reports.clear()
        server.delay = 0.4
        settings = Escalation(enabled=True, cooperative_seconds=0.0, runtime_seconds=0.0)
        asyncio.run(escalate([], settings, reports.append, runtimes=[runtime]))
        assert [one.before for one in reports] == ["cooperative", "runtime"]
        assert reports[1].before_seconds >= 0.4
        server.delay = 0.0
        # on another host only the runtime can be asked, and whether it stopped is unknown
        reports.clear()
        settings = Escalation(enabled=True, cooperative_seconds=0.0, runtime_seconds=0.1)
        asyncio.run(escalate([], settings, reports.append, runtimes=[runtime]))
        assert [one.stage for one in reports] == ["runtime", "unseen"]
        # one that says no has nothing to be waited for
        reports.clear()
        server.status = 401
        settings = Escalation(enabled=True, cooperative_seconds=0.0, runtime_seconds=30.0)
        asyncio.run(escalate([], settings, reports.append, runtimes=[runtime]))
        assert reports[0].answers[runtime.name].startswith("refused: 401")
        assert reports[1].before_seconds < 30
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
