# SPDX-License-Identifier: Apache-2.0
"""attention.mma_segments/1 for sm90: causal attention over absolute key segments, each a chain of tensor-core steps."""
