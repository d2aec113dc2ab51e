# SPDX-License-Identifier: Apache-2.0
"""linear.grouped_mma_chain/1 for sm90; `ops` needs triton."""
