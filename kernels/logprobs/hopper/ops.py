# SPDX-License-Identifier: Apache-2.0
"""Token logprobs of the sm90 function as opaque torch ops, whole or by ranks that own whole leaves; forward only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.kernels.domain import require
from isoexec.kernels.hopper.library import define, require_model_dtype
from isoexec.kernels.logprobs.hopper.kernel import blocks_of, launch_merge, launch_partials
from isoexec.kernels.logprobs.hopper.naive import BLOCK

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["merge", "partials", "token_logprobs"]


def _partials(logits: Tensor, leaves: int) -> tuple[Tensor, Tensor]:
    require_model_dtype("sm90_logprobs", logits)
    require(
        logits.dim() == 2
        and leaves > 0
        and leaves & (leaves - 1) == 0
        and logits.shape[1] % leaves == 0
        and logits.shape[1] > 0,
        "sm90_logprobs",
        f"logits {list(logits.shape)} with {leaves} leaves",
        "logits [rows, V] and a power-of-two number of leaves that divides V",
    )
    shape = (len(logits), leaves, blocks_of(logits.shape[1], leaves, BLOCK))
    m = torch.empty(shape, dtype=torch.float32, device=logits.device)
    s = torch.empty_like(m)
    launch_partials(logits, m, s, block=BLOCK)
    return m, s


def _partials_fake(logits: Tensor, leaves: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], leaves, blocks_of(logits.shape[1], leaves, BLOCK))
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.float32)


def _merge(picked: Tensor, m: Tensor, s: Tensor) -> Tensor:
    require(
        picked.shape == m.shape[:1]
        and m.dim() == 3
        and m.shape == s.shape
        and m.shape[1] & (m.shape[1] - 1) == 0
        and all(t.dtype == torch.float32 and t.is_contiguous() for t in (picked, m, s)),
        "sm90_logprobs_merge",
        f"picked {list(picked.shape)} {picked.dtype} with partials {list(m.shape)} and {list(s.shape)}",
        "contiguous fp32 picked [rows] and partials [rows, all leaves, blocks]",
    )
    out = torch.empty(len(picked), dtype=torch.float32, device=picked.device)
    launch_merge(picked, None, m, s, out)
    return out


def _merge_fake(picked: Tensor, m: Tensor, s: Tensor) -> Tensor:
    return picked.new_empty(picked.shape)


def _token_logprobs(logits: Tensor, target: Tensor, vocab_leaves: int) -> Tensor:
    require(
        target.shape == logits.shape[:1] and target.dtype == torch.int64 and target.is_contiguous(),
        "sm90_token_logprobs",
        f"target {list(target.shape)} {target.dtype} with logits {list(logits.shape)}",
        "contiguous int64 target [rows]",
    )
    m, s = _partials(logits, vocab_leaves)
    out = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    launch_merge(logits, target, m, s, out)
    return out


def _token_fake(logits: Tensor, target: Tensor, vocab_leaves: int) -> Tensor:
    return logits.new_empty(logits.shape[:1], dtype=torch.float32)


_partials_op = define(
    "sm90_logprob_partials(Tensor logits, int leaves) -> (Tensor, Tensor)", _partials, _partials_fake
)
_merge_op = define("sm90_logprob_merge(Tensor picked, Tensor m, Tensor s) -> Tensor", _merge, _merge_fake)
_token_op = define(
    "sm90_token_logprobs(Tensor logits, Tensor target, int vocab_leaves) -> Tensor",
    _token_logprobs,
    _token_fake,
)


def partials(logits: Tensor, *, leaves: int) -> tuple[Tensor, Tensor]:
    """(m, s), fp32 `[rows, leaves, blocks]`, of the `leaves` that these logits hold; ranks gather them along dim 1."""
    m, s = _partials_op(logits, leaves)
    return m, s


def merge(picked: Tensor, m: Tensor, s: Tensor) -> Tensor:
    """fp32 `[rows]` from the target's fp32 logit and every leaf's partials."""
    out: Tensor = _merge_op(picked, m, s)
    return out


def token_logprobs(logits: Tensor, target: Tensor, *, vocab_leaves: int) -> Tensor:
    """fp32 `[rows]`: log p(target) from `logits [rows, V]`; NaN where a target is outside the vocabulary."""
    out: Tensor = _token_op(logits, target, vocab_leaves)
    return out
