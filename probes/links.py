# SPDX-License-Identifier: Apache-2.0
"""The ways in which a client's messages reach a daemon: what every way can do, and the stream of a socket."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from isoexec.contracts import sockets, wire
from isoexec.contracts.errors import WireError
from isoexec.contracts.shards import TOKEN_ARRAYS
from isoexec.probes.address import Address

__all__ = ["Link", "StreamLink", "TooLargeError", "sequence_runs"]


class TooLargeError(WireError):
    """A message that this way cannot carry at all: it is dropped and counted, never tried again."""


class Link(Protocol):
    """One way to a daemon, used by one thread at a time. Every call may raise OSError or IsoExecError: it may be tried again."""

    standing: bool
    """Whether messages can be written: the daemon has welcomed this process here and has not forgotten it since."""
    message_bytes: int
    """Bytes of arrays in one message at most, 0: what a frame holds; known once connected."""

    def connect(self, timeout: float) -> None:
        """Reach the other end, in `timeout` seconds."""

    def greet(self, hello: wire.Message, timeout: float) -> wire.Welcome:
        """Say hello and give the answer."""

    def write(self, message: wire.Message) -> int:
        """Hand one message over, give its bytes. Raises TooLargeError for one that can never be."""

    def lost(self) -> None:
        """Let go of what failed; `standing` says whether hello has to be said again."""

    def close(self) -> None:
        """End for good."""


class StreamLink:
    """A unix or TCP stream: it is welcomed anew each time it is opened."""

    message_bytes = 0

    def __init__(self, state_dir: Path, address: Address | None) -> None:
        self.standing = False
        self._state_dir = state_dir
        self._address = address
        self._stream: socket.socket | None = None

    def connect(self, timeout: float) -> None:
        self.close()
        if self._address is None:
            self._stream = sockets.connect(self._state_dir, timeout=timeout)
        else:
            self._stream = self._address.connect(timeout)

    def greet(self, hello: wire.Message, timeout: float) -> wire.Welcome:
        stream = self._opened()
        deadline = time.monotonic() + timeout
        try:
            for buffer in wire.encode_frame(hello):
                stream.sendall(buffer)
            reader = wire.FrameReader()
            while True:
                stream.settimeout(max(0.1, deadline - time.monotonic()))
                data = stream.recv(65536)
                if not data:
                    raise WireError(
                        "the daemon closed the connection instead of answering hello; see its log"
                    )
                for message in reader.feed(data):
                    if isinstance(message, wire.Welcome):
                        stream.settimeout(None)
                        self.standing = message.accepted
                        return message
        except BaseException:
            self.close()
            raise

    def write(self, message: wire.Message) -> int:
        stream = self._opened()
        buffers = encoded(message)
        for buffer in buffers:
            stream.sendall(buffer)
        return sum(memoryview(b).nbytes for b in buffers)

    def _opened(self) -> socket.socket:
        if self._stream is None:
            raise OSError("the stream to the daemon is not open")
        return self._stream

    def lost(self) -> None:
        self.close()

    def close(self) -> None:
        self.standing = False
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()
            self._stream = None


def encoded(message: wire.Message) -> list[wire.Buffer]:
    """Give the buffers of a message's frame. Raises TooLargeError."""
    try:
        return wire.encode_frame(message)
    except WireError as error:
        raise TooLargeError(str(error)) from error


def sequence_runs(fields: Mapping[str, Any], most_bytes: int) -> Iterator[dict[str, Any]]:
    """Cut the arrays of a logprobs message, [n] sequences, into runs of sequences of `most_bytes` each, or of one; views."""
    lengths = fields["lengths"]
    size = 8  # bytes a token: logprob and id
    first = token = 0
    while first < len(lengths):
        last, tokens = first + 1, int(lengths[first])
        while (
            last < len(lengths) and (tokens + int(lengths[last])) * size + (last - first) * 24 <= most_bytes
        ):
            tokens += int(lengths[last])
            last += 1
        rows, span = slice(first, last), slice(token, token + tokens)
        yield {
            name: value[span if name in TOKEN_ARRAYS else rows] if isinstance(value, np.ndarray) else value
            for name, value in fields.items()
        }
        first, token = last, token + tokens
