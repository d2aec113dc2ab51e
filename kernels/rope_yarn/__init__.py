# SPDX-License-Identifier: Apache-2.0
"""rope.yarn_interleaved_fp32/1: neighbouring columns are rotated by a YaRN table. On sm90 only."""
