# SPDX-License-Identifier: Apache-2.0
"""Take token logprobs from one side of the job and send them under the content of their sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isoexec.contracts import wire
from isoexec.probes.client import Client
from isoexec.probes.pairing import DIGEST_BYTES, sampled, sequence_digest

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
        chosen: list[tuple[bytes, ScoredSequence]] = []
        sent = pending = 0
        for s in sequences:
            digest = sequence_digest(
                np.concatenate([np.asarray(s.prompt, np.int64), np.asarray(s.response, np.int64)])
            )
            if sampled(digest, self._one_in):
                chosen.append((digest, s))
                pending += len(s.response)
            if pending >= _TOKENS_A_MESSAGE or len(chosen) >= wire.SEQUENCES_LIMIT:
                sent += self._send(case, chosen, step, weight_version, temperature, logprobs_mode)
                chosen, pending = [], 0
        return sent + self._send(case, chosen, step, weight_version, temperature, logprobs_mode)

    def _send(
        self,
        case: str,
        chosen: Sequence[tuple[bytes, ScoredSequence]],
        step: int,
        weight_version: int,
        temperature: float,
        mode: str,
    ) -> int:
        if not chosen:
            return 0
        digests = np.frombuffer(b"".join(d for d, _ in chosen), np.uint8).reshape(len(chosen), DIGEST_BYTES)
        lengths = np.array([len(s.response) for _, s in chosen], "<i4")
        self._client.send(
            wire.Logprobs,
            case=case,
            step=step,
            weight_version=weight_version,
            temperature=temperature,
            logprobs_mode=mode,
            digests=digests,
            lengths=lengths,
            starts=np.array([len(s.prompt) for _, s in chosen], "<i4"),
            logprobs=np.concatenate([s.logprobs for _, s in chosen]).astype("<f4", copy=False),
            tokens=np.concatenate([np.asarray(s.response, "<i4") for _, s in chosen]),
        )
        return int(lengths.sum())


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
