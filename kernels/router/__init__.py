# SPDX-License-Identifier: Apache-2.0
"""router.softmax_topk/1 and router.sigmoid_topk/1: which experts a token goes to, in which order, with which weights."""

from __future__ import annotations

from isoexec.kernels.router.ops import softmax_topk
from isoexec.kernels.router.sigmoid.ops import sigmoid_topk

__all__ = ["sigmoid_topk", "softmax_topk"]
