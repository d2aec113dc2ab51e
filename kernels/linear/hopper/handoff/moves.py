# SPDX-License-Identifier: Apache-2.0
"""What moves operands and results between ranks: copies by the copy engines or by a kernel, and the words that announce them."""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
import triton
import triton.language as tl

from isoexec.contracts.errors import IsoExecError
from isoexec.kernels.linear.hopper.handoff import protocol
from isoexec.kernels.linear.hopper.handoff.protocol import finish, is_alive, reach, tell, words_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from isoexec.kernels.linear.hopper.handoff.buffers import Room

__all__ = ["CopyError", "Mark", "Mover", "beside", "collect", "join", "mark", "move", "side", "spread"]

Mover = Literal["engine", "kernel"]
Mark = Literal["open", "raise_came", "raise_ready", "await", "close"]

_CAME, _READY, _LAUNCH = protocol.CAME, protocol.READY, protocol.LAUNCH
_ACCUMULATOR, _INPUTS = protocol.ACCUMULATOR, protocol.INPUTS
_RESULT, _ROOM = protocol.RESULT, protocol.ROOM
_EVERY = tl.constexpr(-1)  # in the place of one rank
_COPIERS = 16  # programs of a copy kernel: enough for NVLink, few beside a product
_SLICE = 16  # rows a program of `spread` takes
_NAN_ROWS = 128
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED
_SIDES: dict[tuple[str, int], Any] = {}


def side(room: Room, which: int) -> Any:
    """A stream of the room beside the caller's; copies run there while products run here."""
    if room.state.device.type != "cuda":
        return None
    return _SIDES.setdefault((room.name, which), torch.cuda.Stream(room.state.device))


@contextlib.contextmanager
def beside(stream: Any) -> Iterator[int]:
    """Run on a side stream, after what the caller's stream has now; yields its handle."""
    if stream is None:
        yield 0
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream.cuda_stream


def join(stream: Any) -> None:
    """Let the caller's stream wait for a side stream."""
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)


class CopyError(IsoExecError):
    """The driver refused a copy: `status` is its CUresult."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(status)

    def __str__(self) -> str:
        return (
            f"cuMemcpy2DAsync between peers returned CUresult {self.status}; choose mover 'kernel' for this schedule in "
            "handoff/table.json, and look at nvidia-smi topo -m for peers without NVLink"
        )


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver's cuda.h."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("src_x", "src_y")),
        ("src_kind", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("src_host", "src_device", "src_array")),
        ("src_pitch", ctypes.c_size_t),
        *((name, ctypes.c_size_t) for name in ("dst_x", "dst_y")),
        ("dst_kind", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("dst_host", "dst_device", "dst_array")),
        *((name, ctypes.c_size_t) for name in ("dst_pitch", "width", "height")),
    ]


@cache
def _driver_copy() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuMemcpy2DAsync_v2
    function.argtypes = [ctypes.POINTER(_Copy2D), ctypes.c_void_p]
    return function


@triton.jit(do_not_specialize=["rows"])
def move_kernel(
    src: tl.tensor,
    dst: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    src_pitch: tl.tensor,
    dst_pitch: tl.tensor,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    across = tl.cdiv(width, WIDTH)
    for t in range(tl.program_id(0), tl.cdiv(rows, HEIGHT) * across, tl.num_programs(0)):
        row = ((t // across) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)[:, None]
        col = (t % across) * WIDTH + tl.arange(0, WIDTH)[None, :]
        real = (row < rows) & (col < width)
        tl.store(dst + row * dst_pitch + col, tl.load(src + row * src_pitch + col, mask=real), mask=real)


def move(dst: Tensor, src: Tensor, mover: Mover, stream: int) -> None:
    """Copy `src [rows, width]` to a `dst` of the same shape, rows at any distance, on the stream whose handle is given."""
    assert dst.shape == src.shape, (dst.shape, src.shape)
    assert dst.stride(1) == src.stride(1) == 1, "rows of both are contiguous"
    rows, width = src.shape
    if not src.numel():
        return
    if mover == "kernel":
        cut = {"HEIGHT": 4, "WIDTH": 1024, "num_warps": 8}
        move_kernel[(min(_COPIERS, -(-rows // 4)),)](
            src, dst, rows, width, src.stride(0), dst.stride(0), **cut
        )
        return
    if src.device.type == "cpu":
        dst.copy_(src)
        return
    size = src.element_size()
    copy = _Copy2D(
        src_kind=_UNIFIED,
        src_device=src.data_ptr(),
        src_pitch=src.stride(0) * size,
        dst_kind=_UNIFIED,
        dst_device=dst.data_ptr(),
        dst_pitch=dst.stride(0) * size,
        width=width * size,
        height=rows,
    )
    if status := _driver_copy()(ctypes.byref(copy), stream):
        raise CopyError(int(status))


@triton.jit(do_not_specialize=["slot", "ahead", "rows"])
def mark_kernel(
    target: tl.tensor,
    bases: tl.tensor,
    state: tl.tensor,
    mirror: tl.tensor,
    patience: tl.tensor,
    slot: tl.tensor,
    ahead: tl.tensor,
    rows: tl.tensor,
    pitch: tl.tensor,
    MARK: tl.constexpr,
    PEER: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    HEIGHT: tl.constexpr,
    TIMED: tl.constexpr,
) -> None:
    last = tl.load(state + _LAUNCH).to(tl.int32)
    alive = is_alive(state)
    words = words_of(bases, RANK)
    if MARK == "open":
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                alive = reach(words + peer, last, alive, _ROOM, peer, state, mirror, patience, TIMED)
    elif MARK == "await":
        KIND: tl.constexpr = _INPUTS if PEER == _EVERY else _ACCUMULATOR
        for peer in tl.static_range(RANKS):
            if peer != RANK and (PEER == _EVERY or peer == PEER):
                word = words + _CAME + slot * RANKS + peer
                alive = reach(word, last + ahead, alive, KIND, peer, state, mirror, patience, TIMED)
        if alive == 0:
            # one NaN a row: the product of a row that never came is NaN
            for start in range(0, rows, HEIGHT):
                row = (start + tl.arange(0, HEIGHT)).to(tl.int64)
                tl.store(target + row * pitch, float("nan"), mask=row < rows)
    elif MARK == "close":
        finish(last, ahead, 1, bases, state, RANK, RANKS)
    elif alive != 0:
        for peer in tl.static_range(RANKS):
            if peer != RANK and (PEER == _EVERY or peer == PEER):
                word = words_of(bases, peer) + slot * RANKS + RANK
                tell(word + (_CAME if MARK == "raise_came" else _READY), last + ahead)


def mark(
    room: Room,
    what: Mark,
    slot: int = 0,
    target: Tensor | None = None,
    *,
    peer: int | None = None,
    ahead: int = 1,
) -> None:
    """Open or close a launch, announce a block (`slot`) to every peer, or wait for it from all; `target` turns NaN if in vain.

    With a `peer`, announce to it or wait for it alone. A launch of several laps counts as that many, and `ahead` says which.
    """
    at = room.inbox(room.rank, torch.bfloat16) if target is None else target
    mark_kernel[(1,)](
        at,
        room.bases,
        room.state,
        room.mirror,
        room.patience,
        slot,
        ahead,
        0 if target is None else len(target),
        0 if target is None else target.stride(0),
        MARK=what,
        PEER=-1 if peer is None else peer,
        RANK=room.rank,
        RANKS=room.ranks,
        HEIGHT=_NAN_ROWS,
        TIMED=room.bases.device.type == "cuda",
        num_warps=1,
    )


@triton.jit(do_not_specialize=["rows", "slots", "per_slot", "ahead"])
def collect_kernel(
    area: tl.tensor,
    out: tl.tensor,
    bases: tl.tensor,
    state: tl.tensor,
    mirror: tl.tensor,
    patience: tl.tensor,
    rows: tl.tensor,
    per: tl.tensor,
    slots: tl.tensor,
    per_slot: tl.tensor,
    ahead: tl.tensor,
    N: tl.tensor,
    OWNER: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TIMED: tl.constexpr,
) -> None:
    """Program (c, r) copies its rows of the area to `out` once their owner has announced them; own ones are there, or NaN."""
    in_slot = tl.cdiv(per_slot, HEIGHT)
    block = tl.program_id(1) // in_slot
    part = block // slots
    owner = part if OWNER == _EVERY else part * 0 + OWNER
    slot = block % slots
    first = part * per + slot * per_slot + (tl.program_id(1) % in_slot) * HEIGHT
    last = tl.load(state + _LAUNCH).to(tl.int32)
    alive = is_alive(state)
    if (owner != RANK) | (alive == 0):
        for peer in tl.static_range(RANKS):
            if (peer == owner) & (peer != RANK):
                word = words_of(bases, RANK) + _READY + slot * RANKS + peer
                alive = reach(word, last + ahead, alive, _RESULT, peer, state, mirror, patience, TIMED)
        row = (first + tl.arange(0, HEIGHT)).to(tl.int64)[:, None]
        end = tl.minimum(tl.minimum(part * per + (slot + 1) * per_slot, (part + 1) * per), rows)
        for start in range(tl.program_id(0) * WIDTH, N, tl.num_programs(0) * WIDTH):
            col = start + tl.arange(0, WIDTH)[None, :]
            real = (row < end) & (col < N)
            value = tl.load(area + row * N + col, mask=real, other=0.0, cache_modifier=".cg")
            value = tl.where(alive != 0, value, float("nan"))
            tl.store(out + row * N + col, value.to(out.dtype.element_ty), mask=real)


def collect(
    room: Room,
    area: Tensor,
    out: Tensor,
    *,
    per: int,
    slots: int,
    per_slot: int,
    owner: int | None = None,
    ahead: int = 1,
) -> None:
    """Copy other owners' rows of `area [rows, N]` to `out`; owner o has rows from `o * per`, in `slots` blocks of `per_slot`.

    With an `owner`, all `per` rows are its. `ahead` is as in `mark`.
    """
    rows, N = out.shape
    height = 8
    collect_kernel[(1, (room.ranks if owner is None else 1) * slots * -(-per_slot // height))](
        area,
        out,
        room.bases,
        room.state,
        room.mirror,
        room.patience,
        rows,
        per,
        slots,
        per_slot,
        ahead,
        N,
        OWNER=-1 if owner is None else owner,
        RANK=room.rank,
        RANKS=room.ranks,
        HEIGHT=height,
        WIDTH=1024,
        TIMED=out.device.type == "cuda",
        num_warps=4,
    )


@triton.jit(do_not_specialize=["rows", "step"])
def spread_kernel(
    src: tl.tensor,
    area: tl.tensor,
    out: tl.tensor,
    bases: tl.tensor,
    state: tl.tensor,
    mirror: tl.tensor,
    patience: tl.tensor,
    rows: tl.tensor,
    step: tl.tensor,
    width: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TIMED: tl.constexpr,
) -> None:
    """Program p sends a slice of rows to every rank's area, waits for that slice from all, and copies it to `out`."""
    last = tl.load(state + _LAUNCH).to(tl.int32)
    alive = tl.full((), 1, tl.int32)
    words = words_of(bases, RANK)
    pid = tl.program_id(0)
    row = (pid * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)[:, None]
    pitch = width * RANKS
    BYTES: tl.constexpr = src.dtype.element_ty.primitive_bitwidth // 8
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            alive = reach(words + peer, last, alive, _ROOM, peer, state, mirror, patience, TIMED)
    for turn in tl.static_range(RANKS):
        peer = (RANK + 1 + turn) % RANKS
        apart = tl.multiple_of((tl.load(bases + peer) - tl.load(bases + RANK)) // BYTES, 16)
        if alive != 0:  # else the peer may still read what lies there
            for start in range(0, width, WIDTH):
                col = start + tl.arange(0, WIDTH)[None, :]
                real = (row < rows) & (col < width)
                value = tl.load(src + (row + peer * step) * width + col, mask=real)
                tl.store(area + apart + row * pitch + RANK * width + col, value, mask=real)
            if peer != RANK:
                tell(words_of(bases, peer) + _CAME + pid * RANKS + RANK, last + 1)
    tl.debug_barrier()  # this program reads its own share below
    for turn in tl.static_range(RANKS):
        peer = (RANK + 1 + turn) % RANKS
        if peer != RANK:
            word = words + _CAME + pid * RANKS + peer
            alive = reach(word, last + 1, alive, _INPUTS, peer, state, mirror, patience, TIMED)
    for start in range(0, pitch, WIDTH):
        col = start + tl.arange(0, WIDTH)[None, :]
        real = (row < rows) & (col < pitch)
        value = tl.load(area + row * pitch + col, mask=real, other=0.0, cache_modifier=".cg")
        value = tl.where(alive != 0, value, float("nan"))
        tl.store(out + row * pitch + col, value.to(out.dtype.element_ty), mask=real)
    finish(last, 1, tl.num_programs(0), bases, state, RANK, RANKS)


def spread(room: Room, src: Tensor, area: Tensor, out: Tensor, *, step: int) -> None:
    """`out [rows, ranks * width]`: every rank's columns side by side, one launch, from `src [., width]` on each.

    Rank q gets rows from `q * step` of every rank's `src`: 0 gathers, `rows` exchanges. Needs room in `area` for `out`.
    """
    rows, width = len(out), src.shape[1]
    assert out.shape[1] == room.ranks * width, (out.shape, width)
    spread_kernel[(-(-rows // _SLICE),)](
        src,
        area,
        out,
        room.bases,
        room.state,
        room.mirror,
        room.patience,
        rows,
        step,
        width,
        RANK=room.rank,
        RANKS=room.ranks,
        HEIGHT=_SLICE,
        WIDTH=512,
        TIMED=src.device.type == "cuda",
        num_warps=4,
    )
