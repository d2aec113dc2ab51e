# SPDX-License-Identifier: Apache-2.0
"""A listener in the daemon's place that keeps what it is sent; the real daemon is tested beside it in test_guard.py."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from isoexec.contracts import sockets, wire


class Listener:
    """Answers hello and collects messages; ``stalled`` stops it from reading."""

    def __init__(self, state_dir: Path) -> None:
        self.messages: list[wire.Message] = []
        self.arrived = threading.Condition()
        self.stalled = threading.Event()
        self.accept = True
        self._server = sockets.listen(state_dir)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                stream, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: socket.socket) -> None:
        reader = wire.FrameReader()
        while not self.stalled.is_set():
            data = stream.recv(1 << 16)
            if not data:
                return
            for message in reader.feed(data):
                if isinstance(message, wire.Hello):
                    answer = wire.Welcome(
                        run=message.run,
                        role="daemon",
                        source="test",
                        accepted=self.accept,
                        differences=() if self.accept else (("composition.x", 1, 2),),
                        message="" if self.accept else "contracts differ",
                    )
                    for buffer in wire.encode_frame(answer):
                        stream.sendall(buffer)
                with self.arrived:
                    self.messages.append(message)
                    self.arrived.notify_all()
        self._held = stream  # open and unread: a hung daemon

    def wait(self, kind: type[wire.Message], count: int = 1, timeout: float = 5.0) -> list[wire.Message]:
        with self.arrived:
            assert self.arrived.wait_for(
                lambda: sum(isinstance(m, kind) for m in self.messages) >= count, timeout
            ), f"{count} of {kind.__name__} did not arrive"
            return [m for m in self.messages if isinstance(m, kind)]

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    running = Listener(tmp_path)
    yield running
    running.close()
