# SPDX-License-Identifier: Apache-2.0
"""logprobs.blocks/2 for sm90; `ops` needs triton."""
