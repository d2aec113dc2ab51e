# SPDX-License-Identifier: Apache-2.0
"""Frames and messages between the probes and the daemon: a msgpack header and raw little-endian arrays.

A frame is the magic ``IXF1``, the header length and the body length as u32le, a msgpack map, and the body:
the arrays that ``header["arrays"]`` describes, one after the other. No pickle, no object is ever rebuilt from
a name. Whatever does not fit raises `WireError`, and the connection it came from is not read further.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgpack
import numpy as np
import numpy.typing as npt

from isoexec.contracts import wire_checks as checks
from isoexec.contracts.errors import WireError

__all__ = [
    "ATTRIBUTES",
    "BODY_LIMIT",
    "HEADER_LIMIT",
    "MAGIC",
    "MESSAGES",
    "ROLES",
    "SEQUENCES_LIMIT",
    "VERSION",
    "Attestation",
    "Bye",
    "FrameReader",
    "Hello",
    "Logprobs",
    "Message",
    "Probe",
    "Step",
    "Weights",
    "Welcome",
    "encode_frame",
]

MAGIC = b"IXF1"
VERSION = 1
HEADER_LIMIT = 1 << 20
"""Bytes of header at most."""
BODY_LIMIT = 64 << 20
"""Bytes of body at most."""
SEQUENCES_LIMIT = 1 << 14
"""Sequences of one message at most: each costs the daemon a look-up, however short it is."""
ATTRIBUTES = ("prefix_hit", "pack_index", "padding")
"""What may be told of each sequence of a logprobs message beside its logprobs."""
ROLES = ("engine", "trainer", "driver")
CASES = ("engine_prefill", "engine_decode", "trainer_fwd", "trainer_recompute", "trainer_score")

_PREFIX = struct.Struct("<4sII")
_START_BYTES = 4096
"""Bytes that a reader takes in before it knows of which frame they are."""
_BODY_BYTES = 1 << 20
"""Bytes of a body that there is room for at once."""
_NO_BYTES = np.empty(0, np.uint8)

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class _Layout:
    """The fields of one type of message, read once: each message is checked on its way out and in."""

    names: frozenset[str]
    required: tuple[str, ...]
    plain: tuple[str, ...]
    checks: tuple[tuple[str, checks.Check, str], ...]
    arrays: Mapping[str, tuple[np.dtype[Any], int]]


_LAYOUTS: dict[str, _Layout] = {}


def _layout(kind: type[Message]) -> _Layout:
    found = _LAYOUTS.get(kind.TYPE)
    if found is None:
        found = _LAYOUTS[kind.TYPE] = _read_layout(kind)
    return found


def _read_layout(kind: type[Message]) -> _Layout:
    items = dataclasses.fields(kind)
    return _Layout(
        names=frozenset(item.name for item in items),
        required=tuple(
            item.name
            for item in items
            if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        ),
        plain=tuple(item.name for item in items if "dtype" not in item.metadata),
        checks=tuple(
            (item.name, item.metadata["check"], item.metadata["wanted"])
            for item in items
            if "check" in item.metadata
        ),
        arrays={
            item.name: (np.dtype(item.metadata["dtype"]), item.metadata["dims"])
            for item in items
            if "dtype" in item.metadata
        },
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Message:
    """What every message says about itself. `seq` counts per source, a gap is a loss; `time` is unix s."""

    TYPE: ClassVar[str] = ""

    run: str = checks.checked(checks.text, "a string")
    role: str = checks.checked(checks.one_of(*ROLES, "daemon"), f"one of {', '.join(ROLES)}")
    source: str = checks.checked(checks.text, "a string host:pid:rank")
    seq: int = checks.checked(checks.count, "a count", default=0)
    time: float = checks.checked(checks.seconds, "finite unix seconds", default=0.0)

    def __post_init__(self) -> None:
        layout = _layout(type(self))
        for name, check, wanted in layout.checks:
            value = getattr(self, name)
            if not check(value):
                raise WireError(f"{self.TYPE}.{name}: wanted {wanted}, found {_show(value)}")
        for name, (dtype, dims) in layout.arrays.items():
            value = getattr(self, name)
            if value is not None or name in layout.required:
                self._check_array(name, value, dtype, dims)

    def _check_array(self, name: str, value: Any, dtype: np.dtype[Any], dims: int) -> None:
        if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != dims:
            found = (
                f"{value.dtype.str}, {value.ndim} dimensions"
                if isinstance(value, np.ndarray)
                else type(value).__name__
            )
            raise WireError(
                f"{self.TYPE}.{name}: wanted an array {dtype.str} of {dims} dimensions, found {found}"
            )

    def header(self) -> dict[str, Any]:
        """The header map of this message, without its arrays."""
        values = {name: getattr(self, name) for name in _layout(type(self)).plain}
        return {"type": self.TYPE, "v": VERSION, **values}

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays of this message by name, in the order in which the body holds them, without those left out."""
        found = {name: getattr(self, name) for name in _layout(type(self)).arrays}
        return {name: array for name, array in found.items() if array is not None}


@dataclass(frozen=True, kw_only=True, eq=False)
class Hello(Message):
    """Opens a connection. `contract` is the canonical dict, or None when the run only monitors.

    Sources of one role and one `replica` are the ranks of one copy of the model; copies have different names.
    """

    TYPE: ClassVar[str] = "hello"

    rank: int = checks.checked(checks.count, "a rank", default=0)
    world: int = checks.checked(checks.count, "a world size", default=1)
    replica: str = checks.checked(checks.text, "a string", default="")
    pid: int = checks.checked(checks.count, "a process id", default=0)
    versions: Mapping[str, str] = checks.checked(
        checks.mapping(checks.text), "{name: version}", default_factory=dict
    )
    regime: str = checks.checked(checks.text, "a regime name")
    monitor_only: bool = checks.checked(checks.flag, "a bool")
    policy: str = checks.checked(
        checks.one_of("fail_open", "fail_closed"), "fail_open or fail_closed", default="fail_open"
    )
    contract: Mapping[str, Any] | None = checks.checked(
        checks.optional(lambda v: isinstance(v, dict) and checks.plain(v)),
        "a contract dict or null",
        default=None,
    )
    identities: Mapping[str, str] | None = checks.checked(
        checks.optional(checks.mapping(checks.text)), "{identity: digest} or null", default=None
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Welcome(Message):
    """The only reply. `differences` are (path, the sender's value, the run's value)."""

    TYPE: ClassVar[str] = "welcome"

    accepted: bool = checks.checked(checks.flag, "a bool")
    differences: tuple[tuple[str, Any, Any], ...] = checks.checked(
        checks.sequence(checks.difference), "[[path, theirs, ours], ...]", default=()
    )
    message: str = checks.checked(checks.long_text, "a string", default="")


@dataclass(frozen=True, kw_only=True, eq=False)
class Attestation(Message):
    """What a process found to be really bound, where, and in what environment.

    `regions` maps a region to object, provider, source, canary, expected_canary, enforcement, ok; and, where
    known, function. A value of None there means that it could not be read. `identities` are those of the contract
    that is in force now; where it is not the one of hello, `contract` is its canonical dict, so that the fields that
    differ can be named.
    """

    TYPE: ClassVar[str] = "attestation"

    reason: str = checks.checked(checks.one_of("start", "sync", "periodic"), "start, sync or periodic")
    step: int = checks.checked(checks.integer, "an integer")
    weight_version: int = checks.checked(checks.integer, "an integer")
    identities: Mapping[str, str] | None = checks.checked(
        checks.optional(checks.mapping(checks.text)), "{identity: digest} or null", default=None
    )
    topology: Mapping[str, int] = checks.checked(checks.mapping(checks.count), "{axis: degree}")
    environment: Mapping[str, Any] = checks.checked(
        checks.mapping(checks.plain), "{name: value}", default_factory=dict
    )
    regions: Mapping[str, Mapping[str, Any]] = checks.checked(
        checks.mapping(checks.mapping(checks.plain)), "{region: {...}}", default_factory=dict
    )
    rank: int = checks.checked(checks.count, "a rank", default=0)
    world: int = checks.checked(checks.count, "a world size", default=1)
    contract: Mapping[str, Any] | None = checks.checked(
        checks.optional(lambda v: isinstance(v, dict) and checks.plain(v)),
        "a contract dict or null",
        default=None,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Logprobs(Message):
    """Token logprobs of n sequences under one case.

    digests u1 [n, 16] (xxh3-128 over the int32le token ids, prompt and response, up to and including the last
    position covered), lengths i4 [n] (logprobs of each), starts i4 [n] (position of the first), logprobs f4
    [sum(lengths)] in nats, tokens i4 [sum(lengths)].

    What a sender knows of its sequences may come with them, i4 [n] each, -1 where it does not know: prefix_hit, prompt
    tokens taken from the prefix cache; pack_index, place in the trainer's pack, 0 first; padding, tokens of padding put
    before it. A mismatch is broken down by them (ATTRIBUTES).
    """

    TYPE: ClassVar[str] = "logprobs"

    case: str = checks.checked(checks.one_of(*CASES), f"one of {', '.join(CASES)}")
    step: int = checks.checked(checks.integer, "an integer")
    weight_version: int = checks.checked(checks.integer, "an integer")
    temperature: float = checks.checked(checks.number, "a number", default=1.0)
    logprobs_mode: str = checks.checked(checks.text, "a string", default="raw_logprobs")
    digests: npt.NDArray[np.uint8] = checks.array("|u1", 2)  # noqa: RUF009
    lengths: npt.NDArray[np.int32] = checks.array("<i4", 1)  # noqa: RUF009
    starts: npt.NDArray[np.int32] = checks.array("<i4", 1)  # noqa: RUF009
    logprobs: npt.NDArray[np.float32] = checks.array("<f4", 1)  # noqa: RUF009
    tokens: npt.NDArray[np.int32] = checks.array("<i4", 1)  # noqa: RUF009
    prefix_hit: npt.NDArray[np.int32] | None = checks.array("<i4", 1, default=None)  # noqa: RUF009
    pack_index: npt.NDArray[np.int32] | None = checks.array("<i4", 1, default=None)  # noqa: RUF009
    padding: npt.NDArray[np.int32] | None = checks.array("<i4", 1, default=None)  # noqa: RUF009

    def __post_init__(self) -> None:
        super().__post_init__()
        side = self.case.partition("_")[0]
        if self.role != side:
            raise WireError(f"logprobs: case {self.case} is the {side}'s to report, found {self.role}")
        n = self.digests.shape[0]
        if n > SEQUENCES_LIMIT:
            raise WireError(
                f"logprobs: wanted {SEQUENCES_LIMIT} sequences at most, found {n}; send several messages"
            )
        if self.digests.shape[1] != 16 or self.lengths.shape[0] != n or self.starts.shape[0] != n:
            raise WireError(
                f"logprobs: wanted digests [n, 16], lengths [n], starts [n], found {self.digests.shape}, "
                f"{self.lengths.shape}, {self.starts.shape}"
            )
        if n and (int(self.lengths.min()) < 0 or int(self.starts.min()) < 0):
            raise WireError("logprobs: wanted lengths and starts of at least 0, found a negative one")
        total = int(self.lengths.sum(dtype=np.int64))
        if self.logprobs.shape[0] != total or self.tokens.shape[0] != total:
            raise WireError(
                f"logprobs: lengths add up to {total}, found {self.logprobs.shape[0]} logprobs and "
                f"{self.tokens.shape[0]} tokens"
            )
        for name in ATTRIBUTES:
            values = getattr(self, name)
            if values is None:
                continue
            if values.shape[0] != n:
                raise WireError(
                    f"logprobs.{name}: wanted one number a sequence, {n}, found {values.shape[0]}"
                )
            if n and int(values.min()) < -1:
                raise WireError(
                    f"logprobs.{name}: wanted numbers from 0 up, or -1, found {int(values.min())}"
                )


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights(Message):
    """Partial sums (lo, hi), each mod 2^64, of the digests of the tensors, or shards, that a rank holds.

    numel is the number of elements that this rank covered, total the number that the whole tensor has.
    Tensors that could not be read are named in `unknown`, never left out; `zero` names
    those of which every element here is 0.
    """

    TYPE: ClassVar[str] = "weights"

    weight_version: int = checks.checked(checks.integer, "an integer")
    step: int = checks.checked(checks.integer, "an integer")
    tensors: Mapping[str, tuple[int, int]] = checks.checked(checks.mapping(checks.words), "{name: [lo, hi]}")
    numel: Mapping[str, int] = checks.checked(checks.mapping(checks.count), "{name: count}")
    total: Mapping[str, int] = checks.checked(checks.mapping(checks.count), "{name: count}")
    unknown: tuple[str, ...] = checks.checked(checks.sequence(checks.text), "[name, ...]", default=())
    zero: tuple[str, ...] = checks.checked(checks.sequence(checks.text), "[name, ...]", default=())

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensors.keys() != self.numel.keys() or self.tensors.keys() != self.total.keys():
            raise WireError("weights: tensors, numel and total must name the same tensors")


@dataclass(frozen=True, kw_only=True, eq=False)
class Step(Message):
    """Times of one step in seconds (generation, score, train, sync, step, probe) and values (loss, ...)."""

    TYPE: ClassVar[str] = "step"

    step: int = checks.checked(checks.integer, "an integer")
    weight_version: int = checks.checked(checks.integer, "an integer", default=-1)
    seconds: Mapping[str, float] = checks.checked(
        checks.mapping(checks.seconds), "{name: seconds}", default_factory=dict
    )
    values: Mapping[str, float] = checks.checked(
        checks.mapping(checks.number), "{name: number}", default_factory=dict
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe(Message):
    """What the probe says about itself since it started: messages sent and dropped, bytes, seconds."""

    TYPE: ClassVar[str] = "probe"

    sent: int = checks.checked(checks.count, "a count")
    dropped: int = checks.checked(checks.count, "a count")
    bytes: int = checks.checked(checks.count, "a count", default=0)
    probe_seconds: float = checks.checked(checks.seconds, "seconds", default=0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Bye(Message):
    """Closes a connection on purpose: what follows is not silence."""

    TYPE: ClassVar[str] = "bye"


MESSAGES: Mapping[str, type[Message]] = {
    kind.TYPE: kind for kind in (Hello, Welcome, Attestation, Logprobs, Weights, Step, Probe, Bye)
}


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def encode_frame(message: Message) -> list[Buffer]:
    """Give the buffers of one frame, in order, for `socket.sendmsg`; contiguous arrays are not copied."""
    header = message.header()
    chunks: list[Buffer] = []
    described: list[list[Any]] = []
    body = 0
    for name, array in message.arrays().items():
        flat = np.ascontiguousarray(array)
        described.append([name, flat.dtype.str, list(flat.shape)])
        body += flat.nbytes
        if flat.nbytes:
            chunks.append(flat.reshape(-1).view(np.uint8).data)
    if described:
        header["arrays"] = described
    packed: bytes = msgpack.packb(header, use_bin_type=True)
    if len(packed) > HEADER_LIMIT or body > BODY_LIMIT:
        raise WireError(
            f"{message.TYPE}: header of {len(packed)} and body of {body} bytes, admitted {HEADER_LIMIT} and "
            f"{BODY_LIMIT}; send it in several messages"
        )
    return [_PREFIX.pack(MAGIC, len(packed), body) + packed, *chunks]


def _decode(header_bytes: bytes, body: memoryview) -> Message:
    try:
        header = msgpack.unpackb(header_bytes, raw=False, strict_map_key=True, use_list=True)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise WireError(f"header: wanted a msgpack map, found {type(error).__name__}: {error}") from error
    if not isinstance(header, dict):
        raise WireError(f"header: wanted a map, found {type(header).__name__}")
    version = header.pop("v", None)
    if version != VERSION:
        raise WireError(f"header.v: wanted {VERSION}, found {_show(version)}; run one version on both sides")
    name = header.pop("type", None)
    kind = MESSAGES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise WireError(f"header.type: wanted one of {', '.join(MESSAGES)}, found {_show(name)}")
    layout = _layout(kind)
    header.update(_decode_arrays(header.pop("arrays", []), body, layout.arrays))
    if not header.keys() <= layout.names:
        raise WireError(
            f"{name}: unknown field {_show(min(str(key) for key in header.keys() - layout.names))}"
        )
    for key in layout.required:
        if key not in header:
            raise WireError(f"{name}.{key}: missing")
    return kind(**header)


def _decode_arrays(
    described: Any, body: memoryview, known: Mapping[str, tuple[np.dtype[Any], int]]
) -> dict[str, npt.NDArray[Any]]:
    if not isinstance(described, list):
        raise WireError(f"header.arrays: wanted a list, found {type(described).__name__}")
    arrays: dict[str, npt.NDArray[Any]] = {}
    offset = 0
    for entry in described:
        if not (isinstance(entry, list) and len(entry) == 3 and isinstance(entry[0], str)):
            raise WireError(f"header.arrays: wanted [name, dtype, shape], found {_show(entry)}")
        name, dtype, shape = entry
        wanted = known[name][0] if name in known else None
        if wanted is None or dtype != wanted.str or name in arrays:
            raise WireError(f"header.arrays: {_show(name)} of {_show(dtype)} is not an array of this message")
        if not (checks.sequence(checks.count)(shape) and len(shape) <= 2):
            raise WireError(f"header.arrays: shape of {name} is {_show(shape)}")
        size = math.prod(shape) * wanted.itemsize
        if offset + size > len(body):
            raise WireError(f"body: {name} needs bytes {offset} to {offset + size}, found {len(body)}")
        count = math.prod(shape)
        arrays[name] = np.frombuffer(body, dtype=wanted, count=count, offset=offset).reshape(shape)
        offset += size
    if offset != len(body):
        raise WireError(f"body: the arrays need {offset} bytes, found {len(body)}")
    return arrays


class FrameReader:
    """Takes a byte stream in any pieces and gives its messages; the first error poisons the reader.

    Bytes are read into `buffer()`, so that a body is received where it stays, or fed. Memory grows with what came, not
    with what a frame says of itself.
    """

    def __init__(self, *, header_limit: int = HEADER_LIMIT, body_limit: int = BODY_LIMIT) -> None:
        self._start = bytearray(_START_BYTES)  # the start of a frame, and what came with it
        self._low = self._high = 0  # what of it is not taken yet
        self._header = b""
        self._in_body = False  # the header of the frame is read
        self._body = _NO_BYTES
        self._body_size = self._got = 0
        self._header_limit = header_limit
        self._body_limit = body_limit
        self._error: WireError | None = None

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not complete yet; not 0 at end of stream means that it was cut."""
        whole = _PREFIX.size + len(self._header) + self._got if self._in_body else 0
        return whole + self._high - self._low

    def buffer(self) -> memoryview:
        """Give memory for the next bytes, of one at least; every message of those before must have been taken."""
        if self._in_body:
            if self._got == self._body.size:
                self._grow_body(self._got + 1)
            return self._body.data[self._got :]
        left = self._high - self._low
        if self._low:
            self._start[:left] = self._start[self._low : self._high]
            self._low, self._high = 0, left
        elif self._high == len(self._start):
            self._start = self._start + bytearray(len(self._start))
        return memoryview(self._start)[self._high :]

    def took(self, count: int) -> Iterator[Message]:
        """Yield each message that is complete with so many bytes more in `buffer()`, those before a malformed frame too.

        Raises WireError, then and ever after.
        """
        if self._error is not None:
            raise self._error
        if self._in_body:
            self._got += count
        else:
            self._high += count
        try:
            while (message := self._next()) is not None:
                yield message
        except WireError as error:
            self._error = error
            self._start, self._body = bytearray(_START_BYTES), _NO_BYTES
            self._low, self._high, self._in_body = 0, 0, False
            raise

    def feed(self, data: bytes | bytearray | memoryview) -> list[Message]:
        """Add bytes and give the messages that are complete now. Raises WireError, then and ever after."""
        return list(self.feed_each(data))

    def feed_each(self, data: bytes | bytearray | memoryview) -> Iterator[Message]:
        """Add bytes and yield each complete message, so that those before a malformed frame are not lost.

        The bytes must stay as they are until the last message was taken.
        """
        if self._error is not None:
            raise self._error
        rest = memoryview(data).cast("B")
        while rest:
            room = self.buffer()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            rest = rest[count:]
            yield from self.took(count)

    def _next(self) -> Message | None:
        if not self._in_body and not self._read_head():
            return None
        if self._got < self._body_size:
            return None
        # the arrays of the message are views of the body: each has its own, and is not written again
        header, body = self._header, self._body.data[: self._body_size]
        self._header, self._body, self._in_body = b"", _NO_BYTES, False
        return _decode(header, body.toreadonly())

    def _read_head(self) -> bool:
        """Whether prefix and header are there, the body begun then; the prefix is checked as soon as it is."""
        count = self._high - self._low
        prefix = bytes(self._start[self._low : min(self._low + _PREFIX.size, self._high)])
        if prefix[:4] != MAGIC[: len(prefix)]:
            raise WireError(f"frame: wanted magic {MAGIC!r}, found {prefix[:4]!r}")
        if count < _PREFIX.size:
            return False
        _, header_len, body_len = _PREFIX.unpack(prefix)
        if header_len > self._header_limit or body_len > self._body_limit:
            raise WireError(
                f"frame: header of {header_len} and body of {body_len} bytes, admitted "
                f"{self._header_limit} and {self._body_limit}"
            )
        size = _PREFIX.size + header_len
        if count < size:
            return False
        self._header = bytes(self._start[self._low + _PREFIX.size : self._low + size])
        self._low += size
        self._got = min(self._high - self._low, body_len)
        self._body_size, self._in_body = body_len, True
        self._grow_body(self._got)
        self._body[: self._got] = np.frombuffer(self._start, np.uint8, self._got, self._low)
        self._low += self._got
        if self._low == self._high:
            self._low = self._high = 0
            if len(self._start) > _START_BYTES:  # a header that long is rare
                self._start = bytearray(_START_BYTES)
        return True

    def _grow_body(self, count: int) -> None:
        """Have room for so many bytes of the body at least."""
        before = self._body
        room = np.empty(min(max(count, 4 * before.size, _BODY_BYTES), self._body_size), np.uint8)
        room[: before.size] = before
        self._body = room
