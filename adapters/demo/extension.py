# SPDX-License-Identifier: Apache-2.0
"""What the demo puts into the workers of an engine under a contract that receives its weights by handles."""

from __future__ import annotations

from isoexec.adapters.demo.faults import FaultExtension
from isoexec.adapters.vllm.transfer import Receiver

__all__ = ["ReceivingFaultExtension"]


class ReceivingFaultExtension(FaultExtension, Receiver):
    """The contract's worker class has the reporting methods; these are the demo's."""
