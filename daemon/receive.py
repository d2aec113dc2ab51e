# SPDX-License-Identifier: Apache-2.0
"""A stream that is read only when asked, into memory that the reader names: what a frame holds is copied once, by the kernel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import structlog

__all__ = ["Receiver"]

_log = structlog.get_logger("isoexec.daemon")


class Receiver(asyncio.BufferedProtocol):
    """One accepted stream, served by a coroutine of its own from the moment it is made."""

    def __init__(self, serve: Callable[[Receiver], Coroutine[Any, Any, None]]) -> None:
        self._serve = serve
        self._room = memoryview(bytearray(1))
        self._waiting: asyncio.Future[int] | None = None
        self._ended = False
        self._error: OSError | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.pause_reading()
        self._task = asyncio.ensure_future(self._serve(self))
        self._task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("stream failed", error=repr(error))
        self.transport.close()

    async def read_into(self, room: memoryview) -> int:
        """Wait for bytes and write them to `room`, as many as came; 0 at the end. Raises OSError for a stream that broke."""
        if self._error is not None:
            raise self._error
        if self._ended:
            return 0
        self._room, self._waiting = room, asyncio.get_running_loop().create_future()
        self.transport.resume_reading()
        try:
            return await self._waiting
        finally:
            self._waiting = None
            self.transport.pause_reading()

    async def read_exactly(self, count: int) -> bytes:
        """Give so many bytes, fewer where the stream ends before. Raises OSError."""
        found = bytearray(count)
        at = 0
        while at < count and (got := await self.read_into(memoryview(found)[at:])):
            at += got
        return bytes(found[:at])

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        self.transport.pause_reading()
        self._tell(nbytes)

    def eof_received(self) -> bool:
        self._ended = True
        self._tell(0)
        # a peer that says no more may still be answered, over TLS it cannot
        return self.transport.get_extra_info("sslcontext") is None

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        if exc is None:
            self._tell(0)
            return
        self._error = exc if isinstance(exc, OSError) else ConnectionResetError(repr(exc))
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(self._error)

    def _tell(self, count: int) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(count)
