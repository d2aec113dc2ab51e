# SPDX-License-Identifier: Apache-2.0
"""silu_mul.poly/1 for sm90; `ops` needs triton."""
