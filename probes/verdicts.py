# SPDX-License-Identifier: Apache-2.0
"""Where a guard reads what the daemon says of its run: a page of this host, a key of a NATS bucket, or a Ray actor.

Another host's clock says nothing here: a verdict holds for `TTL_SECONDS` of this host's clock after it was asked for and found
renewed. What is older, or cannot be had, is unknown.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

from isoexec.contracts.broker import Broker
from isoexec.contracts.halting import Lease, LeaseError, LeasePage, LeaseState, StateDirectory
from isoexec.contracts.ray import RayName, joined
from isoexec.contracts.shards import BEAT_SECONDS, TTL_SECONDS, Standing, verdict_key
from isoexec.probes.client import ProbeSettings
from isoexec.probes.nats_link import BrokerThread
from isoexec.probes.ray_link import ActorCalls

__all__ = ["NatsVerdict", "RayVerdict", "VerdictSource", "open_verdict"]

_ASK_SECONDS = 1.0
_FIRST_SECONDS = 10.0


class VerdictSource(Protocol):
    """What a guard asks at each step."""

    def fine(self) -> bool:
        """Whether the verdict is ok or warn and holds now."""

    def read(self) -> Lease:
        """Give the verdict; what does not hold is not alive."""


def open_verdict(settings: ProbeSettings) -> VerdictSource:
    """Give the run's verdict. Raises LeaseError where nothing was ever said of the run."""
    if isinstance(settings.address, Broker):
        return NatsVerdict(settings.address, settings.run)
    if isinstance(settings.address, RayName):
        return RayVerdict(settings.address, settings.run)
    return LeasePage.open(StateDirectory(settings.state_dir).run(settings.run).lease)


def _lease(standing: Standing | None, at: float, why: str) -> Lease:
    known = standing or Standing(state=LeaseState.UNKNOWN, cause=why)
    return Lease(
        state=known.state,
        policy=known.policy,
        deadline_ns=int((at + TTL_SECONDS) * 1e9),
        step=known.step,
        rule=known.rule,
        cause=known.cause,
        alive=standing is not None and time.monotonic() - at <= TTL_SECONDS,
    )


class _Asked:
    """A verdict that a thread asks for every half second: the step reads memory. Raises LeaseError where there is none."""

    def __init__(self, where: str, run: str, hint: str) -> None:
        self._last: tuple[Standing, float] | None = None
        self._why = "nothing was read yet"
        self._stop = threading.Event()
        self._first = threading.Event()
        self._reader = threading.Thread(target=self._run, name="isoexec-verdict", daemon=True)
        self._reader.start()
        if not self._first.wait(_FIRST_SECONDS):
            self.close()
            raise LeaseError(
                f"wanted a verdict of run {run} at {where}, found none in {_FIRST_SECONDS:.0f} s ({self._why}); {hint}"
            )

    def fine(self) -> bool:
        last = self._last
        return (
            last is not None
            and last[0].state in (LeaseState.OK, LeaseState.WARN)
            and time.monotonic() - last[1] <= TTL_SECONDS
        )

    def read(self) -> Lease:
        last = self._last
        return _lease(last[0], last[1], "") if last is not None else _lease(None, 0.0, self._why)

    def close(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            asked = time.monotonic()
            try:
                if (found := self._ask()) is not None:
                    self._last = (found, asked)
                    self._first.set()
            except Exception as error:  # noqa: BLE001 - whatever it is, the verdict grows old and is unknown
                self._why = str(error) or repr(error)
            self._stop.wait(BEAT_SECONDS)

    def _ask(self) -> Standing | None:
        """Give what is said now; None where nobody has renewed it. Raises whatever it likes."""
        raise NotImplementedError


class NatsVerdict(_Asked):
    """The verdict's key in the bucket."""

    def __init__(self, broker: Broker, run: str) -> None:
        self._broker = broker
        self._key = verdict_key(run)
        self._thread = BrokerThread(broker, f"guard of {run}")
        self._revision = -1
        super().__init__(str(broker), run, "do the shards run, and has this run said hello?")

    def close(self) -> None:
        super().close()
        self._thread.close()

    def _ask(self) -> Standing | None:
        revision, raw = self._thread.call(self._get(), 2 * _ASK_SECONDS)
        if revision == self._revision:
            return None
        found = Standing.decode(raw)
        self._revision = revision
        return found

    async def _get(self) -> tuple[int, bytes]:
        client = await self._thread.client(_ASK_SECONDS)
        bucket = await self._bucket(client)
        entry = await bucket.get(self._key)
        return entry.revision, entry.value

    async def _bucket(self, client: Any) -> Any:
        found = getattr(self, "_known", None)
        if found is None or found[0] is not client:
            stream = client.jetstream(timeout=_ASK_SECONDS)
            found = self._known = (client, await stream.key_value(self._broker.name))
        return found[1]


class RayVerdict(_Asked):
    """The daemon's actor: that it answers is what renews its word."""

    def __init__(self, address: RayName, run: str) -> None:
        joined(address)  # refused at once, and not found to be silent
        self._calls = ActorCalls(address)
        self._name = run
        super().__init__(str(address), run, "does the daemon's actor run, and has this run said hello?")

    def _ask(self) -> Standing | None:
        raw = self._calls.call("standing", self._name, timeout=_ASK_SECONDS)
        if raw is None:
            raise LeaseError(f"the actor watches no run {self._name}")
        return Standing.decode(raw)
