# SPDX-License-Identifier: Apache-2.0
"""The daemon over HTTP: metrics, health, the journal as JSON, and a status page. Reading only: nothing acts."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from isoexec.daemon.page import run_page, runs_page
from isoexec.daemon.service import Service, package_version
from isoexec.daemon.views import run_view, runs_view

__all__ = ["HttpServer", "application", "bind"]

_MOST = 5000


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
        return JSONResponse({"ready": ready, "runs": len(service.runs)}, status_code=200 if ready else 503)

    async def runs(_: Request) -> Response:
        return JSONResponse({"runs": runs_view(state, journal)})

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
        ]
    )


def _missing(request: Request) -> Response:
    return JSONResponse({"error": f"no run {request.path_params['run']!r}"}, status_code=404)


def _limit(request: Request, default: int) -> int:
    text = request.query_params.get("limit", str(default))
    return min(max(int(text), 1), _MOST) if text.isdecimal() else default


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


class HttpServer(uvicorn.Server):
    """uvicorn on a bound socket, which leaves the signals to the daemon."""

    def __init__(self, service: Service) -> None:
        super().__init__(
            uvicorn.Config(
                application(service),
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
