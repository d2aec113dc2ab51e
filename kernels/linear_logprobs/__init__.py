# SPDX-License-Identifier: Apache-2.0
"""Token logprobs straight from hidden states, without the logits; on sm90 only."""
