# SPDX-License-Identifier: Apache-2.0
"""embedding.lookup/1: a copy, plus 0.0."""

from __future__ import annotations

from isoexec.kernels.embedding.ops import embedding, vocab_parallel_embedding

__all__ = ["embedding", "vocab_parallel_embedding"]
