# SPDX-License-Identifier: Apache-2.0
"""The daemon as a named, detached Ray actor, for jobs that run on Ray: ``launch("ray://isoexec/daemon", state_dir=...)``.

It is the same daemon: state directory, journal, markers, HTTP, bounds. Frames come as calls, and guards ask it for the verdict.
Ray starts it again when it dies; what it had not judged by then is lost, as with a daemon on a socket.
"""

from __future__ import annotations

import asyncio
from collections import deque
from importlib import import_module
from typing import Any

from isoexec.contracts.errors import IsoExecError, WireError
from isoexec.contracts.halting import LeaseState
from isoexec.contracts.ray import RayError, RayName, joined
from isoexec.contracts.shards import Standing
from isoexec.contracts.wire import FrameReader, Hello, Welcome, encode_frame
from isoexec.daemon.config import Config, ConfigError
from isoexec.daemon.ingest import Connection
from isoexec.daemon.memory import keep_freed
from isoexec.daemon.running import Running, log_as

__all__ = ["DaemonActor", "launch", "stop"]

_WAITING_BYTES = 1 << 19
"""Bytes of one process that wait to be read, above which its calls do."""
_START_SECONDS = 120.0
_STOP_SECONDS = 30.0


class _Line:
    """The calls of one process as a stream that the ingest reads at its own pace; the way back keeps the welcome."""

    def __init__(self, source: str, taken: int) -> None:
        self.connection = Connection(pid=0, writer=self, peer=f"actor calls of {source}")
        self.welcome: asyncio.Future[Welcome | None] = asyncio.get_running_loop().create_future()
        self.taken = taken
        """Number of the frame that came last: one whose answer was late comes again."""
        self.task: asyncio.Task[None] | None = None
        self.room = asyncio.Event()
        self.room.set()
        self._said = FrameReader()
        self._held: deque[memoryview] = deque()
        self._bytes = 0
        self._news = asyncio.Event()

    @property
    def over(self) -> bool:
        return self.connection.closing or self.task is None or self.task.done()

    def feed(self, frame: bytes) -> None:
        """Take a frame, without waiting; an empty one ends the stream."""
        self._held.append(memoryview(frame))
        self._bytes += len(frame)
        self._news.set()
        if self._bytes > _WAITING_BYTES:
            self.room.clear()

    async def read_into(self, room: memoryview) -> int:
        """Wait for bytes and write them to `room`, as many as came; 0 at the end."""
        while not self._held:
            self._news.clear()
            await self._news.wait()
        first = self._held.popleft()
        count = min(len(first), len(room))
        room[:count] = first[:count]
        if rest := first[count:]:
            self._held.appendleft(rest)
        self._bytes -= count
        if self._bytes <= _WAITING_BYTES:
            self.room.set()
        return count

    def write(self, data: bytes | memoryview) -> None:
        for one in self._said.feed(bytes(data)):
            if isinstance(one, Welcome) and not self.welcome.done():
                self.welcome.set_result(one)

    def close(self) -> None:
        self.feed(b"")
        self.room.set()
        if not self.welcome.done():
            self.welcome.set_result(None)


class DaemonActor:
    """The actor's methods run on its event loop, one at a time between their awaits; `settings` are those of `Config`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._config = _config(settings)
        self._running: Running | None = None
        self._starting = asyncio.Lock()
        self._lines: dict[str, _Line] = {}
        log_as(self._config.log)
        keep_freed()

    async def start(self, settings: dict[str, Any]) -> str:
        """Begin where that is not done, and give the address of HTTP. Raises ConfigError for other settings than it has."""
        for name in sorted(settings.keys() | self._settings.keys()):
            wanted, found = settings.get(name), self._settings.get(name)
            if wanted != found:
                raise ConfigError(
                    f"{name}: wanted {wanted!r}, and the actor that is there has {found!r}; stop it first"
                )
        return (await self._begun()).address

    async def _begun(self) -> Running:
        """Give the daemon; the first call after Ray has started this process starts it."""
        async with self._starting:
            if self._running is None:
                self._running = await Running.start(self._config)
            return self._running

    async def greet(self, source: str, frame: bytes) -> bytes:
        """Take a hello and give the welcome, both as frames. Raises WireError."""
        ingest = (await self._begun()).service.ingest
        found = FrameReader().feed(frame)
        if len(found) != 1 or not isinstance(found[0], Hello) or found[0].source != source:
            raise WireError(f"wanted one hello of {source}")
        taken, old = -1, self._lines.get(source)
        if old is not None:
            old.feed(b"")
            # numbers go on in one process and begin anew in the next
            taken = old.taken if found[0].seq > old.taken else -1
        line = self._lines[source] = _Line(source, taken)
        line.task = asyncio.create_task(ingest.serve(line, line.connection))
        line.task.add_done_callback(lambda _: self._over(source, line))
        line.feed(frame)
        welcome = await line.welcome
        if welcome is None:
            raise WireError(
                f"the daemon closed the calls of {source} instead of answering hello; see its log"
            )
        return b"".join(encode_frame(welcome))

    def _over(self, source: str, line: _Line) -> None:
        line.close()
        if self._lines.get(source) is line:
            del self._lines[source]

    async def take(self, source: str, seq: int, frame: bytes) -> bool:
        """Take the frame with this number once, as soon as there is room; False where the process has to say hello first."""
        await self._begun()
        line = self._lines.get(source)
        if line is None or line.over:
            return False
        if seq != line.taken:
            line.taken = seq
            line.feed(frame)
        await line.room.wait()
        return True

    async def standing(self, run: str) -> bytes | None:
        """Give what is said of a run now, a `Standing`; None for one that is not watched."""
        keeper = (await self._begun()).service.keeper
        found = keeper.standings(resumed=True).get(run)
        if found is not None and not keeper.renews:
            found = Standing(
                state=LeaseState.UNKNOWN, policy=found.policy, cause="the daemon's main loop hangs"
            )
        return found.encode() if found is not None else None

    async def close(self) -> None:
        """End as on SIGTERM: take what came, judge what is complete."""
        async with self._starting:
            running, self._running = self._running, None
            if running is not None:
                for line in list(self._lines.values()):
                    line.feed(b"")
                await running.close()


def _config(settings: dict[str, Any]) -> Config:
    config = Config.load(None, **settings)
    if config.nats is not None:
        raise ConfigError("nats: an actor is a whole daemon, no shard; start shards by isoexec daemon --nats")
    return config


def launch(address: str, *, node: str | None = None, **settings: Any) -> Any:
    """Start the daemon's actor, or give the one that is there with these settings.

    `settings` are those of `Config`, `state_dir` among them: a directory of the node with the id `node`, None: of this
    process's node. The actor stays on that node, and outlives the driver; `stop` ends it. Raises RayError where Ray is not
    installed, this process is in no cluster, or the actor does not start.
    """
    name = RayName.parse(address, "launch")
    module = joined(name)
    settings = {key: str(value) if key == "state_dir" else value for key, value in settings.items()}
    config = _config(settings)
    strategy = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    actor = _find(module, name)
    created = actor is None
    if created:
        actor = (
            module.remote(DaemonActor)
            .options(
                name=name.name,
                namespace=name.namespace,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                num_cpus=0,
                # a call of each process may wait for room; the guards' must not stand behind them
                max_concurrency=config.max_connections + 1024,
                scheduling_strategy=strategy(node or module.get_runtime_context().get_node_id(), soft=False),
            )
            .remote(settings)
        )
    try:
        module.get(actor.start.remote(settings), timeout=_START_SECONDS)
    except module.exceptions.RayError as error:
        if created:
            module.kill(actor, no_restart=True)
        raise RayError(
            f"{name}: the daemon does not start: {getattr(error, 'cause', None) or error}"
        ) from error
    return actor


def stop(address: str) -> None:
    """End the daemon's actor as SIGTERM would, and for good. Raises RayError where there is none."""
    name = RayName.parse(address, "stop")
    module = joined(name)
    actor = _find(module, name)
    if actor is None:
        raise RayError(f"{name}: no such actor")
    try:
        module.get(actor.close.remote(), timeout=_STOP_SECONDS)
    except (module.exceptions.RayError, IsoExecError) as error:
        raise RayError(f"{name}: killed before it could end well: {error}") from error
    finally:
        module.kill(actor, no_restart=True)


def _find(module: Any, name: RayName) -> Any:
    try:
        return module.get_actor(name.name, namespace=name.namespace)
    except ValueError:
        return None
