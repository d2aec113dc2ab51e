# SPDX-License-Identifier: Apache-2.0
"""A daemon's place in its state directory: the lock that makes it the only one, its socket, and the note of where it is found."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from isoexec.contracts.halting import StateDirectory
from isoexec.contracts.sockets import listen
from isoexec.daemon.config import ConfigError
from isoexec.daemon.version import package_version

__all__ = ["Place"]

_log = structlog.get_logger("isoexec.daemon")


class Place:
    """Taken when it is made; raises ConfigError where another daemon has the state directory."""

    def __init__(self, state: StateDirectory) -> None:
        self.state = state
        self.started = time.time()
        self._socket_id = (0, 0)
        self._lock = os.open(state.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConfigError(
                f"{state.path}: another daemon has this state directory; stop it, or choose --state-dir"
            ) from error

    def listen(self) -> socket.socket:
        """Make the socket, in the place of what lies there."""
        listening = listen(self.state.path)
        self._socket_id = _file_id(self.state.socket)
        return listening

    async def tend(self, use: Callable[[socket.socket], Awaitable[None]]) -> None:
        """Make the socket anew where it was removed or replaced: streams that are open stay, but no process could join.

        Raises OSError where that fails.
        """
        if _file_id(self.state.socket) == self._socket_id:
            return
        await use(self.listen())
        _log.critical("the socket was gone; made anew", path=str(self.state.socket))

    def note(
        self,
        http: str | None,
        tcp: str | None = None,
        shard: str | None = None,
        http_token: Path | None = None,
    ) -> None:
        """Write down where this daemon is found, and which file holds the token that its HTTP side asks for."""
        draft = self.state.path / ".daemon.json"
        found = {"pid": os.getpid(), "http": http, "version": package_version(), "started": self.started}
        if tcp:
            found["tcp"] = tcp
        if http_token:
            found["http_token"] = str(http_token.absolute())
        # it stays when the daemon goes: whoever clears a run has to know that there are others
        if shard:
            self.state.shard.write_text(shard + "\n", encoding="utf-8")
        else:
            self.state.shard.unlink(missing_ok=True)
        draft.write_text(json.dumps(found, sort_keys=True) + "\n", encoding="utf-8")
        draft.replace(self.state.daemon)

    def leave(self) -> None:
        """Take note and socket away, and give the lock back."""
        self.state.daemon.unlink(missing_ok=True)
        self.state.socket.unlink(missing_ok=True)
        os.close(self._lock)


def _file_id(path: Path) -> tuple[int, int]:
    """Give device and inode of a file; zeros where there is none."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino
