# SPDX-License-Identifier: Apache-2.0
"""l2_norm.pairs/1: rows divided by their length. On sm90 only."""
