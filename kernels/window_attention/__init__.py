# SPDX-License-Identifier: Apache-2.0
"""attention.mma_window/1: a row sees its last keys. On sm90 only."""
