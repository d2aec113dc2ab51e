# SPDX-License-Identifier: Apache-2.0
"""A daemon at work in this process, from start to end: its service, and the HTTP beside it."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import structlog

from isoexec.daemon.config import Config
from isoexec.daemon.http import HttpServer, bind
from isoexec.daemon.service import Service

__all__ = ["Running", "log_as"]


class Running:
    """Made by `start`. `service` is the daemon, `address` where HTTP is served."""

    def __init__(self, service: Service, server: HttpServer, web: asyncio.Task[Any], address: str) -> None:
        self.service = service
        self.address = address
        self._server = server
        self._web = web

    @classmethod
    async def start(cls, config: Config) -> Running:
        """Take the state directory and begin. Raises IsoExecError and OSError; nothing is held then."""
        service = Service(config)
        try:
            bound = bind(config.http_host, config.http_port)
            host, port = bound.getsockname()[:2]
            address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            tcp = bind(config.tcp_host, config.tcp_port) if config.tcp_host else None
            await service.start(tcp)
            server = HttpServer(service)
            web = asyncio.create_task(server.run_on(bound))
            while not server.started and not web.done():
                await asyncio.sleep(0.005)
            service.place.note(
                address,
                tcp=":".join(map(str, tcp.getsockname()[:2])) if tcp else None,
                shard=f"{config.shard}/{config.shards}" if service.stream is not None else None,
                http_token=config.http_token,
            )
        except BaseException:
            await service.close()
            raise
        return cls(service, server, web, address)

    async def wait(self, stop: asyncio.Event) -> bool:
        """Wait until told to stop, True; False when HTTP or the stream of shards ended by itself."""
        stopping = asyncio.create_task(stop.wait())
        failing = asyncio.create_task(self.service.stream_failed())
        await asyncio.wait({stopping, self._web, failing}, return_when=asyncio.FIRST_COMPLETED)
        failed = self._web.done() or failing.done()
        stopping.cancel()
        failing.cancel()
        return not failed

    async def close(self) -> None:
        """Take what was sent, judge what is complete, end HTTP. Raises what HTTP ended by."""
        self._server.stop()
        await self.service.close()
        await self._web


def log_as(form: str) -> None:
    """Write the log of this process to stderr, `form` json or console."""
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info if form == "json" else _as_it_is,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)


def _as_it_is(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return event
