# SPDX-License-Identifier: Apache-2.0
"""Operators whose rounding schedule is part of their name."""
