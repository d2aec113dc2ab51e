# SPDX-License-Identifier: Apache-2.0
"""Take token logprobs from one side of the job and send them under the content of their sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from isoexec.contracts import wire
from isoexec.probes.client import Client
from isoexec.probes.pairing import DIGEST_BYTES, checked_ids, sampled

__all__ = ["LogprobTap", "ScoredSequence", "from_packed", "from_padded"]

_TOKENS_A_MESSAGE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ScoredSequence:
    """One sequence: prompt and response token ids, and one float32 logprob (nats) per response token.

    What is known of how it was computed, each None where it is not: prefix_hit, prompt tokens that came from the engine's
    prefix cache; pack_index, its place in the trainer's pack, 0 first; padding, tokens of padding put before it.
    """

    prompt: Sequence[int]
    response: Sequence[int]
    logprobs: np.ndarray[Any, np.dtype[np.float32]]
    prefix_hit: int | None = None
    pack_index: int | None = None
    padding: int | None = None

    def __post_init__(self) -> None:
        if self.logprobs.dtype != np.float32 or self.logprobs.shape != (len(self.response),):
            raise ValueError(
                f"logprobs: wanted float32 [{len(self.response)}], found {self.logprobs.dtype} {self.logprobs.shape}"
            )


class LogprobTap:
    """Sends the logprobs of every ``one_in``-th sequence, the same ones on both sides, as their digests decide."""

    def __init__(self, client: Client, *, one_in: int = 1) -> None:
        self._client = client
        self._one_in = one_in

    def record(
        self,
        case: str,
        sequences: Iterable[ScoredSequence],
        *,
        step: int,
        weight_version: int,
        temperature: float = 1.0,
        logprobs_mode: str = "raw_logprobs",
    ) -> int:
        """Send the sampled ones among ``sequences``; returns how many tokens were sent.  Never waits."""
        waiting: list[ScoredSequence] = []
        sent = pending = 0
        for s in sequences:
            waiting.append(s)
            pending += len(s.response)
            if pending >= _TOKENS_A_MESSAGE or len(waiting) >= wire.SEQUENCES_LIMIT:
                sent += self._send(case, waiting, step, weight_version, temperature, logprobs_mode)
                waiting, pending = [], 0
        return sent + self._send(case, waiting, step, weight_version, temperature, logprobs_mode)

    def _send(
        self,
        case: str,
        sequences: Sequence[ScoredSequence],
        step: int,
        weight_version: int,
        temperature: float,
        mode: str,
    ) -> int:
        if not sequences:
            return 0
        # one array of all ids: what is done sequence by sequence here is what the step waits for
        ids = checked_ids(
            np.concatenate([_array(part) for s in sequences for part in (s.prompt, s.response)])
        )
        view, at = ids.data, 0
        digests: list[bytes] = []
        chosen: list[ScoredSequence] = []
        tokens: list[np.ndarray[Any, np.dtype[np.int32]]] = []
        for s in sequences:
            start = at + len(s.prompt)
            end = start + len(s.response)
            digest = xxhash.xxh3_128_digest(view[at:end])
            if sampled(digest, self._one_in):
                digests.append(digest)
                chosen.append(s)
                tokens.append(ids[start:end])
            at = end
        if not chosen:
            return 0
        lengths = np.array([len(s.response) for s in chosen], "<i4")
        self._client.send(
            wire.Logprobs,
            case=case,
            step=step,
            weight_version=weight_version,
            temperature=temperature,
            logprobs_mode=mode,
            digests=np.frombuffer(b"".join(digests), np.uint8).reshape(len(chosen), DIGEST_BYTES),
            lengths=lengths,
            starts=np.array([len(s.prompt) for s in chosen], "<i4"),
            logprobs=np.concatenate([s.logprobs for s in chosen]).astype("<f4", copy=False),
            tokens=np.concatenate(tokens),
            **{name: _known([getattr(s, name) for s in chosen]) for name in wire.ATTRIBUTES},
        )
        return int(lengths.sum())


def _array(ids: Sequence[int] | np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    # joined with int64, other kinds would turn into floats
    return ids if isinstance(ids, np.ndarray) and ids.dtype.kind == "i" else np.asarray(ids, np.int64)


def _known(values: Sequence[int | None]) -> np.ndarray[Any, np.dtype[np.int32]] | None:
    """What is known of sequences, -1 where it is not; None where it is of none of them."""
    if all(value is None for value in values):
        return None
    return np.array([-1 if value is None else value for value in values], "<i4")


def from_padded(
    tokens: np.ndarray[Any, np.dtype[Any]],
    logprobs: np.ndarray[Any, np.dtype[np.float32]],
    prompt_lengths: Sequence[int],
    lengths: Sequence[int],
    *,
    padding: Sequence[int] | None = None,
    pack_index: Sequence[int] | None = None,
) -> list[ScoredSequence]:
    """Cut a trainer's right-padded rows into sequences.

    ``tokens`` [n, L] and ``logprobs`` float32 [n, L], where column j holds the logprob of ``tokens[:, j]`` given what is before
    it; ``lengths`` counts prompt and response. ``padding`` and ``pack_index``, one a row, tell how the trainer computed the
    row where that was another way: padded on the left by so many tokens, or as that sequence of a pack.
    """
    unknown = [None] * len(lengths)
    sequences = zip(
        prompt_lengths,
        lengths,
        unknown if padding is None else padding,
        unknown if pack_index is None else pack_index,
        strict=True,
    )
    return [
        ScoredSequence(
            prompt=tokens[i, :first].tolist(),
            response=tokens[i, first:end].tolist(),
            logprobs=np.ascontiguousarray(logprobs[i, first:end]),
            padding=padded,
            pack_index=place,
        )
        for i, (first, end, padded, place) in enumerate(sequences)
    ]


def from_packed(
    tokens: np.ndarray[Any, np.dtype[Any]],
    logprobs: np.ndarray[Any, np.dtype[np.float32]],
    prompt_lengths: Sequence[int],
    cu_seqlens: Sequence[int],
) -> list[ScoredSequence]:
    """Cut one pack of a trainer into its sequences, each with its place in the pack.

    ``tokens`` [T] and ``logprobs`` float32 [T], where element j holds the logprob of ``tokens[j]`` given what is before it in
    its sequence; ``cu_seqlens`` [n + 1] are the edges of the sequences, from 0 up.  Raises ValueError for edges that do not fit.
    """
    edges = [int(edge) for edge in cu_seqlens]
    if edges[:1] != [0] or edges != sorted(edges) or edges[-1] > len(tokens):
        raise ValueError(f"cu_seqlens: wanted edges from 0 up to {len(tokens)} at most, found {edges[:8]}")
    if len(prompt_lengths) != len(edges) - 1:
        raise ValueError(
            f"prompt_lengths: wanted {len(edges) - 1}, one a sequence, found {len(prompt_lengths)}"
        )
    sequences = zip(edges[:-1], edges[1:], prompt_lengths, strict=True)
    return [
        ScoredSequence(
            prompt=tokens[start : start + prompt].tolist(),
            response=tokens[start + prompt : end].tolist(),
            logprobs=np.ascontiguousarray(logprobs[start + prompt : end]),
            pack_index=place,
        )
        for place, (start, end, prompt) in enumerate(sequences)
    ]
