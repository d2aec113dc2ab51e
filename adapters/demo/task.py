# SPDX-License-Identifier: Apache-2.0
"""A task whose reward rises within a few steps: answer with tokens of one quarter of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Task"]

_FIRST_FREE_TOKEN = 3  # 0, 1 and 2 are pad, begin and end
_BEGIN = 1


@dataclass(frozen=True, kw_only=True)
class Task:
    """``prompts`` random prompts a step, each answered ``group`` times with ``response`` tokens.

    The reward of a response is the share of its tokens with an id that is 0 mod 4: an untrained policy gets about 0.25.
    """

    seed: int = 17
    vocab: int = 512
    prompts: int = 8
    group: int = 8
    prompt_lengths: tuple[int, int] = (16, 48)
    response: int = 64

    @property
    def batch(self) -> int:
        return self.prompts * self.group

    def batch_prompts(self, step: int) -> list[list[int]]:
        """The prompts of a step, each repeated ``group`` times in a row; a function of seed and step alone."""
        rng = np.random.default_rng([self.seed, step])
        low, high = self.prompt_lengths
        out: list[list[int]] = []
        for _ in range(self.prompts):
            length = int(rng.integers(low, high + 1))
            prompt = [_BEGIN, *rng.integers(_FIRST_FREE_TOKEN, self.vocab, length - 1).tolist()]
            out.extend([prompt] * self.group)
        return out

    def rewards(self, responses: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """float32 [n] in [0, 1]."""
        return np.array([np.mean(np.asarray(r) % 4 == 0) if len(r) else 0.0 for r in responses], np.float32)
