# SPDX-License-Identifier: Apache-2.0
"""rope.yarn_interleaved_fp32/1 for sm90; `ops` needs triton."""
