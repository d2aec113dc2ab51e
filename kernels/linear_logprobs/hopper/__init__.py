# SPDX-License-Identifier: Apache-2.0
"""linear_logprobs.mma_blocks/1 for sm90; `ops` needs triton."""
