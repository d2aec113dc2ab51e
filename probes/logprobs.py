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

__all__ = ["LogprobTap", "ScoredSequence", "from_padded"]

_TOKENS_A_MESSAGE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ScoredSequence:
    """One sequence: prompt and response token ids, and one float32 logprob (nats) per response token."""

    prompt: Sequence[int]
    response: Sequence[int]
    logprobs: np.ndarray[Any, np.dtype[np.float32]]

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
        )
        return int(lengths.sum())


def _array(ids: Sequence[int] | np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    # joined with int64, other kinds would turn into floats
    return ids if isinstance(ids, np.ndarray) and ids.dtype.kind == "i" else np.asarray(ids, np.int64)


def from_padded(
    tokens: np.ndarray[Any, np.dtype[Any]],
    logprobs: np.ndarray[Any, np.dtype[np.float32]],
    prompt_lengths: Sequence[int],
    lengths: Sequence[int],
) -> list[ScoredSequence]:
    """Cut a trainer's right-padded rows into sequences.

    ``tokens`` [n, L] and ``logprobs`` float32 [n, L], where column j holds the logprob of ``tokens[:, j]`` given what is before
    it; ``lengths`` counts prompt and response.
    """
    return [
        ScoredSequence(
            prompt=tokens[i, :p].tolist(),
            response=tokens[i, p:n].tolist(),
            logprobs=np.ascontiguousarray(logprobs[i, p:n]),
        )
        for i, (p, n) in enumerate(zip(prompt_lengths, lengths, strict=True))
    ]
