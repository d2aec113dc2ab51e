# SPDX-License-Identifier: Apache-2.0
"""Waiting and signalling between GPUs in Triton: words in symmetric memory that count launches.

A launch has a number on every rank: the launches of a group are the same in the same order everywhere, and the count lies on the
device, so a replayed CUDA graph counts on. A word holds the number of the launch that wrote it last; who waits, waits until the
word has reached a number, so nothing is ever reset. `done[q]` says which launch rank q has finished: before that its buffers
are not written again. Numbers wrap; they are compared by difference. A rank that has waited in vain counts from far ahead:
whatever its later launches wait for is not reached, so they look at the fault, which a launch in order never has to.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

__all__ = [
    "CAME",
    "CLOCK",
    "FAULT",
    "LAUNCH",
    "MOST_RANKS",
    "SLOTS",
    "TICKET",
    "WORDS",
    "code_of",
    "meaning_of",
]

MOST_RANKS = 64
SLOTS = 1 << 15  # tiles or blocks a launch can wait for

# in symmetric memory, int32: done[MOST_RANKS], then a word a slot for what came in and one for results
CAME = tl.constexpr(MOST_RANKS)
READY = tl.constexpr(MOST_RANKS + SLOTS)
WORDS = MOST_RANKS + 2 * SLOTS

# on the rank's own device, int64: number of the last launch, programs that have finished, first fault, a clock in ns, number
# of the last launch in which all came
LAUNCH = tl.constexpr(0)
TICKET = tl.constexpr(1)
FAULT = tl.constexpr(2)
CLOCK = tl.constexpr(3)
GOOD = tl.constexpr(4)
STATE = 5

_POLLS = tl.constexpr(64)  # polls between two looks at the clock
_AHEAD = tl.constexpr(1 << 29)
_KINDS = ("an accumulator", "inputs", "a result", "room for its results")
ACCUMULATOR, INPUTS, RESULT, ROOM = (tl.constexpr(i) for i in range(len(_KINDS)))


def code_of(kind: int, peer: int) -> int:
    """A fault word: what did not come, and from whom."""
    return 1 + kind + len(_KINDS) * peer


def meaning_of(code: int) -> tuple[str, int]:
    """What a fault word says: (what did not come, rank it was awaited from)."""
    return _KINDS[(code - 1) % len(_KINDS)], (code - 1) // len(_KINDS)


@triton.jit
def ns(state: tl.tensor) -> tl.tensor:
    """The device's clock. Threads read their own timers, so an atomic makes one answer of them: loops must end together."""
    tl.atomic_max(state + CLOCK, globaltimer(), sem="relaxed")
    return tl.atomic_max(state + CLOCK, globaltimer(), sem="relaxed")


@triton.jit
def words_of(bases: tl.tensor, rank: tl.tensor) -> tl.tensor:
    """The words of a rank; they lie at the start of its symmetric memory."""
    return tl.multiple_of(tl.load(bases + rank), 16).to(tl.pointer_type(tl.int32))


@triton.jit
def is_alive(state: tl.tensor) -> tl.tensor:
    """1 unless a launch on this rank has waited in vain; atomic, so that all threads of a program agree."""
    return (tl.atomic_add(state + FAULT, 0, sem="relaxed") == 0).to(tl.int32)


@triton.jit
def reach(
    word: tl.tensor,
    wanted: tl.tensor,
    alive: tl.tensor,
    kind: tl.constexpr,
    peer: tl.constexpr,
    state: tl.tensor,
    mirror: tl.tensor,
    patience: tl.tensor,
    TIMED: tl.constexpr,
) -> tl.tensor:
    """Wait until `word` has reached `wanted`; what its writer stored before is then visible to the program.

    Returns `alive`, or 0 after `patience` (ns; polls where not TIMED), when the fault is noted on the device and in host memory.
    """
    seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    if (alive != 0) & (seen - wanted < 0):
        begin = tl.full((), 0, tl.int64)
        if TIMED:
            begin = ns(state)
        waited = tl.full((), 0, tl.int64)
        polls = tl.full((), 0, tl.int64)
        while (alive != 0) & (seen - wanted < 0):
            seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
            polls += 1
            if polls % _POLLS == 0:
                waited = ns(state) - begin if TIMED else polls
                # another program may have given up already
                if (seen - wanted < 0) & ((waited > patience) | (is_alive(state) == 0)):
                    alive = alive * 0
                    code = tl.full((), 1 + kind + 4 * peer, tl.int64)
                    if tl.atomic_cas(state + FAULT, tl.full((), 0, tl.int64), code) == 0:
                        tl.store(mirror, code)
    return alive


@triton.jit
def tell(word: tl.tensor, number: tl.tensor) -> None:
    """Raise a word; whoever sees it sees all that this program stored before."""
    tl.debug_barrier()
    tl.atomic_xchg(word, number, sem="release", scope="sys")


@triton.jit
def finish(
    last: tl.tensor,
    laps: tl.tensor,
    programs: tl.tensor,
    bases: tl.tensor,
    state: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """The last program of a launch counts it and tells every peer, unless something never came."""
    tl.debug_barrier()
    ticket = tl.atomic_add(state + TICKET, 1, sem="acq_rel", scope="gpu")
    if ticket == programs - 1:
        tl.store(state + TICKET, tl.full((), 0, tl.int64))
        if is_alive(state) == 0:
            tl.store(state + LAUNCH, tl.load(state + GOOD) + _AHEAD)
        else:
            tl.store(state + LAUNCH, (last + laps).to(tl.int64))
            tl.store(state + GOOD, (last + laps).to(tl.int64))
            for peer in tl.static_range(RANKS):
                if peer != RANK:
                    tl.atomic_xchg(words_of(bases, peer) + RANK, last + laps, sem="release", scope="sys")
