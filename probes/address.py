# SPDX-License-Identifier: Apache-2.0
"""Where a daemon on another host is heard, and how a process shows it that it may speak."""

from __future__ import annotations

import os
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.tokens import CHALLENGE_BYTES, prove, read_token

__all__ = ["Address"]

_SILENT_MILLISECONDS = 30_000


@dataclass(frozen=True, kw_only=True)
class Address:
    """A daemon's TCP address; ``authority`` is the PEM file that its certificate must follow from, None: no TLS.

    ``token`` is read anew for each connection, so that it can be replaced while a job runs.
    """

    host: str
    port: int
    token: Path
    authority: Path | None = None

    @classmethod
    def from_env(cls) -> Address | None:
        """ISOEXEC_DAEMON (tcp://HOST:PORT, or tls://), ISOEXEC_TOKEN_FILE, and for tls ISOEXEC_TLS_CA; None where unset."""
        text = os.environ.get("ISOEXEC_DAEMON", "")
        if not text:
            return None
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError:
            parts, host, port = urlsplit(""), None, None
        if parts.scheme not in ("tcp", "tls") or not host or not port or parts.path.strip("/"):
            raise IsoExecError(f"ISOEXEC_DAEMON: wanted tcp://HOST:PORT or tls://HOST:PORT, found {text!r}")
        token, authority = os.environ.get("ISOEXEC_TOKEN_FILE"), os.environ.get("ISOEXEC_TLS_CA")
        if not token:
            raise IsoExecError(f"ISOEXEC_TOKEN_FILE: unset, and {text} asks for a token; name its file")
        if (parts.scheme == "tls") != bool(authority):
            raise IsoExecError(
                "ISOEXEC_TLS_CA: set it with tls://, to the PEM file of the daemon's certificate authority or of its "
                "own certificate, and only then"
            )
        return cls(host=host, port=port, token=Path(token), authority=Path(authority) if authority else None)

    def connect(self, timeout: float) -> socket.socket:
        """Open a stream on which the daemon takes frames.  Raises OSError, also where the certificate does not fit;
        TokenError and WireError.
        """
        token = read_token(self.token)
        deadline = time.monotonic() + timeout
        stream: socket.socket = socket.create_connection((self.host, self.port), timeout)
        try:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # what was sent and nobody acknowledges for so long ends the stream: the sending thread must not hang for hours
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MILLISECONDS)
            if self.authority is not None:
                context = ssl.create_default_context(cafile=str(self.authority))
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                stream = context.wrap_socket(stream, server_hostname=self.host)
            asked = b""
            while len(asked) < CHALLENGE_BYTES:
                stream.settimeout(max(0.1, deadline - time.monotonic()))
                data = stream.recv(CHALLENGE_BYTES - len(asked))
                if not data:
                    raise ConnectionRefusedError(
                        f"{self.host}:{self.port} closed the stream; see the daemon's log"
                    )
                asked += data
            stream.sendall(prove(token, asked))
        except BaseException:
            stream.close()
            raise
        return stream
