# SPDX-License-Identifier: Apache-2.0
"""Sampled tokens of mixed lengths, and their logprobs of two runtimes compared as integers; shapes of the models that do it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from isoexec.adapters.demo.job import pad
from isoexec.adapters.demo.processes import Remote, call_all
from isoexec.contracts.errors import IsoExecError

__all__ = ["LONGEST", "MODELS", "MOST", "TINY", "Logprobs", "Tally", "batches", "scored"]

Logprobs = npt.NDArray[np.float32]

# name: what `write_config` takes, and the contract's stem
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3-0.6b": (
        {"layers": 28, "hidden": 1024, "ffn": 3072, "heads": 16, "kv_heads": 8, "head_dim": 128,
         "vocab": 151936, "theta": 1e6, "tied": True},
        "qwen3-dense",
    ),
    "qwen3-8b": (
        {"layers": 36, "hidden": 4096, "ffn": 12288, "heads": 32, "kv_heads": 8, "head_dim": 128,
         "vocab": 151936, "theta": 1e6},
        "qwen3-dense",
    ),
    "mimo-7b": (
        {"layers": 36, "hidden": 4096, "ffn": 11008, "heads": 32, "kv_heads": 8, "head_dim": 128,
         "vocab": 151680, "theta": 640000.0, "mimo": True},
        "mimo-dense",
    ),
}  # fmt: skip

TINY: dict[str, Any] = {"hidden": 512, "ffn": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "vocab": 512}
"""Of the models on a CPU, which eight ranks can share in the blocks of the CPU's chain."""

LONGEST = {True: (60, 40), False: (4096, 2048)}
"""Tokens of the longest prompt and response: tiny, or not."""
MOST = {True: 8, False: 256}
"""Sequences of the largest batch."""
_SIZES = {True: (1, 3, 8), False: (1, 256, 8, 32, 2, 128, 64)}
_TOKENS = {True: 4096, False: 65536}  # that a call of the trainer takes


@dataclass(kw_only=True)
class Tally:
    """What was compared so far; a token counts as equal where its bits are, and are of a number."""

    tokens: int = 0
    equal: int = 0
    sequences: int = 0
    sum_abs_d: float = 0.0
    max_abs_d: float = 0.0

    def add(self, rollout: Logprobs, trainer: Logprobs) -> None:
        """Compare a sequence's logprobs; IsoExecError where they are no float32 of one shape."""
        if rollout.dtype != np.float32 or trainer.dtype != np.float32 or rollout.shape != trainer.shape:
            raise IsoExecError(
                f"wanted float32 of one shape, found {rollout.dtype} {rollout.shape} and {trainer.dtype} {trainer.shape}"
            )
        same = (rollout.view(np.int32) == trainer.view(np.int32)) & np.isfinite(rollout)
        d = np.abs(trainer.astype(np.float64) - rollout.astype(np.float64))
        self.sequences += 1
        self.tokens += len(rollout)
        self.equal += int(same.sum())
        self.sum_abs_d += float(d.sum())
        self.max_abs_d = max(self.max_abs_d, float(d.max(initial=0.0)))

    def result(self) -> dict[str, Any]:
        """Counts, the share of equal tokens, and the mean and largest absolute d in nats."""
        of = max(self.tokens, 1)
        return {
            "tokens": self.tokens,
            "equal": self.equal,
            "sequences": self.sequences,
            "share": self.equal / of,
            "mean_abs_d": self.sum_abs_d / of,
            "max_abs_d": self.max_abs_d,
        }


def batches(vocab: int, *, tiny: bool, seed: int = 7) -> Iterator[tuple[list[list[int]], list[int]]]:
    """Batches of mixed size without end: prompts, and how long their responses are, evenly over the lengths' logarithm."""
    rng = np.random.default_rng(seed)
    low, (high, longest) = 4 if tiny else 16, LONGEST[tiny]

    def lengths(count: int, a: int, b: int) -> list[int]:
        return [int(x) for x in np.exp(rng.uniform(np.log(a), np.log(b + 1), count)).clip(a, b)]

    first = True
    while True:
        for size in _SIZES[tiny]:
            prompts, responses = lengths(size, low, high), lengths(size, 16, longest)
            if first and size > 1:  # both ends are there in any case
                prompts[:2], responses[:2], first = [low, high], [longest, 16], False
            yield [rng.integers(3, vocab, n).tolist() for n in prompts], responses


def scored(
    trainers: Sequence[Remote],
    prompts: Sequence[list[int]],
    responses: Sequence[list[int]],
    *,
    tiny: bool,
    step: int,
    version: int,
) -> list[Logprobs]:
    """The trainer's logprobs of every response, float32 by sequence, in calls of rows of like lengths."""
    found: dict[int, Logprobs] = {}
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(responses[i]))
    while by_length:
        width = len(prompts[by_length[-1]]) + len(responses[by_length[-1]])
        part = [by_length.pop() for _ in range(min(len(by_length), max(1, _TOKENS[tiny] // width)))]
        tokens, first, ends = pad([prompts[i] for i in part], [responses[i] for i in part])
        answers = call_all(
            trainers, "score", tokens, first, ends, step=step, version=version, watched=False, answer=True
        )
        found |= zip(part, answers[0]["logprobs"], strict=True)
    return [found[i] for i in range(len(prompts))]
