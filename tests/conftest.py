# SPDX-License-Identifier: Apache-2.0
"""Keep the repo root off sys.path: kernels, daemon, adapters and contracts are other people's module names."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != _ROOT]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(folder)], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"no tmpfs of our own: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def fill() -> Callable[[Path], Path]:
    """Take every free block of a disk by one file in it."""

    def take(folder: Path) -> Path:
        ballast = folder / "ballast"
        with ballast.open("wb", buffering=0) as out, contextlib.suppress(OSError):
            while True:
                out.write(b"x" * 4096)
        return ballast

    return take


class NatsServer:
    """A real nats-server with JetStream, whose store outlives it."""

    def __init__(self, folder: Path, *settings: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = folder
        self._config = folder / "server.conf"
        lines = [
            f'listen: "127.0.0.1:{self.port}"',
            f'jetstream: {{store_dir: "{folder / "store"}"}}',
            *settings,
        ]
        self._config.write_text("\n".join(lines) + "\n")
        self.start()

    def start(self) -> None:
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(["nats-server", "-c", str(self._config)], stderr=log, stdout=log)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), 1) as stream,
            ):
                if stream.recv(5) == b"INFO ":
                    return
            time.sleep(0.02)
        raise RuntimeError(f"no nats-server: {(self.folder / 'server.log').read_text()[-2000:]}")

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[Callable[..., NatsServer]]:
    """Start NATS servers; they end with the test."""
    if shutil.which("nats-server") is None:
        pytest.skip("nats-server is not on the PATH (make tools gets it)")
    started: list[NatsServer] = []

    def begin(*settings: str) -> NatsServer:
        folder = tmp_path / f"nats{len(started)}"
        folder.mkdir()
        started.append(NatsServer(folder, *settings))
        return started[-1]

    yield begin
    for one in started:
        one.close()
