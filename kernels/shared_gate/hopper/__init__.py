# SPDX-License-Identifier: Apache-2.0
"""moe.shared_gate/1 for sm90; `ops` needs triton."""
