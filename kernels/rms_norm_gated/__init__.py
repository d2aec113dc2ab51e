# SPDX-License-Identifier: Apache-2.0
"""rms_norm.pairs_gated/1: an RMSNorm multiplied by the SiLU of a gate. On sm90 only."""
