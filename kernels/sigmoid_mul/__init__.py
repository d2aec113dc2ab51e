# SPDX-License-Identifier: Apache-2.0
"""gate.sigmoid_mul/1: a product with the sigmoid of a gate. On sm90 only."""
