# SPDX-License-Identifier: Apache-2.0
"""moe.combine/1 for sm90; `ops` needs triton."""
