# SPDX-License-Identifier: Apache-2.0
"""A job whose daemon is a named Ray actor: watched, halted, and what follows when the actor dies.

The same test runs on real Ray where it is installed (`pip install 'isoexec[ray]'`), and everywhere on a stand-in for the few
calls of Ray that are used, under which the real actor runs on a loop of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from isoexec.contracts import wire
from isoexec.contracts.errors import HaltedError, HandshakeError
from isoexec.contracts.halting import LeaseState
from isoexec.contracts.ray import RayError, RayName
from isoexec.contracts.schema import Contract, library
from isoexec.daemon.ray_actor import launch, stop
from isoexec.probes import verdicts
from isoexec.probes.client import Client, ProbeSettings
from isoexec.probes.guard import Guard

ADDRESS = "ray://isoexec/daemon"
DEGREES = {"TP": 2, "SP": 1, "PP": 1, "CP": 1, "EP": 1, "ETP": 1, "DP": 1}


class StandIn(ModuleType):
    """One actor at a time, of which every method is a coroutine; `kill` is a death without a word."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = SimpleNamespace(RayError=type("RayError", (Exception,), {}))
        self.util = ModuleType("ray.util")
        strategies = ModuleType("ray.util.scheduling_strategies")
        strategies.NodeAffinitySchedulingStrategy = lambda *_, **__: None  # type: ignore[attr-defined]
        self.parts = {"ray": self, "ray.util": self.util, "ray.util.scheduling_strategies": strategies}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.named: Any = None

    def is_initialized(self) -> bool:
        return True

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "node")

    def remote(self, kind: Any) -> Any:
        def make(*values: Any) -> Any:
            self.named = Handle(self, lambda: kind(*values))
            return self.named

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make))

    def get_actor(self, name: str, namespace: str) -> Any:
        if self.named is None:
            raise ValueError(f"no actor {name} in {namespace}")
        return self.named

    def get(self, call: Future[Any], timeout: float) -> Any:
        try:
            return call.result(timeout)
        except FutureTimeoutError as error:
            raise self.exceptions.RayError("no answer") from error
        except Exception as error:
            failed = self.exceptions.RayError(str(error))
            failed.cause = error
            raise failed from error

    def kill(self, actor: Any, *, no_restart: bool) -> None:
        asyncio.run_coroutine_threadsafe(actor.die(), self.loop).result(30)
        if no_restart:
            self.named = None

    def shutdown(self) -> None:
        if self.named is not None:
            self.kill(self.named, no_restart=True)
        self.loop.call_soon_threadsafe(self.loop.stop)


class Handle:
    def __init__(self, ray: StandIn, make: Callable[[], Any]) -> None:
        self._ray, self._make, self._actor = ray, make, make()

    async def die(self) -> None:
        before, self._actor = self._actor, self._make()
        if before._running is not None:
            with contextlib.suppress(Exception):
                await before._running.close()

    def __getattr__(self, method: str) -> Any:
        def call(*values: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(getattr(self._actor, method)(*values), self._ray.loop)

        return SimpleNamespace(remote=call)


@pytest.fixture(params=["stand-in", "ray"])
def ray(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Ray, this process part of a cluster."""
    if request.param == "stand-in":
        found = StandIn()
        for name, part in found.parts.items():
            monkeypatch.setitem(sys.modules, name, part)
        yield found
        found.shutdown()
        return
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'isoexec[ray]'")
    # Ray keeps a token under the home directory, and starts its workers as scripts beside which they import
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield ray
    ray.shutdown()


def process(tmp_path: Path, run: str, role: str, policy: str) -> Client:
    settings = ProbeSettings(
        run=run,
        state_dir=tmp_path / "rank",
        regime="bitwise",
        policy=policy,
        contract=Contract.load(library("qwen3-dense-cpu")),
        address=RayName.parse(ADDRESS, "test"),
    )
    client = Client(settings, role, versions={})
    client.connect(timeout=60)
    return client


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_an_actor_watches_halts_and_is_unknown_when_it_dies(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match="no such actor"):
        Client(
            ProbeSettings(run="r", state_dir=tmp_path, address=RayName.parse(ADDRESS, "test")), "engine"
        ).connect(0)
    state = tmp_path / "state"
    actor = launch(ADDRESS, state_dir=state, http_port=0)
    with pytest.raises(RayError, match=r"settle_seconds: wanted 1.0, and the actor that is there has None"):
        launch(ADDRESS, state_dir=state, http_port=0, settle_seconds=1.0)

    engine = process(tmp_path, "bits", "engine", "fail_open")
    guard = Guard(engine.settings)
    guard.check(0)
    identities = engine.settings.contract.identities.to_dict()  # type: ignore[union-attr]
    engine.send(
        wire.Attestation, reason="sync", step=1, weight_version=1, topology=DEGREES | {"CP": 2},
        environment={"arch": "cpu"}, identities=identities,
    )  # fmt: skip
    until(lambda: guard._page.read().state is LeaseState.HALT, "no halt")
    saved: list[int] = []
    with pytest.raises(HaltedError, match="parallel degree") as halted:
        guard.check(1, checkpoint=lambda: saved.append(1))
    assert saved == [1]
    assert halted.value.marker.rule == "topology"  # type: ignore[attr-defined]
    engine.close()
    with pytest.raises(HandshakeError, match="was halted"):
        process(tmp_path, "bits", "engine", "fail_open")

    monkeypatch.setattr(verdicts, "TTL_SECONDS", 60.0)  # how long Ray takes to start it again is Ray's
    trainers = [process(tmp_path, run, "trainer", run) for run in ("fail_open", "fail_closed")]
    guards = [Guard(one.settings) for one in trainers]
    ray.kill(actor, no_restart=False)
    for trainer in trainers:
        sent = trainer.stats.sent
        trainer.send(wire.Step, step=1, weight_version=1, seconds={"step": 1.0})
        until(lambda t=trainer, n=sent: t.stats.sent > n, "the rank did not say hello again")  # type: ignore[misc]
    for one in guards:
        asked = one._page._last[1]  # type: ignore[attr-defined]
        until(lambda g=one, a=asked: g._page._last[1] > a, "no word after the restart")  # type: ignore[misc]
        one.check(2)
    assert [trainer.stats.dropped for trainer in trainers] == [0, 0]

    monkeypatch.setattr(verdicts, "TTL_SECONDS", 0.0)
    stop(ADDRESS)
    open_, closed = guards
    open_.check(3)
    with pytest.raises(HaltedError, match="stopped renewing") as lost:
        closed.check(3)
    assert lost.value.marker.rule == "lease_lost"  # type: ignore[attr-defined]
    with pytest.raises(RayError, match="no such actor"):
        stop(ADDRESS)
    for trainer in trainers:
        trainer.close(0.2)


def test_a_process_outside_a_cluster_is_told_to_join_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ISOEXEC_DAEMON", ADDRESS)
    monkeypatch.setenv("ISOEXEC_STATE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    settings = ProbeSettings.from_env()
    for use in (lambda: Client(settings, "engine").connect(), lambda: Guard(settings)):
        with pytest.raises(RayError, match=r"call ray\.init first"):
            use()
