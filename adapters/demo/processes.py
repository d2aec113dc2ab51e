# SPDX-License-Identifier: Apache-2.0
"""Run an object in a process of its own and call its methods; the demo's stand-in for a job's scheduler.

A child has its environment from its first instruction on: torch, which its main module may load, reads variables once.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from isoexec.contracts.errors import IsoExecError

__all__ = ["Remote", "RemoteError", "call_all"]

_START_SECONDS = 180.0
_CALL_SECONDS = 600.0
_PROFILE = "<profile>"
_STARTING = threading.Lock()


class RemoteError(IsoExecError):
    """A method of a remote object raised; ``kind`` is the name of the error's class, ``text`` what it said."""

    def __init__(self, where: str, kind: str, text: str, trace: str = "") -> None:
        self.where = where
        self.kind = kind
        self.text = text
        self.trace = trace
        super().__init__(f"{where}: {kind}: {text}")


def _serve(pipe: Connection, name: str, target: str, log: str, arguments: Mapping[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    module, _, kind = target.partition(":")
    try:
        host = getattr(importlib.import_module(module), kind)(**arguments)
        pipe.send(("ok", None))
    except BaseException as error:  # noqa: BLE001 - whatever it was, the caller is told
        pipe.send(("error", type(error).__name__, str(error), traceback.format_exc()))
        return
    profile: tuple[str, Path] | None = None
    while True:
        try:
            method, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            if method == _PROFILE:
                (profile,) = args
                if hasattr(host, "profiling"):  # it has workers, which have profilers of their own
                    host.profiling(profile)
                pipe.send(("ok", None))
                continue
            call = partial(getattr(host, method), *args, **kwargs)
            if profile is not None:
                from isoexec.adapters.demo.profiling import profiled

                kind, folder = profile
                call = partial(profiled, kind, folder / f"{name}-{method}-{kind}.txt", call)
            pipe.send(("ok", call()))
        except BaseException as error:  # noqa: BLE001 - whatever it was, the caller is told
            pipe.send(("error", type(error).__name__, str(error), traceback.format_exc()))
        if method == "close":
            sys.stdout.flush()
            return


@contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    """Add ``env`` to the environment for a child that is started inside; one thread at a time."""
    with _STARTING:
        kept = dict(os.environ)
        os.environ.update(env)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(kept)


class Remote:
    """One object ``target`` (``module:Class``) in a spawned process whose output goes to the file ``log``."""

    def __init__(
        self, name: str, target: str, *, env: Mapping[str, str], log: Path, arguments: Mapping[str, Any]
    ) -> None:
        self.name = name
        self.log = log
        self._pipe, child = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(
            target=_serve,
            args=(child, name, target, str(log), dict(arguments)),
            name=name,
            daemon=False,
        )
        with _environment(env):
            self.process.start()
        child.close()

    def wait_ready(self, timeout: float = _START_SECONDS) -> None:
        """Wait for the constructor; raises RemoteError with what it raised."""
        self._receive(timeout, "start")

    def start(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Begin a call; ``finish`` gives its result."""
        try:
            self._pipe.send((method, args, kwargs))
        except OSError as error:
            raise RemoteError(f"{self.name}.{method}", "process ended", f"see {self.log}") from error

    def finish(self, method: str = "", timeout: float = _CALL_SECONDS) -> Any:
        return self._receive(timeout, method)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.start(method, *args, **kwargs)
        return self.finish(method)

    def profile(self, kind: str | None, folder: Path) -> None:
        """Profile every call from now on into ``folder``, by one of `profiling.KINDS`; None ends it."""
        self.call(_PROFILE, None if kind is None else (kind, folder))

    def close(self) -> None:
        """Ask the object to close, then end its process, by force when it does not end by itself."""
        if self.process.is_alive():
            try:
                self.start("close")
                self.finish("close", 20.0)
            except RemoteError:
                pass
            self.process.join(10.0)
        for end in (self.process.terminate, self.process.kill):
            if self.process.is_alive():
                end()
                self.process.join(5.0)

    def _receive(self, timeout: float, method: str) -> Any:
        where = f"{self.name}.{method}" if method else self.name
        try:
            if not self._pipe.poll(timeout):
                raise RemoteError(where, "timeout", f"no answer in {timeout:.0f} s; see {self.log}")
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise RemoteError(where, "process ended", f"see {self.log}") from error
        if answer[0] == "error":
            raise RemoteError(where, answer[1], answer[2], answer[3])
        return answer[1]


def call_all(remotes: Sequence[Remote], method: str, *args: Any, **kwargs: Any) -> list[Any]:
    """Call a method of every object at once and give the results in order."""
    for remote in remotes:
        remote.start(method, *args, **kwargs)
    return [remote.finish(method) for remote in remotes]
