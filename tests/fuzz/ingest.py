# SPDX-License-Identifier: Apache-2.0
"""Fuzz the daemon's two doors: frames on its socket and requests to its HTTP side, by a seeded mutator of bytes.

`python tests/fuzz/ingest.py [--count N] [--seed N] [--door frames|http|reader|all]`; the suite runs a small count. `corpus/`
holds inputs that once broke something, of which mutation starts too. Doors:

- `reader`: frames straight into `FrameReader`, in random pieces: it ends in messages or in a WireError, nothing else;
- `frames`: the same into a real daemon's socket, after a good hello and without one: every stream that broke the protocol is
  closed and counted in `isoexec_decode_errors_total`, exactly once; the daemon lives and its log has no traceback;
- `http`: raw bytes to its HTTP port: whatever comes back is a status below 500, or the stream is closed.

After all of it a good peer still gets its welcome, a scrape is well formed, and resident memory of the process behind the door is
what it was after the first tenth of the inputs, but for 16 MiB. Prints counts; exit code 1 on the first failure,
whose input is written to `corpus/` under its digest.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import xxhash
from prometheus_client.parser import text_string_to_metric_families

from isoexec.contracts import sockets, wire
from isoexec.contracts.errors import WireError

CORPUS = Path(__file__).parent / "corpus"
WORDS = [
    b"\x00", b"\xff", b"\xc1", b"IXF1", b"\x7f\xff\xff\xff", b"\xff" * 8, b"\x80" * 4, b"\xcb\x7f\xf8" + bytes(6), b"\r\n",
    b"\r\n\r\n",     b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xd9\xff",
    b"\x91" * 600, b"%00", b"%ff", b"..%2f", b"Host: a\r\n",
    b"Content-Length: 99999999999999999999\r\n", b"Transfer-Encoding: chunked\r\n", b"?limit=" + b"9" * 5000, b"\xc7\x08\xff",
]  # fmt: skip
GOOD: dict[str, Any] = {"run": "fuzz", "source": "host:1:engine0"}


class BrokenError(Exception):
    """Something that must not happen did."""


def frame(message: wire.Message) -> bytes:
    return b"".join(map(bytes, wire.encode_frame(message)))


def seeds() -> dict[str, list[bytes]]:
    """Good inputs of both doors, and the corpus."""
    one: dict[str, Any] = {"role": "engine", "seq": 1, "time": 1.0, **GOOD}
    two = np.ones(2, np.int32)
    messages: list[wire.Message] = [
        wire.Logprobs(**one, case="engine_decode", step=1, weight_version=1, digests=np.zeros((2, 16), np.uint8),
                      lengths=two, starts=two, logprobs=np.zeros(2, np.float32), tokens=two),
        wire.Step(**one, step=1, seconds={"step": 1.0}, values={"loss": float("nan")}),
        wire.Weights(**one, weight_version=1, step=1, tensors={"w": (1, 2)}, numel={"w": 1}, total={"w": 1}),
        wire.Probe(**one, sent=1, dropped=0),
        wire.Attestation(**one, reason="sync", step=1, weight_version=1, topology={"TP": 1}),
        wire.Hello(**one, regime="bitwise", monitor_only=True),
        wire.Bye(**one),
    ]  # fmt: skip
    paths = ["/", "/metrics", "/healthz", "/readyz", "/api/v1/runs", "/api/v1/runs/fuzz", "/runs/fuzz",
             "/api/v1/runs/fuzz/windows?limit=3", "/api/v1/runs/fuzz/verdicts?outcome=pass"]  # fmt: skip
    requests = [
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode() for path in paths
    ]
    kept = {kind: [p.read_bytes() for p in sorted(CORPUS.glob(f"{kind}-*"))] for kind in ("frames", "http")}
    return {"frames": [frame(m) for m in messages] + kept["frames"], "http": requests + kept["http"]}


def mutate(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Change some bytes, or some of what a frame's header says, which a change of bytes rarely gets right."""
    if data[:4] == wire.MAGIC and rng.random() < 0.4:
        data = mutate_header(data, rng)
    out = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(6):
            case 0:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                out[at:at] = rng.choice(WORDS)
            case 2:
                del out[at : at + rng.choice((1, 4, 64))]
            case 3:
                out[at : at + 4] = struct.pack(
                    "<I", rng.choice((0, 1, 255, 1 << 16, 1 << 20, 1 << 31, (1 << 32) - 1))
                )
            case 4:
                out += rng.choice(others)
            case _:
                out[at:at] = out[: rng.randrange(64)]
    return bytes(out[: 1 << 20])


def mutate_header(data: bytes, rng: random.Random) -> bytes:
    try:
        _, size, _ = struct.unpack_from("<4sII", data)
        header = msgpack.unpackb(data[12 : 12 + size], strict_map_key=False)
        key = rng.choice(list(header))
    except (struct.error, ValueError, msgpack.exceptions.UnpackException, TypeError, IndexError):
        return data
    values: list[Any] = [None, -1, 1 << 63, 0.5, float("nan"), "", "x" * 600, "a\nb", [], {}, True, [[]], {"": None},
              b"\xff", 1 << 53,
              -(1 << 53),               [["logprobs", "<f4", [1 << 40, 1 << 40]]],
              {"a": {"b": [1] * 50}}, "fuzz2", "../x"]  # fmt: skip
    if rng.random() < 0.2:
        del header[key]
    else:
        header[key] = rng.choice(values)
    packed = msgpack.packb(header)
    body = data[12 + size :]
    return struct.pack("<4sII", wire.MAGIC, len(packed), len(body)) + packed + body


def reader(data: bytes, rng: random.Random) -> str:
    """Read one stream in pieces; what became of it."""
    frames, at = wire.FrameReader(), 0
    try:
        while at < len(data):
            step = rng.choice((1, 7, 64, 4096, 1 << 20))
            for message in frames.feed_each(data[at : at + step]):
                message.header()
            at += step
    except WireError:
        return "refused"
    except Exception as error:
        raise BrokenError(f"FrameReader: {error!r}") from error
    return "cut" if frames.pending else "read"


class Daemon:
    """A real daemon in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        code = "import sys; from isoexec.daemon.cli import run; sys.exit(run())"
        (folder / "settings.yaml").write_text("frames_per_second: 1000000\nmax_open_steps: 64\n")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, "--state-dir", str(folder), "--http", "127.0.0.1:0", "--log", "json",
             "--config", str(folder / "settings.yaml")],
            stdout=subprocess.PIPE, stderr=(folder / "daemon.log").open("w"), text=True,
        )  # fmt: skip
        line = self.process.stdout.readline() if self.process.stdout else ""
        self.address = line.removeprefix("isoexec daemon: ").split(",")[0]
        self.port = int(self.address.rpartition(":")[2])

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(self.address + "/metrics", timeout=60) as answer:  # noqa: S310
            text = answer.read().decode()
        return {
            s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples if not s.labels
        }

    def warm(self) -> None:
        """What takes statistics is loaded with the first logprobs: before memory is looked at."""
        with greet(self.folder, **GOOD) or contextlib.nullcontext() as stream:
            if stream is None:
                raise BrokenError("a good hello was not answered")
            stream.sendall(seeds()["frames"][0])
        self.check()

    def check(self) -> None:
        """It lives, takes a good peer, and wrote no traceback."""
        if self.process.poll() is not None:
            raise BrokenError(f"the daemon ended with {self.process.returncode}")
        log = (self.folder / "daemon.log").read_text()
        if "Traceback" in log or "message failed" in log:
            raise BrokenError("traceback in the log: " + log[max(0, log.find("Traceback") - 200) :][:3000])
        answer = greet(self.folder, run="good", source=f"host:{time.monotonic_ns()}:0")
        if answer is None:
            raise BrokenError("a good hello was not answered")
        answer.close()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def greet(folder: Path, **names: Any) -> socket.socket | None:
    """A stream that was welcomed, or answered at least; None where it was closed."""
    stream = sockets.connect(folder)
    stream.sendall(frame(wire.Hello(role="engine", regime="bf16_dense", monitor_only=True, **names)))
    return stream if stream.recv(65536) else None


def frames(daemon: Daemon, data: bytes, rng: random.Random) -> str:
    """One stream to the daemon; whether it was closed before its end, which it must be if `FrameReader` refuses it."""
    greeted = rng.random() < 0.7
    stream = greet(daemon.folder, **GOOD) if greeted else sockets.connect(daemon.folder)
    if stream is None:
        raise BrokenError("a good hello was not answered")
    with stream, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.sendall(data)
        stream.shutdown(socket.SHUT_WR)
        stream.settimeout(20)
        try:
            while stream.recv(65536):
                pass
        except TimeoutError as error:
            raise BrokenError("a stream that ended is not closed") from error
    return "after hello" if greeted else "without hello"


def http(daemon: Daemon, data: bytes, rng: random.Random) -> str:
    """One request; its status."""
    with socket.create_connection(("127.0.0.1", daemon.port), 20) as stream:
        answer = b""
        with contextlib.suppress(ConnectionError):
            stream.sendall(data)
            stream.shutdown(socket.SHUT_WR)
            stream.settimeout(20)
            try:
                while part := stream.recv(65536):
                    answer += part
            except TimeoutError as error:
                raise BrokenError("a request that ended is not answered") from error
    if not answer:
        return "closed"
    status = answer.split(b" ", 2)[1].decode("ascii", "replace") if answer.startswith(b"HTTP/1.1 ") else "?"
    if not status.isdecimal() or int(status) >= 500:
        raise BrokenError(f"answered {answer[:200]!r}")
    return status


def resident_mib(pid: int | str) -> int:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmRSS:"))


def keep(kind: str, data: bytes) -> Path:
    path = CORPUS / f"{kind}-{xxhash.xxh3_64_hexdigest(data)}"
    path.write_bytes(data)
    return path


def fuzz(door: str, count: int, seed: int) -> Counter[str]:
    """Put `count` inputs to a door. Raises BrokenError, the input kept."""
    rng = random.Random(seed)  # noqa: S311
    kind = "http" if door == "http" else "frames"
    bases = seeds()[kind]
    found: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        daemon: Daemon | None = None
        put: Callable[[bytes], str] = lambda data: reader(data, rng)  # noqa: E731
        if door != "reader":
            daemon = Daemon(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isoexec-fuzz-"))))
            stack.callback(daemon.close)
            one, to = daemon, http if door == "http" else frames
            put = lambda data: to(one, data, rng)  # noqa: E731
            daemon.warm()
        refused, process = 0, daemon.process.pid if daemon is not None else "self"
        for number in range(count):
            # each base as it is, then mutations
            data = bases[number] if number < len(bases) else mutate(rng.choice(bases), bases, rng)
            try:
                found[put(data)] += 1
                if daemon is not None and (number % 500 == 499 or number == count - 1):
                    daemon.check()
            except (BrokenError, OSError) as error:
                raise BrokenError(
                    f"{door} {number} of seed {seed}: {error}; kept as {keep(kind, data)}"
                ) from error
            if number == count // 10:
                found["mib_before"] = resident_mib(process)
            if door == "frames":
                refused += reader(data, random.Random(0)) != "read"  # noqa: S311
        found["mib_after"] = resident_mib(process)
        if found["mib_after"] > found["mib_before"] + 16:
            raise BrokenError(f"memory grew from {found['mib_before']} to {found['mib_after']} MiB")
        if door == "frames" and daemon is not None:
            counted = int(daemon.metrics()["isoexec_decode_errors_total"])
            # beside what no reader takes, the daemon refuses good frames out of place, each at the cost of its stream
            if not refused <= counted <= count:
                raise BrokenError(f"{refused} streams were malformed, {counted} were counted")
            found["malformed"], found["counted"] = refused, counted
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--door", choices=("reader", "frames", "http", "all"), default="all")
    chosen = parser.parse_args()
    for door in ("reader", "frames", "http") if chosen.door == "all" else (chosen.door,):
        start = time.monotonic()
        try:
            found = fuzz(door, chosen.count, chosen.seed)
        except BrokenError as error:
            print(f"BROKEN {error}")
            return 1
        rate = chosen.count / (time.monotonic() - start)
        print(f"{door}: {chosen.count} inputs, {rate:.0f}/s: {dict(sorted(found.items()))}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
