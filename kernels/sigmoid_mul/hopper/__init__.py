# SPDX-License-Identifier: Apache-2.0
"""gate.sigmoid_mul/1 for sm90; `ops` needs triton."""
