# SPDX-License-Identifier: Apache-2.0
"""attention.latent_segments/1 on sm90."""
