# SPDX-License-Identifier: Apache-2.0
"""logprobs.leaves/1: log-softmax with its sum over fixed vocabulary leaves."""

from __future__ import annotations

from isoexec.kernels.logprobs.entropy import entropy, temper
from isoexec.kernels.logprobs.ops import log_softmax, token_logprobs

__all__ = ["entropy", "log_softmax", "temper", "token_logprobs"]
