# SPDX-License-Identifier: Apache-2.0
"""l2_norm.pairs/1 for sm90; `ops` needs triton."""
