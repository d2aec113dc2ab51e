# SPDX-License-Identifier: Apache-2.0
"""The stream and the bucket that the shards of a daemon keep on a JetStream server."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from isoexec.contracts.broker import Broker, BrokerError
from isoexec.contracts.shards import COUNT_KEY
from isoexec.daemon.config import Config, ConfigError

if TYPE_CHECKING:
    from nats.js.client import JetStreamContext
    from nats.js.kv import KeyValue

__all__ = ["make_bucket", "make_stream"]

_DUPLICATE_SECONDS = 120.0
"""How long the server knows a frame that is published again; after that its shard does."""


async def make_stream(stream: JetStreamContext, broker: Broker, config: Config) -> None:
    """Make the stream of frames, or see that it is one. Raises BrokerError."""
    from nats.js import api
    from nats.js.errors import BadRequestError, NotFoundError

    name = broker.name
    wanted = api.StreamConfig(
        name=name,
        subjects=[f"{name}.frames.>"],
        # what is acknowledged is gone; what does not fit is refused, so that its sender knows
        retention=api.RetentionPolicy.WORK_QUEUE,
        discard=api.DiscardPolicy.NEW,
        storage=api.StorageType.FILE,
        max_bytes=config.nats_bytes,
        duplicate_window=_DUPLICATE_SECONDS,
        num_replicas=config.nats_replicas,
    )
    try:
        found = (await stream.stream_info(name)).config
    except NotFoundError:
        try:
            await stream.add_stream(wanted)
        except BadRequestError as error:
            raise BrokerError(f"{broker}: the stream cannot be made: {error.description}") from error
        return
    for part in ("subjects", "retention", "discard"):
        if getattr(found, part) != getattr(wanted, part):
            raise BrokerError(
                f"{broker}: stream {name} has {part} {getattr(found, part)}, wanted {getattr(wanted, part)}; "
                f"choose another name in the address, or remove the stream"
            )


async def make_bucket(stream: JetStreamContext, broker: Broker, config: Config) -> KeyValue:
    """Give the bucket, made where there is none, for this number of shards. Raises BrokerError and ConfigError."""
    from nats.js import api
    from nats.js.errors import BadRequestError, BucketNotFoundError, KeyWrongLastSequenceError

    try:
        bucket = await stream.key_value(broker.name)
    except BucketNotFoundError:
        try:
            bucket = await stream.create_key_value(
                api.KeyValueConfig(bucket=broker.name, history=1, replicas=config.nats_replicas)
            )
        except BadRequestError as error:
            raise BrokerError(f"{broker}: the bucket cannot be made: {error.description}") from error
    with suppress(KeyWrongLastSequenceError):
        await bucket.create(COUNT_KEY, str(config.shards).encode())
    found = (await bucket.get(COUNT_KEY)).value or b""
    if found != str(config.shards).encode():
        raise ConfigError(
            f"shards: {broker} has {found.decode(errors='replace')}, wanted {config.shards}; give every shard "
            f"the same number, or remove key {COUNT_KEY} of the bucket between jobs"
        )
    return bucket
