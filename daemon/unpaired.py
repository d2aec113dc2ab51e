# SPDX-License-Identifier: Apache-2.0
"""Says why sequences never met a partner: one word of `UNPAIRED_REASONS` for each.

What a digest shows is noted while pairing: `version` and `length` where the other side reported the same sequence under other
weights, or another part of it, `late` and `evicted` where its partner had been let go of. A digest that nobody shares says
only that some token differs. So what is let go alone is compared, token by token, with what the other side has left alone,
nearest step first: a record is found by the first or last tokens that it shares, and is the same sequence to a person where

- the shorter one is the beginning (at the same position) or the end of the longer one: `length`;
- both begin at the same position with all the same tokens, so that the prompt differs, or the shorter one shares half of its
  tokens or more with the other, counted from both ends: `ids`.

It is a likeness, no proof: two samples of one prompt that differ in few tokens look the same as one that was tokenised anew. That
nothing resembles a record (`only_rollout`, `only_trainer`) is said only where all that was left was compared; where that was too
much, where too many begin or end alike, or where a record has fewer than 4 tokens to compare, it is `unknown`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from isoexec.daemon.pairing import Block

__all__ = ["ALONE", "Place", "explain"]

ALONE = {"engine": "only_rollout", "trainer": "only_trainer"}

_EXPLAINED = 1024
"""Records let go at once that are compared, at most."""
_COMPARED = 16384
"""Records of the other side that these are compared with, at most."""
_TRIED = 16
"""Of those that begin or end alike, at most; where there are more, none: it would tell little for much."""
_LEAST = 4
"""Tokens that have to be equal before two records are taken for one sequence."""
_SHARED = 0.5
_KEYS = (16, _LEAST)

Ints = npt.NDArray[np.int32]
Key = tuple[int, bytes]
Place = tuple["Block", int]
"""A record: its block and its place there."""


def explain(gone: Sequence[Place], left: Iterable[Place]) -> None:
    """Note the reason of each of `gone`, records of one side, in the `reasons` of its block.

    `left` are the records of the other side that have met nothing either; those that resemble one of `gone` have its reason too.
    """
    found = iter(left)
    index: dict[Key, list[Place]] = {}
    others = list(islice(found, _COMPARED))
    for one in others:
        for key in _keys(one):
            index.setdefault(key, []).append(one)
    complete = next(found, None) is None
    for number, one in enumerate(gone):
        block, place = one
        if not others:
            block.reasons[place] = ALONE[block.role]
        elif number < _EXPLAINED:
            block.reasons[place] = _compared(one, index, complete=complete)
        else:
            block.reasons[place] = "unknown"


def _compared(one: Place, index: dict[Key, list[Place]], *, complete: bool) -> str:
    block, place = one
    sure = complete and block.sizes[place] >= _LEAST
    for key in _keys(one):
        alike = index.get(key, ())
        if len(alike) > _TRIED:
            sure = False
            continue
        for other, there in alike:
            if reason := _likeness(block, place, other, there):
                other.reasons.setdefault(there, reason)
                return reason
    return ALONE[block.role] if sure else "unknown"


def _tokens(block: Block, place: int) -> Ints:
    at = block.offsets[place]
    return block.message.tokens[at : at + block.sizes[place]]


def _keys(one: Place) -> list[Key]:
    """Give by what a record is found, the most telling first: its first tokens with their position, its last ones without."""
    block, place = one
    tokens, start = _tokens(block, place), block.starts[place]
    keys: list[Key] = []
    for size in _KEYS:
        if size <= tokens.size:
            keys += [(start, tokens[:size].tobytes()), (-1, tokens[-size:].tobytes())]
    return keys


def _likeness(block: Block, place: int, other: Block, there: int) -> str:
    a, b = _tokens(block, place), _tokens(other, there)
    n = min(a.size, b.size)
    head = _equal(a[:n], b[:n]) if block.starts[place] == other.starts[there] else 0
    if head == n:
        return "length" if a.size != b.size else "ids"
    tail = _equal(a[a.size - n :][::-1], b[b.size - n :][::-1])
    if tail == n and a.size != b.size:
        return "length"
    return "ids" if head + tail >= _SHARED * n else ""


def _equal(a: Ints, b: Ints) -> int:
    """Give how many tokens from the start are equal."""
    unequal = np.flatnonzero(a != b)
    return int(unequal[0]) if unequal.size else int(a.size)
