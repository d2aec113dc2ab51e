# SPDX-License-Identifier: Apache-2.0
"""Who is at the other end of a stream, and how much of it is heard."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable
from pathlib import Path

from isoexec.contracts.tokens import PROOF_BYTES, challenge, proven
from isoexec.daemon.config import ConfigError
from isoexec.daemon.receive import Receiver

__all__ = ["Pace", "SparseLog", "admit_by_token", "keep_alive", "peer_admitted", "peer_of", "tls_context"]

_CREDENTIALS = struct.Struct("3i")


def peer_of(stream: socket.socket) -> tuple[int, int]:
    """Give (pid, uid) of the process at the other end, by the kernel's word."""
    raw = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def peer_admitted(uid: int, own: int | None = None) -> bool:
    """Whether a user may talk to this daemon: its own user, or root."""
    return uid in (0, os.geteuid() if own is None else own)


async def admit_by_token(stream: Receiver, token: bytes, *, seconds: float) -> bool:
    """Ask a peer on another host to prove that it holds the token; False where it does not, in `seconds` at most."""
    asked = challenge()
    stream.transport.write(asked)
    try:
        answer = await asyncio.wait_for(stream.read_exactly(PROOF_BYTES), seconds)
    except TimeoutError:
        return False
    return proven(token, asked, answer)


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Make the server's TLS side, 1.3 only: both ends are ours. Raises ConfigError naming the files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tcp_certificate {certificate}, tcp_key {key}: cannot be used: {error}") from error
    return context


def keep_alive(stream: socket.socket) -> None:
    """Have the kernel notice within two minutes that a host is gone without a word."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


class Pace:
    """A token bucket: so many a second on average, and what two seconds admit at once."""

    __slots__ = ("_at", "_clock", "_left", "_rate")

    def __init__(self, rate: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._left = 2.0 * rate
        self._clock = clock
        self._at = clock()

    def spend(self, amount: float) -> float:
        """Take an amount; give the seconds to wait before the next, 0 within the pace."""
        now = self._clock()
        self._left = min(self._left + (now - self._at) * self._rate, 2.0 * self._rate) - amount
        self._at = now
        return max(-self._left / self._rate, 0.0)

    def admits(self) -> bool:
        """Whether there is room for one now; takes it where there is, and owes nothing where there is none."""
        if self.spend(1.0) <= 0:
            return True
        self._left += 1.0
        return False


class SparseLog:
    """One line a second of one kind at most, so that a peer cannot fill a disk with our own words."""

    def __init__(self, *, seconds: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._last = float("-inf")
        self._unsaid = 0

    def due(self) -> int | None:
        """Give how many were not said since the last that was, or None where this one is not said either."""
        now = self._clock()
        if now - self._last < self._seconds:
            self._unsaid += 1
            return None
        self._last, unsaid, self._unsaid = now, self._unsaid, 0
        return unsaid
