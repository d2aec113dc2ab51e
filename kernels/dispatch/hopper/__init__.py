# SPDX-License-Identifier: Apache-2.0
"""moe.dispatch/1 for sm90; `ops` needs triton."""
