# SPDX-License-Identifier: Apache-2.0
"""What the sm90 functions share: arithmetic that is written out, sums by index, and the way their ops are registered.

The functions live in `kernels/<op>/hopper/`. This package imports no triton; `arithmetic` and the kernels do.
"""
