# SPDX-License-Identifier: Apache-2.0
"""The end-to-end demonstration: a tiny model, both runtimes, one machine."""
