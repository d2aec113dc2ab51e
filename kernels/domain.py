# SPDX-License-Identifier: Apache-2.0
"""The refusal every kernel raises when a shape, dtype or degree is outside its function's domain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isoexec.contracts.errors import IsoExecError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DomainError", "require", "require_float"]

FLOATS = (torch.float32, torch.bfloat16)


class DomainError(IsoExecError):
    """An input for which the function's bits are not defined: `op`, `found`, `wanted`."""

    def __init__(self, op: str, found: str, wanted: str) -> None:
        self.op = op
        self.found = found
        self.wanted = wanted
        super().__init__(op, found, wanted)

    def __str__(self) -> str:
        return f"{self.op} refuses {self.found}; it is defined for {self.wanted}"


def require(condition: bool, op: str, found: str, wanted: str) -> None:
    """Raise `DomainError` unless `condition`; a hot path raises it itself, so that no message is made in vain."""
    if not condition:
        raise DomainError(op, found, wanted)


def require_float(op: str, *tensors: Tensor) -> None:
    """Raise `DomainError` unless every tensor is float32 or bfloat16."""
    for tensor in tensors:
        if tensor.dtype not in FLOATS:
            raise DomainError(op, f"dtype {tensor.dtype}", "float32 and bfloat16")
