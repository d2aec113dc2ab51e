# SPDX-License-Identifier: Apache-2.0
"""rope.neox_fp32/1 for sm90: the CPU function's expression, so its `naive.py` is the specification here too."""
