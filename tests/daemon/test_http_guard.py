# SPDX-License-Identifier: Apache-2.0
"""HTTP turns away what a browser was tricked into, who has no token, and who never asks."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isoexec.contracts import asking
from isoexec.contracts.halting import StateDirectory
from isoexec.contracts.tokens import TokenError

TOKEN = "0123456789abcdef" * 2


def ask(daemon: Any, path: str, **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(daemon.address + path, headers=headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            return answer.status, answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9461", 200),
        ("127.0.0.1", 200),
        ("[::1]:1", 200),
        ("evil.example", 421),
        ("", 421),
        ("localhost.evil", 421),
    ],
)
def test_on_loopback_it_answers_to_loopback_names_only(daemon: Any, host: str, status: int) -> None:
    assert ask(daemon, "/metrics", Host=host)[0] == status


def test_another_name_is_admitted_by_name(start: Callable[..., Any]) -> None:
    daemon = start(http_hosts=["node7.cluster"])
    assert ask(daemon, "/healthz", Host="node7.cluster:9461")[0] == 200


def test_with_a_token_only_health_is_told_without_it(start: Callable[..., Any], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    daemon = start(http_token=str(token))
    for path in ("/", "/metrics", "/api/v1/runs", "/nothing"):
        assert ask(daemon, path)[0] == 401
        assert ask(daemon, path, Authorization=f"Bearer {TOKEN}x")[0] == 401
        assert ask(daemon, path, Authorization=f"Basic {TOKEN}")[0] == 401
    assert ask(daemon, "/metrics", Authorization=f"Bearer {TOKEN}")[0] == 200
    assert ask(daemon, "/healthz")[0] == ask(daemon, "/readyz")[0] == 200


def test_commands_on_its_host_have_the_token_and_name_one_that_they_may_not_read(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    state = StateDirectory(start(http_token=str(token)).state_dir)
    assert asking.ask(state, "/api/v1/runs") is not None
    token.unlink()
    with pytest.raises(TokenError, match=str(token)):
        asking.ask(state, "/api/v1/runs")


def test_every_answer_forbids_scripts_and_sniffing(daemon: Any) -> None:
    for path in ("/", "/metrics", "/nothing"):
        headers = ask(daemon, path)[1]
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/v1/runs/..%2f..%2fetc/windows", 404),
        ("/api/v1/runs/%00", 400),
        ("/api/v1/runs/%ff%fe", 404),
        ("/api/v1/runs/a%0d%0aset-cookie:%20x/windows", 400),
        ("/api/v1/runs/x/windows?limit=" + "9" * 5000, 404),
        ("/runs/%3Cscript%3E", 404),
        ("/" + "a" * 2000, 400),
    ],
)
def test_paths_that_are_no_names_end_in_an_answer(daemon: Any, path: str, status: int) -> None:
    found, headers = ask(daemon, path)
    assert found == status
    assert "set-cookie" not in headers


def test_who_never_asks_is_hung_up_on_and_blocks_nobody(daemon: Any) -> None:
    host, _, port = daemon.address.removeprefix("http://").rpartition(":")
    streams = [socket.create_connection((host, int(port)), 10) for _ in range(300)]
    streams[-1].sendall(b"GET /metrics HTTP/1.1\r\nx: ")
    assert daemon.json("/healthz")["status"] == "ok"
    streams[0].settimeout(10)
    assert streams[0].recv(1) == b""  # the oldest made room
    streams[-1].settimeout(20)
    assert streams[-1].recv(1) == b""  # the others' time runs out
    for stream in streams:
        stream.close()
