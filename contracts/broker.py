# SPDX-License-Identifier: Apache-2.0
"""Where probes and the shards of a daemon meet when they are on many hosts: a NATS server with JetStream, and its names.

One stream holds the frames that no shard has accounted for yet, one key-value bucket the number of shards, what each says, and
the verdict of each run. Frames are those of `isoexec.contracts.wire`; a message's id is ``<lane>.<number>.<shard>``.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.tokens import read_token

if TYPE_CHECKING:
    from nats.aio.client import Client as NatsClient

__all__ = [
    "ID_HEADER",
    "REPLY_HEADER",
    "Broker",
    "BrokerError",
    "frame_id",
    "parse_id",
    "run_key",
    "subject_of",
]

ID_HEADER = "Nats-Msg-Id"
REPLY_HEADER = "Isoexec-Reply"
"""Where a shard answers the hello in this frame."""
_SCHEMES = ("nats", "nats+tls")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
_ID = re.compile(r"([0-9a-f]{16})\.(0|[1-9][0-9]{0,18})\.[0-9]{1,4}")


class BrokerError(IsoExecError):
    """A NATS address, credential or server that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Broker:
    """A NATS server and who we are there. ``name`` is the stream's and the bucket's; ``authority`` a PEM file, None: no TLS.

    ``token`` is the file of a token, ``user`` one that holds ``user:password``, both mode 0600 and read anew for each
    connection.
    """

    host: str
    port: int
    name: str = "isoexec"
    token: Path | None = None
    user: Path | None = None
    authority: Path | None = None

    @classmethod
    def parse(
        cls, text: str, where: str, *, token: Path | None, user: Path | None, authority: Path | None
    ) -> Broker:
        """Read ``nats://HOST:PORT/NAME`` or ``nats+tls://``; NAME may be left out. Raises BrokerError, `where` first."""
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port or 4222
        except ValueError:
            parts, host, port = urlsplit(""), None, 0
        name = parts.path.strip("/") or "isoexec"
        if parts.scheme not in _SCHEMES or not host or parts.username or parts.query or parts.fragment:
            shown = re.sub(r"//[^/]*@", "//...@", text)
            raise BrokerError(
                f"{where}: wanted nats://HOST:PORT/NAME or nats+tls://HOST:PORT/NAME, credentials in files, found {shown!r}"
            )
        if _NAME.fullmatch(name) is None:
            raise BrokerError(
                f"{where}: wanted a NAME of letters, digits, '_' and '-', 32 at most, found {name!r}"
            )
        if token is not None and user is not None:
            raise BrokerError(f"{where}: name a token file or a file of user:password, not both")
        if (parts.scheme == "nats+tls") != (authority is not None):
            raise BrokerError(
                f"{where}: nats+tls:// and the PEM file of the server's certificate authority go together"
            )
        return cls(host=host, port=port, name=name, token=token, user=user, authority=authority)

    def __str__(self) -> str:
        return f"nats{'+tls' if self.authority else ''}://{self.host}:{self.port}/{self.name}"

    async def connect(self, who: str, timeout: float) -> NatsClient:
        """Open a connection that is not renewed: whoever holds it opens another when it is closed.

        Raises BrokerError where the server does not take us as we are, OSError where it is not reached.
        """
        client_class, errors = _nats()
        client: NatsClient = client_class()
        failed: list[Exception] = []

        async def note(error: Exception) -> None:
            failed.append(error)

        try:
            async with asyncio.timeout(timeout):
                await client.connect(
                    f"nats://{self.host}:{self.port}",
                    name=f"isoexec {who}",
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0.1,  # type: ignore[arg-type]  # any number of seconds
                    connect_timeout=max(1, int(timeout)),
                    ping_interval=10,
                    error_cb=note,
                    **self._credentials(client),
                )
        except IsoExecError:
            raise
        except (OSError, TimeoutError, errors.Error) as error:
            reason = next((one for one in reversed(failed) if str(one)), error)
            if isinstance(reason, errors.AuthorizationError) or "authoriz" in str(reason).lower():
                raise BrokerError(f"{self}: the server refuses our credentials: {reason}") from error
            if isinstance(reason, ssl.SSLError):
                raise BrokerError(f"{self}: TLS failed: {reason}") from error
            raise OSError(f"{self}: not reached: {reason or type(error).__name__}") from error
        return client

    def _credentials(self, client: NatsClient) -> dict[str, Any]:
        """What goes with CONNECT, read as it is sent: never to a server that offers no TLS where we want it."""
        authority = self.authority

        def guarded(value: str) -> str:
            if authority is not None and not client._server_info.get("tls_required"):
                raise BrokerError(
                    f"{self}: wanted TLS, and the server offers none; set tls in its configuration"
                )
            return value

        found: dict[str, Any] = {}
        if authority is not None:
            try:
                context = ssl.create_default_context(cafile=str(authority))
            except (OSError, ssl.SSLError) as error:
                raise BrokerError(
                    f"{authority}: cannot be used as a certificate authority: {error}"
                ) from error
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            found |= {"tls": context, "tls_hostname": self.host}
        if self.user is not None:
            path = self.user
            _user(path)
            found |= {"user": lambda: guarded(_user(path)[0]), "password": lambda: guarded(_user(path)[1])}
        elif self.token is not None:
            secret = self.token
            read_token(secret)
            found["token"] = lambda: guarded(read_token(secret).decode())
        elif authority is not None:
            found["token"] = lambda: guarded("")
        return found


def _user(path: Path) -> tuple[str, str]:
    user, colon, password = read_token(path).decode(errors="replace").partition(":")
    if not colon or not user or not password:
        raise BrokerError(f"{path}: wanted one line user:password")
    return user, password


def _nats() -> tuple[Any, Any]:
    """Give nats-py's client class and its module of errors."""
    try:
        import nats.aio.client
        import nats.errors
    except ImportError as error:
        raise BrokerError(
            f"a nats:// address needs the package nats-py ({error}): pip install 'isoexec[nats]'"
        ) from error
    return nats.aio.client.Client, nats.errors


def subject_of(name: str, shard: int, run: str) -> str:
    """Give the subject of a run's frames for one shard; a run's dots would be levels of it."""
    return f"{name}.frames.{shard}.{run_key(run)}"


def run_key(run: str) -> str:
    """Give a run's name as one token of a subject or key; '=' is in no run name."""
    return run.replace(".", "=")


def frame_id(lane: str, seq: int, shard: int) -> str:
    """Name a frame: who published it, its number there, and for which shard."""
    return f"{lane}.{seq}.{shard}"


def parse_id(headers: Mapping[str, str] | None) -> tuple[str, int] | None:
    """Give (lane, number) of a message, None where it names none."""
    found = _ID.fullmatch((headers or {}).get(ID_HEADER, ""))
    return (found[1], int(found[2])) if found else None
