# SPDX-License-Identifier: Apache-2.0
"""How a run is stopped: the lease page that the daemon renews, and the marker that outlives every restart.

State directory: ``isoexec.sock``, ``journal.sqlite``, ``daemon.json`` and ``runs/<run>/`` with ``lease`` and
``halt.json``. The marker is written before the lease says halt, no restart finds the one without the other.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from isoexec.contracts.errors import IsoExecError

__all__ = [
    "LEASE_TTL_SECONDS",
    "RENEW_SECONDS",
    "HaltMarker",
    "Lease",
    "LeaseError",
    "LeasePage",
    "LeaseState",
    "Policy",
    "RunDirectory",
    "StateDirectory",
    "default_state_dir",
]

RENEW_SECONDS = 0.2
"""How often the daemon moves the deadline."""
LEASE_TTL_SECONDS = 2.0
"""How far ahead the deadline lies: a daemon that is dead or hung is noticed after this long."""

PAGE_BYTES = 4096
_MAGIC = b"IXLEASE1"
_SEQ = struct.Struct("<Q")
_FIXED = struct.Struct("<8sIIQq")  # magic, state, policy, deadline in CLOCK_MONOTONIC ns, step
_FAST = struct.Struct("<Q8sIIQ")
_FIXED_AT = 8
_RULE_AT = _FIXED_AT + _FIXED.size
_RULE_BYTES = 128
_CAUSE_AT = _RULE_AT + _RULE_BYTES
_CAUSE_BYTES = 512
_TRIES = 200
_PAUSE_SECONDS = 0.0005  # between tries: a writer may lose its processor inside a write
_RESERVE = ".halt.reserve"
_RESERVE_BYTES = 65536
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class LeaseError(IsoExecError):
    """A lease page that is not there, or is not one."""


class LeaseState(IntEnum):
    """What the daemon says of a run; UNKNOWN is also what a reader makes of a page that it cannot trust."""

    OK = 1
    WARN = 2
    HALT = 3
    UNKNOWN = 4


class Policy(IntEnum):
    """What a run does when the daemon is lost."""

    FAIL_OPEN = 0
    FAIL_CLOSED = 1


@dataclass(frozen=True, kw_only=True)
class Lease:
    """One consistent reading of a page. `alive` says whether the deadline (CLOCK_MONOTONIC ns) lay ahead."""

    state: LeaseState
    policy: Policy
    deadline_ns: int
    step: int
    rule: str
    cause: str
    alive: bool


_UNREADABLE = Lease(
    state=LeaseState.UNKNOWN,
    policy=Policy.FAIL_OPEN,
    deadline_ns=0,
    step=-1,
    rule="",
    cause="the lease page could not be read",
    alive=False,
)


class LeasePage:
    """A page of one writer (the daemon) and many readers (the guards) on one host, under a sequence lock.

    The file is never replaced, only written in place, so a mapping stays good over a restart of the daemon.
    """

    def __init__(self, page: mmap.mmap, *, writable: bool) -> None:
        self._page = page
        self._writable = writable
        self._now = time.monotonic_ns

    @classmethod
    def create(cls, path: Path) -> LeasePage:
        """Map a page for writing, making the file (0600) if there is none; unknown until written.

        Raises LeaseError when the disk has no room for it, and OSError when the file cannot be opened.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size != PAGE_BYTES:
                os.ftruncate(descriptor, PAGE_BYTES)
            # a hole that finds no block later would end the writer by SIGBUS
            os.posix_fallocate(descriptor, 0, PAGE_BYTES)
            page = cls(mmap.mmap(descriptor, PAGE_BYTES), writable=True)
        except OSError as error:
            raise LeaseError(f"{path}: no room for a lease page: {error.strerror}; free some disk") from error
        finally:
            os.close(descriptor)
        return page

    @classmethod
    def open(cls, path: Path) -> LeasePage:
        """Map a page for reading. Raises LeaseError when there is none."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise LeaseError(
                f"wanted a lease page at {path}, found {error.strerror}; is the daemon running with this "
                f"state directory, and has this run said hello?"
            ) from error
        try:
            if os.fstat(descriptor).st_size != PAGE_BYTES:
                raise LeaseError(f"wanted a lease page of {PAGE_BYTES} bytes at {path}; remove the file")
            return cls(mmap.mmap(descriptor, PAGE_BYTES, prot=mmap.PROT_READ), writable=False)
        finally:
            os.close(descriptor)

    def write(
        self,
        state: LeaseState,
        *,
        policy: Policy = Policy.FAIL_OPEN,
        ttl_seconds: float = LEASE_TTL_SECONDS,
        step: int = -1,
        rule: str = "",
        cause: str = "",
    ) -> None:
        """Put down a state and a deadline `ttl_seconds` from now. Long texts are cut at a character."""
        if not self._writable:
            raise LeaseError("this page was opened for reading; only the daemon writes it")
        page = self._page
        # a writer that died inside a write left an odd number: the next even one is beyond it
        odd = _SEQ.unpack_from(page, 0)[0] | 1
        _SEQ.pack_into(page, 0, odd)
        deadline = self._now() + int(ttl_seconds * 1e9)
        _FIXED.pack_into(page, _FIXED_AT, _MAGIC, int(state), int(policy), deadline, step)
        page[_RULE_AT : _RULE_AT + _RULE_BYTES] = _fixed_text(rule, _RULE_BYTES)
        page[_CAUSE_AT : _CAUSE_AT + _CAUSE_BYTES] = _fixed_text(cause, _CAUSE_BYTES)
        _SEQ.pack_into(page, 0, (odd + 1) % (1 << 64))

    def read(self) -> Lease:
        """Give a consistent reading; a torn, foreign or empty page reads as unknown and not alive."""
        page = self._page
        for _ in range(_TRIES):
            before = _SEQ.unpack_from(page, 0)[0]
            if before & 1:
                time.sleep(_PAUSE_SECONDS)
                continue
            magic, state, policy, deadline, step = _FIXED.unpack_from(page, _FIXED_AT)
            rule = page[_RULE_AT : _RULE_AT + _RULE_BYTES]
            cause = page[_CAUSE_AT : _CAUSE_AT + _CAUSE_BYTES]
            if _SEQ.unpack_from(page, 0)[0] != before:
                continue
            if magic != _MAGIC or state not in (1, 2, 3, 4) or policy not in (0, 1):
                return _UNREADABLE
            return Lease(
                state=LeaseState(state),
                policy=Policy(policy),
                deadline_ns=deadline,
                step=step,
                rule=_text(rule),
                cause=_text(cause),
                alive=deadline > self._now(),
            )
        return _UNREADABLE

    def fine(self) -> bool:
        """Whether the page says ok or warn and is alive: the cheap question of every step."""
        page = self._page
        seq, magic, state, _, deadline = _FAST.unpack_from(page, 0)
        return (
            not seq & 1
            and magic == _MAGIC
            and (state in (1, 2))
            and deadline > self._now()
            and _SEQ.unpack_from(page, 0)[0] == seq
        )

    def close(self) -> None:
        self._page.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _fixed_text(text: str, size: int) -> bytes:
    return text.encode()[:size].decode(errors="ignore").encode().ljust(size, b"\0")


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class HaltMarker:
    """Why a run was halted. While it lies in the run directory the run refuses to start."""

    run: str
    step: int
    rule: str
    cause: str
    verdict: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    time: float = 0.0
    runbook: str = ""

    @staticmethod
    def reserve(run_dir: Path) -> None:
        """Set aside the blocks of a marker, so that a halt is written on a full disk too. Raises OSError."""
        path = run_dir / _RESERVE
        if path.exists() and path.stat().st_size == _RESERVE_BYTES:
            return
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(b"\0" * _RESERVE_BYTES)
        path.chmod(0o600)

    def write(self, run_dir: Path) -> Path:
        """Put the marker down, proof against a power cut, unless one lies there: the first one counts.

        Raises OSError when it cannot be written, not even without its evidence.
        """
        path = run_dir / "halt.json"
        if path.exists():
            return path
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = run_dir / f".halt.{os.getpid()}.json"
        with suppress(FileNotFoundError):
            (run_dir / _RESERVE).rename(draft)
        try:
            self._put(draft)
        except OSError:
            short = replace(self, evidence={"left out": "the disk had no room for the evidence"})
            try:
                short._put(draft)
            except OSError:
                draft.unlink(missing_ok=True)
                if path.exists():  # another rank of this host had the room that was set aside
                    return path
                raise
        _place(draft, path)
        _sync_directory(run_dir)
        return path

    def _put(self, draft: Path) -> None:
        raw = (json.dumps(asdict(self), sort_keys=True, indent=1, default=str) + "\n").encode()
        # not truncated first: the blocks that are reserved are written over, then what is left of them is cut off
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(raw)
            out.flush()
            out.truncate(len(raw))
            os.fsync(out.fileno())

    @classmethod
    def read(cls, run_dir: Path) -> HaltMarker | None:
        """Give the marker, or None where there is none. A marker that cannot be read still halts."""
        path = run_dir / "halt.json"
        try:
            raw = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            return cls._unreadable(run_dir, str(error))
        try:
            found = json.loads(raw)
            return cls(**{item.name: found[item.name] for item in fields(cls)})
        except (ValueError, KeyError, TypeError) as error:
            return cls._unreadable(run_dir, f"{type(error).__name__}: {error}")

    @classmethod
    def _unreadable(cls, run_dir: Path, why: str) -> HaltMarker:
        return cls(
            run=run_dir.name,
            step=-1,
            rule="marker_unreadable",
            cause=f"{run_dir / 'halt.json'} cannot be read ({why}); whether the run was halted is unknown",
            verdict="unknown",
        )

    @classmethod
    def clear(cls, run_dir: Path) -> HaltMarker | None:
        """Lift the halt and give what was lifted; the marker is kept as halt-cleared-<unix ns>.json."""
        marker = cls.read(run_dir)
        if marker is None:
            return None
        (run_dir / "halt.json").rename(run_dir / f"halt-cleared-{time.time_ns()}.json")
        _sync_directory(run_dir)
        return marker

    def __str__(self) -> str:
        return (
            f"run {self.run} was halted at step {self.step} by rule {self.rule}: {self.cause}. "
            f"It does not start until `isoexec clear {self.run}`."
        )


def _place(draft: Path, path: Path) -> None:
    """Give a file its name, unless one by that name was there first."""
    try:
        path.hardlink_to(draft)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        draft.replace(path)
        return
    draft.unlink()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def default_state_dir() -> Path:
    """Give ISOEXEC_STATE_DIR, or ~/.local/state/isoexec."""
    named = os.environ.get("ISOEXEC_STATE_DIR")
    return Path(named).expanduser() if named else Path.home() / ".local" / "state" / "isoexec"


@dataclass(frozen=True)
class RunDirectory:
    """Where one run keeps its lease and its marker."""

    path: Path

    @property
    def lease(self) -> Path:
        return self.path / "lease"

    @property
    def marker(self) -> Path:
        return self.path / "halt.json"


@dataclass(frozen=True)
class StateDirectory:
    """Where a daemon keeps what it keeps; made 0700."""

    path: Path

    @classmethod
    def default(cls) -> StateDirectory:
        return cls(default_state_dir())

    def make(self) -> StateDirectory:
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self

    @property
    def socket(self) -> Path:
        return self.path / "isoexec.sock"

    @property
    def journal(self) -> Path:
        return self.path / "journal.sqlite"

    @property
    def shard(self) -> Path:
        """Names which shard the daemon of this directory is, such as 0/2, or was when it last ran; not there for one alone."""
        return self.path / "shard"

    @property
    def daemon(self) -> Path:
        """The daemon's own note: pid, http address, version, start."""
        return self.path / "daemon.json"

    @property
    def lock(self) -> Path:
        return self.path / "daemon.lock"

    def run(self, name: str) -> RunDirectory:
        """Give the directory of a run. Raises LeaseError for a name that is no plain file name."""
        if _RUN_NAME.fullmatch(name) is None:
            raise LeaseError(
                f"wanted a run name of letters, digits, '.', '_' and '-', 64 at most, found {name[:80]!r}"
            )
        return RunDirectory(self.path / "runs" / name)

    def runs(self) -> list[str]:
        """Name every run that has a directory."""
        root = self.path / "runs"
        return sorted(item.name for item in root.iterdir() if item.is_dir()) if root.is_dir() else []
