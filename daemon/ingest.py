# SPDX-License-Identifier: Apache-2.0
"""Takes connections of probes: checks who is there, reads frames, hands on messages, answers hello.

Whatever a peer sends, the worst that happens is that its own connection is closed and counted. A stream is not read further
while too much of it, or of all of them, waits to be processed, nor faster than its pace: memory stays bounded, no peer takes
the turns of the others, and the probes, whose queues drop and count, notice. A stream that says no hello in time, or stands
still inside a frame, or says nothing at all for long, is closed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from isoexec.contracts.errors import WireError
from isoexec.contracts.tokens import read_token
from isoexec.contracts.wire import FrameReader, Hello, Logprobs, Message, Welcome, encode_frame
from isoexec.daemon.config import Config
from isoexec.daemon.peers import (
    Pace,
    SparseLog,
    admit_by_token,
    keep_alive,
    peer_admitted,
    peer_of,
    tls_context,
)
from isoexec.daemon.receive import Receiver

__all__ = ["Connection", "Ingest", "Reader", "Writer"]

_log = structlog.get_logger("isoexec.daemon")

_TURN_SECONDS = 0.002
_HELLOS = 16
"""Refused hellos on one stream, at most."""
_STRANGERS = 128
"""Streams over TCP that have not proved their token yet, at most."""
_EACH_MESSAGES = 4
"""Messages of one stream that wait to be processed, at most: a hello waits behind those of every stream."""
_MESSAGE_BYTES = 512  # what a message costs beside its arrays


class Reader(Protocol):
    """What a peer says."""

    async def read_into(self, room: memoryview) -> int:
        """Wait for bytes and write them to `room`, as many as came; 0 at the end. Raises OSError."""


class Writer(Protocol):
    """The way back to a peer."""

    def write(self, data: bytes | memoryview) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Connection:
    """One open stream. `run` and `source` are those of the hello it was accepted with; `pid` is 0 for another host.

    `peer` says who is there, by the kernel's word.
    """

    pid: int
    writer: Writer
    peer: str = ""
    since: float = field(default_factory=time.monotonic)
    run: str | None = None
    source: str = ""
    bytes_read: int = 0
    closing: bool = False
    hellos: int = 0
    partial_bytes: int = 0
    waiting_bytes: int = 0
    waiting_messages: int = 0
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    room: asyncio.Event = field(default_factory=asyncio.Event)

    def answer(self, welcome: Welcome) -> None:
        for part in encode_frame(welcome):
            self.writer.write(part)
        self.answered.set()

    def close(self) -> None:
        self.closing = True
        # whoever waits for an answer or for room must see that there is none to come
        self.answered.set()
        self.room.set()
        self.writer.close()


class Ingest:
    """The servers and the queue between reading and processing."""

    def __init__(
        self,
        config: Config,
        *,
        process: Callable[[Connection, Message], None],
        lost: Callable[[Connection], None],
        malformed: Callable[[Connection, WireError], None],
        failed: Callable[[Connection, Message], None],
        spent: Callable[[float], None],
        prepare: Callable[[], None],
    ) -> None:
        self._config = config
        self._process = process
        self._lost = lost
        self._malformed = malformed
        self._failed = failed
        self._spent = spent
        self._prepare = prepare
        self._prepared = False
        self._queue: asyncio.Queue[tuple[Connection, Message | None, int]] = asyncio.Queue()
        self._waiting_bytes = 0
        self._partial_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._servers: list[asyncio.Server] = []
        self._local: asyncio.Server | None = None
        self._worker: asyncio.Task[None] | None = None
        self._strangers = 0
        self._said = SparseLog()
        self.done = 0
        """Messages processed since the start."""
        self._token = b""
        self.connections: set[Connection] = set()
        self.refused: Counter[str] = Counter()
        """Streams turned away before any frame of theirs was read, by reason: peer, token, limit."""

    @property
    def depth(self) -> int:
        """Messages received and not yet processed."""
        return self._queue.qsize()

    @property
    def held_bytes(self) -> int:
        """Bytes received and not yet processed, of whole messages and of parts of one."""
        return self._waiting_bytes + self._partial_bytes

    async def start(self, listening: socket.socket, tcp: socket.socket | None = None) -> None:
        """Serve a listening unix socket, and a bound TCP socket. Raises TokenError and ConfigError."""
        if tcp is not None:
            config = self._config
            self._token = read_token(config.tcp_token) if config.tcp_token else b""
            tls = (
                tls_context(config.tcp_certificate, config.tcp_key)
                if config.tcp_certificate and config.tcp_key
                else None
            )
            tcp.setblocking(False)
            server = await asyncio.get_running_loop().create_server(
                lambda: Receiver(self._serve_tcp),
                sock=tcp,
                ssl=tls,
                backlog=512,
                ssl_handshake_timeout=config.hello_seconds if tls else None,
            )
            self._servers.append(server)
        self._local = await self._unix(listening)
        self._worker = asyncio.create_task(self._work())

    async def listen_again(self, listening: socket.socket) -> None:
        """Serve this unix socket in place of the one before; streams that are open stay."""
        before, self._local = self._local, await self._unix(listening)
        if before is not None:
            before.close()

    async def _unix(self, listening: socket.socket) -> asyncio.Server:
        listening.setblocking(False)
        loop = asyncio.get_running_loop()
        return await loop.create_unix_server(lambda: Receiver(self._serve_unix), sock=listening, backlog=512)

    async def close(self) -> None:
        """Accept no more, process what was received, close every stream."""
        for server in (*self._servers, self._local):
            if server is not None:
                server.close()
        try:
            await asyncio.wait_for(self._queue.join(), timeout=8.0)
        finally:
            for connection in list(self.connections):
                connection.close()
            if self._worker is not None:
                self._worker.cancel()

    async def _work(self) -> None:
        while True:
            connection, message, size = await self._queue.get()
            if isinstance(message, Logprobs) and not self._prepared:
                await self._make_ready()
            # read once a turn: where the kernel is asked for it, the clock costs more than a small message
            start, until = time.thread_time(), time.perf_counter() + _TURN_SECONDS
            self._one(connection, message, size)
            while self._prepared and not self._queue.empty() and time.perf_counter() < until:
                self._one(*self._queue.get_nowait())
            self._spent(time.thread_time() - start)
            # the queue gives without waiting while it is full: let readers, HTTP and the clock have their turn
            await asyncio.sleep(0)

    async def _make_ready(self) -> None:
        """Load what the first logprobs need, off the loop: a second, ten where it is compiled."""
        try:
            await asyncio.to_thread(self._prepare)
        except Exception:  # noqa: BLE001
            _log.exception("statistics cannot be taken")  # each message with logprobs says so again
        self._prepared = True

    def _one(self, connection: Connection, message: Message | None, size: int) -> None:
        try:
            if message is None:
                self._lost(connection)
            else:
                self._process(connection, message)
        except WireError as error:
            self._refuse(connection, error)
        except Exception:  # noqa: BLE001
            # one message must not stop the watch over every run; its sender is cut off, loudly
            _log.exception("message failed", type=getattr(message, "TYPE", None), source=connection.source)
            if message is not None:
                self._failed(connection, message)
            connection.close()
        finally:
            self._done(connection, size)

    def _done(self, connection: Connection, size: int) -> None:
        self.done += 1
        self._waiting_bytes -= size
        connection.waiting_bytes -= size
        connection.waiting_messages -= 1
        if self._waiting_bytes <= self._config.waiting_bytes:
            self._room.set()
        if not self._full(connection):
            connection.room.set()
        self._queue.task_done()

    def _full(self, connection: Connection) -> bool:
        return (
            connection.waiting_bytes > self._config.waiting_bytes // 8
            or connection.waiting_messages >= _EACH_MESSAGES
        )

    def _refuse(self, connection: Connection, error: WireError) -> None:
        self._malformed(connection, error)
        connection.close()

    def _turn_away(self, writer: Writer, reason: str, **facts: object) -> None:
        self.refused[reason] += 1
        unsaid = self._said.due()
        if unsaid is not None:
            _log.warning("peer refused", reason=reason, unsaid=unsaid, **facts)
        writer.close()

    async def _serve_unix(self, stream: Receiver) -> None:
        writer = stream.transport
        try:
            pid, uid = peer_of(writer.get_extra_info("socket"))
        except OSError:  # gone already
            return
        if not peer_admitted(uid):
            self._turn_away(writer, "peer", pid=pid, uid=uid, wanted=f"uid {os.geteuid()} or root")
            return
        await self.serve(stream, Connection(pid=pid, writer=writer, peer=f"process {pid}"))

    async def _serve_tcp(self, stream: Receiver) -> None:
        writer = stream.transport
        host = str((writer.get_extra_info("peername") or ("?",))[0])
        if self._strangers >= _STRANGERS:
            self._turn_away(writer, "limit", host=host, wanted=f"{_STRANGERS} streams without proof at most")
            return
        self._strangers += 1
        try:
            keep_alive(writer.get_extra_info("socket"))
            admitted = await admit_by_token(stream, self._token, seconds=self._config.hello_seconds)
        except OSError:
            admitted = False
        finally:
            self._strangers -= 1
        if not admitted:
            self._turn_away(writer, "token", host=host, wanted="proof of the token in tcp_token")
            return
        await self.serve(stream, Connection(pid=0, writer=writer, peer=f"host {host}"))

    async def serve(self, stream: Reader, connection: Connection) -> None:
        """Take the frames of one stream until it ends, or is closed for what it says."""
        config = self._config
        if len(self.connections) >= config.max_connections:
            self._turn_away(
                connection.writer,
                "limit",
                peer=connection.peer,
                wanted=f"max_connections {config.max_connections}",
            )
            return
        self.connections.add(connection)
        frames = FrameReader()
        pace, flow = Pace(config.frames_per_second), Pace(config.bytes_per_second)
        try:
            while count := await self._read(stream, connection, frames):
                await self._take(connection, frames, count, pace)
                if connection.closing:
                    break
                self._count_partial(connection, frames)
                if (wait := flow.spend(count)) > 0:
                    await asyncio.sleep(wait)
            if frames.pending and not connection.closing:
                self._malformed(
                    connection, WireError(f"stream ended inside a frame, {frames.pending} bytes in")
                )
        except WireError as error:
            self._malformed(connection, error)
        except OSError:
            pass  # the peer is gone: said once, below
        finally:
            self._partial_bytes -= connection.partial_bytes
            connection.partial_bytes = 0
            self.connections.discard(connection)
            connection.close()
            connection.waiting_messages += 1
            self._queue.put_nowait((connection, None, 0))

    async def _read(self, stream: Reader, connection: Connection, frames: FrameReader) -> int:
        """Take the next bytes in, give how many, 0 at the end. Raises WireError for a peer that keeps the daemon waiting."""
        config = self._config
        if not connection.hellos:
            seconds, wanted = config.hello_seconds - (time.monotonic() - connection.since), "hello"
        elif frames.pending:
            seconds, wanted = config.stall_seconds, "the rest of a frame"
        else:
            seconds, wanted = config.idle_seconds, "a word"
        try:
            async with asyncio.timeout(seconds):
                return await stream.read_into(frames.buffer())
        except TimeoutError as error:
            raise WireError(
                f"wanted {wanted} in time, waited {max(seconds, 0):.1f} s more in vain"
            ) from error

    def _count_partial(self, connection: Connection, frames: FrameReader) -> None:
        """Keep what is held of unfinished frames within bounds: the stream that holds most of it goes."""
        self._partial_bytes += frames.pending - connection.partial_bytes
        connection.partial_bytes = frames.pending
        if self._partial_bytes <= self._config.waiting_bytes:
            return
        greedy = max(self.connections, key=lambda one: one.partial_bytes)
        error = WireError(
            f"wanted {self._config.waiting_bytes} bytes of unfinished frames at most over all streams; this one "
            f"holds {greedy.partial_bytes} of {self._partial_bytes}"
        )
        if greedy is connection:
            raise error
        self._refuse(greedy, error)

    async def _take(self, connection: Connection, frames: FrameReader, count: int, pace: Pace) -> None:
        connection.bytes_read += count
        for message in frames.took(count):
            if isinstance(message, Hello):
                connection.hellos += 1
                if connection.run is not None or connection.hellos > _HELLOS:
                    raise WireError(f"wanted one hello on a stream, and {_HELLOS} refused ones at most")
            elif connection.run is None and not connection.hellos:
                raise WireError(f"wanted hello first, found {message.TYPE}")
            size = sum(array.nbytes for array in message.arrays().values()) + _MESSAGE_BYTES
            self._put(connection, message, size)
            if isinstance(message, Hello):
                # what follows a hello depends on its answer
                await connection.answered.wait()
                connection.answered.clear()
            await self._room.wait()
            await connection.room.wait()
            if connection.closing:
                return
            if (wait := pace.spend(1.0)) > 0:
                await asyncio.sleep(wait)

    def _put(self, connection: Connection, message: Message, size: int) -> None:
        self._waiting_bytes += size
        connection.waiting_bytes += size
        connection.waiting_messages += 1
        if self._waiting_bytes > self._config.waiting_bytes:
            self._room.clear()
        if self._full(connection):
            connection.room.clear()
        else:
            connection.room.set()
        self._queue.put_nowait((connection, message, size))
