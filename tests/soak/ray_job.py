# SPDX-License-Identifier: Apache-2.0
"""A job on real Ray with the daemon as its named actor: watched, halted by a broken bit, its daemon killed and started again.

    PYTHONPATH=.src python tests/soak/ray_job.py      # needs ray and torch; starts a local cluster of its own, of two nodes

The ranks run on the node that the daemon is not on, with a state directory of their own; at the end it loses its node.

Prints what was stopped, what the driver saw, and after how long; exit code 1 where anything else happened.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from isoexec.contracts import wire
from isoexec.contracts.errors import HaltedError
from isoexec.contracts.ray import RayName, ray
from isoexec.contracts.schema import Contract, library
from isoexec.probes.client import Client, ProbeSettings

ADDRESS, ELSEWHERE = "ray://isoexec/daemon", "ray://isoexec/elsewhere"
SETTINGS: dict[str, Any] = {
    "http_port": 0,
    "settle_seconds": 0.5,
    "window_seconds": 30.0,
    "quiet_seconds": 0.1,
}
CASES = {"engine": "engine_decode", "trainer": "trainer_score"}


class Rank:
    """One process of the job; the trainer holds the guard."""

    def __init__(self, run: str, role: str, state_dir: str, policy: str, address: str) -> None:
        settings = ProbeSettings(
            run=run,
            state_dir=Path(state_dir),
            regime="bitwise",
            policy=policy,
            contract=Contract.load(library("qwen3-dense-cpu")),
            address=RayName.parse(address, "soak"),
        )
        self.role = role
        self.client = Client(settings, role, versions={})
        self.client.connect(timeout=60)
        self.guard: Any = None
        if role == "trainer":
            from isoexec.probes.guard import Guard

            self.guard = Guard(settings)

    def step(self, step: int, *, broken: bool = False) -> tuple[int, int, float]:
        """One step; what the client sent and dropped, and the seconds that the guard took."""
        begun = time.perf_counter()
        if self.guard is not None:
            self.guard.check(step)
        asked = time.perf_counter() - begun
        rng = np.random.default_rng(step)
        ids = rng.integers(0, 1000, (32, 16), dtype="<i4")
        logprobs = -rng.random(ids.size).astype("<f4")
        if broken and self.role == "trainer":
            logprobs.view("<i4")[5] ^= 1
        self.client.send(
            wire.Logprobs,
            case=CASES[self.role],
            step=step,
            weight_version=step,
            digests=np.frombuffer(b"".join(xxhash.xxh3_128_digest(r.tobytes()) for r in ids), "|u1").reshape(
                -1, 16
            ),
            lengths=np.full(len(ids), 16, "<i4"),
            starts=np.zeros(len(ids), "<i4"),
            logprobs=logprobs,
            tokens=ids.reshape(-1),
        )
        if self.role == "trainer":
            self.client.send(wire.Step, step=step, weight_version=step, seconds={"step": 1.0})
        self.client.flush(0.5)
        return self.client.stats.sent, self.client.stats.dropped, asked

    def end(self) -> None:
        self.client.close(10)


class Soak:
    def __init__(self, folder: Path, cluster: Any, other: Any) -> None:
        self.ray = ray()
        self.folder, self.cluster, self.other = folder, cluster, other
        self.wrong: list[str] = []
        self.rank = self.ray.remote(Rank)

    def make(self, run: str, role: str, policy: str, *, on: str = "other", address: str = ADDRESS) -> Any:
        state_dir = str(self.folder / "ranks")
        return self.rank.options(num_cpus=0, resources={on: 1}).remote(run, role, state_dir, policy, address)

    def job(self, run: str, policy: str, **where: str) -> dict[str, Any]:
        return {role: self.make(run, role, policy, **where) for role in CASES}

    def step(self, ranks: dict[str, Any], step: int, **how: Any) -> list[Any]:
        return list(self.ray.get([one.step.remote(step, **how) for one in ranks.values()]))

    def run_until(
        self, ranks: dict[str, Any], first: int, seconds: float, **how: Any
    ) -> tuple[int, BaseException | None]:
        """Step until the driver is told to halt; the last step begun."""
        deadline, step = time.monotonic() + seconds, first
        while time.monotonic() < deadline:
            try:
                self.step(ranks, step, **how)
            except self.ray.exceptions.RayTaskError as error:
                return step, error.cause
            step += 1
            time.sleep(0.1)
        return step, None

    def expect(self, what: str, found: bool, told: str) -> None:
        print(f"{'ok  ' if found else 'FAIL'} {what}: {told}", flush=True)
        if not found:
            self.wrong.append(what)

    def standing(self, run: str) -> Any:
        from isoexec.contracts.shards import Standing

        with contextlib.suppress(self.ray.exceptions.RayError, ValueError):
            actor = self.ray.get_actor("daemon", namespace="isoexec")
            raw = self.ray.get(actor.standing.remote(run), timeout=1.0)
            return Standing.decode(raw).state if raw is not None else None
        return None

    def restart(self, actor: Any, policy: str) -> None:
        """Kill the actor and go on; with fail_closed, if Ray starts it again before the guard gives it up."""
        run = f"restarted-{policy}"
        ranks = self.job(run, policy)
        for step in range(10):
            self.step(ranks, step)
            time.sleep(0.1)
        self.ray.kill(actor, no_restart=False)
        killed = time.perf_counter()
        back = 0.0
        for step in range(10, 200):
            try:
                self.step(ranks, step)
            except self.ray.exceptions.RayTaskError as error:
                # Ray took longer than a guard holds a verdict
                late = policy == "fail_closed" and "lease_lost" in str(error.cause)
                self.expect(f"the actor is killed, {policy}: halted", late, f"step {step}: {error.cause}")
                return
            time.sleep(0.1)
            if not back and self.standing(run) is not None:
                back = time.perf_counter() - killed
            if back and time.perf_counter() - killed > back + 10:
                break
        told = f"the actor says something again {back:.1f} s after the kill; the job is at step {step}"
        self.expect(f"the actor is killed, {policy}: the job goes on", bool(back), told)
        dropped = [one[1] for one in self.step(ranks, step + 1)]
        told = f"dropped {dropped}, the run is {self.standing(run)!r}"
        self.expect("nothing dropped meanwhile", dropped == [0, 0], told)
        for rank in ranks.values():
            self.ray.get(rank.end.remote())

    def go(self) -> None:
        from isoexec.daemon.ray_actor import launch

        begun = time.perf_counter()
        actor = launch(ADDRESS, state_dir=self.folder / "state", **SETTINGS)
        print(f"daemon's actor ready after {time.perf_counter() - begun:.1f} s", flush=True)

        ranks = self.job("bits", "fail_open")
        rows = [self.step(ranks, step) for step in range(50)]
        asked = sorted(row[1][2] for row in rows[5:])
        told = f"50 steps, asking took {1e3 * asked[len(asked) // 2]:.2f} ms (median)"
        self.expect("watched", all(one[1] == 0 for one in rows[-1]), told)
        broken_at = time.perf_counter()
        step, cause = self.run_until(ranks, 50, 60, broken=True)
        told = f"step {step}, {time.perf_counter() - broken_at:.2f} s: {cause}"
        self.expect("a broken bit halts at the driver", isinstance(cause, HaltedError), told)
        try:
            self.ray.get(self.make("bits", "engine", "fail_open").end.remote())
            again = "it started"
        except self.ray.exceptions.RayError as error:
            again = str(error).splitlines()[-1][:160]
        self.expect("a halted run does not start again", "was halted" in again, again)

        for policy in ("fail_open", "fail_closed"):
            self.restart(actor, policy)

        self.lost(
            "the actor is gone for good",
            self.job("gone", "fail_closed"),
            lambda: self.ray.kill(self.ray.get_actor("daemon", namespace="isoexec"), no_restart=True),
        )
        node = self.other.node_id
        launch(ELSEWHERE, node=node, state_dir=self.folder / "elsewhere", **SETTINGS)
        self.lost(
            "the actor's node is gone",
            self.job("node", "fail_closed", on="head", address=ELSEWHERE),
            lambda: self.cluster.remove_node(self.other),
        )

    def lost(self, what: str, ranks: dict[str, Any], strike: Callable[[], object]) -> None:
        """See that a run that fails closed halts once its daemon is lost."""
        self.step(ranks, 0)
        strike()
        struck = time.perf_counter()
        step, cause = self.run_until(ranks, 1, 60)
        self.expect(
            f"{what}, fail_closed",
            isinstance(cause, HaltedError) and "lease_lost" in str(cause),
            f"step {step}, {time.perf_counter() - struck:.2f} s: {cause}",
        )


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory(prefix="isoexec-ray-") as folder:
        # Ray writes a token under the home directory, which later clusters of the user would ask for
        os.environ.update(HOME=folder, RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0")
        module = ray()
        cluster_class = import_module("ray.cluster_utils").Cluster
        node = {"num_cpus": 2, "object_store_memory": 100 << 20}
        cluster = cluster_class(
            initialize_head=True,
            head_node_args=node | {"resources": {"head": 10}, "include_dashboard": False},
        )
        other = cluster.add_node(**node, resources={"other": 10})
        module.init(address=cluster.address, log_to_driver=False)
        soak = Soak(Path(folder), cluster, other)
        try:
            soak.go()
        finally:
            module.shutdown()
            cluster.shutdown()
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
