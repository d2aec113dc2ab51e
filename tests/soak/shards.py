# SPDX-License-Identifier: Apache-2.0
"""Two shards behind a real nats-server while shards, server and links are stopped under a running job: what became of each token.

    PATH=.tools/usr/sbin:$PATH .venv-light/bin/python tests/soak/shards.py --seconds 30

Root, since links are cut between network namespaces of its own (`ip netns`, a veth pair each). Per event: when the verdict was
unknown, when it stood again, what the clients sent and dropped, and what the journals of the shards count. Exit code 1 where a
token is nowhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import yaml

from isoexec.contracts import wire
from isoexec.contracts.broker import Broker
from isoexec.probes.client import Client, ProbeSettings
from isoexec.probes.verdicts import NatsVerdict

CASES = {"engine": "engine_decode", "trainer": "trainer_score"}
ROWS, LENGTH = 32, 64
STEP_SECONDS = 0.25
SHARDS = 2
SETTINGS = {
    "settle_seconds": 5.0, "quiet_seconds": 0.2, "window_seconds": 60.0, "nats_ack_seconds": 5.0, "shards": SHARDS,
}  # fmt: skip


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Room:
    """A network namespace with one link to the server's host."""

    def __init__(self, number: int) -> None:
        self.name, self.link = f"isoexec{number}", f"isoexec{number}v"
        self.server = f"10.231.{number}.1"
        with contextlib.suppress(subprocess.CalledProcessError):
            subprocess.run(["ip", "netns", "del", self.name], check=True, stderr=subprocess.DEVNULL)
        ip("netns", "add", self.name)
        ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("addr", "add", f"{self.server}/24", "dev", self.link)
        ip("link", "set", self.link, "up")
        ip("-n", self.name, "addr", "add", f"10.231.{number}.2/24", "dev", "eth0")
        for link in ("eth0", "lo"):
            ip("-n", self.name, "link", "set", link, "up")

    def cut(self) -> None:
        ip("link", "set", self.link, "down")

    def mend(self) -> None:
        ip("link", "set", self.link, "up")

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def close(self) -> None:
        subprocess.run(["ip", "netns", "del", self.name], check=False)


class World:
    """The server and the shards, each in a room."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.rooms = [Room(number) for number in range(SHARDS + 1)]  # the last is the job's
        self.server = self.start_server()
        self.shards = [self.start_shard(number) for number in range(SHARDS)]

    def start_server(self) -> subprocess.Popen[bytes]:
        words = ["nats-server", "-js", "-sd", str(self.folder / "store"), "-p", str(self.port)]
        with (self.folder / "server.log").open("ab") as log:
            return subprocess.Popen(words, stderr=log)

    def start_shard(self, number: int) -> subprocess.Popen[str]:
        state = self.folder / f"shard{number}"
        state.mkdir(exist_ok=True)
        address = f"nats://{self.rooms[number].server}:{self.port}/soak"
        (state / "settings.yaml").write_text(yaml.safe_dump({**SETTINGS, "nats": address, "shard": number}))
        code = "import sys; from isoexec.daemon.cli import run; sys.exit(run())"
        with (state / "log").open("ab") as log:
            process = subprocess.Popen(
                self.rooms[number].command(
                    sys.executable, "-P", "-c", code, "--state-dir", str(state), "--http", "127.0.0.1:0",
                    "--config", str(state / "settings.yaml"),
                ),
                stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        if process.stdout is None or not process.stdout.readline().startswith("isoexec daemon"):
            raise RuntimeError((state / "log").read_text()[-2000:])
        return process

    def close(self) -> None:
        processes: list[subprocess.Popen[Any]] = [*self.shards, self.server]
        for process in processes:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in processes:
            process.wait(60)
        for room in self.rooms:
            room.close()


def message(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    ids = rng.integers(0, 150_000, (ROWS, LENGTH), dtype="<i4")
    return {
        "digests": np.frombuffer(
            b"".join(xxhash.xxh3_128_digest(row.tobytes()) for row in ids), "|u1"
        ).reshape(-1, 16),
        "lengths": np.full(ROWS, LENGTH, "<i4"),
        "starts": np.zeros(ROWS, "<i4"),
        "logprobs": -rng.exponential(1.0, ids.size).astype("<f4"),
        "tokens": ids.reshape(-1),
    }


def job(run: str, address: Broker, seconds: float, capacity: int) -> None:
    """One run, in a process of the job's room: its account goes to stdout as JSON."""
    settings = ProbeSettings(run=run, state_dir=Path(), address=address)
    clients = {role: Client(settings, role, versions={}, capacity=capacity) for role in CASES}
    for client in clients.values():
        client.connect(timeout=60)
    verdict = NatsVerdict(address, run)
    seen: list[tuple[float, str]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            lease = verdict.read()
            state = f"{lease.state.name.lower()}{'' if lease.alive else ' (old)'}"
            if not seen or seen[-1][1] != state:
                seen.append((time.time(), state))

    watcher = threading.Thread(target=watch)
    watcher.start()
    print("started", flush=True)
    sent, longest = dict.fromkeys(CASES, 0), 0.0
    step, deadline = 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        following = time.monotonic() + STEP_SECONDS
        fields = message(step)
        for role, client in clients.items():
            begun = time.perf_counter()
            kept = client.send(wire.Logprobs, case=CASES[role], step=step, weight_version=step, **fields)
            longest = max(longest, time.perf_counter() - begun)
            sent[role] += ROWS * LENGTH * kept
        clients["trainer"].send(wire.Step, step=step, weight_version=step, seconds={"step": STEP_SECONDS})
        step += 1
        time.sleep(max(0.0, following - time.monotonic()))
    done.set()
    watcher.join()
    for client in clients.values():
        client.flush(120)
        client.close(120)
    told = {
        "steps": step, "tokens": sent, "seen": seen, "longest_send_ms": 1e3 * longest,
        "messages": sum(client.stats.sent for client in clients.values()),
        "dropped": {role: client.stats.dropped for role, client in clients.items()},
    }  # fmt: skip
    print(json.dumps(told), flush=True)
    verdict.close()


def journal(world: World, run: str) -> dict[str, Any]:
    """What both shards count of a run."""
    found: dict[str, Any] = {"paired": 0, "engine": 0, "trainer": 0, "dropped": []}
    for number in range(SHARDS):
        with contextlib.closing(
            sqlite3.connect(world.folder / f"shard{number}" / "journal.sqlite")
        ) as database:
            rows = database.execute("SELECT data FROM windows WHERE run = ? ORDER BY id", (run,)).fetchall()
        windows = [json.loads(row[0]) for row in rows]
        for pair in (pair for window in windows for pair in window["pairs"]):
            found["paired"] += pair["tokens"]
            for role, tokens in pair["unpaired"].items():
                found[role] += tokens
        found["dropped"].append(sum(window["dropped"] for window in windows))
    return found


Event = tuple[str, Callable[[], None], Callable[[], None], int]
"""Name, how something is stopped, how it is mended, messages in each client's queue."""


def play(world: World, event: Event, seconds: float, down: float) -> list[str]:
    """One event under a run of its own; prints its row and gives what does not add up."""
    name, stop, mend, capacity = event
    room = world.rooms[-1]
    run = name.replace(" ", "-")
    process = subprocess.Popen(
        room.command(
            sys.executable, "-P", __file__, "--job", run, "--address", f"{room.server}:{world.port}",
            "--seconds", str(seconds), "--capacity", str(capacity),
        ),
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    if process.stdout is None or process.stdout.readline() != "started\n":
        raise RuntimeError(f"{name}: the job did not start")
    time.sleep(seconds / 4)
    stopped = time.time()
    stop()
    time.sleep(down)
    mended = time.time()
    mend()
    out, _ = process.communicate(timeout=400)
    told = json.loads(out.splitlines()[-1])
    wanted = told["tokens"]["engine"]
    deadline = time.monotonic() + 120
    while (found := journal(world, run))["paired"] + found["engine"] < wanted and time.monotonic() < deadline:
        time.sleep(0.5)
    time.sleep(1.0)
    found = journal(world, run)
    fine = ("ok", "warn")
    lost = [(at, state) for at, state in told["seen"] if at >= stopped and state not in fine]
    back = [at for at, state in told["seen"] if lost and at > lost[0][0] and state in fine]
    unknown = f"{lost[0][0] - stopped:.1f} s ({lost[0][1]})" if lost else "never"
    again = f"{back[0] - mended:.1f} s" if back else "not in the run" if lost else "-"
    print(
        f"| {name} | {down:.0f} s | {unknown} | {again} | {told['messages']} | {sum(told['dropped'].values())} "
        f"| {max(found['dropped'])} | {told['tokens']['engine']} + {told['tokens']['trainer']} | {found['paired']} "
        f"| {found['engine']} + {found['trainer']} | {told['longest_send_ms']:.1f} ms |",
        flush=True,
    )
    wrong = [
        f"{name}: {role}: {told['tokens'][role]} tokens sent, {found['paired']} paired + {found[role]} unpaired"
        for role in CASES
        if told["tokens"][role] != found["paired"] + found[role]
    ]
    if sum(told["dropped"].values()) != max(found["dropped"]):
        wrong.append(f"{name}: {told['dropped']} messages dropped, {found['dropped']} counted")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="of each event's run")
    parser.add_argument("--down", type=float, default=8.0, help="how long what is stopped stays so")
    parser.add_argument("--capacity", type=int, default=256, help="of each client's queue, messages")
    parser.add_argument("--only", default="", help="events whose name holds this")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.job:
        host, _, port = chosen.address.partition(":")
        job(chosen.job, Broker(host=host, port=int(port), name="soak"), chosen.seconds, chosen.capacity)
        return 0
    if os.geteuid():
        print("needs root, for network namespaces", file=sys.stderr)
        return 2
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="isoexec-shards-") as folder:
        world = World(Path(folder), 14223)

        def kill(number: int) -> Callable[[], None]:
            def now() -> None:
                world.shards[number].kill()  # the daemon itself: `ip netns exec` becomes it

            return now

        def restart(number: int) -> Callable[[], None]:
            def again() -> None:
                world.shards[number].wait()
                world.shards[number] = world.start_shard(number)

            return again

        def kill_server() -> None:
            world.server.kill()

        def server_again() -> None:
            world.server.wait()
            world.server = world.start_server()

        def signalled(number: int, what: signal.Signals) -> Callable[[], None]:
            return lambda: world.shards[number].send_signal(what)

        events: list[Event] = [
            ("shard that follows SIGKILL", kill(1), restart(1), chosen.capacity),
            ("shard that leads SIGKILL", kill(0), restart(0), chosen.capacity),
            ("shard SIGSTOP", signalled(1, signal.SIGSTOP), signalled(1, signal.SIGCONT), chosen.capacity),
            ("server SIGKILL", kill_server, server_again, chosen.capacity),
            ("server SIGKILL queue of 8", kill_server, server_again, 8),
            ("link of a shard cut", world.rooms[1].cut, world.rooms[1].mend, chosen.capacity),
            ("link of the job cut", world.rooms[-1].cut, world.rooms[-1].mend, chosen.capacity),
        ]
        print(
            "| stopped | for | verdict unknown after | stands again after | messages | dropped | counted | tokens sent, engine + "
            "trainer | paired | unpaired, engine + trainer | longest send |\n|" + "---|" * 11
        )
        try:
            for event in events:
                if chosen.only in event[0]:
                    wrong += play(world, event, chosen.seconds, chosen.down)
        finally:
            world.close()
            if wrong and os.environ.get("KEEP_LOGS"):
                for number in range(SHARDS):
                    sys.stderr.write((Path(folder) / f"shard{number}" / "log").read_text()[-8000:])
    for one in wrong:
        print(one)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
