# SPDX-License-Identifier: Apache-2.0
"""The daemon's settings: read from a YAML file and flags, unknown names refused, every bound in its unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from isoexec.contracts.broker import Broker
from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.shards import SHARDS_LIMIT
from isoexec.daemon.runtimes import Runtime

__all__ = ["Config", "ConfigError", "Escalation"]


_PATHS = (
    "state_dir", "rules", "http_token", "tcp_token", "tcp_certificate", "tcp_key", "nats_token", "nats_user", "nats_ca",
)  # fmt: skip


class ConfigError(IsoExecError):
    """A settings file or flag that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Escalation:
    """What follows a halt that the job does not heed. Off unless `enabled`; each stage is timed, counted and journaled."""

    enabled: bool = False
    cooperative_seconds: float = 120.0
    """How long the job has to stop by itself, checkpoint included."""
    terminate_seconds: float = 30.0
    """How long after SIGTERM."""
    runtimes: tuple[Runtime, ...] = ()
    """Runtimes that are asked next, each for the runs that it names."""
    runtime_seconds: float = 60.0
    """How long after they were asked."""
    kill_seconds: float = 10.0
    """How long after SIGKILL a process may take to be gone before that is reported."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that the daemon can be told. Times in seconds."""

    state_dir: Path
    http_host: str = "127.0.0.1"
    http_port: int = 9461
    http_hosts: tuple[str, ...] = ()
    """Names, beside the loopback ones, by which HTTP may be asked while it is bound to loopback."""
    http_token: Path | None = None
    """File of a token that HTTP asks of all but health checks, as `Authorization: Bearer`."""
    tcp_host: str | None = None
    """Address on which probes of other hosts are heard; None: unix socket only."""
    tcp_port: int = 9462
    tcp_token: Path | None = None
    """File of the token that those probes hold, mode 0600; needed with `tcp_host`."""
    tcp_certificate: Path | None = None
    """PEM file of a certificate chain: probes of other hosts speak TLS 1.3. Needs `tcp_key`."""
    tcp_key: Path | None = None
    nats: str | None = None
    """Address nats://HOST:PORT/NAME of a JetStream server: this daemon is a shard behind it."""
    nats_token: Path | None = None
    """File of the server's token, mode 0600."""
    nats_user: Path | None = None
    """File of user:password at the server, mode 0600."""
    nats_ca: Path | None = None
    """PEM file of the server's certificate authority; needed with nats+tls://."""
    nats_ack_seconds: float = 30.0
    """How long a frame may be held without a word before the server delivers it again: what a restart waits for."""
    nats_outstanding: int = 65536
    """Frames that may be delivered and not yet accounted for."""
    nats_bytes: int = 8 << 30
    """Size of the stream, if this shard makes it; a full one refuses, and the probes drop and count."""
    nats_replicas: int = 1
    """Servers that keep the stream and the bucket, if this shard makes them."""
    shard: int = 0
    """Which part of the sequences this daemon judges, from 0."""
    shards: int = 1
    """How many parts there are; the same at every shard."""
    max_connections: int = 4096
    """Streams of probes open at one time."""
    max_processes: int = 4096
    """Processes of one run, those that ended included."""
    max_open_steps: int = 1024
    """Steps of one run that are open at one time; a peer that opens more is cut off."""
    hello_seconds: float = 10.0
    """How long a new stream may take to prove its token, and then to say hello."""
    stall_seconds: float = 60.0
    """How long a stream may stand still inside a frame."""
    idle_seconds: float = 600.0
    """How long a stream may say nothing; probes report every two seconds. Its process is then no longer connected."""
    frames_per_second: float = 1000.0
    """Pace at which one stream is read, messages a second, with twice that at once."""
    bytes_per_second: float = float(512 << 20)
    """Pace at which one stream is read, bytes a second, with twice that at once."""
    waiting_bytes: int = 256 << 20
    """Bytes received and not yet processed, at most, over all streams; one stream has an eighth."""
    log: str = "console"
    settle_seconds: float = 2.0
    """How long a window waits for tokens that have no partner yet, once both sides have reported the step."""
    quiet_seconds: float = 0.2
    """How long nothing may have come for a step before it is judged complete."""
    window_seconds: float = 120.0
    """How long a finished step waits for a side that has said nothing before silence is judged."""
    silence_seconds: Mapping[str, float] = field(
        default_factory=lambda: {"engine": 1800.0, "trainer": 1800.0, "driver": 1800.0}
    )
    """Largest age of the last message of each rank of a role while its run lives; probes report every two seconds."""
    attestation_seconds: float = 900.0
    """Largest age of a process's last attestation when a window closes."""
    pending_seconds: float = 900.0
    """How long a sequence of no stated step waits for its partner."""
    lag_steps: int = 0
    """Steps by which training may lag behind generation; unpaired sequences are counted that much later."""
    pending_tokens: int = 8_000_000
    """Tokens that wait for a partner, at most, over all runs; the oldest go first and count as unpaired."""
    sample_tokens: int = 65_536
    """Raw pairs kept of one window for diagnosis."""
    sample_windows: int = 32
    """Windows of which raw pairs are kept, per run."""
    evidence_bundles: int = 32
    """Evidence bundles kept per run: one of each halt, and of the first window in which a rule or cause shows."""
    evidence_bytes: int = 4 << 20
    """Largest evidence bundle."""
    journal_bytes: int = 1 << 30
    """Size of the journal above which its oldest rows move to an archive, and size of an archive."""
    journal_days: float = 30.0
    """Age at which rows move to an archive."""
    journal_archives: int = 8
    """Archives kept beside the journal; the oldest go."""
    max_runs: int = 64
    """Runs exported at one time."""
    run_ttl_seconds: float = 3600.0
    """How long a run without connections stays exported."""
    escalation: Escalation = field(default_factory=Escalation)
    rules: Path | None = None
    """A rules file that replaces the rules of every regime."""

    @classmethod
    def load(cls, path: Path | None, **flags: Any) -> Self:
        """Read a YAML map of the fields above, flags winning. Raises ConfigError naming the field."""
        values: dict[str, Any] = {}
        if path is not None:
            import yaml

            try:
                found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
                raise ConfigError(f"{path}: cannot be read: {error}") from error
            if not isinstance(found, dict):
                raise ConfigError(f"{path}: wanted a map of settings, found {type(found).__name__}")
            values = {str(key): value for key, value in found.items()}
        values.update({key: value for key, value in flags.items() if value is not None})
        where = str(path or "flags")
        known = {item.name for item in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise ConfigError(f"{where}: unknown setting {unknown[0]!r}; known: {', '.join(sorted(known))}")
        if isinstance(values.get("escalation"), Mapping):
            values["escalation"] = _section(Escalation, values["escalation"], f"{where}: escalation")
        for name in _PATHS:
            if isinstance(values.get(name), str):
                values[name] = Path(values[name]).expanduser()
        if isinstance(values.get("http_hosts"), list):
            values["http_hosts"] = tuple(map(str, values["http_hosts"]))
        try:
            config = cls(**values)
        except TypeError as error:
            raise ConfigError(f"{where}: {error}") from error
        config._check(where)
        return replace(config, silence_seconds={**cls._silence(), **config.silence_seconds})

    @property
    def broker(self) -> Broker | None:
        """The server that this shard is behind."""
        return self._broker("nats") if self.nats is not None else None

    def _broker(self, where: str) -> Broker:
        return Broker.parse(
            self.nats or "",
            f"{where}: nats",
            token=self.nats_token,
            user=self.nats_user,
            authority=self.nats_ca,
        )

    @staticmethod
    def _silence() -> dict[str, float]:
        return {"engine": 1800.0, "trainer": 1800.0, "driver": 1800.0}

    def _check(self, where: str) -> None:
        bounds: dict[str, tuple[float, float]] = {
            "http_port": (0, 65535),
            "tcp_port": (0, 65535),
            "nats_ack_seconds": (1, 3600),
            "nats_outstanding": (16, 1 << 20),
            "nats_bytes": (1 << 20, 1 << 50),
            "nats_replicas": (1, 5),
            "shards": (1, SHARDS_LIMIT),
            "shard": (0, SHARDS_LIMIT - 1),
            "max_connections": (1, 1 << 20),
            "max_processes": (1, 1 << 20),
            "max_open_steps": (2, 1 << 20),
            "hello_seconds": (0.01, 3600),
            "stall_seconds": (0.01, 86400),
            "idle_seconds": (0.01, 1 << 30),
            "frames_per_second": (1, 1 << 30),
            "bytes_per_second": (1 << 10, 1 << 50),
            "waiting_bytes": (1 << 20, 1 << 40),
            "settle_seconds": (0, 3600),
            "quiet_seconds": (0, 3600),
            "window_seconds": (0.01, 86400),
            "attestation_seconds": (0.01, 86400),
            "pending_seconds": (0.01, 86400),
            "lag_steps": (0, 1000),
            "pending_tokens": (1, 1 << 32),
            "sample_tokens": (0, 1 << 24),
            "sample_windows": (0, 10000),
            "evidence_bundles": (0, 10000),
            "evidence_bytes": (1 << 16, 1 << 30),
            "journal_bytes": (1 << 20, 1 << 40),
            "journal_days": (0.001, 36500),
            "journal_archives": (1, 10000),
            "max_runs": (1, 1000),
            "run_ttl_seconds": (0.01, 1 << 30),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ConfigError(f"{where}: {name}: wanted a number from {low} to {high}, found {value!r}")
        if self.log not in ("json", "console"):
            raise ConfigError(f"{where}: log: wanted json or console, found {self.log!r}")
        if self.tcp_host is not None and self.tcp_token is None:
            raise ConfigError(
                f"{where}: tcp_token: tcp_host is open to other hosts, so probes must hold a token; "
                f"make one: openssl rand -hex 32 > FILE && chmod 600 FILE"
            )
        if (self.tcp_certificate is None) != (self.tcp_key is None):
            raise ConfigError(f"{where}: tcp_certificate and tcp_key are set together or not at all")
        if self.nats is not None:
            self._broker(where)
        elif self.shards != 1 or self.shard or self.nats_token or self.nats_user or self.nats_ca:
            raise ConfigError(f"{where}: nats: the other settings of shards need the address of a server")
        if self.shard >= self.shards:
            raise ConfigError(f"{where}: shard: wanted 0 to {self.shards - 1}, found {self.shard}")
        if not isinstance(self.silence_seconds, Mapping) or self.silence_seconds.keys() - self._silence():
            raise ConfigError(f"{where}: silence_seconds: wanted a map of engine, trainer and driver")


def _section(kind: type[Escalation], values: Mapping[str, Any], where: str) -> Escalation:
    known = {item.name for item in fields(kind)}
    if unknown := sorted(set(map(str, values)) - known):
        raise ConfigError(f"{where}: unknown setting {unknown[0]!r}; known: {', '.join(sorted(known))}")
    given = dict(values)
    if not isinstance(given.get("enabled", False), bool):
        raise ConfigError(f"{where}: enabled: wanted true or false, found {given['enabled']!r}")
    for name in sorted(known - {"enabled", "runtimes"}):
        value = given.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 86400:
            raise ConfigError(f"{where}: {name}: wanted seconds from 0 to 86400, found {value!r}")
    found = given.get("runtimes", ())
    if not isinstance(found, list | tuple):
        raise ConfigError(f"{where}: runtimes: wanted a list, found {found!r}")
    given["runtimes"] = tuple(
        Runtime.of(one, f"{where}: runtimes[{index}]") for index, one in enumerate(found)
    )
    return kind(**given)
