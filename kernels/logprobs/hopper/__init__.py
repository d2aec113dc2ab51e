# SPDX-License-Identifier: Apache-2.0
"""logprobs.blocks/1 for sm90; `ops` needs triton."""
