# SPDX-License-Identifier: Apache-2.0
"""rms_norm.pairs_gated/1 for sm90; `ops` needs triton."""
