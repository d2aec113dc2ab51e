# SPDX-License-Identifier: Apache-2.0
"""Takes connections of probes: checks who is there, reads frames, hands on messages, answers hello.

Whatever a peer sends, the worst that happens is that its own connection is closed and counted. Reading stops
while too much waits to be processed, so that memory stays bounded and the probes, whose queues drop, notice.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from isoexec.contracts.errors import WireError
from isoexec.contracts.wire import FrameReader, Hello, Message, Welcome, encode_frame

__all__ = ["Connection", "Ingest", "peer_admitted", "peer_of"]

_log = structlog.get_logger("isoexec.daemon")

_READ_BYTES = 1 << 18
_WAITING_BYTES = 256 << 20
"""Bytes of messages received and not yet processed, over all connections, at most."""
_CREDENTIALS = struct.Struct("3i")


def peer_of(stream: socket.socket) -> tuple[int, int]:
    """Give (pid, uid) of the process at the other end, by the kernel's word."""
    raw = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def peer_admitted(uid: int, own: int | None = None) -> bool:
    """Whether a user may talk to this daemon: its own user, or root."""
    return uid in (0, os.geteuid() if own is None else own)


@dataclass(slots=True, eq=False)
class Connection:
    """One open stream. `run` and `source` are those of the hello it was accepted with."""

    pid: int
    writer: asyncio.StreamWriter
    run: str | None = None
    source: str = ""
    bytes_read: int = 0
    closing: bool = False
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    def answer(self, welcome: Welcome) -> None:
        for part in encode_frame(welcome):
            self.writer.write(part)
        self.answered.set()

    def close(self) -> None:
        self.closing = True
        self.writer.close()


class Ingest:
    """The server and the queue between reading and processing."""

    def __init__(
        self,
        *,
        process: Callable[[Connection, Message], None],
        lost: Callable[[Connection], None],
        malformed: Callable[[Connection, WireError], None],
    ) -> None:
        self._process = process
        self._lost = lost
        self._malformed = malformed
        self._queue: asyncio.Queue[tuple[Connection, Message | None, int]] = asyncio.Queue()
        self._waiting_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._server: asyncio.Server | None = None
        self._worker: asyncio.Task[None] | None = None
        self.connections: set[Connection] = set()
        self.refused_peers = 0

    @property
    def depth(self) -> int:
        """Messages received and not yet processed."""
        return self._queue.qsize()

    async def start(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        self._server = await asyncio.start_unix_server(self._serve, sock=listening)
        self._worker = asyncio.create_task(self._work())

    async def close(self) -> None:
        """Accept no more, process what was received, close every stream."""
        if self._server is not None:
            self._server.close()
        await asyncio.wait_for(self._queue.join(), timeout=8.0)
        for connection in list(self.connections):
            connection.close()
        if self._worker is not None:
            self._worker.cancel()

    async def _work(self) -> None:
        while True:
            connection, message, size = await self._queue.get()
            try:
                if message is None:
                    self._lost(connection)
                else:
                    self._process(connection, message)
            except WireError as error:
                self._refuse(connection, error)
            except Exception:  # noqa: BLE001
                # one message must not stop the watch over every run; its sender is cut off, loudly
                _log.exception(
                    "message failed", type=getattr(message, "TYPE", None), source=connection.source
                )
                connection.close()
            finally:
                self._waiting_bytes -= size
                if self._waiting_bytes <= _WAITING_BYTES:
                    self._room.set()
                self._queue.task_done()
            # the queue gives without waiting while it is full: let readers, HTTP and the clock have their turn
            await asyncio.sleep(0)

    def _refuse(self, connection: Connection, error: WireError) -> None:
        self._malformed(connection, error)
        connection.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream: socket.socket = writer.get_extra_info("socket")
        pid, uid = peer_of(stream)
        if not peer_admitted(uid):
            self.refused_peers += 1
            _log.warning("peer refused", pid=pid, uid=uid, wanted=f"uid {os.geteuid()} or root")
            writer.close()
            return
        connection = Connection(pid=pid, writer=writer)
        self.connections.add(connection)
        frames = FrameReader()
        try:
            while data := await reader.read(_READ_BYTES):
                if connection.closing:
                    break
                await self._take(connection, frames, data)
            if frames.pending:
                self._malformed(
                    connection, WireError(f"stream ended inside a frame, {frames.pending} bytes in")
                )
        except WireError as error:
            self._malformed(connection, error)
        except OSError:
            pass  # the peer is gone: said once, below
        finally:
            self.connections.discard(connection)
            connection.close()
            self._queue.put_nowait((connection, None, 0))

    async def _take(self, connection: Connection, frames: FrameReader, data: bytes) -> None:
        connection.bytes_read += len(data)
        for message in frames.feed_each(data):
            greeted = connection.run is not None or isinstance(message, Hello)
            if not greeted and not connection.answered.is_set():
                raise WireError(f"wanted hello first, found {message.TYPE}")
            size = sum(array.nbytes for array in message.arrays().values()) + 512
            self._waiting_bytes += size
            if self._waiting_bytes > _WAITING_BYTES:
                self._room.clear()
            self._queue.put_nowait((connection, message, size))
            if isinstance(message, Hello):
                # what follows a hello depends on its answer
                await connection.answered.wait()
                connection.answered.clear()
            await self._room.wait()
