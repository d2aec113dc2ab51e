# SPDX-License-Identifier: Apache-2.0
"""linear.mma_chain/1 for sm90: one K chain in bf16 tensor-core steps, computed by a library or by a kernel for few rows.

`ops` needs triton and a GPU; `table.json` says which serves how many rows.
"""
