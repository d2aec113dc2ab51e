# SPDX-License-Identifier: Apache-2.0
"""embedding.lookup/1: the row plus 0.0 (a sum over vocabulary shards turns -0 into +0, so one rank must too)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def embedding(ids: Tensor, w: Tensor) -> Tensor:
    return w[ids] + 0.0


def embedding_backward(grad: Tensor, ids: Tensor, rows: int) -> Tensor:
    """fp32 [rows, width]: each row's terms in token order, from zero."""
    dw = torch.zeros(rows, grad.shape[-1], dtype=torch.float32)
    for token, g in zip(ids.reshape(-1).tolist(), grad.reshape(-1, grad.shape[-1]).float(), strict=True):
        dw[token] = dw[token] + g
    return dw
