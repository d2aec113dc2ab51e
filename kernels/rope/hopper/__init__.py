# SPDX-License-Identifier: Apache-2.0
"""rope.neox_fp32/1 for sm90: the CPU function, whose `naive.py` specifies it; `rotation.py` adds axes."""
