# SPDX-License-Identifier: Apache-2.0
"""grad_norm.exact/1 for sm90: the CPU function, so its `naive.py` is the specification here too."""
