# SPDX-License-Identifier: Apache-2.0
"""Names the likely cause of a mismatch from raw token pairs, with its evidence, or says that it is unclear."""
