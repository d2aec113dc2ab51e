# SPDX-License-Identifier: Apache-2.0
"""Where a daemon that is not beside the job is heard, and how a process shows it that it may speak."""

from __future__ import annotations

import os
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from isoexec.contracts.broker import Broker
from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.ray import RayName
from isoexec.contracts.tokens import CHALLENGE_BYTES, prove, read_token

__all__ = ["Address", "address_from_env"]

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
    def parse(cls, text: str, *, token: Path | None, authority: Path | None) -> Address:
        """Read ``tcp://HOST:PORT`` or ``tls://HOST:PORT``. Raises IsoExecError naming the variable that is wrong."""
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError:
            parts, host, port = urlsplit(""), None, None
        if parts.scheme not in ("tcp", "tls") or not host or not port or parts.path.strip("/"):
            raise IsoExecError(
                f"ISOEXEC_DAEMON: wanted tcp://HOST:PORT, tls://HOST:PORT, nats://HOST:PORT/NAME, "
                f"nats+tls://HOST:PORT/NAME or ray://NAMESPACE/NAME, found {text!r}"
            )
        if token is None:
            raise IsoExecError(f"ISOEXEC_TOKEN_FILE: unset, and {text} asks for a token; name its file")
        if (parts.scheme == "tls") != (authority is not None):
            raise IsoExecError(
                "ISOEXEC_TLS_CA: set it with tls://, to the PEM file of the daemon's certificate authority or of its "
                "own certificate, and only then"
            )
        return cls(host=host, port=port, token=token, authority=authority)

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


def address_from_env() -> Address | Broker | RayName | None:
    """ISOEXEC_DAEMON (see `Address`, `Broker`, `RayName`), ISOEXEC_TOKEN_FILE, ISOEXEC_NATS_USER_FILE, ISOEXEC_TLS_CA.

    None where ISOEXEC_DAEMON is unset: the unix socket of the state directory.
    """
    text = os.environ.get("ISOEXEC_DAEMON", "")
    if not text:
        return None
    token, user, authority = (
        Path(found) if (found := os.environ.get(name)) else None
        for name in ("ISOEXEC_TOKEN_FILE", "ISOEXEC_NATS_USER_FILE", "ISOEXEC_TLS_CA")
    )
    if text.startswith(("nats:", "nats+tls:")):
        return Broker.parse(text, "ISOEXEC_DAEMON", token=token, user=user, authority=authority)
    if text.startswith("ray:"):
        return RayName.parse(text, "ISOEXEC_DAEMON")
    return Address.parse(text, token=token, authority=authority)
