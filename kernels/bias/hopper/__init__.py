# SPDX-License-Identifier: Apache-2.0
"""bias.add/1 for sm90: the CPU function, so its `naive.py` is the specification here too."""
