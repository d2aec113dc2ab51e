# SPDX-License-Identifier: Apache-2.0
"""One shard of a daemon behind a JetStream stream: takes its frames, keeps them held until they are accounted for.

The consumer is durable and every acknowledgement explicit: what this process dies with is delivered again. Held frames are
kept from coming again by saying, now and then, that they are worked on. What the server cannot store it refuses, and the
probes' queues drop and count: nothing here makes a step of the job wait.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from isoexec.contracts.broker import REPLY_HEADER, Broker, parse_id
from isoexec.contracts.errors import IsoExecError, WireError
from isoexec.contracts.halting import LEASE_TTL_SECONDS
from isoexec.contracts.shards import BEAT_SECONDS, TTL_SECONDS
from isoexec.contracts.wire import Bye, FrameReader, Hello, Message, Welcome, encode_frame
from isoexec.daemon.accounts import Accounts, Frame, Lane, Spans
from isoexec.daemon.config import Config
from isoexec.daemon.halt import LeaseKeeper
from isoexec.daemon.ingest import Connection
from isoexec.daemon.jetstream import make_bucket, make_stream
from isoexec.daemon.joint import Joint, ShardTakenError
from isoexec.daemon.journal import Journal
from isoexec.daemon.metrics import Metrics
from isoexec.daemon.peers import SparseLog
from isoexec.daemon.runs import Run

if TYPE_CHECKING:
    from nats.aio.client import Client as NatsClient
    from nats.aio.msg import Msg
    from nats.js.client import JetStreamContext
    from nats.js.kv import KeyValue

__all__ = ["Stream"]

_log = structlog.get_logger("isoexec.daemon")

_ASK_SECONDS = 2.0
_BATCH = 64
_TURN_SECONDS = 0.002
_KEEP_SECONDS = 1.0
"""How often what was accounted for between windows goes into the journal."""
_LAG_SECONDS = 5.0
"""How often the server is asked what waits there."""
_LONGEST_PAUSE_SECONDS = 4.0
_AGAIN_SECONDS = 10.0
"""How long frames that are to be delivered again may keep the new ones waiting, from the last of them on."""


class Host(Protocol):
    """What a stream needs of the service."""

    journal: Journal
    metrics: Metrics
    keeper: LeaseKeeper
    runs: dict[str, Run]
    halted: dict[str, str]

    def process(self, connection: Connection, message: Message, frame: Frame | None = None) -> None: ...
    def malformed(self, connection: Connection, error: WireError) -> None: ...
    def failed(self, connection: Connection, message: Message) -> None: ...
    def lost(self, connection: Connection) -> None: ...
    def found(self, connection: Connection) -> None: ...
    def holder(self, run: str, source: str) -> Connection | None: ...


class _Reply:
    """The way back to one publisher: whole frames to its inbox."""

    def __init__(self, stream: Stream) -> None:
        self.inbox = ""
        self._stream = stream

    def write(self, data: bytes | memoryview) -> None:
        self._stream.say(self.inbox, bytes(data))

    def close(self) -> None:
        """Nothing to close: the publisher is told that it has to say hello again with its next frame."""


@dataclass(slots=True, eq=False)
class _Publisher:
    lane: Lane
    connection: Connection
    reply: _Reply
    seen: float
    restored: bool = False  # its numbers go on from those in the journal
    idle: bool = False
    denied: bool = False  # its hello was refused
    early: dict[int, tuple[Message, Msg]] = field(default_factory=dict)
    """Frames that came before their hello; not acknowledged."""
    early_since: float = 0.0
    told: float = 0.0


class Stream:
    """The consumer of one shard, and its place among the others."""

    def __init__(self, config: Config, broker: Broker, host: Host) -> None:
        self._config = config
        self._broker = broker
        self._host = host
        self._client: NatsClient | None = None
        self._bucket: KeyValue | None = None
        self._publishers: dict[str, _Publisher] = {}
        self._acks: list[str] = []
        self._said = SparseLog()
        self._durable = f"shard-{config.shard}"
        self._joint = Joint(config.shard, config.shards, secrets.token_hex(8))
        self._tasks: list[asyncio.Task[None]] = []
        self._claimed = False
        self._closing = False
        self.failed = asyncio.Event()
        """Set when another daemon has this shard: it had to stop for good."""

    @property
    def connected(self) -> bool:
        return self._client is not None and self._client.is_connected

    @property
    def held(self) -> int:
        """Frames that are not acknowledged yet."""
        return sum(accounts.held for accounts in self._accounts())

    @property
    def heard(self) -> int:
        """Shards that are heard."""
        return self._joint.heard if self.connected else 0

    def view(self) -> dict[str, Any]:
        """Give what all shards say; what can no longer be heard grows old in it."""
        return self._joint.view()

    def _accounts(self) -> list[Accounts]:
        return [run.accounts for run in self._host.runs.values() if run.accounts is not None]

    async def start(self) -> None:
        """Begin. Raises IsoExecError where the server, or what it holds, does not fit; one that is away is waited for."""
        try:
            await self._open()
        except OSError as error:
            _log.warning("stream not reached yet", server=str(self._broker), error=str(error))
            await self._shut()
        self._tasks = [asyncio.create_task(work()) for work in (self._consume, self._tend, self._beats)]

    async def close(self) -> None:
        """Stop taking frames; what is held stays unacknowledged and comes to the next daemon of this shard."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        if self.connected and self._client is not None:
            with suppress(Exception):
                async with asyncio.timeout(_ASK_SECONDS):
                    self._keep()
                    await self._flush_acks()
                    if self._bucket is not None and self._claimed and not self.failed.is_set():
                        await self._joint.leave(self._bucket)
        await self._shut()

    async def _shut(self) -> None:
        client, self._client, self._bucket = self._client, None, None
        if client is not None and not client.is_closed:
            with suppress(Exception):
                await client.close()

    # the server

    async def _open(self) -> JetStreamContext:
        import nats.errors
        import nats.js.errors

        await self._shut()
        self._client = await self._broker.connect(f"shard {self._config.shard}", _ASK_SECONDS)
        stream = self._client.jetstream(timeout=_ASK_SECONDS)
        try:
            await make_stream(stream, self._broker, self._config)
            self._bucket = await make_bucket(stream, self._broker, self._config)
            if not self._claimed:
                await self._joint.claim(self._bucket, asyncio.sleep)
                self._claimed = True
        except (nats.errors.Error, TimeoutError) as error:
            raise OSError(f"{self._broker}: {error!r}") from error
        return stream

    async def _subscribe(self, stream: JetStreamContext) -> Any:
        from nats.js import api

        name, shard = self._broker.name, self._config.shard
        subscription = await stream.pull_subscribe(
            f"{name}.frames.{shard}.>",
            durable=self._durable,
            stream=name,
            config=api.ConsumerConfig(
                ack_policy=api.AckPolicy.EXPLICIT,
                ack_wait=self._config.nats_ack_seconds,
                max_ack_pending=self._config.nats_outstanding,
                max_deliver=-1,
            ),
        )
        info = await subscription.consumer_info()
        lost = (info.num_ack_pending or 0) - self.held
        if lost > 0:
            # delivered to a process or connection that is no more: they come first, in their order
            wait = float(info.config.ack_wait or self._config.nats_ack_seconds)
            _log.warning("frames are delivered again", frames=lost, after_seconds=wait)
            await asyncio.sleep(wait + 0.5)
            await self._again(subscription, lost)
        return subscription

    async def _again(self, subscription: Any, count: int) -> None:
        import nats.errors

        found: dict[int, Msg] = {}
        heard = time.monotonic()
        while len(found) < count and time.monotonic() - heard < _AGAIN_SECONDS:
            try:
                messages = await subscription.fetch(min(_BATCH, count - len(found)), timeout=1.0)
            except (nats.errors.TimeoutError, TimeoutError):
                continue
            before = len(found)
            found |= {one.metadata.sequence.stream: one for one in messages}
            if len(found) > before:
                # those that are here come once more meanwhile, and one the server counts may be no more
                heard = time.monotonic()
        for _, message in sorted(found.items()):
            self._take(message)

    async def _consume(self) -> None:
        import nats.errors

        pause = 0.2
        stream = self._client.jetstream(timeout=_ASK_SECONDS) if self._client is not None else None
        while not self._closing:
            try:
                if stream is None or not self.connected:
                    stream = await self._open()
                subscription = await self._subscribe(stream)
                pause = 0.2
                while self.connected:
                    await self._fetch(subscription)
            except IsoExecError as error:
                self._fail(error)
                if self.failed.is_set():
                    return
            except (OSError, nats.errors.Error, TimeoutError) as error:
                _log.warning("stream lost", server=str(self._broker), error=repr(error), again_seconds=pause)
            except Exception:  # noqa: BLE001 - the shard goes on; what it held comes again
                _log.exception("stream failed")
            stream = None
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _fail(self, error: IsoExecError) -> None:
        if isinstance(error, ShardTakenError):
            self._closing = True
            self.failed.set()
        _log.critical("stream refused", server=str(self._broker), error=str(error))

    async def _fetch(self, subscription: Any) -> None:
        import nats.errors

        try:
            messages = await subscription.fetch(_BATCH, timeout=1.0)
        except (nats.errors.TimeoutError, TimeoutError):
            return
        start, until = time.thread_time(), time.perf_counter() + _TURN_SECONDS
        for message in messages:
            self._take(message)
            if time.perf_counter() > until:
                # HTTP, leases and the clock have their turn
                await asyncio.sleep(0)
                until = time.perf_counter() + _TURN_SECONDS
        self._host.metrics.add("ingest_seconds", time.thread_time() - start)
        await self._flush_acks()

    # frames

    def _take(self, message: Msg) -> None:
        found = parse_id(message.headers)
        if found is None or message.reply is None:
            self._spoiled(
                None, message, WireError(f"a message of {message.subject} that is no frame of a probe")
            )
            return
        key, seq = found
        publisher = self._publishers.get(key) or self._meet(key)
        lane = publisher.lane
        if lane.knows(seq) or seq in publisher.early:
            self._host.metrics.add("stream_frames_repeated", 1.0)
            if seq in lane.held:
                lane.held[seq].ticket = message.reply
            elif seq in publisher.early:
                publisher.early[seq] = (publisher.early[seq][0], message)
            else:
                self._acks.append(message.reply)
            return
        publisher.seen = time.monotonic()
        try:
            one = _one(message.data, seq)
        except WireError as error:
            self._spoiled(publisher, message, error)
            return
        publisher.reply.inbox = (message.headers or {}).get(REPLY_HEADER, "")
        publisher.connection.bytes_read += len(message.data)
        if isinstance(one, Hello):
            self._greet(publisher, one, message.reply)
        else:
            self._hear(publisher, one, message)

    def _meet(self, key: str) -> _Publisher:
        reply = _Reply(self)
        connection = Connection(pid=0, writer=reply, peer=f"lane {key}")
        lane = Lane(key, taken=Spans(self._host.journal.lane(key)))
        one = self._publishers[key] = _Publisher(lane, connection, reply, time.monotonic())
        return one

    def _spoiled(self, publisher: _Publisher | None, message: Msg, error: WireError) -> None:
        # its number stays open: a gap, which the verdict counts as a loss
        connection = (
            publisher.connection if publisher else Connection(pid=0, writer=_Reply(self), peer="nobody")
        )
        self._host.malformed(connection, error)
        if message.reply is not None:
            self._acks.append(message.reply)

    def _greet(self, publisher: _Publisher, hello: Hello, ticket: str) -> None:
        lane, before = publisher.lane, publisher.connection
        publisher.connection = connection = Connection(pid=0, writer=publisher.reply, peer=before.peer)
        holder = self._host.holder(hello.run, hello.source)
        if holder is not None and holder.peer.startswith("lane "):
            holder.closing = True  # the same process says hello again, or began again
        self._host.process(connection, hello)
        run = self._host.runs.get(hello.run)
        publisher.denied = connection.run is None or run is None
        if publisher.denied or run is None:
            self._host.lost(before)
            self._acks.append(ticket)
            self._refuse_early(publisher)
            return
        lane.run = hello.run
        process = run.processes[hello.source]
        if not publisher.restored and len(lane.taken):
            process.first_seq = min(lane.taken.first, hello.seq)
            process.last_seq = max(lane.taken.last, hello.seq)
            process.received = len(lane.taken) + 1
        publisher.restored = True
        process.spoiled += lane.refused
        lane.refused = 0
        run.accounts = run.accounts or Accounts()
        run.accounts.hold(lane, hello, ticket)
        early, publisher.early = publisher.early, {}
        for _, (one, message) in sorted(early.items()):
            self._hear(publisher, one, message)

    def _hear(self, publisher: _Publisher, one: Message, message: Msg) -> None:
        lane, connection, ticket = publisher.lane, publisher.connection, message.reply
        run = self._host.runs.get(one.run)
        if not publisher.denied and (connection.run is None or (run is None and connection.run == one.run)):
            # its hello may come after it, where both are delivered again; or has to be said again
            publisher.early_since = publisher.early_since if publisher.early else publisher.seen
            publisher.early[one.seq] = (one, message)
            return
        if connection.closing or connection.run != one.run or run is None or one.source not in run.processes:
            self._refuse(publisher, one, message)
            return
        if publisher.idle:
            publisher.idle = False
            self._host.found(connection)
        run.accounts = run.accounts or Accounts()
        frame = run.accounts.hold(lane, one, ticket)
        try:
            self._host.process(connection, one, frame)
        except WireError as error:
            del lane.held[one.seq]
            self._spoiled(publisher, message, error)
        except Exception:  # noqa: BLE001 - one message must not stop the watch over every run
            _log.exception("message failed", type=one.TYPE, source=one.source)
            self._host.failed(connection, one)
            run.accounts.done(frame)
        if isinstance(one, Bye):
            self._host.lost(connection)

    def _refuse(self, publisher: _Publisher, one: Message, message: Msg) -> None:
        publisher.lane.refused += 1
        self._host.metrics.add("stream_frames_refused", 1.0)
        if message.reply is not None:
            self._acks.append(message.reply)
        if self._said.due() is not None:
            _log.warning(
                "frame refused", run=one.run, source=one.source, type=one.TYPE, peer=publisher.connection.peer
            )

    def _refuse_early(self, publisher: _Publisher) -> None:
        early, publisher.early = publisher.early, {}
        for one, message in early.values():
            self._refuse(publisher, one, message)

    def _ask_for_hello(self, publisher: _Publisher, now: float) -> None:
        """Where frames wait for a hello that was not delivered with them, ask their publisher to say it again."""
        one = next(iter(publisher.early.values()))[0]
        publisher.told = now
        _log.warning("frames without hello", run=one.run, source=one.source, frames=len(publisher.early))
        welcome = Welcome(
            run=one.run, role="daemon", source=f"shard{self._config.shard}", time=time.time(), accepted=False,
            message=f"shard {self._config.shard} does not know {one.source}; say hello again",
        )  # fmt: skip
        self.say(publisher.reply.inbox, b"".join(encode_frame(welcome)))

    def say(self, inbox: str, data: bytes) -> None:
        """Send to a publisher's inbox, when there is a turn for it; an answer that is lost is asked for again."""
        client = self._client
        if inbox and client is not None and client.is_connected:
            task = asyncio.ensure_future(client.publish(inbox, data))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    # acknowledgements

    def _keep(self) -> None:
        """Put what was accounted for into the journal, after which it can be acknowledged."""
        journal = self._host.journal
        for accounts in self._accounts():
            journal.add_lanes(accounts.rows())
            if not journal.degraded:
                accounts.kept()

    async def _flush_acks(self) -> None:
        for accounts in self._accounts():
            self._acks.extend(accounts.ready())
        client = self._client
        while self._acks and client is not None and client.is_connected:
            await client.publish(self._acks.pop(), b"+ACK")

    async def _tend(self) -> None:
        each = min(self._config.nats_ack_seconds / 3, 10.0)
        renewed = asked = time.monotonic()
        while True:
            await asyncio.sleep(min(_KEEP_SECONDS, each))
            try:
                self._keep()
                await self._flush_acks()
                await self._make_room()
                now = time.monotonic()
                if now - renewed >= each:
                    renewed = now
                    await self._renew()
                if now - asked >= _LAG_SECONDS:
                    asked = now
                    await self._measure_lag()
                self._look_for_idle(now)
            except Exception as error:  # noqa: BLE001 - tried again in a moment
                _log.warning("acknowledging failed", error=repr(error))

    async def _renew(self) -> None:
        client = self._client
        for accounts in self._accounts():
            for frame in list(accounts.frames()):
                if frame.ticket is not None and client is not None and client.is_connected:
                    await client.publish(frame.ticket, b"+WPI")

    async def _measure_lag(self) -> None:
        client = self._client
        if client is not None and client.is_connected:
            stream = client.jetstream(timeout=_ASK_SECONDS)
            info = await stream.consumer_info(self._broker.name, self._durable)
            self._host.metrics.set("stream_frames_waiting", info.num_pending or 0)

    async def _make_room(self) -> None:
        """Where so much is held that the server would deliver no more, let go of the oldest data before it is judged.

        It is judged all the same; if this process dies first, its numbers are a gap, which counts as a loss.
        """
        over = self.held - self._config.nats_outstanding * 7 // 8
        if over <= 0:
            return
        frames = [
            one for accounts in self._accounts() for one in accounts.frames() if one.data and one.ticket
        ]
        for frame in frames[:over]:
            self._acks.append(frame.ticket)
            frame.ticket = None
        self._host.metrics.add("stream_acks_early", float(len(frames[:over])))
        if self._said.due() is not None:
            _log.critical(
                "too many frames are open; raise nats_outstanding", held=self.held, let_go=len(frames[:over])
            )
        await self._flush_acks()

    def _look_for_idle(self, now: float) -> None:
        for key, one in list(self._publishers.items()):
            silent = now - one.seen
            patience = 2 * self._config.nats_ack_seconds
            if one.early and now - max(one.early_since, one.told) > patience:
                self._ask_for_hello(one, now)
            if one.early and silent > self._config.idle_seconds:
                self._refuse_early(one)
            if silent > self._config.idle_seconds and not one.idle:
                one.idle = True
                self._host.lost(one.connection)
            if (
                silent > max(self._config.run_ttl_seconds, self._config.idle_seconds)
                and not one.lane.held
                and not one.early
            ):
                del self._publishers[key]

    # among the shards

    async def _beats(self) -> None:
        import nats.errors

        failing = 0.0
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            bucket, client = self._bucket, self._client
            if bucket is None or client is None or not self._claimed:
                continue
            start = time.monotonic()
            try:
                async with asyncio.timeout(TTL_SECONDS):
                    await self._joint.beat(bucket, self._host.keeper.standings(), self._host.halted)
                failing = 0.0
            except ShardTakenError as error:
                self._fail(error)
                await self._shut()
                return
            except (OSError, nats.errors.Error, TimeoutError) as error:
                failing += time.monotonic() - start
                _log.warning("verdict not shared", error=repr(error))
                if failing > LEASE_TTL_SECONDS and client is self._client:
                    await self._shut()  # a link that was cut and says nothing: open another
                    failing = 0.0


def _one(data: bytes, seq: int) -> Message:
    found = FrameReader().feed(data)
    if len(found) != 1 or found[0].seq != seq:
        raise WireError(f"wanted one frame, numbered {seq}, found {[one.seq for one in found]}")
    return found[0]
