# SPDX-License-Identifier: Apache-2.0
"""What proves rms_norm.pairs_centred/1 on sm90: its specification on the GPU and on the CPU, hidden rows, residuals and heads."""

from __future__ import annotations

from isoexec.kernels.gates import Gate
from isoexec.kernels.gates.norms import hang_norm
from isoexec.kernels.rms_norm.hopper import gradient
from isoexec.kernels.rms_norm.hopper.kernel import launch
from isoexec.kernels.rms_norm_centred.hopper import naive, ops

GATE = Gate("rms_norm.pairs_centred/1", "sm90")

hang_norm(GATE, ops, naive, launch, centred=True, widest=lambda: gradient.WIDEST)
