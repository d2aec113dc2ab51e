# SPDX-License-Identifier: Apache-2.0
"""router.sigmoid_topk/1: the router of sigmoid scores, a selection bias and groups."""

from __future__ import annotations

from isoexec.kernels.router.sigmoid.ops import sigmoid_topk

__all__ = ["sigmoid_topk"]
