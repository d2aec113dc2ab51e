# SPDX-License-Identifier: Apache-2.0
"""The shards of a daemon in a key-value bucket: what each says, who joins it, and the verdict of each run.

Every shard renews its word; one of them, the leader, joins the words, so that the worst wins, and renews each run's verdict.
Leading is a key that is written only over the revision that was read: of several that try one succeeds, and a leader that
was stopped for a while finds its next write refused. A verdict is written the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.shards import (
    LEADER_KEY,
    TTL_SECONDS,
    ShardWord,
    Standing,
    join,
    shard_key,
    verdict_key,
)
from isoexec.daemon.config import ConfigError

if TYPE_CHECKING:
    from nats.js.kv import KeyValue

__all__ = ["Joint", "ShardTakenError"]

_log = structlog.get_logger("isoexec.daemon")


class ShardTakenError(ConfigError):
    """Another daemon speaks for this shard."""


@dataclass(slots=True)
class _Seen:
    revision: int
    at: float
    value: bytes


class Joint:
    """What one shard, under one start of it (`boot`), knows of the bucket."""

    def __init__(
        self, shard: int, count: int, boot: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._shard = shard
        self._count = count
        self._boot = boot
        self._clock = clock
        self._own = 0
        self._leading = 0  # revision of our own write of the leader's key, 0: another leads
        self._written: dict[str, int] = {}
        self._seen: dict[str, _Seen] = {}

    @property
    def leads(self) -> bool:
        return self._leading > 0

    @property
    def heard(self) -> int:
        """Shards whose word is not too old, this one among them."""
        return sum(age <= TTL_SECONDS for _, age in self._words().values())

    def view(self) -> dict[str, Any]:
        """Give what is known of every shard, and the joined verdicts, as plain data; ages in seconds of this clock."""
        words = self._words()
        rows = []
        for shard in range(self._count):
            word, age = words.get(shard, (ShardWord(boot=""), None))
            rows.append(
                {
                    "shard": shard,
                    "silent_seconds": age,
                    "heard": age is not None and age <= TTL_SECONDS,
                    "runs": {run: one.to_dict() for run, one in word.runs.items()},
                    "halted": dict(word.halted),
                }
            )
        joined = {run: one.to_dict() for run, one in join(words, self._count).items()}
        return {"shard": self._shard, "count": self._count, "words": rows, "verdicts": joined}

    async def claim(self, bucket: KeyValue, wait: Callable[[float], object]) -> None:
        """Begin to speak for the shard. Raises ShardTakenError while another daemon does.

        `wait` is awaited for as long as a dead daemon's word holds.
        """
        found = await self._look(bucket, shard_key(self._shard))
        if found is not None and not self._is_ours(found.value):
            await wait(TTL_SECONDS)  # type: ignore[misc]
            again = await self._look(bucket, shard_key(self._shard))
            if again is not None and again.revision != found.revision:
                raise ShardTakenError(
                    f"shard: another daemon speaks for shard {self._shard} of this stream; stop it, or choose another --shard"
                )
        self._own = found.revision if found is not None else 0

    async def beat(
        self, bucket: KeyValue, runs: Mapping[str, Standing], halted: Mapping[str, str] | None = None
    ) -> None:
        """Renew this shard's word, hear the others, and lead where nobody does."""
        await self._speak(bucket, runs, halted or {})
        for shard in range(self._count):
            await self._look(bucket, shard_key(shard))
        await self._lead(bucket)
        if self.leads:
            await self._join(bucket)

    async def leave(self, bucket: KeyValue) -> None:
        """Say that this shard speaks no more, on purpose: the others need not wait to know."""
        await bucket.delete(shard_key(self._shard))
        if self.leads:
            await bucket.delete(LEADER_KEY, last=self._leading)

    async def _speak(self, bucket: KeyValue, runs: Mapping[str, Standing], halted: Mapping[str, str]) -> None:
        from nats.js.errors import KeyWrongLastSequenceError

        key, word = shard_key(self._shard), ShardWord(boot=self._boot, runs=runs, halted=halted).encode()
        try:
            self._own = await self._write(bucket, key, word, self._own)
        except KeyWrongLastSequenceError:
            found = await self._look(bucket, key)
            if found is not None and not self._is_ours(found.value):
                raise ShardTakenError(
                    f"shard: another daemon has begun to speak for shard {self._shard}; this one ends"
                ) from None
            # a write of ours whose answer was lost
            self._own = found.revision if found is not None else 0
            self._own = await self._write(bucket, key, word, self._own)

    async def _write(self, bucket: KeyValue, key: str, value: bytes, last: int) -> int:
        return await (bucket.update(key, value, last=last) if last else bucket.create(key, value))

    async def _look(self, bucket: KeyValue, key: str) -> _Seen | None:
        """Read a key, and since when it stands by our clock; None where there is none."""
        from nats.js.errors import KeyNotFoundError

        asked = self._clock()
        try:
            entry = await bucket.get(key)
        except KeyNotFoundError:
            self._seen.pop(key, None)
            return None
        seen = self._seen.get(key)
        if seen is None or seen.revision != entry.revision:
            seen = self._seen[key] = _Seen(entry.revision or 0, asked, entry.value or b"")
        return seen

    def _is_ours(self, raw: bytes) -> bool:
        try:
            return ShardWord.decode(raw).boot == self._boot
        except IsoExecError:
            return False

    def _words(self) -> dict[int, tuple[ShardWord, float]]:
        now, words = self._clock(), {}
        for shard in range(self._count):
            seen = self._seen.get(shard_key(shard))
            if seen is None:
                continue
            try:
                words[shard] = (ShardWord.decode(seen.value), now - seen.at)
            except IsoExecError as error:
                _log.error("a shard's word cannot be read", shard=shard, error=str(error))
        return words

    async def _lead(self, bucket: KeyValue) -> None:
        from nats.js.errors import KeyWrongLastSequenceError

        me = f"{self._shard} {self._boot}".encode()
        try:
            if self._leading:
                self._leading = await bucket.update(LEADER_KEY, me, last=self._leading)
                return
            seen = await self._look(bucket, LEADER_KEY)
            if seen is not None and seen.value != me and self._clock() - seen.at <= TTL_SECONDS:
                return
            self._leading = await self._write(bucket, LEADER_KEY, me, seen.revision if seen else 0)
            self._written.clear()
            _log.info("leads", shard=self._shard)
        except KeyWrongLastSequenceError:
            if self._leading:
                _log.warning("leads no more", shard=self._shard)
            self._leading = 0

    async def _join(self, bucket: KeyValue) -> None:
        from nats.js.errors import KeyWrongLastSequenceError

        joined = join(self._words(), self._count)
        for run, standing in joined.items():
            if run not in self._written:
                seen = await self._look(bucket, verdict_key(run))
                self._written[run] = seen.revision if seen is not None else 0
            try:
                self._written[run] = await self._write(
                    bucket, verdict_key(run), standing.encode(), self._written[run]
                )
            except KeyWrongLastSequenceError:
                # another leads by now, or an answer was lost: read again before the next
                del self._written[run]
        for run in self._written.keys() - joined.keys():
            await bucket.delete(verdict_key(run), last=self._written.pop(run))
