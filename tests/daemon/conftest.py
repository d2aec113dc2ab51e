# SPDX-License-Identifier: Apache-2.0
"""A real daemon in a process of its own, and peers that speak to it over its real socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import yaml

from isoexec.contracts import sockets, wire
from isoexec.contracts.halting import StateDirectory
from isoexec.contracts.schema import Contract, library

Sequence_ = tuple[Sequence[int], int, Any]
"""(token ids of prompt and response, position of the first logprob, logprobs)."""


def until(condition: Callable[[], Any], what: str, seconds: float = 10.0) -> Any:
    """Wait for something another process does; the only place that polls."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"{what}: not within {seconds} s")


def logprob_fields(sequences: Sequence[Sequence_]) -> dict[str, Any]:
    """The arrays of a logprobs message."""
    digests = [xxhash.xxh3_128_digest(np.asarray(ids, "<i4").tobytes()) for ids, _, _ in sequences]
    values = [np.asarray(logprobs, np.float32) for _, _, logprobs in sequences]
    ids = [
        np.asarray(ids, np.int32)[start : start + len(v)]
        for (ids, start, _), v in zip(sequences, values, strict=True)
    ]
    return {
        "digests": np.frombuffer(b"".join(digests), np.uint8).reshape(len(sequences), 16),
        "lengths": np.asarray([len(v) for v in values], np.int32),
        "starts": np.asarray([start for _, start, _ in sequences], np.int32),
        "logprobs": np.concatenate(values),
        "tokens": np.concatenate(ids),
    }


class Peer:
    """One process of a job, as the daemon sees it."""

    def __init__(self, state_dir: Path, role: str, run: str = "r", rank: int = 0, **hello: Any) -> None:
        self.run, self.role = run, role
        self.source = f"host:{os.getpid()}:{role}{rank}"
        self.seq = 0
        self.stream = sockets.connect(state_dir)
        fields = {"regime": "bitwise", "monitor_only": True, "rank": rank, **hello}
        self.reader = wire.FrameReader()
        self.send(wire.Hello, **fields)
        self.welcome = self._answer()

    def _answer(self) -> wire.Welcome:
        while True:
            data = self.stream.recv(65536)
            if not data:
                raise ConnectionResetError("closed instead of a welcome")
            for message in self.reader.feed(data):
                assert isinstance(message, wire.Welcome)
                return message

    def send(self, kind: type[wire.Message], **fields: Any) -> None:
        message = kind(
            run=self.run, role=self.role, source=self.source, seq=self.seq, time=time.time(), **fields
        )
        self.seq += 1
        for part in wire.encode_frame(message):
            self.stream.sendall(part)

    def logprobs(self, case: str, step: int, sequences: Sequence[Sequence_], **fields: Any) -> None:
        values = {"weight_version": step, **fields, **logprob_fields(sequences)}
        self.send(wire.Logprobs, case=case, step=step, **values)

    def weights(self, version: int, tensors: dict[str, tuple[int, int]], **fields: Any) -> None:
        counts = dict.fromkeys(tensors, 4)
        values = {"numel": counts, "total": counts, **fields}
        self.send(wire.Weights, weight_version=version, step=version, tensors=tensors, **values)

    def step(self, step: int, **seconds: float) -> None:
        self.send(wire.Step, step=step, weight_version=step, seconds=seconds or {"step": 1.0, "probe": 0.01})

    def bye(self) -> None:
        self.send(wire.Bye)
        self.stream.close()

    def closed(self) -> bool:
        """Whether the daemon closes this stream."""
        self.stream.settimeout(10)
        try:
            return self.stream.recv(1) == b""
        except (ConnectionResetError, BrokenPipeError):
            return True


class Daemon:
    """A daemon process and its HTTP side."""

    def __init__(self, state_dir: Path, settings: dict[str, Any] | None = None) -> None:
        self.state = StateDirectory(state_dir)
        self.state_dir = state_dir
        state_dir.mkdir(parents=True, exist_ok=True)
        config = state_dir / "settings.yaml"
        config.write_text(yaml.safe_dump({"settle_seconds": 0.5, "window_seconds": 1.0, **(settings or {})}))
        self.log = (state_dir / "daemon.log").open("ab")
        self.process = subprocess.Popen(
            [
                sys.executable, "-P", "-c", "import sys; from isoexec.daemon.cli import run; sys.exit(run())",
                "--state-dir", str(state_dir), "--http", "127.0.0.1:0", "--log", "json", "--config", str(config),
            ],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("isoexec daemon: http://"):
            self.process.wait(10)
            raise RuntimeError(f"no daemon: {line!r} {(state_dir / 'daemon.log').read_text()[-2000:]}")
        self.address = line.removeprefix("isoexec daemon: ").split(",")[0]

    def text(self, path: str) -> str:
        with urllib.request.urlopen(self.address + path, timeout=10) as answer:  # noqa: S310
            return str(answer.read().decode())

    def json(self, path: str) -> Any:
        return json.loads(self.text(path))

    def metric(self, name: str, **labels: str) -> float | None:
        """One value of a scrape."""
        for line in self.text("/metrics").splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == name and all(f'{k}="{v}"' in head for k, v in labels.items()):
                return float(value)
        return None

    def windows(self, run: str = "r", count: int = 1) -> list[dict[str, Any]]:
        """The windows of a run, once there are so many."""

        def enough() -> list[dict[str, Any]] | None:
            rows = self.json(f"/api/v1/runs/{run}/windows")["windows"]
            return [row["window"] for row in rows] if len(rows) >= count else None

        found: list[dict[str, Any]] = until(enough, f"{count} windows of {run}")
        return found

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.log.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Start daemons, by default on one state directory; all are ended with the test."""
    started: list[Daemon] = []

    def begin(state_dir: Path | None = None, **settings: Any) -> Daemon:
        daemon = Daemon(state_dir or tmp_path / "state", settings)
        started.append(daemon)
        return daemon

    yield begin
    for daemon in started:
        daemon.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for the tests of a module that use runs of their own."""
    one = Daemon(tmp_path_factory.mktemp("shared") / "state")
    yield one
    one.close()


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    """Connect peers; their streams are closed with the test."""
    made: list[Peer] = []

    def connect(daemon: Daemon, role: str, **fields: Any) -> Peer:
        one = Peer(daemon.state_dir, role, **fields)
        made.append(one)
        return one

    yield connect
    for one in made:
        one.stream.close()


@pytest.fixture
def contract_hello() -> dict[str, Any]:
    """What a process under a contract says in its hello."""
    contract = Contract.load(library("qwen3-dense-cpu"))
    return {
        "monitor_only": False,
        "contract": contract.to_dict(),
        "identities": contract.identities.to_dict(),
    }


@pytest.fixture
def unread_socket(daemon: Daemon) -> Iterator[socket.socket]:
    """A bare stream to the daemon, that has said nothing."""
    stream = sockets.connect(daemon.state_dir)
    yield stream
    stream.close()


@pytest.fixture
def wait_until() -> Callable[..., Any]:
    return until
