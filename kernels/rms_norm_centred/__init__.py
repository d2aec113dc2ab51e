# SPDX-License-Identifier: Apache-2.0
"""rms_norm.pairs_centred/1: an RMSNorm whose scale is 1 + w. On sm90 only."""
