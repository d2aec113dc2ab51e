# SPDX-License-Identifier: Apache-2.0
"""router.sigmoid_topk/1 for sm90; `ops` needs triton."""
