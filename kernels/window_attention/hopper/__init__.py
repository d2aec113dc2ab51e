# SPDX-License-Identifier: Apache-2.0
"""attention.mma_window/1 for sm90; `ops` needs triton."""
