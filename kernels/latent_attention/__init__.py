# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention over one shared latent row a key: computed on sm90 only (`latent_attention/hopper`)."""
