# SPDX-License-Identifier: Apache-2.0
"""Streams into a real daemon: over TCP with a token and TLS, from hostile and from lost peers, within every bound."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from isoexec.contracts import sockets, wire
from isoexec.contracts.errors import IsoExecError, WireError
from isoexec.probes.address import Address, address_from_env
from isoexec.probes.client import Client, ProbeSettings

TOKEN = "0123456789abcdef" * 2


def secret(path: Path, text: str = TOKEN, mode: int = 0o600) -> Path:
    path.write_text(text + "\n")
    path.chmod(mode)
    return path


def tcp_port(daemon: Any) -> int:
    return int(json.loads(daemon.state.daemon.read_text())["tcp"].rpartition(":")[2])


def certificate(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(exist_ok=True)
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return folder / "cert.pem", folder / "key.pem"


def remote(tmp_path: Path, address: Address, role: str = "engine") -> Client:
    return Client(ProbeSettings(run="far", state_dir=tmp_path / "nowhere", address=address), role)


def start_tcp(start: Callable[..., Any], tmp_path: Path, **settings: Any) -> tuple[Any, Path]:
    token = secret(tmp_path / "token")
    return start(tcp_host="127.0.0.1", tcp_port=0, tcp_token=str(token), **settings), token


def test_a_probe_of_another_host_is_heard_over_tcp_with_the_token_only(
    start: Callable[..., Any], tmp_path: Path, wait_until: Callable[..., Any]
) -> None:
    daemon, token = start_tcp(start, tmp_path)
    at = Address(host="127.0.0.1", port=tcp_port(daemon), token=token)
    client = remote(tmp_path, at)
    assert client.connect().accepted
    assert client.send(wire.Step, step=7)
    wait_until(lambda: daemon.metric("isoexec_step", run="far") == 7, "the step")
    client.close()
    wrong = Address(host="127.0.0.1", port=at.port, token=secret(tmp_path / "wrong", "x" * 32))
    with pytest.raises((WireError, OSError)):
        remote(tmp_path, wrong).connect(timeout=0.4)
    assert daemon.json("/readyz")["refused"]["token"] >= 1
    # nothing of a peer without the token was read as a frame
    assert daemon.metric("isoexec_decode_errors_total") == 0
    assert daemon.metric("isoexec_messages_received_total", run="far", role="engine", type="hello") == 1


def test_what_was_overheard_proves_nothing_to_another_challenge(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    from isoexec.contracts.tokens import CHALLENGE_BYTES, prove

    daemon, _ = start_tcp(start, tmp_path)
    streams = [socket.create_connection(("127.0.0.1", tcp_port(daemon)), 10) for _ in range(2)]
    asked = [stream.recv(CHALLENGE_BYTES, socket.MSG_WAITALL) for stream in streams]
    assert asked[0] != asked[1]
    replayed = prove(TOKEN.encode(), asked[0])
    streams[1].sendall(replayed)
    with contextlib.suppress(ConnectionResetError):
        assert streams[1].recv(1) == b""
    streams[0].sendall(replayed)
    hello = wire.Hello(run="far", role="engine", source="a:1:0", regime="bitwise", monitor_only=True)
    for part in wire.encode_frame(hello):
        streams[0].sendall(part)
    assert streams[0].recv(4) == wire.MAGIC
    for stream in streams:
        stream.close()


def test_tls_is_checked_by_the_probe(start: Callable[..., Any], tmp_path: Path) -> None:
    cert, key = certificate(tmp_path / "ca")
    other, _ = certificate(tmp_path / "other")
    daemon, token = start_tcp(start, tmp_path, tcp_certificate=str(cert), tcp_key=str(key))
    at: dict[str, Any] = {"host": "localhost", "port": tcp_port(daemon), "token": token}
    client = remote(tmp_path, Address(**at, authority=cert))
    assert client.connect().accepted
    client.close()
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        remote(tmp_path, Address(**at, authority=other)).connect(timeout=0.4)
    with pytest.raises((WireError, OSError)):  # plain words to a TLS port
        remote(tmp_path, Address(**at)).connect(timeout=0.4)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "tcp_token"),
        ({"tcp_token": "missing"}, "cannot be read"),
        ({"tcp_token": "open"}, "chmod 600"),
        ({"tcp_token": "short"}, "openssl rand"),
        ({"tcp_token": "good", "tcp_key": "good"}, "tcp_certificate"),
        ({"tcp_token": "good", "tcp_key": "good", "tcp_certificate": "good"}, "cannot be used"),
    ],
)
def test_a_tcp_side_without_its_guard_does_not_start(
    start: Callable[..., Any], tmp_path: Path, settings: dict[str, str], says: str
) -> None:
    secret(tmp_path / "open", mode=0o644), secret(tmp_path / "short", "abc"), secret(tmp_path / "good")
    paths = {name: str(tmp_path / value) for name, value in settings.items()}
    with pytest.raises(RuntimeError, match=says):
        start(tcp_host="127.0.0.1", tcp_port=0, **paths)


def test_an_address_is_read_from_the_environment_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_from_env() is None
    monkeypatch.setenv("ISOEXEC_DAEMON", "tls://[::1]:9462")
    with pytest.raises(IsoExecError, match="ISOEXEC_TOKEN_FILE"):
        address_from_env()
    monkeypatch.setenv("ISOEXEC_TOKEN_FILE", "/t")
    with pytest.raises(IsoExecError, match="ISOEXEC_TLS_CA"):
        address_from_env()
    monkeypatch.setenv("ISOEXEC_TLS_CA", "/ca")
    assert address_from_env() == Address(host="::1", port=9462, token=Path("/t"), authority=Path("/ca"))
    for bad in ("tcp://host", "http://host:1", "host:1", "tcp://host:99999999", "tcp://[x:1"):
        monkeypatch.setenv("ISOEXEC_DAEMON", bad)
        with pytest.raises(IsoExecError, match="ISOEXEC_DAEMON"):
            address_from_env()


def closed(stream: socket.socket) -> bool:
    stream.settimeout(10)
    try:
        return stream.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_stream_that_keeps_the_daemon_waiting_is_closed(
    start: Callable[..., Any], peer: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    daemon = start(hello_seconds=1.0, stall_seconds=0.3, idle_seconds=1.5)
    silent = sockets.connect(daemon.state_dir)
    dripping = sockets.connect(daemon.state_dir)
    began = time.monotonic()
    with contextlib.suppress(OSError):
        for byte in wire.MAGIC + b"\x10\0\0\0" * 20:
            dripping.sendall(bytes([byte]))
            time.sleep(0.2)
    assert time.monotonic() - began < 5  # each byte came in time, the hello did not
    assert closed(silent)
    assert closed(dripping)
    inside = peer(daemon, "engine", run="slow")
    inside.stream.sendall(wire.MAGIC)
    assert inside.closed()
    idle = peer(daemon, "trainer", run="slow")
    assert idle.closed()
    assert daemon.metric("isoexec_decode_errors_total") == 4
    silent.close()
    dripping.close()
    wait_until(lambda: daemon.metric("isoexec_connections") == 0, "their end")


def test_a_flood_is_slowed_down_and_takes_no_turn_of_another_rank(
    start: Callable[..., Any], peer: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    daemon = start(frames_per_second=40)
    flood, honest = peer(daemon, "engine", run="flood"), peer(daemon, "trainer", run="flood")
    flood.stream.setblocking(False)
    frame = b"".join(
        map(
            bytes,
            wire.encode_frame(wire.Step(run="flood", role="engine", source=flood.source, seq=1, step=1)),
        )
    )
    began, sent = time.monotonic(), 0
    with contextlib.suppress(BlockingIOError):
        while sent < 200_000:
            sent += flood.stream.send(frame * 100) // len(frame)
    heard = {"run": "flood", "type": "step"}
    honest.step(3)
    wait_until(
        lambda: daemon.metric("isoexec_messages_received_total", **heard, role="trainer") == 1, "it", 3
    )
    assert sent > 500
    found = daemon.metric("isoexec_messages_received_total", **heard, role="engine")
    assert found <= 85 + 41 * (time.monotonic() - began)


def test_what_is_held_of_unfinished_frames_is_bounded(
    start: Callable[..., Any], peer: Callable[..., Any]
) -> None:
    daemon = start(waiting_bytes=1 << 20)
    small, big = peer(daemon, "engine", run="part"), peer(daemon, "trainer", run="part")
    small.stream.sendall(struct.pack("<4sII", b"IXF1", 100, 32 << 20) + bytes(64 << 10))
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        big.stream.sendall(struct.pack("<4sII", b"IXF1", 100, 32 << 20) + bytes(4 << 20))
    assert big.closed()
    assert daemon.metric("isoexec_decode_errors_total") == 1  # the one that holds most, and no other
    assert daemon.metric("isoexec_connections") == 1


def test_streams_are_bounded_in_number(start: Callable[..., Any], peer: Callable[..., Any]) -> None:
    daemon = start(max_connections=2)
    first, _ = peer(daemon, "engine"), peer(daemon, "trainer")
    one_more = sockets.connect(daemon.state_dir)
    assert closed(one_more)
    one_more.close()
    assert daemon.json("/readyz")["refused"] == {"limit": 1}
    first.step(1)  # those within are not touched
    assert daemon.metric("isoexec_connections") == 2


def test_processes_and_open_steps_of_a_run_are_bounded(
    start: Callable[..., Any], peer: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    daemon = start(max_processes=2, max_open_steps=8, window_seconds=60)
    engine, _ = peer(daemon, "engine"), peer(daemon, "trainer")
    third = peer(daemon, "trainer", rank=1)
    assert "max_processes" in third.welcome.message
    bits = np.zeros(1, np.float32)
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        for step in range(20):
            engine.logprobs("engine_decode", step, [([1, 2], 1, bits)])
    assert engine.closed()
    assert "steps of run r are open" in (daemon.state_dir / "daemon.log").read_text()


def test_a_source_is_not_taken_over_by_another_process(
    daemon: Any, peer: Callable[..., Any], tmp_path: Path
) -> None:
    one = peer(daemon, "engine", run="taken")
    code = (
        "import sys; from pathlib import Path\n"
        "from isoexec.contracts import sockets, wire\n"
        "stream = sockets.connect(Path(sys.argv[1]))\n"
        "hello = wire.Hello(run='taken', role='engine', source=sys.argv[2], regime='bitwise', monitor_only=True)\n"
        "[stream.sendall(part) for part in wire.encode_frame(hello)]\n"
        "print(wire.FrameReader().feed(stream.recv(65536))[0].message)\n"
    )
    found = subprocess.run(
        [sys.executable, "-P", "-c", code, str(daemon.state_dir), one.source],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"is spoken for by process {os.getpid()}" in found.stdout, found.stderr
    # the process itself may come back while its old stream is still there, and the old one's end is not its own
    again = peer(daemon, "engine", run="taken")
    assert again.welcome.accepted


def test_a_second_hello_on_a_stream_is_cut_off(daemon: Any, peer: Callable[..., Any]) -> None:
    one = peer(daemon, "engine", run="twice")
    one.send(wire.Hello, regime="bitwise", monitor_only=True)
    assert one.closed()


def test_the_end_of_an_old_stream_does_not_end_the_process(
    start: Callable[..., Any], peer: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    daemon = start(run_ttl_seconds=0.5)
    old = peer(daemon, "engine")
    new = peer(daemon, "engine")
    old.stream.close()
    wait_until(lambda: daemon.metric("isoexec_connections") == 1, "the end of the old stream")
    time.sleep(2.0)
    assert daemon.metric("isoexec_run_info", run="r") == 1
    # and a run that nobody is connected to any more is not kept
    new.stream.close()
    wait_until(lambda: daemon.metric("isoexec_run_info", run="r") is None, "the end of the run")
    assert 'run="r"' not in daemon.text("/metrics")


def test_losses_are_counted_per_run_and_side_also_after_the_last_window(
    daemon: Any, peer: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    sides = {role: peer(daemon, role, run="losing") for role in ("engine", "trainer")}
    sides["engine"].seq += 4
    sides["trainer"].send(wire.Probe, sent=10, dropped=2)
    sides["engine"].step(1), sides["trainer"].step(1)
    daemon.windows("losing")

    def lost(role: str) -> Any:
        return daemon.metric("isoexec_messages_dropped_total", run="losing", role=role)

    assert (lost("engine"), lost("trainer")) == (4, 2)
    sides["trainer"].seq += 3  # more than what the probe says
    for side in sides.values():
        side.bye()
    wait_until(lambda: (lost("engine"), lost("trainer")) == (4, 3), "the end of the run")


@pytest.mark.parametrize(
    "name", ['a"} 1\nisoexec_halted{run="b', "a\nb 1", 'a{b="c"}', "a" * 65, "..", "a/b", "\\", ""]
)
def test_no_name_of_a_run_becomes_a_path_or_another_series(
    daemon: Any, peer: Callable[..., Any], name: str
) -> None:
    assert not peer(daemon, "engine", run=name).welcome.accepted
    text = daemon.text("/metrics")
    labels = {s.labels.get("run") for family in text_string_to_metric_families(text) for s in family.samples}
    assert not {one for one in labels if one and not one.replace("-", "").isalnum()}


@pytest.mark.parametrize("field", ["source", "replica"])
def test_a_name_with_control_characters_is_refused(daemon: Any, field: str) -> None:
    fields: dict[str, Any] = {
        "run": "names",
        "role": "engine",
        "source": "a:1:0",
        "regime": "bitwise",
        "monitor_only": True,
    }
    stream = sockets.connect(daemon.state_dir)
    for part in wire.encode_frame(wire.Hello(**{**fields, field: "a\n[critical] halt"})):
        stream.sendall(part)
    (welcome,) = wire.FrameReader().feed(stream.recv(65536))
    stream.close()
    assert isinstance(welcome, wire.Welcome)
    assert not welcome.accepted
    assert field in welcome.message


def test_messages_are_bounded_in_sequences_and_in_numbers() -> None:
    fields: dict[str, Any] = {
        "run": "r",
        "role": "engine",
        "source": "s",
        "case": "engine_decode",
        "weight_version": 0,
    }
    n = wire.SEQUENCES_LIMIT + 1
    empty: dict[str, Any] = {"logprobs": np.zeros(0, "<f4"), "tokens": np.zeros(0, "<i4")}
    with pytest.raises(WireError, match="sequences at most"):
        wire.Logprobs(
            **fields, step=0, **empty, digests=np.zeros((n, 16), np.uint8), lengths=np.zeros(n, "<i4"), starts=np.zeros(n, "<i4")
        )  # fmt: skip
    with pytest.raises(WireError, match="step"):
        wire.Step(run="r", role="engine", source="s", step=1 << 60)
