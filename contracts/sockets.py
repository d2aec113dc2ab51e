# SPDX-License-Identifier: Apache-2.0
"""The unix socket of a daemon, in its state directory."""

from __future__ import annotations

import os
import socket
from pathlib import Path

__all__ = ["connect", "listen"]

_SOCKET_NAME = "isoexec.sock"


def _at(state_dir: Path) -> tuple[str, int]:
    """Give an address that fits sockaddr_un however long the path is, and a descriptor to close."""
    descriptor = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{descriptor}/{_SOCKET_NAME}", descriptor


def connect(state_dir: Path, *, timeout: float | None = 5.0) -> socket.socket:
    """Open a stream to the daemon of a state directory. Raises OSError when nobody listens."""
    address, descriptor = _at(state_dir)
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        stream.settimeout(timeout)
        stream.connect(address)
    except BaseException:
        stream.close()
        raise
    finally:
        os.close(descriptor)
    return stream


def listen(state_dir: Path, *, backlog: int = 512) -> socket.socket:
    """Bind the daemon's socket, mode 0600, in place of one left over; the caller holds the daemon's lock."""
    (state_dir / _SOCKET_NAME).unlink(missing_ok=True)
    address, descriptor = _at(state_dir)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        server.bind(address)
        server.listen(backlog)
    except BaseException:
        server.close()
        raise
    finally:
        os.umask(mask)
        os.close(descriptor)
    return server
