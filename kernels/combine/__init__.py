# SPDX-License-Identifier: Apache-2.0
"""moe.combine/1: a token's expert outputs, weighed and added in routing order in fp32."""

from __future__ import annotations

from isoexec.kernels.combine.ops import combine

__all__ = ["combine"]
