# SPDX-License-Identifier: Apache-2.0
"""The daemon over HTTP: metrics, health, the journal as JSON, and a status page. Reading only: nothing acts.

Bound to loopback it answers only where it is asked by a loopback name, so that no web page reads it through a name of its own
(DNS rebinding). With `http_token` set, everything but the health checks asks for the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as ASGIMessage
from uvicorn.protocols.http.h11_impl import H11Protocol

from isoexec.contracts.tokens import read_token, same
from isoexec.daemon.config import Config
from isoexec.daemon.page import run_page, runs_page
from isoexec.daemon.service import Service
from isoexec.daemon.version import package_version
from isoexec.daemon.views import run_view, runs_view

__all__ = ["Doorkeeper", "HttpServer", "application", "bind"]

_MOST = 5000
_CONNECTIONS = 256
_REQUEST_SECONDS = 10.0
_HEADERS = (
    (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


def application(service: Service) -> Starlette:
    """Make the ASGI application of one daemon."""
    registry = service.metrics.registry()
    state, journal = service.state, service.journal

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=None, headers={"content-type": content_type})

    async def healthz(_: Request) -> Response:
        return JSONResponse({"status": "ok", "version": package_version()})

    async def readyz(_: Request) -> Response:
        ready = service.ready
        found = {"ready": ready, "runs": len(service.runs), "refused": dict(service.ingest.refused)}
        return JSONResponse(found, status_code=200 if ready else 503)

    async def runs(_: Request) -> Response:
        shards = {"shards": service.stream.view()} if service.stream is not None else {}
        return JSONResponse({"runs": runs_view(state, journal), **shards})

    async def run(request: Request) -> Response:
        found = run_view(state, journal, request.path_params["run"])
        return _missing(request) if found is None else JSONResponse(found)

    async def windows(request: Request) -> Response:
        name = request.path_params["run"]
        rows = journal.windows(name, limit=_limit(request, 200))
        return JSONResponse({"run": name, "windows": rows}) if rows or _known(name) else _missing(request)

    async def verdicts(request: Request) -> Response:
        name = request.path_params["run"]
        outcome = request.query_params.get("outcome")
        if outcome not in (None, "pass", "violation", "unknown"):
            return JSONResponse({"error": "outcome is pass, violation or unknown"}, status_code=400)
        rows = journal.verdicts(name, limit=_limit(request, 500), outcome=outcome)
        return JSONResponse({"run": name, "verdicts": rows}) if rows or _known(name) else _missing(request)

    async def page(_: Request) -> Response:
        return HTMLResponse(runs_page(runs_view(state, journal)))

    async def one_page(request: Request) -> Response:
        name = request.path_params["run"]
        found = run_view(state, journal, name)
        if found is None:
            return HTMLResponse("<p>no such run", status_code=404)
        return HTMLResponse(run_page(found, journal.windows(name, limit=400), journal.steps(name, limit=400)))

    def _known(name: str) -> bool:
        return any(row["run"] == name for row in journal.runs())

    return Starlette(
        routes=[
            Route("/", page),
            Route("/runs/{run}", one_page),
            Route("/metrics", metrics),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/api/v1/runs", runs),
            Route("/api/v1/runs/{run}", run),
            Route("/api/v1/runs/{run}/windows", windows),
            Route("/api/v1/runs/{run}/verdicts", verdicts),
        ],
        middleware=[Middleware(Doorkeeper, config=service.config)],
    )


class Doorkeeper:
    """Refuses requests under another's name, without the token, or that are not text; puts the headers on every answer."""

    def __init__(self, app: ASGIApp, config: Config) -> None:
        self._app = app
        self._token = read_token(config.http_token) if config.http_token else None
        loopback = config.http_host == "localhost" or _is_loopback(config.http_host)
        self._hosts = {"localhost", "127.0.0.1", "[::1]", *config.http_hosts} if loopback else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: ASGIMessage) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        answer: Response | None = self._refusal(Request(scope))
        await (self._app if answer is None else answer)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        asked = request.headers.get("host", "")
        name = asked[: asked.rfind("]") + 1] if asked.startswith("[") else asked.partition(":")[0]
        if self._hosts is not None and name.lower() not in self._hosts:
            return JSONResponse(
                {"error": "ask for localhost, or name this host in http_hosts"}, status_code=421
            )
        path = request.scope["path"]
        if not path.isprintable() or len(path) > 1024:
            return JSONResponse({"error": "a path of printable characters, 1024 at most"}, status_code=400)
        if self._token is not None and path not in ("/healthz", "/readyz"):
            kind, _, given = request.headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not same(given.strip().encode("latin-1", "replace"), self._token):
                return JSONResponse(
                    {"error": "wanted Authorization: Bearer TOKEN, as in http_token"},
                    status_code=401,
                    headers={"www-authenticate": "Bearer"},
                )
        return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _missing(request: Request) -> Response:
    return JSONResponse({"error": f"no run {request.path_params['run']!r}"}, status_code=404)


def _limit(request: Request, default: int) -> int:
    text = request.query_params.get("limit", str(default))
    return min(max(int(text), 1), _MOST) if text.isdecimal() and len(text) <= 9 else default


def bind(host: str, port: int) -> socket.socket:
    """Bind the address at once, so that port 0 has its number before anything else starts. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, port))
    except OSError:
        server.close()
        raise
    return server


class _Impatient(H11Protocol):
    """HTTP/1.1 whose first request must come in time and whose streams are bounded in number."""

    since = 0.0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = self.loop.time()
        if len(self.connections) > _CONNECTIONS:
            # the one that has been there longest without asking anything makes room
            idle = [one for one in self.connections if getattr(one, "cycle", None) is None]
            min(idle or [self], key=lambda one: getattr(one, "since", 0.0)).transport.close()
        self._late = self.loop.call_later(_REQUEST_SECONDS, self._hang_up)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _hang_up(self) -> None:
        # keep-alive between requests has a limit of its own
        if getattr(self, "cycle", None) is None:
            self.transport.close()


class HttpServer(uvicorn.Server):
    """uvicorn on a bound socket, which leaves the signals to the daemon."""

    def __init__(self, service: Service) -> None:
        super().__init__(
            uvicorn.Config(
                application(service),
                http=_Impatient,
                ws="none",
                backlog=128,
                h11_max_incomplete_event_size=16 << 10,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=2,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        self.should_exit = True

    async def run_on(self, bound: socket.socket) -> Any:
        return await self.serve(sockets=[bound])
