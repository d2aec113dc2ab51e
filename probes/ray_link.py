# SPDX-License-Identifier: Apache-2.0
"""A client's way to a daemon that is a named Ray actor: each frame is a call that is waited for, in the sending thread."""

from __future__ import annotations

import time
from typing import Any

from isoexec.contracts import wire
from isoexec.contracts.errors import WireError
from isoexec.contracts.ray import RayName, joined
from isoexec.probes.links import encoded

__all__ = ["ActorCalls", "RayLink"]

_TAKE_SECONDS = 10.0


class ActorCalls:
    """Calls of the daemon's actor. Ray looks a name up at once; what fails is looked up again at the next call."""

    def __init__(self, address: RayName) -> None:
        self._address = address
        self._actor: Any = None

    def find(self) -> None:
        """Look the actor up. Raises RayError outside a cluster, OSError where there is no such actor."""
        module = joined(self._address)
        try:
            self._actor = module.get_actor(self._address.name, namespace=self._address.namespace)
        except (ValueError, module.exceptions.RayError) as error:
            raise OSError(f"{self._address}: no such actor: {error}") from error

    def call(self, method: str, *values: Any, timeout: float) -> Any:
        """Call a method and wait for its answer, seconds at most. Raises as `find`, and OSError where none comes."""
        module = joined(self._address)
        if self._actor is None:
            self.find()
        try:
            return module.get(getattr(self._actor, method).remote(*values), timeout=timeout)
        except module.exceptions.RayError as error:
            self._actor = None
            raise OSError(f"{self._address}: {type(error).__name__}: {error}") from error

    def forget(self) -> None:
        self._actor = None


class RayLink:
    """Frames as bytes; the actor says whether it knows this process."""

    message_bytes = 0

    def __init__(self, address: RayName, source: str) -> None:
        self.standing = False
        self._address = address
        self._source = source
        self._calls = ActorCalls(address)

    def connect(self, timeout: float) -> None:  # noqa: ARG002 - Ray looks a name up at once, or raises
        self._calls.find()

    def greet(self, hello: wire.Message, timeout: float) -> wire.Welcome:
        deadline = time.monotonic() + timeout
        frame = b"".join(encoded(hello))
        raw = self._calls.call("greet", self._source, frame, timeout=max(0.1, deadline - time.monotonic()))
        found = wire.FrameReader().feed(raw)
        if len(found) != 1 or not isinstance(found[0], wire.Welcome):
            raise WireError(f"{self._address}: wanted a welcome, found {found!r}")
        self.standing = found[0].accepted
        return found[0]

    def write(self, message: wire.Message) -> int:
        frame = b"".join(encoded(message))
        if not self._calls.call("take", self._source, message.seq, frame, timeout=_TAKE_SECONDS):
            raise OSError(f"{self._address}: the daemon does not know {self._source} any more")
        return len(frame)

    def lost(self) -> None:
        self.close()

    def close(self) -> None:
        self.standing = False
        self._calls.forget()
