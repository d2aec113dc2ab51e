# SPDX-License-Identifier: Apache-2.0
"""Which shard of a daemon judges a sequence, and what the shards say together.

Each shard hears every message, and of the logprobs its own sequences: it judges the facts of a run whole and the tokens by
its part. The verdict is the worst of theirs. Nothing compares clocks of two hosts: a reader takes a word for alive while it
was renewed within `TTL_SECONDS` of its own clock.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from isoexec.contracts.broker import run_key
from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.halting import LeaseState, Policy
from isoexec.contracts.wire import Logprobs

__all__ = [
    "BEAT_SECONDS",
    "COUNT_KEY",
    "HALTED_LIMIT",
    "LEADER_KEY",
    "SHARDS_LIMIT",
    "TOKEN_ARRAYS",
    "TTL_SECONDS",
    "ShardWord",
    "Standing",
    "join",
    "parts_of",
    "shard_key",
    "shard_of",
    "verdict_key",
]

_Made = TypeVar("_Made")

BEAT_SECONDS = 0.5
"""How often a shard, and the joined verdict, are renewed."""
TTL_SECONDS = 3.0
"""How long a word holds that is not renewed."""
SHARDS_LIMIT = 1024
HALTED_LIMIT = 128
TOKEN_ARRAYS = ("logprobs", "tokens")
"""The arrays of a logprobs message that hold one value a token; the others hold one a sequence."""
COUNT_KEY = "shards"
LEADER_KEY = "leader"

# how bad a state is: what cannot be known is worse than a warning
_RANK = {LeaseState.OK: 0, LeaseState.WARN: 1, LeaseState.UNKNOWN: 2, LeaseState.HALT: 3}


def shard_key(shard: int) -> str:
    return f"shard.{shard}"


def verdict_key(run: str) -> str:
    return f"verdict.{run_key(run)}"


def shard_of(digests: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.int64]:
    """Give the shard of each sequence, int64 [n], from digests u1 [n, 16]: their last 8 bytes, big-endian, modulo `count`.

    The first 8 bytes decide what is sampled: a sample must not fall on one shard.
    """
    last = np.ascontiguousarray(digests[:, 8:]).view(">u8").reshape(-1)
    return (last % np.uint64(count)).astype(np.int64)


def parts_of(message: Logprobs, count: int) -> list[Logprobs]:
    """Give each shard's part of a message, in order, under the message's own number; a part may hold no sequence."""
    if count == 1:
        return [message]
    owners = shard_of(message.digests, count)
    tokens = np.repeat(owners, message.lengths)
    parts = []
    for shard in range(count):
        mine, own = owners == shard, tokens == shard
        arrays = {
            name: values[own if name in TOKEN_ARRAYS else mine] for name, values in message.arrays().items()
        }
        parts.append(dataclasses.replace(message, **arrays))
    return parts


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What is said of a run: its state, what a lost daemon means to it, and why."""

    state: LeaseState
    policy: Policy = Policy.FAIL_OPEN
    step: int = -1
    rule: str = ""
    cause: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "state": self.state.name, "policy": self.policy.name}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Standing:
        return cls(
            state=LeaseState[found["state"]],
            policy=Policy[found["policy"]],
            step=int(found["step"]),
            rule=str(found["rule"]),
            cause=str(found["cause"]),
        )

    def encode(self) -> bytes:
        return json.dumps(self.to_dict(), sort_keys=True).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Standing:
        """Read what `encode` wrote. Raises IsoExecError."""
        return _read(raw, cls.from_dict)


@dataclass(frozen=True, kw_only=True)
class ShardWord:
    """What one shard says: of every run that it watches, and under which start (`boot`) it says so.

    `halted` are the runs that a halt marker in its state directory keeps from starting, whether it watches them or not, with
    step, rule and cause in words: the newest `HALTED_LIMIT`.
    """

    boot: str
    runs: Mapping[str, Standing] = field(default_factory=dict)
    halted: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        runs = {name: one.to_dict() for name, one in self.runs.items()}
        return json.dumps(
            {"boot": self.boot, "runs": runs, "halted": dict(self.halted)}, sort_keys=True
        ).encode()

    @classmethod
    def decode(cls, raw: bytes) -> ShardWord:
        """Read what `encode` wrote. Raises IsoExecError."""
        return _read(
            raw,
            lambda found: cls(
                boot=str(found["boot"]),
                runs={str(k): Standing.from_dict(v) for k, v in found["runs"].items()},
                halted={str(k): str(v) for k, v in found.get("halted", {}).items()},
            ),
        )


def _read(raw: bytes, make: Callable[[Any], _Made]) -> _Made:
    try:
        return make(json.loads(raw))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IsoExecError(f"wanted what a shard says, found {raw[:80]!r} ({error!r})") from error


def join(words: Mapping[int, tuple[ShardWord, float]], count: int) -> dict[str, Standing]:
    """Give the verdict of each run from (word, its age in seconds) of the shards that were ever heard; the worst wins.

    A shard that is not there, is too old, or does not know a run that another knows, leaves that run unknown; one that said
    halt and fell silent still says halt.
    """
    said = {name for word, _ in words.values() for name in word.runs}
    return {name: _worst(_each(name, words, count)) for name in sorted(said)}


def _each(name: str, words: Mapping[int, tuple[ShardWord, float]], count: int) -> Iterable[Standing]:
    for shard in range(count):
        word, age = words.get(shard, (None, 0.0))
        standing = word.runs.get(name) if word is not None else None
        if standing is not None and (age <= TTL_SECONDS or standing.state is LeaseState.HALT):
            yield dataclasses.replace(standing, cause=_by(shard, standing.cause))
        elif word is None or age > TTL_SECONDS:
            yield _unknown("shard_silent", f"shard {shard} of {count} is not heard")
        else:
            yield _unknown("shard_unaware", f"shard {shard} of {count} has not heard of the run")


def _by(shard: int, cause: str) -> str:
    return f"{cause} (shard {shard})" if cause else ""


def _unknown(rule: str, cause: str) -> Standing:
    return Standing(state=LeaseState.UNKNOWN, rule=rule, cause=cause)


def _worst(standings: Iterable[Standing]) -> Standing:
    found = list(standings)
    worst = max(found, key=lambda one: _RANK[one.state])
    # the run's own policy, where any shard knows it
    closed = any(one.policy is Policy.FAIL_CLOSED for one in found)
    return dataclasses.replace(worst, policy=Policy.FAIL_CLOSED if closed else Policy.FAIL_OPEN)
