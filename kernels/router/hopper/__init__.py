# SPDX-License-Identifier: Apache-2.0
"""router.softmax_topk/1 for sm90; `ops` needs triton."""
