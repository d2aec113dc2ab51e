# SPDX-License-Identifier: Apache-2.0
"""A client's way to the shards of a daemon through a JetStream stream.

A frame counts as written once the server has stored it for every shard. What is tried again is known by its id, so that it
is taken once. A server that is full or gone refuses, and the client's queue drops and counts, as with a daemon that is gone.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from isoexec.contracts import wire
from isoexec.contracts.broker import ID_HEADER, REPLY_HEADER, Broker, BrokerError, frame_id, subject_of
from isoexec.contracts.errors import WireError
from isoexec.contracts.shards import COUNT_KEY, SHARDS_LIMIT, parts_of
from isoexec.probes.links import TooLargeError, encoded

if TYPE_CHECKING:
    from nats.aio.client import Client as NatsClient
    from nats.aio.msg import Msg

__all__ = ["BrokerThread", "NatsLink"]

_T = TypeVar("_T")
_STORE_SECONDS = 5.0
_HEADROOM_BYTES = 1 << 16  # of a message beside its arrays: header of the frame, of NATS
_SMALLEST_BYTES = 1 << 18


class BrokerThread:
    """A thread that keeps one connection to a NATS server, for callers that are no coroutines. Thread-safe."""

    def __init__(self, broker: Broker, who: str) -> None:
        self._broker = broker
        self._who = who
        self._client: NatsClient | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="isoexec-nats", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, _T], seconds: float) -> _T:
        """Run on the thread; raises OSError after so long."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except (TimeoutError, FutureTimeoutError) as error:
            future.cancel()
            raise OSError(f"{self._broker}: no answer in {seconds:.1f} s") from error

    async def client(self, timeout: float) -> NatsClient:
        """Give the connection, opened anew where it was lost; on the thread. Raises as `Broker.connect`."""
        if self._client is None or self._client.is_closed or not self._client.is_connected:
            await self.drop()
            self._client = await self._broker.connect(self._who, timeout)
        return self._client

    async def drop(self) -> None:
        client, self._client = self._client, None
        if client is not None and not client.is_closed:
            with suppress(Exception):
                await client.close()

    def close(self) -> None:
        if self._thread.is_alive():
            with suppress(OSError):
                self.call(self.drop(), 1.0)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(1.0)


class NatsLink:
    """One lane of frames to each shard, all under one name of this process's own (`lane`)."""

    def __init__(self, broker: Broker, source: str) -> None:
        self.standing = False
        self.message_bytes = 0
        self._broker = broker
        self._lane = secrets.token_hex(8)
        self._thread = BrokerThread(broker, source)
        self._shards = 0
        self._most = 0
        self._inbox = f"_INBOX.isoexec.{self._lane}"
        self._heard: NatsClient | None = None
        self._welcomes: asyncio.Queue[wire.Welcome] = asyncio.Queue()

    def connect(self, timeout: float) -> None:
        self._thread.call(self._connect(timeout), timeout + 1.0)

    async def _connect(self, timeout: float) -> None:
        import nats.errors
        import nats.js.errors

        client = await self._client(timeout)
        try:
            entry = await (await client.jetstream(timeout=timeout).key_value(self._broker.name)).get(
                COUNT_KEY
            )
            count = int(entry.value or b"")
        except nats.js.errors.NotFoundError as error:
            raise OSError(f"{self._broker}: no shard of a daemon has begun there") from error
        except (nats.errors.Error, ValueError) as error:
            raise OSError(f"{self._broker}: how many shards there are cannot be read: {error!r}") from error
        if not 1 <= count <= SHARDS_LIMIT or (self._shards and count != self._shards):
            raise BrokerError(
                f"{self._broker}: wanted {self._shards or f'1 to {SHARDS_LIMIT}'} shards, found {count}; "
                f"their number changes between jobs only"
            )
        self._shards = count
        self._most = client.max_payload
        if self._most < _SMALLEST_BYTES:
            raise BrokerError(
                f"{self._broker}: max_payload: wanted {_SMALLEST_BYTES} bytes at least, found {self._most}"
            )
        self.message_bytes = self._most - _HEADROOM_BYTES

    async def _client(self, timeout: float) -> NatsClient:
        client = await self._thread.client(timeout)
        if client is not self._heard:
            await client.subscribe(self._inbox, cb=self._answered)
            self._heard = client
        return client

    async def _answered(self, message: Msg) -> None:
        try:
            found = wire.FrameReader().feed(message.data)
        except WireError:
            return
        for one in found:
            if isinstance(one, wire.Welcome):
                if self.standing and not one.accepted:
                    self.standing = False  # a shard that has forgotten us: hello is said again
                self._welcomes.put_nowait(one)

    def greet(self, hello: wire.Message, timeout: float) -> wire.Welcome:
        welcome = self._thread.call(self._greet(hello, timeout), timeout + 1.0)
        self.standing = welcome.accepted
        return welcome

    async def _greet(self, hello: wire.Message, timeout: float) -> wire.Welcome:
        deadline = time.monotonic() + timeout
        while not self._welcomes.empty():
            self._welcomes.get_nowait()
        await self._publish(hello)
        answers: dict[str, wire.Welcome] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.1, deadline - time.monotonic())):
                while len(answers) < self._shards:
                    one = await self._welcomes.get()
                    if not one.accepted:
                        return one
                    answers[one.source] = one
        if len(answers) < self._shards:
            raise OSError(
                f"{self._broker}: {len(answers)} of {self._shards} shards answered hello; the others are not there, or behind"
            )
        return next(iter(answers.values()))

    def write(self, message: wire.Message) -> int:
        return self._thread.call(self._publish(message), 2 * _STORE_SECONDS)

    async def _publish(self, message: wire.Message) -> int:
        import nats.errors
        import nats.js.errors

        client = await self._client(_STORE_SECONDS)
        stream = client.jetstream(timeout=_STORE_SECONDS)
        parts = (
            parts_of(message, self._shards)
            if isinstance(message, wire.Logprobs)
            else [message] * self._shards
        )
        payloads = [b"".join(encoded(part)) for part in parts]
        if (largest := max(map(len, payloads))) + _HEADROOM_BYTES // 4 > self._most:
            raise TooLargeError(
                f"{message.TYPE}: a frame of {largest} bytes, and max_payload of {self._broker} is {self._most}; raise it there"
            )
        try:
            await asyncio.gather(
                *(
                    stream.publish(
                        subject_of(self._broker.name, shard, message.run),
                        payload,
                        stream=self._broker.name,
                        headers={
                            ID_HEADER: frame_id(self._lane, message.seq, shard),
                            REPLY_HEADER: self._inbox,
                        },
                    )
                    for shard, payload in enumerate(payloads)
                )
            )
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            raise OSError(f"{self._broker}: a frame was not stored: {error!r}") from error
        return sum(map(len, payloads))

    def lost(self) -> None:
        # the lane stands over connections: frames that are stored wait there for their shard
        with suppress(OSError):
            self._thread.call(self._thread.drop(), 1.0)

    def close(self) -> None:
        self.standing = False
        self._thread.close()
