# SPDX-License-Identifier: Apache-2.0
"""rope.interleaved_fp32/1: neighbouring columns are rotated, by the table of rope.neox_fp32/1. On sm90 only."""
