# SPDX-License-Identifier: Apache-2.0
"""Sees whether the engine's prefix cache was really emptied: a prompt that hit before the reset must not hit after it.

What the engine answers to a reset is its intention. Blocks that outlive a weight sync hold keys and values of old weights, and
every prompt that shares them is decoded by a model that is no more.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PrefixProbe"]


class PrefixProbe:
    """Asks one ``LLM`` with a prompt of its own; each question is one request of ``length`` tokens that samples one."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        cache = llm.llm_engine.vllm_config.cache_config
        room = int(llm.llm_engine.model_config.max_model_len) - 1
        block = int(cache.block_size or 0)
        self.length = min(2 * block + 1, room)
        self.needed = bool(cache.enable_prefix_caching) and 0 < block < room
        """Whether any prompt can leave a block behind: caching is on, and a prompt can be longer than one block."""

    def hits(self) -> int:
        """Ask, and give the tokens of the prompt that came from the cache."""
        from vllm import SamplingParams, TokensPrompt

        (output,) = self._llm.generate(
            [TokensPrompt(prompt_token_ids=[1 + i % 7 for i in range(self.length)])],
            SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
            use_tqdm=False,
        )
        return int(output.num_cached_tokens or 0)

    def seen(self) -> bool:
        """Whether the probe's own prompt is found in the cache, asked twice at most; a probe that sees none proves nothing."""
        return self.hits() > 0 or self.hits() > 0
